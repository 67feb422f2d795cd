"""Ranks compare and agree on something small, and tell where they are in their loops: ``Largest`` sends numbers,
``same`` compares digests over groups, :class:`Ranks` lets the ranks of one model meet and names who is elsewhere,
``check_equal`` compares tensors that ranks should hold alike.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import weakref
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshpar._torch.groups import all_gather
from meshpar.core import runtime
from meshpar.core.errors import MeshparError, first_line
from meshpar.core.mesh import MeshSpec
from meshpar.core.passes import Role
from meshpar.core.patterns import class_name
from meshpar.core.resolved import Resolved
from meshpar.exchange.host_messages import FAN_OUT, LargestByHops
from meshpar.tensors.digests import FACTOR, digest
from meshpar.tensors.placements import local_tensor, sharded_axes


@final
class Looks:
    """Decide in which calls ranks compare: in each on a CPU (if ``always``), in the first ones on an accelerator."""

    FIRST = 2

    def __init__(self, *, always: bool = True) -> None:
        self._count: Counter[str] = Counter()
        self._always = always
        # Simulated ranks are past the first calls.
        self._first = runtime.among_real_ranks(lambda: 1) or 0

    def now(self, name: str, device: torch.device) -> bool:
        """Return whether to look at what is called ``name`` this time, and count it."""
        return self.first(name) or (self._always and runtime.over_hosts(device))

    def next(self, name: str, device: torch.device) -> bool:
        """Return whether to look at what is called ``name`` the next time."""
        return self._count[name] < self.FIRST * self._first or (self._always and runtime.over_hosts(device))

    def first(self, name: str) -> bool:
        """Return whether this is one of the first times, and count it."""
        self._count[name] += 1
        return self._count[name] <= self.FIRST * self._first


@final
class Largest:
    """The largest of each of the ranks' numbers, exchanged meanwhile: between few ranks at once, else by hops."""

    ONE_HOP = FAN_OUT
    """Up to how many ranks send each other their numbers."""

    def __init__(self, numbers: Tensor, group: dist.ProcessGroup) -> None:
        ranks, hosts = group.size(), runtime.over_hosts(numbers.device)
        self._every, self._work, self._hops = numbers.expand(ranks, *numbers.shape), None, None
        if hosts and 1 < ranks <= self.ONE_HOP:
            sent, self._every = self._every.contiguous(), self._every.new_empty(self._every.shape)
            self._work = dist.all_to_all_single(self._every, sent, group=group, async_op=True)
        elif hosts and ranks > 1:
            self._hops = runtime.among_real_ranks(partial(LargestByHops, numbers, group, self.ONE_HOP))
        if self._work is None and self._hops is None and ranks > 1:
            self._every = numbers[None].clone()
            self._work = dist.all_reduce(self._every, dist.ReduceOp.MAX, group, async_op=True)

    def read(self) -> Tensor:
        """Wait for the exchange, and return the numbers."""
        if self._hops is not None:
            return self._hops.wait()
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._every.amax(0)


def same(values: Tensor, groups: Iterable[dist.ProcessGroup]) -> list[bool]:
    """Return of each 64-bit number whether all ranks of the groups have the same, as simulated ones. Collective."""
    spans = torch.cat([values, ~values])
    for group in groups:
        spans = Largest(spans, group).read()
    read = runtime.among_real_ranks(spans.view(2, -1).tolist)
    return [True] * len(values) if read is None else [high == ~low for high, low in zip(*read)]


_NUMBERS: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""Of the models that all ranks of a default group made together: a rank may simulate others alone, or have made some
in another group.
"""


def models_made() -> int:
    """Return the number of models that all ranks of the open process group have made together."""
    return 0 if dist.group.WORLD is None else _NUMBERS.get(dist.group.WORLD, 0)


def own_group(number: int, ranks: tuple[int, ...] | None = None) -> dist.ProcessGroup:
    """Return a new group of all or some ranks for one model's exchanges through the hosts. Collective."""
    return runtime.new_host_group(f"meshpar model {number}" + (f", ranks {ranks}" if ranks else ""), ranks=ranks)


def count_models_anew() -> None:
    """Forget the models that were made; for processes in which one job follows another. Every rank calls it."""
    _NUMBERS.clear()


def next_number() -> int:
    """Return the number of a model that all ranks make now, from 0."""
    number = models_made()
    if dist.group.WORLD is not None:
        _NUMBERS[dist.group.WORLD] = number + 1
    return number


def stages_of(resolved: Resolved) -> list[list[int]]:
    """Return the ranks that have each stage's layers; nothing where all ranks have all layers."""
    spec, axes = resolved.spec, resolved.divided(Role.LAYERS)
    stages: list[list[int]] = [[] for _ in range(spec.axes[axes[0]])] if axes else []
    for rank in range(spec.size if axes else 0):
        stages[spec.coordinates(rank)[axes[0]]].append(rank)
    return stages


_OURS = ("torch", "meshpar", "contextlib")


def _line_of_user() -> str:
    """Return file and line of the innermost running code that is neither torch's nor meshpar's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _OURS:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@final
class Ranks:
    """Small exchanges, all of one size, of the ranks with the same layers, through the hosts; each tells its place."""

    NUMBERS = 2

    def __init__(self, model: str, hosts: dist.ProcessGroup, own: dist.ProcessGroup | None = None) -> None:
        self._model, self._hosts, self._own = model, hosts, own
        self._history = 0

    @classmethod
    def of(cls, module: nn.Module, stages: Sequence[Sequence[int]] = ()) -> Ranks:
        """Return the exchanges of the last module with a plan; ``stages``: the ranks of each. Collective."""
        number, model_group = models_made() - 1, None
        if stages:
            groups = [own_group(number, tuple(ranks)) for ranks in stages]
            hosts = next(group for group, ranks in zip(groups, stages, strict=True) if dist.get_rank() in ranks)
        else:
            hosts = runtime.hosts()
            model_group = own_group(number) if number > 0 and dist.get_world_size() > 1 else None
        return cls(f"{number} {class_name(module)}", hosts, model_group)

    def counted(self, number: int) -> int:
        """Take a number into the digest of all that this rank has counted, and return the digest."""
        self._history = (self._history * FACTOR + number + 1) % (1 << 62)
        return self._history

    @property
    def hosts(self) -> dist.ProcessGroup:
        """The group of the exchanges: the stage's, in the main thread all models', in another one this model's own."""
        apart = threading.current_thread() is not threading.main_thread()
        return self._own if apart and self._own is not None else self._hosts

    def _all_places(self, place: str) -> str:
        """Return where this rank is, and the others that are elsewhere, each with the line of the user's code."""
        here = f"{place} (model {self._model}, {_line_of_user()})"
        ranks = dist.get_process_group_ranks(self.hosts)
        places: list[Any] = [here] * len(ranks)
        with suppress(RuntimeError):  # of a rank that met this one by another exchange
            dist.all_gather_object(places, here, self.hosts)
        elsewhere = {said: rank for rank, said in reversed(list(zip(ranks, places, strict=True))) if said != here}
        return ", ".join([f"this rank is at {here}", *(f"rank {rank} at {said}" for said, rank in elsewhere.items())])

    def meet(self, place: str, numbers: Sequence[int] = ()) -> list[bool]:
        """Check that all ranks are at one place; return of each number whether all have the same. Collective."""
        hosts = self.hosts
        if hosts.size() == 1:
            return [True] * len(numbers)
        tag = zlib.crc32(f"{self._model} {place}".encode())
        numbers_here = torch.tensor([tag, *numbers, *[0] * (self.NUMBERS - len(numbers))], device="cpu")
        try:
            here, *agree = same(numbers_here, [hosts])
        except RuntimeError as error:
            self._refuse_wait(place, error)
        if not here:  # on every rank alike, so that they can say more
            self._refuse_place(place)
        return agree[: len(numbers)]

    def _refuse_wait(self, place: str, error: Exception) -> NoReturn:
        raise MeshparError(
            f"this rank is at {place} ({_line_of_user()}), and the other ranks did not come there in time; call the "
            "module equally often on every rank, in training and in evaluation. The wait ended with: "
            f"{first_line(error)}"
        ) from error

    def _refuse_place(self, place: str) -> NoReturn:
        raise MeshparError(
            f"ranks are at different places of their loops: {self._all_places(place)}. Run the same calls in the "
            "same order on every rank: as many batches, steps and sums, also in evaluation. Call every block on "
            "every rank, because data ranks gather and reduce a block together, or make a skipped part one block "
            "with its neighbours (blocks=...)"
        )


@final
class GradientMarks:
    """Exchange which gradients ranks have: marks 0 for none, 1 for zeros of others' gradients, 2 for a gradient."""

    def __init__(
        self, ranks: Ranks, trained: Sequence[tuple[str, nn.Parameter]], marks: Sequence[int], *, compares: bool = True
    ) -> None:
        self._trained, self._marks, self._compares = trained, marks, compares
        if compares:
            numbers_here = torch.tensor([ranks.counted(len(marks)), *marks], device="cpu")
            self._sent = Largest(torch.cat([numbers_here, -numbers_here]), ranks.hosts)
        else:
            self._sent = Largest(torch.tensor(marks, dtype=torch.uint8, device="cpu"), ranks.hosts)

    def check(self) -> list[int]:
        """Wait for the exchange, and return the largest mark of each parameter; MeshparError on every rank alike."""
        read = runtime.among_real_ranks(self._sent.read().view(1 + self._compares, -1).tolist)
        if read is None:  # simulated ranks have the same
            return list(self._marks)
        if not self._compares:
            return list(read[0])
        (most_counted, *largest), (least_counted, *smallest) = read
        if any(high and not -low for high, low in zip(largest, smallest)):
            without = [
                name
                for (name, parameter), mark in zip(self._trained, self._marks)
                if parameter.requires_grad and not mark
            ]
            raise MeshparError(
                "data ranks have gradients for different parameters; here these have none: "
                f"{', '.join(without[:6]) or '(all have one)'}; call the same blocks on every rank; to leave out a "
                "block, multiply its output by 0 instead of skipping it"
            )
        if most_counted != -least_counted:
            raise MeshparError(
                "ranks took different steps: other settings of an optimizer (a learning rate that follows a rank's "
                "own loss), or another number of steps; step on every rank alike"
            )
        return largest


def check_equal(
    tensors: Mapping[str, Tensor],
    groups: Mapping[str, Sequence[int]],
    what: str,
    *,
    remedy: str = "",
    guards: Sequence[str] = (),
) -> None:
    """Compare ranks' tensors by digest through the hosts. Collective: every rank of the world calls it.

    ``groups``: name -> a number for every rank; ranks of one number must hold equal values. ``guards``: the guards of
    installed packages, compared in the same exchange. ``remedy``: the end of the message, which names what differs.
    """
    _check_same_names(tensors, what, guards)
    if not tensors:
        return
    digests = [digest(tensor) for tensor in tensors.values()]
    # some may be offloaded
    device = max((value.device for value in digests), key=lambda candidate: not runtime.on_host(candidate))
    table = _gathered(torch.stack([value.to(device) for value in digests]).cpu())
    differing = []
    for column, name in enumerate(tensors):
        first: dict[int, int] = {}
        places = [first.setdefault(number, rank) for rank, number in enumerate(groups[name])]
        references = torch.tensor(places, device="cpu")
        odd = (table[:, column] != table[references, column]).nonzero()[:, 0].tolist()
        against: dict[int, list[int]] = {}
        for rank in odd:
            against.setdefault(int(references[rank]), []).append(rank)
        differing += [f"{name}: rank {reference} against ranks {ranks}" for reference, ranks in against.items()]
    if differing:
        shown = "\n  ".join(differing[:20]) + (f"\n  and {len(differing) - 20} more" if len(differing) > 20 else "")
        raise MeshparError(
            f"{what} differ between ranks that must hold the same:\n  {shown}" + (f"\n{remedy}" if remedy else "")
        )


def check_replicas(state: Mapping[str, Tensor], held: MeshSpec, *, other_names: bool) -> None:
    """Compare every tensor along the axes of ``held`` that do not divide it. Collective: every rank of the world.

    ``other_names``: ranks have tensors of different names.
    """
    tensors = {name: local_tensor(tensor) for name, tensor in state.items()}
    places = [held.coordinates(rank) for rank in range(held.size)]
    split: dict[str, Collection[str]] = {name: sharded_axes(tensor) for name, tensor in state.items()}
    has = dict[str, list[bool]]()
    if other_names:
        tensors, split, has = _of_all_ranks(tensors, split)
    groups = dict[str, list[int]]()
    for name, axes in split.items():
        parts = [tuple(coordinates[axis] for axis in axes if axis in coordinates) for coordinates in places]
        groups[name] = [hash((part, *has.get(name, ())[rank : rank + 1])) for rank, part in enumerate(parts)]
    check_equal(tensors, groups, "parameters or buffers")


def _of_all_ranks(
    tensors: Mapping[str, Tensor], split: Mapping[str, Collection[str]]
) -> tuple[dict[str, Tensor], dict[str, Collection[str]], dict[str, list[bool]]]:
    """Return tensors and their split axes under all ranks' names, and which ranks have each. Collective."""
    own_kinds = {name: (tensor.dtype, tuple(split[name])) for name, tensor in tensors.items()}
    every: list[dict[str, tuple[torch.dtype, tuple[str, ...]]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, own_kinds, group=runtime.hosts())
    kinds = {name: kind for rank in every for name, kind in rank.items()}
    named = {name: tensors.get(name, torch.empty(0, dtype=dtype)) for name, (dtype, _) in kinds.items()}
    axes: dict[str, Collection[str]] = {name: axes for name, (_, axes) in kinds.items()}
    return named, axes, {name: [name in rank for rank in every] for name in kinds}


def _gathered(mine: Tensor) -> Tensor:
    """Return the numbers (N,) of all ranks, (ranks, N), which the hosts exchange."""
    every = mine.new_empty(dist.get_world_size() * len(mine))
    all_gather(every, mine, runtime.hosts())
    return every.view(-1, len(mine))


def _check_same_names(tensors: Mapping[str, Tensor], what: str, guards: Sequence[str]) -> None:
    """Refuse names that differ between ranks, and guards of some ranks alone, which would wait for others."""
    listed = "\n".join(f"{name} {tensor.dtype}" for name, tensor in tensors.items()), "\n".join(guards)
    own_bytes = [byte for text in listed for byte in hashlib.blake2b(text.encode(), digest_size=8).digest()]
    every = _gathered(torch.tensor(own_bytes, device="cpu"))
    names, offered = (every != every[0]).split(8, dim=1)
    if offered.any():
        _refuse_guards(guards)
    if odd := names.any(1).nonzero()[:, 0].tolist():
        raise MeshparError(
            f"{what} have other names or dtypes on ranks {odd} than on rank 0; build the same model on every rank, "
            "everywhere on the meta device or everywhere with weights"
        )


def _refuse_guards(guards: Sequence[str]) -> None:
    """Raise an error that names the guards that some ranks alone have. Collective."""
    every: list[Sequence[str]] = [()] * dist.get_world_size()
    dist.all_gather_object(every, list(guards), group=runtime.hosts())
    lines = []
    for guard in sorted({guard for rank in every for guard in rank}):
        has = [rank for rank, offered in enumerate(every) if guard in offered]
        if len(has) < len(every):
            lines.append(f"guard {guard}: on ranks {has}, and not on {sorted(set(range(len(every))) - set(has))}")
    listed = "\n  ".join(lines)
    raise MeshparError(
        f"the installed packages offer guards on some ranks and not on others:\n  {listed}\n"
        "ranks of a guard that exchanges values would wait for the others; install the same packages on every host, or "
        "leave guards out by Plan(guards='off')"
    )
