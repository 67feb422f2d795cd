"""The comparisons of a plan without guards: none, and the one exchange of which exactness has need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from torch import nn
from torch.optim import Optimizer

from meshpar._torch.units import Units
from meshpar.passes.unused import Exchange, Unused


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
