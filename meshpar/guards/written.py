"""Refuse parameters, and buffers of recomputed blocks, that are written inside of a forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from meshpar._torch.calls import eager
from meshpar._torch.modules import BatchNorm
from meshpar.core.errors import MeshparError
from meshpar.core.patterns import class_name
from meshpar.exchange.ranks import Looks
from meshpar.passes.data.whole_parameters import WholeParameters, refuse_written
from meshpar.passes.recompute import Recomputed
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
        self._units.writes.keep_gathered(unit)

    @eager
    def _before_freed(self, unit: nn.Module, args: object, output: object) -> None:
        if name := self._units.writes.written_in_forward(unit, look=self._looks.first(self._names[unit])):
            refuse_written(name)


@final
class RecomputedBuffers(Guard):
    """Compare the buffers in recomputed blocks before and after a forward; batch norm knows when it is recomputed."""

    def __init__(self, guarded: Guarded) -> None:
        self._before: list[tuple[nn.Module, str, Tensor, int]] = []
        recomputed = guarded.facts.find(Recomputed)
        blocks = () if recomputed is None else recomputed.blocks
        children = [child for block in blocks for child in block.modules()]
        self._recomputed = [child for child in children if child._buffers and not isinstance(child, BatchNorm)]

    def before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._before = list(self._buffers()) if torch.is_grad_enabled() else []

    def after_forward(self, output: object) -> None:
        before, self._before = self._before, []
        for child, name, buffer, version in before:
            if child._buffers[name] is not buffer or buffer._version != version:
                raise MeshparError(
                    f"{class_name(child)} changes its buffer {name!r} in forward, which recomputation would do twice; "
                    "leave such blocks out: ActivationCheckpoint(blocks=...)"
                )

    def _buffers(self) -> Iterator[tuple[nn.Module, str, Tensor, int]]:
        for child in self._recomputed:
            for name, buffer in child._buffers.items():
                if buffer is not None:
                    yield child, name, buffer, buffer._version
