"""The batches of one data rank: every sample once per epoch, on any mesh.

The position ``{"epoch", "samples"}`` counts samples that all ranks together have used, so any other mesh resumes from
it. ``returned`` are places before it whose samples a lost replica had: the next steps begin with them.
"""

from __future__ import annotations

import math
import signal
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import torch

from meshpar.core.errors import RecipeError
from meshpar.process.imports import need
from meshpar.process.waiting import STOPPING
from meshpar.training.order import Interleave, key_of, permute

FILLER = -1  # the index of a sample that is fully masked: it fills the last global batch of an epoch

TensorBatch = dict[str, torch.Tensor]


class SampleSet(Protocol):
    """The samples of :class:`Batches`, which collate themselves; ``str()`` describes their number.

    Optional: ``mix``, the :class:`meshpar.training.order.Interleave` that orders several sources (a batch then has
    ``source`` (B,) int64), and ``separates``: batches may have ``position_ids`` that restart with each document; such
    samples also have ``vocab_size`` and ``length``.
    """

    fingerprint: str

    def __len__(self) -> int:
        """Return the number of samples in an epoch."""
        ...

    def __getitems__(self, indices: Sequence[int]) -> TensorBatch:
        """Return the batch of these samples; the index ``FILLER`` is a sample without counted labels."""
        ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """Configure how batches are read ahead.

    Attributes:
        workers: number of reading processes; 0: the training process reads, which is fast enough for packed tokens.
        pin_memory: copy batches to page-locked memory, from which copies to a GPU overlap with its work.
        persistent_workers: keep the workers from one epoch to the next.
        prefetch: number of batches that each worker prepares ahead.
    """

    workers: int = 0
    pin_memory: bool = False
    persistent_workers: bool = True
    prefetch: int = 2


@final
@dataclass
class OrderedBatches:
    """A data rank's indices to the epoch's end; one micro-batch of all ranks has the same samples on any mesh."""

    samples: int
    micro_batch: int
    accumulate: int
    data_rank: int
    data_size: int
    seed: int | None
    mix: Interleave | None = None
    grow: Mapping[int, int] = field(default_factory=dict)
    epoch: int = 0
    consumed: int = 0
    returned: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        whole = self.micro_batch * self.data_size
        self.grow = {0: self.accumulate} | {at: size // whole for at, size in sorted(self.grow.items())}
        self.counts: tuple[int, ...] = (0,) * (0 if self.mix is None else len(self.mix.sizes))

    @property
    def global_batch(self) -> int:
        """Number of samples that all ranks together use in one step, before it grows."""
        return self.micro_batch * self.accumulate * self.data_size

    def __iter__(self) -> Iterator[list[int]]:
        counts = self.counts
        for first, accumulate in self.steps():
            if self.mix is None:
                indices = self.step(first, accumulate)
            else:
                sources = self.mix.sources(counts, self.micro_batch * accumulate * self.data_size)
                here = self._mine(accumulate)
                indices = self.mix.places(counts, sources, self.seed)[here[here < len(sources)]].tolist()
                counts = self.mix.after(counts, sources)
            yield from self.micro_batches(indices, accumulate)

    def micro_batches(self, indices: list[int], accumulate: int) -> Iterator[list[int]]:
        """Yield a step's micro-batches, the last of them filled."""
        indices = indices + [FILLER] * (self.micro_batch * accumulate - len(indices))
        return (indices[row : row + self.micro_batch] for row in range(0, len(indices), self.micro_batch))

    def accumulated(self, place: int) -> tuple[int, float]:
        """Return the micro-batches of the step that begins at a place of all epochs, and where their number changes."""
        places = [*self.grow, math.inf]
        at = bisect_right(places, place)
        return self.grow[int(places[at - 1])], places[at]

    def steps(self) -> Iterator[tuple[int, int]]:
        """Yield the first sample of each step left of the epoch, and its micro-batches. A mix may have no end."""
        first, remaining = 0, self.samples - self.consumed + len(self.returned)
        endless, begin = self.mix is not None and self.mix.total is None, (self.epoch + 1) * self.samples - remaining
        while endless or first < remaining:
            accumulate, _ = self.accumulated(begin + first)
            yield first, accumulate
            first += self.micro_batch * accumulate * self.data_size

    def places(self, first: int, count: int) -> list[int]:
        """Return the places of at most ``count`` samples left of the epoch, from the one numbered ``first``."""
        back, start = self.returned[first : first + count], self.consumed + max(0, first - len(self.returned))
        return [*back, *range(start, min(start + count - len(back), self.samples))]

    def step(self, first: int, accumulate: int) -> list[int]:
        """Return this rank's indices of the step that begins with the ``first`` of the samples that are left."""
        whole = self.micro_batch * accumulate * self.data_size
        here, places = self._mine(accumulate), need("numpy").array(self.places(first, whole), dtype="int64")
        return self.at(places[here[here < len(places)]])

    def at(self, places: Sequence[int]) -> list[int]:
        """Return the indices of the samples at these places in the order of the epoch."""
        order = need("numpy").array(places, dtype="int64")
        return (order if self.seed is None else permute(order, self.samples, key_of(self.seed, self.epoch))).tolist()

    def _mine(self, accumulate: int) -> Any:  # noqa: ANN401 - numpy is optional
        """Return the places of this rank's samples in a step, (accumulate x micro_batch,) int64."""
        numpy = need("numpy")
        micro = numpy.arange(accumulate)[:, None] * self.data_size + self.data_rank
        return (micro * self.micro_batch + numpy.arange(self.micro_batch)).reshape(-1)


@final
class Batches:
    """Yield one data rank's batches, step by step, through torchdata's ``StatefulDataLoader``.

    >>> samples = PackedTokens(file, 1024)  # doctest: +SKIP
    >>> Batches(samples, micro_batch=8, data_rank=par.data_rank, data_size=par.data_size)  # doctest: +SKIP

    A step is a list of micro-batches. The order of samples depends on ``seed`` and the epoch alone. Each step uses the
    next ``global_batch`` of them, and each data rank its slice; fully masked samples fill the last step of an epoch.

    Args:
        samples: the samples to read.
        micro_batch: number of samples of this rank in one forward pass.
        accumulate: number of micro-batches in one optimizer step.
        data_rank: this rank's slice of all slices: ``par.data_rank``.
        data_size: number of slices: ``par.data_size``.
        seed: seed of the order; None: the order of the data.
        loader: settings of workers and read-ahead.
        replicas: number of replicas that :meth:`share` the samples, each with ``data_size`` slices.
        grow: place in the samples of all epochs -> samples of a step of all ranks from there on, a multiple of
            ``micro_batch`` x ``data_size``.

    Raises:
        RecipeError: a size is below one, or there are no samples; ``grow`` does not fit the ranks.
    """

    def __init__(
        self,
        samples: SampleSet,
        *,
        micro_batch: int,
        accumulate: int = 1,
        data_rank: int = 0,
        data_size: int = 1,
        seed: int | None = 0,
        loader: LoaderSettings | None = None,
        replicas: int = 1,
        grow: Mapping[int, int] | None = None,
    ) -> None:
        if micro_batch < 1 or accumulate < 1 or not 0 <= data_rank < data_size:
            raise RecipeError(
                f"expected sizes of at least 1 and rank < size; got {micro_batch=}, {accumulate=}, data rank "
                f"{data_rank} of {data_size}"
            )
        if len(samples) == 0:
            raise RecipeError(
                "the data has no sample; give at least two tokens, because a token and its successor make a sample"
            )
        whole = micro_batch * data_size
        if wrong := [size for at, size in (grow or {}).items() if at < 1 or size < 1 or size % whole]:
            raise RecipeError(
                f"grow: expected places of at least 1 and sizes that are multiples of {micro_batch} x {data_size} data "
                f"ranks, got {wrong[0]} of {dict(grow or {})}; use other sizes or a smaller micro_batch"
            )
        self.samples, self._replicas = samples, replicas
        self._sampler = OrderedBatches(
            len(samples),
            micro_batch=micro_batch,
            accumulate=accumulate,
            data_rank=data_rank,
            data_size=data_size,
            seed=seed,
            mix=getattr(samples, "mix", None),
            grow=grow or {},
        )
        self._loader = _loader(samples, self._sampler, loader or LoaderSettings())
        self._epoch, self._consumed = 0, 0
        self._returned, self._counts = tuple[int, ...](), self._sampler.counts

    @property
    def global_batch(self) -> int:
        """Samples that all ranks together use in a step, before it grows; of all replicas, when none is lost."""
        return self._sampler.global_batch * self._replicas

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in the first epoch."""
        return self._steps(0, 1, None)

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self._epoch

    def steps_at(self, batch: int) -> float:
        """Return the position as a number of steps of ``batch`` samples, the last of each epoch not full."""
        return self._epoch * math.ceil(len(self.samples) / batch) + (self._consumed - len(self._returned)) / batch

    def steps_until(self, epochs: int, batch: int | None = None) -> int:
        """Return how many steps of ``batch`` samples (None: this data's) are left of ``epochs`` epochs."""
        return self._steps(self._epoch * len(self.samples) + self._consumed - len(self._returned), epochs, batch)

    def _steps(self, position: int, epochs: int, batch: int | None) -> int:
        """Return the number of steps from a place in all epochs to the end of ``epochs`` of them."""
        count, steps = len(self.samples), 0
        while position < epochs * count:
            accumulate, until = self._sampler.accumulated(position)
            size = batch or self.global_batch // self._sampler.accumulate * accumulate
            end = (position // count + 1) * count
            count_here = math.ceil((min(end, end if batch else until) - position) / size)
            steps, position = steps + count_here, min(position + count_here * size, end)
        return steps

    def one_epoch(self) -> Iterator[list[TensorBatch]]:
        """Yield the remaining steps of this epoch; the position advances with each."""
        self._place_sampler()
        step: list[TensorBatch] = []
        sizes, wanted = self._sampler.steps(), 0
        for batch in self._loader:
            wanted = wanted or next(sizes)[1]
            step.append(batch)
            if len(step) == wanted:
                size, mix = self._sampler.micro_batch * wanted * self._sampler.data_size, self._sampler.mix
                if mix is None:
                    self.count([True], size)
                else:
                    self._counts = mix.after(self._counts, mix.sources(self._counts, size))
                    self._consumed += size
                    if mix.total is not None and self._consumed >= len(self.samples):
                        self._epoch, self._consumed = self._epoch + 1, 0
                yield step
                step, wanted = [], 0

    def __iter__(self) -> Iterator[list[TensorBatch]]:
        """Yield steps forever, epoch after epoch; RecipeError when all sources of a mix are used up."""
        while True:
            yield from self.one_epoch()
            if self._sampler.mix is not None:
                problem = f"the sources of the mix are used up after {self.steps_per_epoch} steps; raise their epochs"
                raise RecipeError(problem)

    def share_problems(self) -> Iterator[str]:
        """Yield why :meth:`share` cannot read this data, one line each."""
        if self._sampler.mix is not None:
            yield (
                "the data is a mix of sources, and samples of lost replicas cannot return to its order; train on one "
                "source"
            )
        if len(self._sampler.grow) > 1:
            yield "the batch grows, and replicas share steps of one size; leave data.grow out"
        if self._loader.num_workers:
            yield (
                f"workers={self._loader.num_workers} read ahead, and which samples come next depends on the replicas; "
                "set workers=0"
            )

    def share(self, replica: int, replicas: int) -> list[TensorBatch]:
        """Return one step's micro-batches for replica number ``replica`` of ``replicas``; the position stays."""
        self._place_sampler()
        sampler = self._sampler
        indices = sampler.step(replica * sampler.global_batch, sampler.accumulate)
        return [self.samples.__getitems__(rows) for rows in sampler.micro_batches(indices, sampler.accumulate)]

    def has_share(self, replica: int) -> bool:
        """Return whether :meth:`share` has samples for this replica: at the end of an epoch it may have none."""
        self._place_sampler()
        return bool(self._sampler.places(replica * self._sampler.global_batch, self._sampler.global_batch))

    def count(self, counted: Sequence[bool], size: int | None = None) -> None:
        """Advance by a step of replicas with ``size`` samples each; samples that did not count come again."""
        if not all(counted):  # else an iteration over the epoch may be reading the sampler
            self._place_sampler()
        size = size or self._sampler.global_batch
        whole = size * len(counted)
        uncounted = [number for number, is_counted in enumerate(counted) if not is_counted]
        lost = [lost_place for number in uncounted for lost_place in self._sampler.places(number * size, size)]
        self._consumed = min(len(self.samples), self._consumed + max(0, whole - len(self._returned)))
        self._returned = (*lost, *self._returned[whole:])
        if self._consumed >= len(self.samples) and not self._returned:
            self._epoch, self._consumed = self._epoch + 1, 0

    def _place_sampler(self) -> None:
        sampler = self._sampler
        sampler.epoch, sampler.consumed = self._epoch, self._consumed
        sampler.counts, sampler.returned = self._counts, self._returned

    def restart(self) -> None:
        """Set the position to the beginning of the first epoch."""
        self._epoch, self._consumed, self._returned, self._counts = 0, 0, (), (0,) * len(self._counts)

    def position(self) -> dict[str, Any]:
        """Return the position of the next step, the same on every rank; of a mix with each source's samples."""
        position: dict[str, Any] = {"epoch": self._epoch, "samples": self._consumed}
        position |= {"returned": list(self._returned)} if self._returned else {}
        return position if self._sampler.mix is None else position | {"sources": list(self._counts)}

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the seed and the fingerprint of the data."""
        return self.position() | {"seed": self._sampler.seed, "data": self.samples.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a position of any mesh; raises RecipeError for one in other data or another order."""
        now = self.state_dict()
        names = [name for name in ("seed", "data") if state[name] != now[name]]
        if differ := [f"{name}: saved {state[name]!r}, now {now[name]!r}" for name in names]:
            raise RecipeError(
                f"the saved position is one in other data ({'; '.join(differ)}); resume with the same text, tokenizer, "
                "sequence length and seed, or start a new run"
            )
        self._epoch, self._consumed, self._counts = state["epoch"], state["samples"], tuple(state.get("sources", ()))
        self._returned = tuple(state.get("returned", ()))


# torchdata has no types
def _loader(samples: SampleSet, sampler: OrderedBatches, settings: LoaderSettings) -> Any:  # noqa: ANN401
    ahead: dict[str, Any] = {}
    if settings.workers:
        # forkserver: a fork of a process with tokenizer, gloo or CUDA threads may hang
        ahead = {"multiprocessing_context": "forkserver", "worker_init_fn": _leave_signals_to_the_trainer}
        ahead |= {"persistent_workers": settings.persistent_workers, "prefetch_factor": settings.prefetch}
    stateful = need("torchdata.stateful_dataloader").StatefulDataLoader
    with warnings.catch_warnings():
        # torchdata 0.11's own call, deprecated in torch 2.13
        warnings.filterwarnings("ignore", message=".*set_vital.*")
        return stateful(
            samples,
            batch_sampler=sampler,
            collate_fn=dict,  # samples collate themselves
            num_workers=settings.workers,
            pin_memory=settings.pin_memory,
            generator=torch.Generator(),  # a separate one: reading data must not change the model's random state
            **ahead,
        )


def _leave_signals_to_the_trainer(worker: int) -> None:
    """Ignore stop requests in a worker: the trainer gets them, too, and finishes its step first."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
