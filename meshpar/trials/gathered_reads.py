"""Parameters of which each rank holds its part: each read gathers one, and backward does so again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor, nn

from meshpar._torch.autograd import StorageWeakRef
from meshpar.passes.tensor.collectives import gather_values, join_chunks, take_chunk
from meshpar.passes.tensor.context import Context

Cut = tuple[int, int]
"""The dim along which a parameter is split, and its whole length."""


class _WholeRead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, reads: WholeReads) -> Tensor:
        ctx.chunk = reads.cuts[part][0], reads.context.group
        return reads.join(part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return take_chunk(grad, *ctx.chunk), None


@final
class WholeReads:
    """Reads of whole parameters, by the ranks of the axis together; ``failed_elsewhere``: another rank's error code."""

    def __init__(self, context: Context) -> None:
        self.context, self.failed_elsewhere = context, 0
        self.cuts: dict[Tensor, Cut] = {}
        self._parts: dict[StorageWeakRef, Tensor] = {}

    def read(self, part: Any) -> Any:
        """Return the whole of a part, and anything else as it is. Collective over the axis."""
        if not isinstance(part, Tensor) or part not in self.cuts:
            return part
        whole: Any = _WholeRead.apply(part, self)
        self._parts[StorageWeakRef(whole.untyped_storage())] = part
        return whole

    def join(self, part: Tensor) -> Tensor:
        """Return the ranks' parts joined. Collective over the axis."""
        self.failed_elsewhere = self.worst(0, part.device)
        if self.failed_elsewhere:
            raise RuntimeError("another rank of the axis failed")
        return join_chunks(part, *self.cuts[part], self.context.group)

    def worst(self, code: int, device: torch.device) -> int:
        """Return the largest code of the axis's ranks, above 0 where one failed. Collective over the axis."""
        return int(gather_values(torch.tensor([code], device=device), self.context.group).max())

    def of(self, block: nn.Module) -> AbstractContextManager[object]:
        """Let a copy, which holds the parts, read whole parameters; it runs, forward and backward, in this context."""
        for child in block.modules():
            vars(child)["_parameters"] = _Read(child._parameters, self)
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, saved: Tensor) -> Any:
        part = None if saved.layout != torch.strided else self._parts.get(StorageWeakRef(saved.untyped_storage()))
        if part is None or part.dtype != saved.dtype:
            return saved
        return part, saved.shape, saved.stride(), saved.storage_offset()

    def _unpack(self, packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else self.join(packed[0]).as_strided(*packed[1:])


class _Read(dict[str, Any]):
    """A module's parameters, each whole where it is read."""

    def __init__(self, parameters: Mapping[str, Any], reads: WholeReads) -> None:
        super().__init__(parameters)
        self._reads = reads

    def __getitem__(self, name: str) -> Any:
        return self._reads.read(super().__getitem__(name))

    def values(self) -> Iterable[Any]:  # type: ignore[override]
        return (self[name] for name in self)

    def items(self) -> Iterable[tuple[str, Any]]:  # type: ignore[override]
        return ((name, self[name]) for name in self)
