"""The joint norm of gradients that are split over the axes of a mesh, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from meshpar.placements import local_tensor, sharded_axes


def clip_grad_norm_(
    parameters: Iterable[Tensor], groups: Mapping[str, dist.ProcessGroup], max_norm: float, norm_type: float, device: torch.device
) -> Tensor:
    """Scale gradients so that their joint norm is at most ``max_norm``, and return the norm before: see ``Parallelized``.

    Args:
        parameters: of the model, the same on every rank.
        groups: axis -> this rank's process group, outermost first.
        max_norm: largest norm. ``inf`` scales nothing.
        norm_type: p.
        device: where the norm is.

    Collective over the groups of axes that split a parameter.
    """
    parameters = list(parameters)
    parts: dict[frozenset[str], list[Tensor]] = {}
    for parameter in parameters:
        if (grad := _whole_gradient(parameter)) is not None:
            parts.setdefault(_split_over(grad, groups), []).append(local_tensor(grad))
    # A rank may have no gradient where another has: every rank joins the same reductions all the same.
    kinds = {_split_over(parameter, groups) for parameter in parameters if parameter.requires_grad}
    wide = torch.float64 if any(each.dtype == torch.float64 for each in parameters) else torch.float32
    powers = {axes: _power(parts.get(axes, []), norm_type, device).to(wide) for axes in kinds | set(parts)}
    total = _joined(powers, groups, norm_type, device)
    norm = total if math.isinf(norm_type) else total ** (1.0 / norm_type)
    if not math.isinf(max_norm):
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for grads in parts.values():
            for place, together in _by_device(grads).items():
                torch._foreach_mul_(together, scale.to(place))
    return norm


def _joined(
    powers: dict[frozenset[str], Tensor], groups: Mapping[str, dist.ProcessGroup], norm_type: float, device: torch.device
) -> Tensor:
    """Join the powers of norms, keyed by the axes over which their gradients are split, axis by axis, innermost first."""
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
            known = powers.get(rest)
            powers[rest] = value if known is None else torch.maximum(known, value) if largest else known + value
    return powers.get(frozenset(), torch.zeros((), device=device))


def _split_over(tensor: Tensor, groups: Collection[str]) -> frozenset[str]:
    """Return the axes of ``groups`` that split a tensor. The axis that divides experts is a part of the data axis there."""
    return frozenset(sharded_axes(tensor)).intersection(groups)


def _whole_gradient(parameter: Tensor) -> Tensor | None:
    """Return the gradient with partial sums reduced."""
    grad: Any = parameter.grad
    if isinstance(grad, DTensor) and any(isinstance(each, Partial) for each in grad.placements):
        parameter.grad = grad.redistribute(placements=[Replicate() if isinstance(each, Partial) else each for each in grad.placements])
    return parameter.grad


def _power(grads: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return sum |g|^p over ``grads`` (their maximum for p = inf), in float32, or in float64 where a gradient is."""
    grads = [grad for grad in grads if grad.numel()]
    if not grads:
        return torch.zeros((), device=device)
    wide = torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32
    norms = [norm for together in _by_device(grads).values() for norm in torch._foreach_norm(together, norm_type, dtype=wide)]
    stacked = torch.stack([norm.to(device) for norm in norms])
    return stacked.max() if math.isinf(norm_type) else (stacked**norm_type).sum()


def _by_device(tensors: list[Tensor]) -> dict[torch.device, list[Tensor]]:
    """Return the tensors by the device on which they are, for the kernels that take many at once."""
    groups: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device, []).append(tensor)
    return groups
