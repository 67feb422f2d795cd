"""Refuse parameters that are written inside of a forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from torch import nn

from meshpar._torch.calls import eager
from meshpar._torch.units import Units
from meshpar.core import runtime
from meshpar.core.guards import Guard, Guarded
from meshpar.passes.applied import applied
from meshpar.passes.data.whole_parameters import refuse_written
from meshpar.step.rank_digests import Looks


@final
class WrittenInForward(Guard):
    """Compare parameters that data ranks keep whole before and after a call of the module, and gathered ones before and
    after their unit's forward.
    """

    def __init__(self, guarded: Guarded, units: Units) -> None:
        self._module, self._units = guarded.module, units
        self._before: dict[str, tuple[int, int]] = {}
        self._names, self._looks = {unit: name for name, unit in self._module.named_modules()}, Looks()
        for unit in units.modules:
            # FSDP2's own hook came before; its hook after a forward comes next
            unit.register_forward_pre_hook(self._gathered)
            unit.register_forward_hook(self._before_freed, prepend=True)

    def before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._before = self._now()

    def after_forward(self, output: object) -> None:
        now = self._now()
        if now != self._before:
            refuse_written(next(name for name in now if now[name] != self._before[name]))

    def _now(self) -> dict[str, tuple[int, int]]:
        whole = applied(self._module).whole
        return {} if whole is None else whole.versions()

    @eager
    def _gathered(self, unit: nn.Module, args: object) -> None:
        self._units.remember(unit)

    @eager
    def _before_freed(self, unit: nn.Module, args: object, output: object) -> None:
        if name := self._units.written(unit, look=not runtime.is_simulated() and self._looks.first(self._names[unit])):
            refuse_written(name)
