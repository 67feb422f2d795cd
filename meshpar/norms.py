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
    """Return sum |g|^p over ``grads`` (their maximum for p = inf), in float32."""
    grads = [grad for grad in grads if grad.numel()]
    if not grads:
        return torch.zeros((), device=device)
    norms = [norm for together in by_device(grads).values() for norm in torch._foreach_norm(together, norm_type, dtype=torch.float32)]
    stacked = torch.stack([norm.to(device) for norm in norms])
    return stacked.max() if math.isinf(norm_type) else (stacked**norm_type).sum()


def by_device(tensors: list[Tensor]) -> dict[torch.device, list[Tensor]]:
    """Return the tensors by the device on which they are, for the kernels that take many at once."""
    groups: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device, []).append(tensor)
    return groups
