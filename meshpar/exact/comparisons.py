"""The comparisons between ranks that a parallel module asks for, and the ones of a plan without guards: none, and the
one exchange of which exactness has need.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, final

from torch import nn
from torch.optim import Optimizer

from meshpar._torch.units import Units
from meshpar.passes.unused import Exchange, Unused


class Comparisons(Protocol):
    """The comparisons between ranks; see :class:`meshpar.exact.agreement.Agreement`."""

    def begin(self, *, draws: bool) -> None:
        """Before the first step, and after modules came."""

    def batch(self, inputs: object) -> None:
        """Before a forward."""

    def whole(self, batch: object) -> None:
        """Before a batch is split by positions."""

    def begin_forward(self, units: Units) -> None:
        """Before a forward of the module."""

    def end_forward(self) -> None:
        """After a forward of the module."""

    def fail_forward(self) -> None:
        """After a forward of the module that raised an error."""

    def unit(self, name: str, unit: nn.Module, units: Units) -> None:
        """Before the forward of a unit, one of ``units``."""

    @property
    def meets_before_backward(self) -> bool:
        """Ranks meet before the next backward."""
        ...

    def backward(self) -> None:
        """Before a backward."""

    def meet(self, place: str, numbers: Sequence[int] = ()) -> list[bool]:
        """Before ranks exchange something at ``place``; tells of each number whether all have the same."""
        ...

    def micro_batches(self, left: int) -> None:
        """Before a micro-batch."""

    def settings(self, optimizer: Optimizer) -> None:
        """Before an optimizer's step."""

    def gradients(self, unused: list[nn.Parameter]) -> None:
        """After a backward that left gradients, zeros for what was ``unused`` here; those that no rank used lose
        theirs.
        """


class LossComparison(Protocol):
    """The comparison of what backwards start from; see :class:`meshpar.exact.losses.Losses`."""

    @property
    def compared(self) -> bool:
        """The next loss is compared."""
        ...

    def check(self, roots: Iterable[object]) -> None:
        """Before a backward of the module."""


@final
class NoComparisons:
    """Compare nothing; drop the gradients of parameters that no rank used.

    Args:
        module: the outermost module.
        exchange: see :class:`meshpar.passes.unused.Unused`.
    """

    meets_before_backward = False

    def __init__(self, module: nn.Module, exchange: Exchange | None) -> None:
        self._unused = Unused(module, exchange)

    def begin(self, *, draws: bool) -> None:
        """Compare nothing."""

    def batch(self, inputs: object) -> None:
        """Compare nothing."""

    def whole(self, batch: object) -> None:
        """Compare nothing."""

    def begin_forward(self, units: Units) -> None:
        """Compare nothing."""

    def end_forward(self) -> None:
        """Compare nothing."""

    def fail_forward(self) -> None:
        """Compare nothing."""

    def unit(self, name: str, unit: nn.Module, units: Units) -> None:
        """Compare nothing."""

    def backward(self) -> None:
        """Compare nothing."""

    def meet(self, place: str, numbers: Sequence[int] = ()) -> list[bool]:
        """Take all ranks for alike."""
        return [True] * len(numbers)

    def micro_batches(self, left: int) -> None:
        """Compare nothing."""

    def settings(self, optimizer: Optimizer) -> None:
        """Compare nothing."""

    def gradients(self, unused: list[nn.Parameter]) -> None:
        """Drop the gradients of parameters that no rank used. Collective."""
        self._unused.drop(unused)


@final
class NoLosses:
    """Compare no losses."""

    compared = False

    def check(self, roots: Iterable[object]) -> None:
        """Compare nothing."""
