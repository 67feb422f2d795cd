"""Changes of torch for the whole process, which last as long as a parallel module that needs them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

Undo = Callable[[], bool]
"""Undoes a change; returns False where it cannot be undone now. The garbage collector may call it anywhere."""


def set_attribute(owner: object, name: str, value: object) -> Undo:
    """Set an attribute; undoing it leaves what others set since alone."""
    before = getattr(owner, name)
    setattr(owner, name, value)

    def undo() -> bool:
        if getattr(owner, name) is value:
            setattr(owner, name, before)
        return True

    return undo


def undo_all(changes: Sequence[Undo]) -> Undo:
    """Undo several changes, those that are added later, too: every one, also where one cannot be undone now."""

    def undo() -> bool:
        undone = [change() for change in changes]
        return all(undone)

    return undo


@final
@dataclass(slots=True)
class _Change:
    """A change, those that need it, and what undoes it; None where it is not made."""

    needed_by: set[object] = field(default_factory=set)
    undo: Undo | None = None


_CHANGES: dict[str, _Change] = {}


def while_lives(owner: object, name: str, make: Callable[[], Undo]) -> None:
    """Change torch by ``make``, unless ``name`` is changed already; undo it when the last ``owner`` is gone."""
    change, mark = _CHANGES.setdefault(name, _Change()), object()
    change.needed_by.add(mark)
    if change.undo is None:
        change.undo = make()
    weakref.finalize(owner, _leave, change, mark).atexit = False


def _leave(change: _Change, mark: object) -> None:
    change.needed_by.discard(mark)
    if change.needed_by or change.undo is None:
        return
    if change.undo():
        change.undo = None
    else:
        _Later(change, mark)


@final
class _Later:
    """Garbage by its making, so that the next collection tries once more."""

    def __init__(self, change: _Change, mark: object) -> None:
        self._change, self._mark, self._myself = change, mark, self

    def __del__(self) -> None:
        if not sys.is_finalizing():
            _leave(self._change, self._mark)
