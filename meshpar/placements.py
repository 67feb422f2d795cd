"""Which part of a tensor a rank holds, and over which axes."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from meshpar._torch import StridedShard, quiet_gathers


def shard_dim(placement: Placement) -> int | None:
    """Return the dim that a placement splits (``Shard`` and ``_StridedShard``, which is no subclass in every torch), else None."""
    return placement.dim if placement.is_shard() or isinstance(placement, StridedShard) else None  # type: ignore[attr-defined]


def sharded_axes(tensor: Tensor) -> tuple[str, ...]:
    """Return the names of the mesh axes over which ``tensor`` is split; none for a plain tensor. A flattened axis stands for its parts."""
    if not isinstance(tensor, DTensor):
        return ()
    names = tensor.device_mesh.mesh_dim_names
    assert names is not None, "meshpar's meshes have names"
    split = (name for name, placement in zip(names, tensor.placements, strict=True) if shard_dim(placement) is not None)
    return tuple(part for name in split for part in name.split("+"))


def local_index(
    shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> tuple[slice, ...]:
    """Return the slice of a tensor of ``shape`` that the rank at ``coordinate`` holds.

    A shard is torch's chunk: ceil-sized, the last ones short or empty. FSDP2 over a tensor-parallel dim splits what the tensor axis
    left, and says so by ``_StridedShard``: those placements are taken last.
    """
    starts, sizes = [0] * len(shape), list(shape)
    order = sorted(range(len(placements)), key=lambda axis: isinstance(placements[axis], StridedShard))
    for axis in order:
        dim = shard_dim(placements[axis])
        if dim is None:
            continue
        chunk = -(-sizes[dim] // mesh_shape[axis])
        start = min(chunk * coordinate[axis], sizes[dim])
        starts[dim], sizes[dim] = starts[dim] + start, min(chunk, sizes[dim] - start)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def held_by_this_rank(tensor: Tensor) -> tuple[slice, ...]:
    """Return the slice of the whole that this rank's part of ``tensor`` is."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the tensor's mesh"
    return local_index(tensor.shape, tensor.placements, tensor.device_mesh.shape, coordinate)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of ``tensor``, detached, sharing its memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of ``tensor``, detached. Collective where ``tensor`` is a DTensor."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    with quiet_gathers():
        return tensor.full_tensor()


def undivided(placements: Sequence[Placement], dims: Collection[int]) -> tuple[Placement, ...]:
    """Return ``placements`` without those that split ``dims``."""
    return tuple(Replicate() if shard_dim(each) in dims else each for each in placements)


def placed_like(value: Tensor, like: DTensor, reduced: Collection[int]) -> DTensor:
    """Return ``value`` divided as ``like`` is, but for the dims ``reduced``, of which ``value`` has one element.

    Args:
        value: the same whole tensor on every rank, or a DTensor. A DTensor that is divided so is returned itself.
        like: has the dims of ``value``.
        reduced: dims of either.

    Collective where ``value`` is a DTensor that is divided otherwise.
    """
    mesh, placements = like.device_mesh, undivided(like.placements, reduced)
    if isinstance(value, DTensor) and (value.device_mesh, value.placements) == (mesh, placements):
        return value
    whole, coordinate = whole_tensor(value), mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the tensor's mesh"
    part = whole[local_index(value.shape, placements, mesh.shape, coordinate)].clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=value.shape, stride=whole.stride())


def unevenly_split(tensor: Tensor) -> bool:
    """Tell whether ranks hold parts of ``tensor`` of different sizes."""
    if not isinstance(tensor, DTensor):
        return False
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    parts = [(dim, size) for placement, size in sizes if (dim := shard_dim(placement)) is not None]
    return any(tensor.shape[dim] % math.prod(size for other, size in parts if other == dim) for dim, _ in parts)
