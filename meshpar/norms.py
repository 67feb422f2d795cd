"""Norms of gradients that are split over several meshes: each rank's part, before the ranks join theirs."""

from __future__ import annotations

import math
from collections.abc import Iterable
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
    """Return sum |g|^p over ``grads`` (their maximum for p = inf), in float32, or in float64 where a gradient is."""
    grads = [grad for grad in grads if grad.numel()]
    if not grads:
        return torch.zeros((), device=device)
    wide = torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32
    norms = [norm for together in by_device(grads).values() for norm in torch._foreach_norm(together, norm_type, dtype=wide)]
    stacked = torch.stack([norm.to(device) for norm in norms])
    return stacked.max() if math.isinf(norm_type) else (stacked**norm_type).sum()


def by_device(tensors: list[Tensor]) -> dict[torch.device, list[Tensor]]:
    """Return the tensors by the device on which they are, for the kernels that take many at once."""
    groups: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device, []).append(tensor)
    return groups


def widest(parameters: Iterable[Tensor]) -> torch.dtype:
    """Return the dtype in which norms are joined: float32, or float64 where a parameter is; the same on every rank."""
    return torch.float64 if any(each.dtype == torch.float64 for each in parameters) else torch.float32
