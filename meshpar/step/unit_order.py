"""Predict in which order forwards call units, so that ranks meet once a forward, not before every unit, where they
would wait for ever for one that gathers another. A rank that leaves the prediction gathers the rest of it, for which
the others wait, and meets them; one that left it alone is refused there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from torch import nn

Kind = tuple[bool, bool]
"""Two flags of a forward: it wants gradients; the module trains."""


@final
@dataclass(slots=True)
class _Habit:
    """The units of the last forwards of one kind, how many called them, and how many must before they are predicted."""

    order: tuple[nn.Module, ...] = ()
    times: int = 0
    needed: int = 2


@final
class Schedule:
    """The order in which forwards of one module call its units; ``gather`` gathers and frees one, as a forward does."""

    def __init__(self, gather: Callable[[nn.Module], None]) -> None:
        self._gather = gather
        self._habits: dict[Kind, _Habit] = {}
        self._habit: _Habit | None = None  # of the forward that runs
        self._called: list[nn.Module] = []
        self._expected: Sequence[nn.Module] | None = None

    def begin(self, kind: Kind) -> None:
        """Begin a forward of the outermost module."""
        self._habit, self._expected = self._habits.setdefault(kind, _Habit()), None
        self._called.clear()

    @property
    def prediction(self) -> Sequence[nn.Module]:
        """The units that the forward that begins will call; empty where they are not known, or one has been called."""
        habit = self._habit
        return () if habit is None or self._called or habit.times < habit.needed else habit.order

    def follow(self, order: Sequence[nn.Module]) -> None:
        """Expect these units, as all ranks do; the forward that runs has called none yet."""
        self._expected = order

    def expects(self, unit: nn.Module) -> bool:
        """Return whether all ranks call this unit now, as predicted; else gather the predicted rest, collectively."""
        if self._habit is None:  # a unit is called from outside of the module
            return False
        number = len(self._called)
        self._called.append(unit)
        if self._expected is None:
            return False
        if number < len(self._expected) and self._expected[number] is unit:
            return True
        self._leave(number)
        return False

    def end(self) -> bool:
        """End a forward; return whether ranks must meet, because it called too few units. Collective where it did."""
        habit, self._habit = self._habit, None
        assert habit is not None, "a forward ends that has begun"
        short = self._expected is not None and len(self._called) < len(self._expected)
        if short:
            self._leave(len(self._called), habit)
        order, self._expected = tuple(self._called), None
        habit.order, habit.times = order, habit.times + 1 if order == habit.order else 1
        return short

    def fail(self) -> None:
        """End a forward in which an error was raised, here or on all ranks. Collective where units were predicted."""
        habit, self._habit = self._habit, None
        if habit is not None and self._expected is not None and len(self._called) < len(self._expected):
            self._leave(len(self._called), habit)
        self._expected = None

    def _leave(self, place: int, habit: _Habit | None = None) -> None:
        habit, expected, self._expected = habit or self._habit, self._expected, None
        assert habit is not None and expected is not None, "only a predicted order can be left"
        habit.times, habit.needed = 0, 2 * habit.needed
        for unit in expected[place:]:
            self._gather(unit)
