"""Refuse parameters that are written inside of a forward, among those that data ranks keep whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

from torch import nn

from meshpar.core.guards import Guard, Guarded
from meshpar.passes.applied import applied
from meshpar.passes.local import refuse_written


def guards(guarded: Guarded) -> Iterator[Guard]:
    """Yield the guard of any module: which parameters stay whole may change when modules come."""
    yield WrittenInForward(guarded.module)


@final
class WrittenInForward(Guard):
    """Compare the versions of whole parameters before and after a call of the module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before: dict[str, tuple[int, int]] = {}

    def before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._before = self._now()

    def after_forward(self, output: object) -> None:
        now = self._now()
        if now != self._before:
            refuse_written(next(name for name in now if now[name] != self._before[name]))

    def _now(self) -> dict[str, tuple[int, int]]:
        whole = applied(self._module).whole
        return {} if whole is None else whole.versions()
