"""The positions of a batch that are this rank's, where passes divide positions."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from meshpar.core.errors import MeshparError
from meshpar.core.passes import Pass
from meshpar.tensors.pytrees import leaves


def with_positions(batch: object, dim: int) -> list[Tensor]:
    """Return the tensors of a batch that have the dimension of positions, all of one length."""
    tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim > dim]
    lengths = sorted({tensor.shape[dim] for tensor in tensors})
    if len(lengths) != 1:
        raise MeshparError(
            f"split requires tensors of one length along dim {dim}, got {lengths or 'none'}; split each length alone"
        )
    return tensors


def positions(splitter: Pass, length: int, axis: str, size: int, place: int) -> Tensor:
    """Return the positions, of ``length`` ones, that a pass gives to the rank at ``place`` of an axis."""
    if length % size:
        raise MeshparError(f"{axis}={size} does not divide {length} positions; pad the batch to a multiple of {size}")
    return splitter.positions(length, size, place)


def selected(values: object, index: Tensor, dim: int) -> object:
    """Return ``values`` with the tensors in it cut to ``index`` along ``dim``. Tensors without such a dim stay."""
    if isinstance(values, Tensor):
        return _taken(values, index.to(values.device, non_blocking=True), dim) if values.ndim > dim else values
    if isinstance(values, Mapping):
        return {name: selected(value, index, dim) for name, value in values.items()}
    if isinstance(values, list | tuple):
        parts = [selected(value, index, dim) for value in values]
        return parts if isinstance(values, list) else tuple(parts)
    return values


def _taken(values: Tensor, index: Tensor, dim: int) -> Tensor:
    """Return ``index_select``, for page-locked memory in page-locked memory: its copy to a device does not wait."""
    if not values.is_pinned():
        return values.index_select(dim, index)
    shape = [len(index) if place == dim else size for place, size in enumerate(values.shape)]
    return torch.index_select(values, dim, index, out=torch.empty(shape, dtype=values.dtype, pin_memory=True))
