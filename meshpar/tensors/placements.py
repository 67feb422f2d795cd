"""Which part of a tensor a rank holds and over which axes, and the joint norm of gradients that are split so, and
clipping by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from meshpar._torch.dtensor import StridedShard, quiet_gathers
from meshpar._torch.tensors import foreach_mul_, foreach_norm, held_part
from meshpar.core import runtime
from meshpar.core.errors import MeshparError

_BUCKET = 1 << 22  # elements
_CACHED = 1 << 16  # elements whose powers stay in a core's cache


def shard_dim(placement: Placement) -> int | None:
    """Return the dim that a placement (``Shard``, ``_StridedShard``) splits, else None."""
    if placement.is_shard() or isinstance(placement, StridedShard):
        return placement.dim  # type: ignore[attr-defined]
    return None


def placements_text(tensor: Tensor) -> str:
    """Return how ``tensor`` is placed, as messages say it: ``dp_shard:dim 0 tp:copy``; ``whole``: on no mesh."""
    if not isinstance(tensor, DTensor):
        return "whole"
    dims = zip(tensor.device_mesh.mesh_dim_names or (), map(shard_dim, tensor.placements), strict=True)
    return " ".join(f"{axis}:{'copy' if dim is None else f'dim {dim}'}" for axis, dim in dims)


def sharded_axes(tensor: Tensor) -> tuple[str, ...]:
    """Return the names of the mesh axes over which ``tensor`` is split; of a flattened axis its parts."""
    if not isinstance(tensor, DTensor):
        return ()
    names = tensor.device_mesh.mesh_dim_names
    assert names is not None, "meshpar's meshes have names"
    split = (name for name, placement in zip(names, tensor.placements, strict=True) if shard_dim(placement) is not None)
    return tuple(part for name in split for part in name.split("+"))


def local_index(
    shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> tuple[slice, ...]:
    """Return the slice of ``shape`` at ``coordinate``: torch's chunks, in which ``_StridedShard`` splits last."""
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
    device = tensor.device_mesh.device_type
    # ranks gather offloaded parts on their devices
    on_device: Any = tensor if tensor.device.type in (device, "meta") else tensor.to(device)
    with quiet_gathers():
        return on_device.full_tensor()


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of ``tensor``, with the gradient that ``full_tensor()`` has: see ``Parallelized``."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return whole_tensor(tensor)
    with quiet_gathers():
        return tensor.full_tensor()


def like(tensor: Tensor, values: Any) -> Tensor:
    """Return whole ``values``, or those of another mesh, placed as ``tensor`` is: see ``Parallelized``."""
    if isinstance(values, DTensor) and isinstance(tensor, DTensor) and _have_equal_parts(values, tensor):
        return part_like(local_tensor(values).clone(), tensor)
    if not isinstance(values, DTensor):
        values = torch.as_tensor(values).to(tensor.device)
    expanded = values.expand(tensor.shape).contiguous()
    return placed_like(expanded, tensor, ()) if isinstance(tensor, DTensor) else whole_tensor(expanded).clone()


def _have_equal_parts(first: DTensor, second: DTensor) -> bool:
    """Return whether each rank holds the same part of both tensors, each on a mesh of its own plan."""
    meshes = first.device_mesh.mesh, second.device_mesh.mesh
    return first.shape == second.shape and first.placements == second.placements and torch.equal(*meshes)


def undivided(placements: Sequence[Placement], dims: Collection[int]) -> tuple[Placement, ...]:
    """Return ``placements`` without those that split ``dims``, or that leave sums to be made."""
    return tuple(
        Replicate() if (dim := shard_dim(placement)) is None or dim in dims else placement for placement in placements
    )


def placed_like(value: Tensor, like: DTensor, reduced: Collection[int]) -> DTensor:
    """Return ``value`` divided as ``like`` is, but for the dims ``reduced``, in which it has one element."""
    mesh, placements = like.device_mesh, undivided(like.placements, reduced)
    if isinstance(value, DTensor) and (value.device_mesh, value.placements) == (mesh, placements):
        return value
    whole, coordinate = whole_tensor(value), mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the tensor's mesh"
    part = whole[local_index(value.shape, placements, mesh.shape, coordinate)].clone(
        memory_format=torch.contiguous_format
    )
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=value.shape, stride=whole.stride())


def replicated_like(value: Tensor, like: DTensor) -> DTensor:
    """Return ``value``, the same on all ranks, as a DTensor on the mesh of ``like``."""
    mesh = like.device_mesh
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def part_like(part: Tensor, like: DTensor) -> DTensor:
    """Return a DTensor of which this rank holds ``part``, of the shape of ``like`` and divided as ``like`` is."""
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def unevenly_split(tensor: Tensor) -> bool:
    """Return whether ranks hold parts of ``tensor`` of different sizes."""
    if not isinstance(tensor, DTensor):
        return False
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    parts = [(dim, size) for placement, size in sizes if (dim := shard_dim(placement)) is not None]
    return any(tensor.shape[dim] % math.prod(size for other, size in parts if other == dim) for dim, _ in parts)


def clip_grad_norms_(
    parameters: Iterable[Tensor],
    groups: Mapping[str, dist.ProcessGroup],
    max_norm: float,
    norm_type: float,
    device: torch.device,
    apart: tuple[dist.ProcessGroup, set[int]] | None = None,
    rows: Mapping[int, int] | None = None,
    count: int = 1,
    elements: int = 0,
) -> Tensor:
    """Scale gradients so that their joint norm is at most ``max_norm``; return the norms before, the joint one first.

    ``groups``: axis -> this rank's group, outermost first. ``apart``: ranks with other parameters, and the ``id`` of
    this rank's that another one counts. ``rows``: ``id`` of a parameter -> which of ``count`` norms has it, too.
    ``elements``: of how many of the whole model the powers are added exactly, in any order; 0: they are rounded.
    Collective over the groups of axes that split a parameter.
    """
    parameters, rows = list(parameters), rows or {}
    stages, elsewhere = apart or (None, set[int]())
    parts: dict[frozenset[str], list[list[Tensor]]] = {}
    twice = list[Tensor]()
    axes_by_placement: dict[object, frozenset[str]] = {}
    for parameter in parameters:
        grad = _placed_gradient(parameter)
        if grad is None and not parameter.requires_grad:
            continue
        key = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        if (axes := axes_by_placement.get(key)) is None:  # that of experts is a part of the data axis
            axes_by_placement[key] = axes = frozenset(sharded_axes(parameter)).intersection(groups)
        # A rank may have no gradient where another has: every rank joins the same reductions all the same.
        over = parts.setdefault(axes, [[] for _ in range(count)])
        if grad is not None:
            together = twice if elsewhere and id(parameter) in elsewhere else over[rows.get(id(parameter), 0)]
            together.append(held_part(grad))
    largest, dtypes = math.isinf(norm_type), {parameter.dtype for parameter in parameters}
    wide = torch.float32 if dtypes.isdisjoint((torch.float64, torch.complex128)) else torch.float64

    def join(kind: float, power: Callable[[list[Tensor]], Tensor]) -> Tensor:
        powers = {axes: torch.stack([power(grads) for grads in over]) for axes, over in parts.items()}
        joined = joined_over_axes(powers, groups, kind, torch.stack([power([])] * count))
        if stages is not None:
            dist.all_reduce(joined, dist.ReduceOp.MAX if math.isinf(kind) else dist.ReduceOp.SUM, group=stages)
        joined[0] = joined.amax(0) if math.isinf(kind) else joined.sum(0)
        return joined

    if elements and not largest:
        top = join(math.inf, lambda grads: _power(grads, math.inf, device).to(wide))[0]
        exact = _ExactPowers(norm_type, top, elements)
        norms = exact.norms(join(norm_type, exact.power)).to(wide)
    else:
        joined = join(norm_type, lambda grads: _power(grads, norm_type, device).to(wide))
        norms = joined if largest else joined ** (1.0 / norm_type)
    if not math.isinf(max_norm):
        scale = (max_norm / (norms[0] + 1e-6)).clamp(max=1.0)
        scales = {scale.device: scale}
        for grads in [twice, *(grads for over in parts.values() for grads in over)]:
            for grad_device, together in by_device(grads).items():
                if grad_device not in scales:
                    scales[grad_device] = scale.to(grad_device)
                foreach_mul_(together, scales[grad_device])
    return norms


def joined_over_axes(
    powers: dict[frozenset[str], Tensor], groups: Mapping[str, dist.ProcessGroup], norm_type: float, none: Tensor
) -> Tensor:
    """Join powers of norms, or other sums, by the axes over which tensors are split, axis by axis, innermost first."""
    largest = math.isinf(norm_type)
    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    for axis in reversed(list(groups)):
        keys = sorted((key for key in powers if axis in key), key=sorted)
        if not keys:
            continue
        vector = torch.stack([powers.pop(key) for key in keys])
        dist.all_reduce(vector, op, group=groups[axis])
        for key, value in zip(keys, vector.unbind(), strict=True):
            rest = key - {axis}
            joined_before = powers.get(rest)
            powers[rest] = (
                value
                if joined_before is None
                else torch.maximum(joined_before, value)
                if largest
                else joined_before + value
            )
    return powers.get(frozenset(), none)


def _placed_gradient(parameter: Any) -> Tensor | None:
    """Return the gradient, with partial sums reduced, divided as its parameter is."""
    grad = parameter.grad
    if type(grad) is type(parameter) is DTensor and grad.placements != parameter.placements:
        parameter.grad = grad.redistribute(placements=parameter.placements)
    return parameter.grad


def local_gradient(parameter: Tensor) -> Tensor:
    """Return this rank's part of a gradient, divided as its parameter; MeshparError for a sparse one. Collective."""
    grad = _placed_gradient(parameter)
    assert grad is not None
    if grad.is_sparse:
        raise MeshparError(
            "the optimizer does not support sparse gradients; build the embedding with sparse=False, or use SparseAdam"
        )
    return local_tensor(grad)


def _power(grads: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return sum |g|^p over ``grads`` (their maximum for p = inf), in float32, or in float64 where a gradient is."""
    grads = [grad.abs() if grad.dtype.is_complex else grad for grad in grads if 0 not in grad.shape]
    if not grads:
        return torch.zeros((), device=device)
    wide = torch.float64 if torch.float64 in {grad.dtype for grad in grads} else torch.float32
    norms = [torch.stack(foreach_norm(together, norm_type, dtype=wide)) for together in by_device(grads).values()]
    stacked = torch.cat([norm.to(device, non_blocking=True) for norm in norms])
    return stacked.max() if math.isinf(norm_type) else (stacked**norm_type).sum()


@final
class _ExactPowers:
    """Sums of |g|^p as whole numbers of units of float64, which no order of additions and no cut of a tensor changes.

    A power, at most that of the ``largest`` gradient, is written in digits of so many bits that float64 adds up one of
    each of all ``elements`` exactly, and in so many digits that the rest of all together is below the norm's last bit.
    """

    def __init__(self, norm_type: float, largest: Tensor, elements: int) -> None:
        if norm_type not in (1.0, 2.0):
            raise MeshparError(
                f"the norm of type {norm_type:g} takes powers, whose last bits depend on a value's place in memory; "
                "under same_bits use norm_type=2, 1 or inf"
            )
        self._type, count_bits = norm_type, elements.bit_length()
        self._base = 2.0 ** (52 - count_bits)
        self._digits = -(-((54 if largest.dtype == torch.float64 else 25) + count_bits) // (52 - count_bits))
        # the base divided by it is finite
        self._unit = torch.where(largest.isfinite(), largest, 1.0).to(torch.float64).clamp(min=1e-280)

    def power(self, grads: list[Tensor]) -> Tensor:
        """Return the sum of each digit over ``grads``, the highest first."""
        sums = self._unit.new_zeros(self._digits)
        for grad in grads:
            scale = (self._base ** (1.0 / self._type) / self._unit).to(grad.device)
            for part in grad.reshape(-1).split(_CACHED if runtime.on_host(grad.device) else _BUCKET):
                rest = part.abs() if self._type == 1 or part.is_complex() else part
                rest = rest.to(torch.float64, copy=True).mul_(scale).pow_(self._type)
                for number in range(self._digits):
                    if number:
                        rest.frac_().mul_(self._base)
                    sums[number] += rest.floor().sum().to(sums.device)
        return sums

    def norms(self, sums: Tensor) -> Tensor:
        """Return the norms of rows of sums; what is not finite is so in the highest digit."""
        total = sum(digit * self._base**-number for number, digit in enumerate(sums.unbind(-1), 1))
        total = torch.where(sums[:, 0].isfinite(), total, sums[:, 0])
        return total ** (1.0 / self._type) * self._unit


def buckets(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield parameters of one dtype whose gradients or values travel together, in their order."""
    bucket, size = list[Tensor](), 0
    for parameter in parameters:
        if bucket and (parameter.dtype != bucket[0].dtype or size >= _BUCKET):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += local_tensor(parameter).numel()
    if bucket:
        yield bucket


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of a dtype are added up."""
    return torch.promote_types(dtype, torch.float32)


def by_device(tensors: Iterable[Tensor]) -> dict[torch.device, list[Tensor]]:
    """Return the tensors by the device on which they are, for the kernels that take many at once."""
    tensors = list(tensors)
    devices = dict.fromkeys([tensor.device for tensor in tensors])
    return {device: [tensor for tensor in tensors if tensor.device == device] for device in devices}
