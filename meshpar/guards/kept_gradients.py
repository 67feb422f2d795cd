"""Compare the gradients of what ranks keep whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshpar.core.errors import MeshparError
from meshpar.tensors.placements import local_tensor, sharded_axes

_RELATIVE, _FLOOR = 1e-2, 1e-4


def check_copies(module: nn.Module, mesh: DeviceMesh, axes: Sequence[str]) -> None:
    """Check that what the ranks of each axis keep whole has one gradient there. Collective over the axes."""
    for axis in axes:
        if odd := differing_gradients(module, axis, mesh.get_group(axis), mesh.device_type):
            raise MeshparError(
                f"ranks of {axis} have different gradients for parameters that each keeps whole: "
                f"{', '.join(odd[:6])}; give collectives of your own in a loss or a hook group=par.data_group, whose "
                "ranks have different samples; where such a module sees a slice of the heads or features, give it the "
                "style 'grad_sum' in the layout's tensor-parallel table; where it draws random numbers, draw them from "
                "a generator with the same seed on these ranks"
            )


def differing_gradients(module: nn.Module, axis: str, group: dist.ProcessGroup, device_type: str) -> list[str]:
    """Return whole parameters whose gradients' norms differ over ``group`` by more than rounding. Collective."""
    kept = [(name, p) for name, p in module.named_parameters() if p.requires_grad and axis not in sharded_axes(p)]
    if not kept:
        return []
    norms = torch.stack([_norm(parameter).to(device_type) for _, parameter in kept])
    most, least = norms.clone(), norms.neg()
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    dist.all_reduce(least, dist.ReduceOp.MAX, group)
    odd = (most + least) > _RELATIVE * most + _FLOOR * most.max()
    return [name for (name, _), differs in zip(kept, odd.tolist(), strict=True) if differs]


def _norm(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros((), device=local_tensor(parameter).device)
    return torch.linalg.vector_norm(local_tensor(parameter.grad).float())
