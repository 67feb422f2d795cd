"""The joint norm of gradients, whose bits follow neither cuts nor kernels.

Squares are summed along each row of a whole parameter, then over rows, then over parameters in the order of their
names. A row is summed in up to :data:`PARTS` equal parts of each of its dims, as a mesh may cut any of them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence

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
    parameters: Sequence[Tensor],
    groups: Mapping[str, dist.ProcessGroup],
    apart: Collection[str],
    norm_type: float,
    device: torch.device,
    rows: Mapping[int, int],
    count: int,
) -> Tensor:
    """Return ``count`` norms of all parameters, as ``clip_grad_norms_`` does; on meta: other ranks' over ``apart``."""
    if norm_type not in (1.0, 2.0):
        raise MeshparError(
            f"the norm of type {norm_type:g} takes powers, whose last bits depend on a value's place in memory; under "
            "same_bits use norm_type=2, 1 or inf"
        )
    parameters = [parameter for parameter in parameters if parameter.numel()]
    wide = torch.float64 if torch.float64 in {parameter.dtype for parameter in parameters} else torch.float32
    blocks = [_blocks(parameter) for parameter in parameters]
    # Each sum is one rank's alone, and the others add zeros: the order of these additions does not matter.
    every = torch.zeros(sum(map(math.prod, blocks)), dtype=wide, device=device)
    sums = [part.view(block) for part, block in zip(every.split(list(map(math.prod, blocks))), blocks)]
    for number, parameter in enumerate(parameters):
        index, copies, cut = 0, 1, sharded_axes(parameter)
        for axis, group in groups.items():
            if axis not in (*apart, *cut):
                index, copies = index * group.size() + group.rank(), copies * group.size()
        # ranks with copies divide the parameters
        if number % copies == index and parameter.grad is not None:
            _add_up(parameter, norm_type, sums[number])
    for group in groups.values():
        if group.size() > 1:
            dist.all_reduce(every, group=group)
    members: list[list[Tensor]] = [[] for _ in range(count)]
    for parameter, of_parameter in zip(parameters, sums):
        total = fold(fold(of_parameter.view(len(of_parameter), -1)))
        for row in {0, rows.get(id(parameter), 0)}:
            members[row].append(total)
    powers = torch.stack([fold(torch.stack(of_one or [every.new_zeros(())])) for of_one in members])
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


def _add_up(parameter: Tensor, norm_type: float, sums: Tensor) -> None:
    """Write this rank's sums of powers of a gradient into those of the whole."""
    rows, *columns = held_by_this_rank(parameter) or (slice(0, 1),)
    widths = [max(length // parts, 1) for length, parts in zip(parameter.shape[1:], sums.shape[1:], strict=True)]
    region = [slice(part.start // width, part.stop // width) for part, width in zip(columns, widths, strict=True)]
    part = sums[rows, *region]
    grad = local_gradient(parameter).to(sums.dtype)
    powers = grad.square() if norm_type == 2 else grad.abs()
    if len(part):
        cuts = zip(part.shape[1:], widths, strict=True)
        powers = powers.reshape(len(part), *(length for cut in cuts for length in cut))
        order = (0, *range(1, powers.ndim, 2), *range(2, powers.ndim, 2))
        part.copy_(fold(powers.permute(order).reshape(*part.shape, math.prod(widths))))
