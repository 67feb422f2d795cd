"""Refuse parameters that are written inside of a forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from torch import nn

from meshpar._torch.calls import eager
from meshpar.exchange.ranks import Looks
from meshpar.passes.data.whole_parameters import WholeParameters, refuse_written
from meshpar.step.moment import Guard, Guarded


@final
class WrittenInForward(Guard):
    """Compare whole parameters before and after a call of the module, and gathered ones around their unit's forward."""

    def __init__(self, guarded: Guarded) -> None:
        self._units, self._whole = guarded.units, guarded.facts.find(WholeParameters)
        self._before: dict[str, tuple[int, int]] = {}
        self._names, self._looks = {unit: name for name, unit in guarded.module.named_modules()}, Looks()
        for unit in self._units.modules:
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
        return {} if self._whole is None else self._whole.versions()

    @eager
    def _gathered(self, unit: nn.Module, args: object) -> None:
        self._units.remember(unit)

    @eager
    def _before_freed(self, unit: nn.Module, args: object, output: object) -> None:
        if name := self._units.written(unit, look=self._looks.first(self._names[unit])):
            refuse_written(name)
