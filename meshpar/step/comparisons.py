"""The exchanges of ranks that a parallel module asks for itself, and those of a plan without guards: the one of which
exactness has need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, final

from torch import nn

from meshpar.passes.data.unused_gradients import Exchange, Unused


class Comparisons(Protocol):
    """The exchanges of ranks beside the moments of a guard; see :class:`meshpar.guards.agreement.Agreement`."""

    def begin(self, *, draws: bool) -> None:
        """Before the first step."""

    def whole(self, batch: object) -> None:
        """Before a batch is split by positions."""

    def meet(self, place: str, numbers: Sequence[int] = ()) -> list[bool]:
        """Before ranks exchange something at ``place``; tells of each number whether all have the same."""
        ...

    def gradients(self, unused: list[nn.Parameter]) -> None:
        """After a backward that left gradients, zeros for what was ``unused`` here; those that no rank used lose
        theirs.
        """


@final
class NoComparisons:
    """Compare nothing; drop the gradients of parameters that no rank used.

    Args:
        module: the outermost module.
        exchange: see :class:`meshpar.passes.data.unused_gradients.Unused`.
    """

    def __init__(self, module: nn.Module, exchange: Exchange | None) -> None:
        self._unused = Unused(module, exchange)

    def begin(self, *, draws: bool) -> None:
        """Compare nothing."""

    def whole(self, batch: object) -> None:
        """Compare nothing."""

    def meet(self, place: str, numbers: Sequence[int] = ()) -> list[bool]:
        """Take all ranks for alike."""
        return [True] * len(numbers)

    def gradients(self, unused: list[nn.Parameter]) -> None:
        """Drop the gradients of parameters that no rank used. Collective."""
        self._unused.drop(unused)
