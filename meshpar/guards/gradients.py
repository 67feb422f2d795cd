"""Refuse gradients that a step left, that hooks get too early, or that differ between ranks that keep them whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from meshpar._torch.units import Units
from meshpar.core.errors import MeshparError
from meshpar.step.gradients import LeftGradients
from meshpar.step.moment import Guard
from meshpar.tensors.placements import local_tensor, sharded_axes


@final
class UnfinishedSteps(Guard):
    """Look for gradients that are left, before a forward of training and before a step."""

    def __init__(self, left: LeftGradients) -> None:
        self._left = left

    def before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if torch.is_grad_enabled():
            self._refuse()

    def before_step(self, optimizer: Optimizer, *, trains: bool) -> None:
        if trains:
            self._refuse()

    def _refuse(self) -> None:
        self._left.forget_cleared()
        if self._left.cut_short:
            raise MeshparError(
                "an error ended a backward, so the gradients are incomplete; call optimizer.zero_grad() after such an "
                "error"
            )
        if self._left.any:
            raise MeshparError(
                "par.accumulate was left before its last micro-batch, so that the gradients of this step were never "
                "reduced; call optimizer.zero_grad() after leaving it, or run all micro-batches"
            )


@final
class HookedGradients(Guard):
    """Look at the hooks of one module's sharded parameters."""

    def __init__(self, units: Units) -> None:
        self._units = units
        self._had_gradient: set[int] = set()

    def before_backward(self, roots: Iterable[object], *, reaches: Callable[[], bool]) -> None:
        self._had_gradient = {id(parameter) for parameter in self._units.hooked() if parameter.grad is not None}

    def end_backward(self, *, reduces: bool) -> None:
        if not reduces and (self._units.hooked() or self._units.hooked_after()):
            _refuse()

    def gradients(self, unused: list[nn.Parameter]) -> None:
        """Refuse hooks that ran for parameters that no rank used, and those on gradients of several backwards."""
        if any(parameter.grad is None and parameter._post_accumulate_grad_hooks for parameter in unused):
            raise MeshparError(
                "a post-accumulate-grad hook ran for a parameter that no rank used in this backward; use every "
                "parameter in each step, or change gradients between backward and step instead"
            )
        hooked = (parameter for parameter in self._units.hooked() if parameter.grad is not None)
        if any(id(parameter) in self._had_gradient for parameter in hooked):
            _refuse()


def _refuse() -> NoReturn:
    raise MeshparError(
        "a hook on a parameter gets the gradient of one backward, but here several are added up before it can "
        "run; change gradients between the last backward and the step instead, or run one backward a step"
    )


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
    whole_parameters = [
        (name, p) for name, p in module.named_parameters() if p.requires_grad and axis not in sharded_axes(p)
    ]
    if not whole_parameters:
        return []
    norms = torch.stack([_norm(parameter).to(device_type) for _, parameter in whole_parameters])
    largest, smallest = norms.clone(), norms.neg()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    dist.all_reduce(smallest, dist.ReduceOp.MAX, group)
    odd = (largest + smallest) > _RELATIVE * largest + _FLOOR * largest.max()
    return [name for (name, _), differs in zip(whole_parameters, odd.tolist(), strict=True) if differs]


def _norm(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros((), device=local_tensor(parameter).device)
    return torch.linalg.vector_norm(local_tensor(parameter.grad).float())
