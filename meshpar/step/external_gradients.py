"""Weights that a loss uses outside of the module's calls, whose gradients are averaged here, since no unit does."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from meshpar._torch.modules import held_part
from meshpar.tensors.placements import held_by_this_rank, local_tensor, whole_tensor


def average_outside(parameter: Any, kept: Collection[str], reached: Callable[[], None]) -> None:
    """Average a sharded parameter's gradients of ``full_tensor()`` in a loss over the axes that are not ``kept``."""
    mesh: DeviceMesh = parameter.device_mesh
    data = [place for place, name in enumerate(mesh.mesh_dim_names or ()) if name not in kept and mesh.size(place) > 1]
    if not data:
        return
    groups = [mesh.get_group(place) for place in data]

    def full_tensor(*, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        if not (torch.is_grad_enabled() and parameter.requires_grad):
            return DTensor.full_tensor(parameter, grad_placements=grad_placements)
        return cast("Tensor", _Outside.apply(parameter, True, groups, reached))

    def to_local(*, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        copies = [group for place, group in zip(data, groups) if parameter.placements[place].is_replicate()]
        if not copies or not (torch.is_grad_enabled() and parameter.requires_grad):
            return DTensor.to_local(parameter, grad_placements=grad_placements)
        return cast("Tensor", _Outside.apply(parameter, False, copies, reached))

    parameter.full_tensor, parameter.to_local = full_tensor, to_local


class _Outside(torch.autograd.Function):
    """The whole of a parameter, or this rank's part, whose gradient is averaged over groups of data ranks."""

    @staticmethod
    def forward(
        ctx: Any, parameter: DTensor, whole: bool, groups: Sequence[dist.ProcessGroup], reached: Callable[[], None]
    ) -> Tensor:
        ctx.like, ctx.whole, ctx.groups, ctx.reached = parameter.detach(), whole, groups, reached
        return whole_tensor(parameter) if whole else local_tensor(parameter).view_as(held_part(parameter))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.reached()
        total = grads[0].contiguous().clone()
        for group in ctx.groups:
            dist.all_reduce(total, group=group)
        total /= math.prod(group.size() for group in ctx.groups)
        grad = torch.empty_like(ctx.like)  # on the host where the parameter is
        local_tensor(grad).copy_(total[held_by_this_rank(ctx.like)] if ctx.whole else total)
        return grad, None, None, None
