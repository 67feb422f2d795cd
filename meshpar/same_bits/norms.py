"""The joint norm of gradients, whose bits follow neither cuts nor kernels.

Squares are summed along each row of a whole parameter, then over rows, then over parameters in the order of their
names. A row is summed in up to :data:`PARTS` equal parts of each of its dims, as a mesh may cut any of them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from meshpar.core.errors import MeshparError
from meshpar.same_bits.trees import fold
from meshpar.tensors.placements import held_by_this_rank, local_gradient, sharded_axes

PARTS = 8
"""The finest cut on any mesh of another dim than the first."""
RUNS = weakref.WeakSet[object]()
"""The runs under ``same_bits``."""


def joint_norms(
    named: Mapping[str, Tensor],
    groups: Mapping[str, dist.ProcessGroup],
    apart: Collection[str],
    norm_type: float,
    device: torch.device,
    rows: Mapping[str, int],
    count: int,
) -> Tensor:
    """Return ``count`` norms, the joint one first; ``rows``: which one a parameter has, too. Collective.

    ``named`` has all parameters of the model in one order: those of other ranks, which differ over the axes ``apart``
    of ``groups``, on the meta device.
    """
    if norm_type not in (1.0, 2.0):
        raise MeshparError(
            f"the norm of type {norm_type:g} takes powers, whose last bits depend on a value's place in memory; under "
            "same_bits use norm_type=2, 1 or inf"
        )
    wide = torch.float64 if torch.float64 in {parameter.dtype for parameter in named.values()} else torch.float32
    sizes = [math.prod(_blocks(parameter)) for parameter in named.values()]
    # Each sum is one rank's alone, and the others add zeros: the order of these additions does not matter.
    every = torch.zeros(sum(sizes), dtype=wide, device=device)
    for number, (parameter, sums) in enumerate(zip(named.values(), every.split(sizes), strict=True)):
        index, copies, cut = 0, 1, sharded_axes(parameter)
        for axis, group in groups.items():
            if axis not in (*apart, *cut):
                index, copies = index * group.size() + group.rank(), copies * group.size()
        # ranks with copies divide the parameters
        if number % copies == index and parameter.grad is not None:
            own_sums, region = _sums(parameter, norm_type, wide)
            sums.view(_blocks(parameter))[region] = own_sums
    for group in groups.values():
        if group.size() > 1:
            dist.all_reduce(every, group=group)
    totals = [
        fold(fold(sums.view(_blocks(parameter)[0], -1)))
        for parameter, sums in zip(named.values(), every.split(sizes), strict=True)
    ]
    members: list[list[Tensor]] = [totals, *([] for _ in range(count - 1))]
    for name, total in zip(named, totals, strict=True):
        if rows.get(name, 0):
            members[rows[name]].append(total)
    powers = torch.stack([fold(torch.stack(of_one)) for of_one in members])
    return powers ** (1.0 / norm_type)


def refuse_norms_of_shards(gradients: Iterable[Tensor]) -> None:
    """Refuse gradients whose squares torch would add up shard by shard, while a run needs the same bits."""
    if RUNS and any(map(sharded_axes, gradients)):
        raise MeshparError(
            "torch.nn.utils.clip_grad_norm_ adds up the squares of each rank's shards, so that the last bits of the "
            "norm follow the mesh; under same_bits call par.clip_grad_norm_(max_norm)"
        )


def _blocks(parameter: Tensor) -> tuple[int, ...]:
    """Return the number of rows of a whole parameter, and in how many parts of each other dim they are summed."""
    rows, *columns = parameter.shape or (1,)
    return rows, *(math.gcd(length, PARTS) for length in columns)


def _sums(parameter: Tensor, norm_type: float, wide: torch.dtype) -> tuple[Tensor, tuple[slice, ...]]:
    """Return this rank's sums of powers, and which of the whole these are."""
    rows, *columns = held_by_this_rank(parameter) or (slice(0, 1),)
    widths = [
        max(length // parts, 1) for length, parts in zip(parameter.shape[1:], _blocks(parameter)[1:], strict=True)
    ]
    region = [slice(part.start // width, part.stop // width) for part, width in zip(columns, widths, strict=True)]
    grad = local_gradient(parameter).to(wide)
    powers = grad.square() if norm_type == 2 else grad.abs()
    count, parts = rows.stop - rows.start, [part.stop - part.start for part in region]
    powers = powers.reshape(count, *(length for cut in zip(parts, widths, strict=True) for length in cut))
    order = (0, *range(1, powers.ndim, 2), *range(2, powers.ndim, 2))
    powers = powers.permute(order).reshape(count, *parts, math.prod(widths))
    return fold(powers) if count else powers.sum(-1), (rows, *region)
