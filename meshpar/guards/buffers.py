"""Refuse buffers that a recomputed block changes in its forward, which recomputation would do twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from meshpar._torch.modules import BatchNorm
from meshpar.core.errors import MeshparError
from meshpar.core.patterns import class_name
from meshpar.passes.recompute import Recomputed
from meshpar.step.moment import Guard, Guarded


@final
class RecomputedBuffers(Guard):
    """Compare the buffers in recomputed blocks before and after a forward; batch norm knows when it is recomputed."""

    def __init__(self, guarded: Guarded) -> None:
        self._before: list[tuple[nn.Module, str, Tensor, int]] = []
        recomputed = guarded.facts.find(Recomputed)
        blocks = () if recomputed is None else recomputed.blocks
        inside = [child for block in blocks for child in block.modules()]
        self._recomputed = [child for child in inside if child._buffers and not isinstance(child, BatchNorm)]

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
