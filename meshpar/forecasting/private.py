"""What stands in for comparisons of ranks in the simulation, whose ranks have no peers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshpar._torch.autograd import in_backward
from meshpar.core import runtime
from meshpar.core.guards import Guard
from meshpar.guards.agreement import Agreement
from meshpar.guards.losses import Losses
from meshpar.parallelized import Parallelized
from meshpar.passes.applied import applied
from meshpar.passes.experts.routing import Routing
from meshpar.step.meeting import Meeting
from meshpar.step.rank_digests import Largest


def settle(par: Parallelized) -> None:
    """Let the ranks compare what they compare after the first steps, and look at nothing."""
    if par.cycle is None:
        return
    par.cycle.first_runs.split = None
    par.cycle.placed.record()
    on_cpu = par.cycle.guards == "always" and runtime.over_hosts(par.device)
    watching: list[Guard] = []
    for guard in par.cycle.watching:
        if isinstance(guard, Losses):
            watching.append(SentLosses(list(guard.groups.values()) if on_cpu else [], par.device))
        elif isinstance(guard, Agreement):
            par.cycle.agreement = settled = Settled(par, guard, on_cpu=on_cpu)
            watching.append(settled)
        else:
            watching.append(guard)
    par.cycle.watching = tuple(watching)
    applied(par.module).routing = Assumed(applied(par.module).routing.skew)


@final
class Assumed(Routing):
    """As many rows for the busiest rank, which this one is, as its skew says; the others' share the rest equally."""

    __slots__ = ()

    def filled(self, rows: Tensor, count: int) -> Tensor:
        """Return as many rows as one expert would have."""
        return torch.arange(len(rows) // count, device=rows.device)

    def sizes(self, numbers: Tensor, held: int) -> list[int]:
        """Return equal numbers of rows."""
        rows = len(numbers)
        return [rows * (place + 1) // held - rows * place // held for place in range(held)]

    def exchanged(self, counts: Tensor, rows: int, rank: int) -> tuple[list[int], list[int], list[int]]:
        """Return what the skew says, and no choice that is no expert."""
        size = counts.shape[1]
        mine_of, others = round(rows * self.skew / size), size - 1
        rest = rows - mine_of
        sent = [rest * (place + 1) // others - rest * place // others for place in range(others)]
        sent.insert(rank, mine_of)
        return sent, [mine_of] * size, []


@final
class Settled(Guard):
    """The comparisons of a step after the first ones, which send what they send and look at nothing.

    Args:
        par: the model.
        real: the comparisons of a job.
        on_cpu: ranks compute on CPUs, where looking does not wait for a device, so that more is looked at.
    """

    def __init__(self, par: Parallelized, real: Agreement, *, on_cpu: bool) -> None:
        self._par, self._real, self._on_cpu = par, real, on_cpu

    def _send(self, numbers: int, groups: Sequence[dist.ProcessGroup]) -> None:
        for group in groups if self._on_cpu else ():
            _exchange(numbers, torch.int64, group, self._par.device)

    def before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Send the digests of a batch, where they are looked at."""
        if torch.is_grad_enabled():
            self._send(2 * self._real.numbers(), self._real.same_groups())

    def whole(self, batch: object) -> None:
        """Send the digest of a batch that is split by positions, where it is looked at."""
        self._send(2, self._real.split_groups())

    def begin(self, *, draws: bool) -> None:
        """Send nothing."""

    def meet(self, place: str, numbers: Sequence[int] = ()) -> list[bool]:
        """Send where a rank is, where it is looked at."""
        if self._on_cpu and self._real.hosts.size() > 1:
            _exchange(2 * (1 + Meeting.NUMBERS), torch.int64, self._real.hosts, self._par.device)
        return [True] * len(numbers)

    def before_unit(self, name: str, unit: nn.Module) -> None:
        """Send the marks of a unit, where they are looked at: of the first one where the others are predicted."""
        if not (self._real.ordered or (name and self._real.predicts)) and not in_backward():
            self.meet(name)

    def before_backward(self, roots: Iterable[object], *, reaches: Callable[[], bool]) -> None:
        """Send that a backward begins, where it is looked at."""
        if self._on_cpu and self._real.differs and reaches():
            self.meet("a backward")

    def before_micro_batch(self, left: int) -> None:
        """Send how far a rank is, where it is looked at."""
        self.meet("a micro-batch")

    def before_step(self, optimizer: torch.optim.Optimizer, *, trains: bool) -> None:
        """Send the digest of an optimizer's settings, where it is looked at."""
        if trains:
            self.meet("a step")

    def gradients(self, unused: list[nn.Parameter]) -> None:
        """Send which parameters have a gradient; simulated ranks all use the same. Beside an accelerator the hosts
        send it meanwhile.
        """
        if self._on_cpu and self._real.differs:
            count = 1 + sum(1 for _ in self._par.module.parameters())
            _exchange(2 * count, torch.int64, self._real.hosts, self._par.device)
        for parameter in unused:
            parameter.grad = None


@final
class SentLosses(Guard):
    """The losses of backwards, which are sent on a CPU and not looked at.

    Args:
        groups: those whose ranks compare losses.
        device: where numbers are exchanged.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        self._groups, self._device = groups, device

    def before_backward(self, roots: Iterable[object], *, reaches: Callable[[], bool]) -> None:
        """Send a loss and its negation."""
        for group in self._groups if self._groups and reaches() else ():
            _exchange(2, torch.float64, group, self._device)


def _exchange(count: int, dtype: torch.dtype, group: Any, device: torch.device) -> None:
    """Send numbers as ranks on CPUs do."""
    Largest(torch.empty(count, dtype=dtype, device=device), group).read()
