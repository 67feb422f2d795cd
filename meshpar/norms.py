"""Norms of gradients that are split over several meshes: each rank's part, before the ranks join theirs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate


def whole_gradient(parameter: Tensor) -> Tensor | None:
    """Return the gradient with partial sums reduced."""
    grad: Any = parameter.grad
    if isinstance(grad, DTensor) and any(isinstance(each, Partial) for each in grad.placements):
        parameter.grad = grad.redistribute(placements=[Replicate() if isinstance(each, Partial) else each for each in grad.placements])
    return parameter.grad


def power(grads: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return sum |g|^p over ``grads`` (their maximum for p = inf), in float32; float64 gradients are measured in float64 first."""
    grads = [grad for grad in grads if grad.numel()]
    if not grads:
        return torch.zeros((), device=device)
    norms: list[Tensor] = []
    for together in by_device(grads).values():
        for dtype in (torch.float32, torch.float64):
            of_dtype = [grad for grad in together if (grad.dtype == torch.float64) == (dtype == torch.float64)]
            norms += torch._foreach_norm(of_dtype, norm_type, dtype=dtype) if of_dtype else ()
    # Ranks without a gradient join with float32 zeros, so every rank's part has that dtype.
    stacked = torch.stack([norm.to(device, torch.float32) for norm in norms])
    return stacked.max() if math.isinf(norm_type) else (stacked**norm_type).sum()


def by_device(tensors: list[Tensor]) -> dict[torch.device, list[Tensor]]:
    """Return the tensors by the device on which they are, for the kernels that take many at once."""
    groups: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device, []).append(tensor)
    return groups
