"""Comparisons and sums of stages in a step, and the errors of which they tell one another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any, Final, NoReturn, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshpar._torch.groups import default_store
from meshpar.core.errors import MeshparError, brief
from meshpar.exchange.ranks import Looks
from meshpar.passes.host_reads import beside
from meshpar.passes.pipeline.edges import Edges, digest_of, state_of
from meshpar.passes.pipeline.messages import BACK, FAILED_ALONE, FORTH, FailedBeforeError, StageMessages, failed_alone
from meshpar.passes.pipeline.portion import Portion
from meshpar.passes.pipeline.stand_ins import StandIn
from meshpar.tensors.placements import local_tensor

_ALIKE_S = 10.0  # in which an error comes on all ranks of a stage, if it does
_EXACT: Final = (1 << 48) - 1  # digests of 48 bits are exact in float64


@final
class ForwardCounts:
    """Refuse steps after an error of a model whose forwards change attributes or buffers, such as counts: until the
    error, stages have run forwards of other micro-batches than one process.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._failed, self._before = module, False, dict[str, list[Any]]()

    def doubt(self) -> None:
        """Note that a step or an evaluation has ended with an error."""
        self._failed = True

    def begin(self) -> None:
        """Begin a step or an evaluation."""
        self._before = self._now() if self._failed else {}

    def refuse(self) -> None:
        """Raise where forwards of the first step after an error have changed something."""
        if not self._failed:
            return
        now, before = self._now(), self._before
        if changed := [name for name in now if not (name in before and all(map(_is_same, now[name], before[name])))]:
            raise MeshparError(
                "a step before this one ended with an error, until which stages of pp have run other forwards than one "
                f"process, and forwards change {', '.join(changed[:3])}; build the model and apply the plan again, and "
                "load the last checkpoint"
            )

    def trust(self) -> None:
        """Note that a step has ended without one."""
        self._failed = False

    def _now(self) -> dict[str, list[Any]]:
        """Return what modules keep, by name: attributes with what is in containers, and versions of buffers."""
        named = {name: child for name, child in self._module.named_modules() if not isinstance(child, StandIn)}
        return {
            f"{name}.{key}".lstrip("."): [value, len(items), *items]
            for name, state in zip(named, state_of(named.values()), strict=True)
            for key, (value, items) in state.items()
        } | {
            name: [buffer, buffer._version]
            for name, buffer in self._module.named_buffers()
            if not buffer.is_inference()
        }


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) is int and one == other)


@final
class StageErrors:
    """The first error of this rank in a step; ``acting`` returns which stage runs, in which action."""

    def __init__(self, portion: Portion, acting: Callable[[], str]) -> None:
        self._acting, self._rank, self._ranks = acting, portion.rank, portion.ranks
        self.counts = ForwardCounts(portion.module)
        # that ended an action of this step, of which the other stages do not know yet
        self.error: Exception | None = None
        # where and what it was, where it is this stage's own
        self.cause = ""
        self._reported = False  # to the other ranks, as one that failed alone

    def begin(self) -> None:
        """Begin a step: forget the last one's error, also before the other ranks."""
        self.error, self.cause = None, ""
        self.counts.begin()
        if self._reported:
            forget_alone()
            self._reported = False

    def fail(self, error: Exception) -> None:
        """Remember the first error of this stage; raise it where other ranks of the stage run on."""
        self.error = error
        if isinstance(error, FailedBeforeError):
            return
        where = self._acting() or f"stage {self._rank}, its micro-batches"
        self.cause = f"{where}: {brief(error)}"
        if alone := failed_alone():
            raise MeshparError(alone) from error
        # nothing but the end of this process ends the waits of those that run on
        if not all_fail(where, dist.get_world_size() // self._ranks):
            self._reported = True
            error.add_note(tell_alone(self.cause))
            raise error


def forget_alone() -> None:
    """Forget what this rank has told, because it goes on."""
    with suppress(RuntimeError):
        default_store().delete_key(FAILED_ALONE)


def tell_alone(cause: str) -> str:
    """Tell the other ranks that this one failed alone, for when its end breaks their exchanges; return the text."""
    said = (
        f"rank {dist.get_rank()} failed alone in {cause}; the other ranks of its stage wait for it; correct what "
        "failed there, and start the job again"
    )
    with suppress(RuntimeError):  # the store has ended with its process
        default_store().set(FAILED_ALONE, said)
    return said


def all_fail(where: str, ranks: int) -> bool:
    """Return whether so many ranks fail at the same place within seconds."""
    if ranks == 1:
        return True
    with suppress(RuntimeError):
        store, until = default_store(), time.monotonic() + _ALIKE_S
        failed = f"meshpar/failed/{ranks} ranks/{where}"  # plans over other numbers of stages count for themselves
        count, pause = store.add(failed, 1), 0.02
        needed = count + -count % ranks
        while store.add(failed, 0) < needed:
            if time.monotonic() > until:
                if store.add(failed, -1) < needed - 1:  # the next failure there counts from the beginning
                    return False
                store.add(failed, 1)  # the last one came just now
            time.sleep(pause)
            pause = min(1.5 * pause, 0.5)
        return True
    return False


@final
class StageInputs:
    """Compare what ``loss`` gives the module, and the ``buffers`` of all stages; ``gather`` asks all of them."""

    def __init__(self, edges: Edges, gather: Callable[[Any], list[Any]], buffers: Sequence[str]) -> None:
        self._edges, self._gather, self._buffers = edges, gather, buffers
        self._looks, self._unwritten = Looks(), dict[str, tuple[int, int]]()
        # Digests of the inputs of the step before, which are not read yet.
        self._later: tuple[Callable[[], Tensor], list[list[Tensor | int]]] | None = None

    def begin(self) -> None:
        """Begin a step."""
        self._unwritten = self._buffer_versions()

    def digests(self, like: Tensor) -> list[Tensor]:
        """Return a number for each chunk's inputs, ``like`` where there are none, and one for written buffers."""
        edges = self._edges
        numbers = [_sum(inputs, like) & _EXACT for inputs in edges.inputs if inputs]
        numbers += [numbers[0] if numbers else like] * (len(edges.inputs) - len(numbers))
        now, module = self._buffer_versions(), edges.portion.module
        written = [module.get_buffer(name) for name in now if now[name] != self._unwritten[name]]
        none = torch.zeros((), dtype=torch.int64, device=edges.transfers.device)
        return [*numbers, (digest_of(written, edges.transfers.device) & _EXACT) + 1 if written else none]

    def compare(self, digests: Tensor) -> None:
        """Compare those of all stages, a row each: now, or one step later beside a device."""
        read, inputs, transfers = (lambda: digests), self._edges.inputs, self._edges.transfers
        if transfers.late and not self._looks.first("inputs"):
            with beside(transfers.device) as to_host:
                later = to_host(digests), inputs
            if self._later is None:
                self._later = later
                return
            (read, inputs), self._later = self._later, later
        every = read()
        if transfers.supposed is not None:
            return
        if (written := set(every[:, -1].tolist())) != {0.0} and (len(written) > 1 or len(inputs) > 1):
            self._refuse_written()
        if len(set(every[:, :-1].flatten().tolist())) > 1:
            self._refuse_inputs(inputs)

    def _buffer_versions(self) -> dict[str, tuple[int, int]]:
        """Return what changes where a buffer of all stages is written into."""
        buffers = {name: self._edges.portion.module.get_buffer(name) for name in self._buffers}
        return {name: (id(buffer), buffer._version) for name, buffer in buffers.items()}

    def _refuse_written(self) -> NoReturn:
        """Refuse buffers of all stages that differ between them. Collective over the stages."""
        now = self._buffer_versions()
        every = self._gather({name: now[name] != self._unwritten[name] for name in now})
        names = sorted({name for stage in every for name, written in stage.items() if written})
        raise MeshparError(
            f"the forward writes into the buffers {', '.join(names)}, which each stage of pp would fill from values of "
            "its own, with virtual= once for each of its stages; put the buffer into a module with parameters behind "
            "the blocks, or register it with persistent=False where stages may differ"
        )

    def _refuse_inputs(self, inputs: Sequence[Sequence[Tensor | int]]) -> NoReturn:
        """Refuse micro-batches in which stages got other arguments. Collective over the stages."""
        every = self._gather([list(map(int, digests)) for digests in inputs])
        first = every[0][0]
        chunks = ((rank, digests) for rank, chunks in enumerate(every) for digests in chunks)
        pairs = ((rank, enumerate(zip_longest(first, digests))) for rank, digests in chunks)
        rank, number = next((rank, number) for rank, both in pairs for number, (one, two) in both if one != two)
        raise MeshparError(
            f"loss gave the module other inputs on rank {rank} of pp than on rank 0, in micro-batch {number}: loss "
            "runs on every stage, and draws masks or noise from the random state, which differs; call "
            "par.manual_seed(seed) before the step"
        )


def _sum(digests: Iterable[Tensor | int], like: Tensor) -> Tensor:
    """Return the sum of some digests on the device of ``like``."""
    total = torch.zeros((), dtype=torch.int64, device=like.device)
    for digest in digests:
        total = total + digest
    return total


@final
class StageTies:
    """The gradients of ``shared`` parameters, which other stages have, too -> the ranks of the group that do."""

    def __init__(self, portion: Portion, shared: dict[str, tuple[int, ...]], messages: StageMessages) -> None:
        self._portion, self._of_all, self._messages = portion, shared, messages
        self.shared = {name: ranks for name, ranks in shared.items() if portion.rank in ranks}

    def used(self) -> list[float]:
        """Return 1.0 for each shared parameter of which this stage has a gradient, in one order on all stages."""
        module = self._portion.module
        return [float(name in self.shared and module.get_parameter(name).grad is not None) for name in self._of_all]

    def set_aside(self) -> dict[str, Tensor | None]:
        """Take away the gradients that shared parameters have from before, which are sums over stages already."""
        grads = dict[str, Tensor | None]()
        for name in self.shared:
            parameter = self._portion.module.get_parameter(name)
            grads[name], parameter.grad = parameter.grad, None
        return grads

    @torch.no_grad()
    def add_up(self, before: dict[str, Tensor | None], used: Iterable[bool]) -> None:
        """Add up the gradients that the two ends or all ranks have of a parameter; None where no stage has used it."""
        of_all = dict(zip(self._of_all, used, strict=True))
        # the first stage is behind the last one in the ring of their messages
        other, to, back = (self._portion.last, BACK, FORTH) if self._portion.rank == 0 else (0, FORTH, BACK)
        for name, earlier in before.items():
            parameter = self._portion.module.get_parameter(name)
            if not parameter.requires_grad or not of_all[name]:
                parameter.grad = earlier
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grad = local_tensor(parameter.grad)
            if len(self.shared[name]) > 2:
                total = grad.contiguous()
                self._messages.exchanged(dist.all_reduce, total, group=self._portion.group)
                grad.copy_(total)
            else:
                others_grad = torch.empty_like(grad, memory_format=torch.contiguous_format)
                self._messages.send([grad.contiguous()], other, to)
                self._messages.receive(others_grad, other, back)
                self._messages.settle_all()
                grad += others_grad
            if earlier is not None:
                parameter.grad += earlier
