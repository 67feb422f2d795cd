"""Gradients outside of units' backwards: those of external uses, those left or unused, and users' hooks on them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from meshpar._torch.tensors import held_part
from meshpar._torch.units import Units
from meshpar.core import runtime
from meshpar.exchange.ranks import Ranks
from meshpar.same_bits.trees import average_
from meshpar.step.moment import Moment
from meshpar.tensors.placements import held_by_this_rank, local_tensor, whole_tensor


def average_outside(parameter: Any, kept: Collection[str], reached: Callable[[], None], *, by_tree: bool) -> None:
    """Average gradients of a shard's ``full_tensor()`` in a loss over axes not ``kept``; ``by_tree``: sum them."""
    mesh: DeviceMesh = parameter.device_mesh
    data = [dim for dim, name in enumerate(mesh.mesh_dim_names or ()) if name not in kept and mesh.size(dim) > 1]
    if not data:
        return
    average = partial(average_, by_tree=by_tree)
    groups = [mesh.get_group(dim) for dim in data]

    def full_tensor(*, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        if not (torch.is_grad_enabled() and parameter.requires_grad):
            return DTensor.full_tensor(parameter, grad_placements=grad_placements)
        return cast("Tensor", _Outside.apply(parameter, True, partial(average, groups=groups), reached))

    def to_local(*, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        copies = [group for dim, group in zip(data, groups) if parameter.placements[dim].is_replicate()]
        if not copies or not (torch.is_grad_enabled() and parameter.requires_grad):
            return DTensor.to_local(parameter, grad_placements=grad_placements)
        return cast("Tensor", _Outside.apply(parameter, False, partial(average, groups=copies), reached))

    parameter.full_tensor, parameter.to_local = full_tensor, to_local


class _Outside(torch.autograd.Function):
    """The whole of a parameter, or this rank's part, whose gradient is averaged over groups of data ranks."""

    @staticmethod
    def forward(
        ctx: Any, parameter: DTensor, whole: bool, average: Callable[[Tensor], None], reached: Callable[[], None]
    ) -> Tensor:
        ctx.like, ctx.whole, ctx.average, ctx.reached = parameter.detach(), whole, average, reached
        return whole_tensor(parameter) if whole else local_tensor(parameter).view_as(held_part(parameter))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.reached()
        total = grads[0].contiguous().clone()
        ctx.average(total)
        grad = torch.empty_like(ctx.like)  # on the host where the parameter is
        local_tensor(grad).copy_(total[held_by_this_rank(ctx.like)] if ctx.whole else total)
        return grad, None, None, None


@final
class LeftGradients(Moment):
    """Remember gradients of a step that was left (``pending``) or a failed backward (``cut_short``), until cleared."""

    def __init__(self, module: nn.Module, units: Units) -> None:
        self._module, self._units = module, units
        self.pending: list[tuple[Tensor, Tensor, int]] = []
        self.cut_short = False

    def leave_step(self, *, by_error: bool) -> None:
        if self._units.modules or by_error:
            self._leave(by_error=by_error)

    def after_failed_backward(self) -> None:
        self._leave(by_error=True)

    def _leave(self, *, by_error: bool) -> None:
        for parameter in self._module.parameters():
            if parameter.requires_grad:
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = grad
                self.pending.append((parameter, grad, grad._version))
        self.cut_short = self.cut_short or by_error

    def before_backward(self, roots: object, *, reaches: object) -> None:
        self.forget_cleared()

    def forget_cleared(self) -> None:
        """Forget the gradients that somebody has cleared."""
        if self.pending and not any(
            parameter.grad is grad and grad._version == version for parameter, grad, version in self.pending
        ):
            self._units.drop_unreduced_gradients()
            self.pending.clear()
        if self.cut_short:
            grads = (
                local_tensor(parameter.grad) for parameter in self._module.parameters() if parameter.grad is not None
            )
            self.cut_short = bool(self.pending) or any(bool(grad.count_nonzero()) for grad in grads)


@final
class UnusedGradients(Moment):
    """Find the parameters that no rank used, among those whose gradient counts as zero on this one."""

    def __init__(self, module: nn.Module, ranks: Ranks | None) -> None:
        self._module, self._ranks = module, ranks
        self._pending: dist.Work | None = None
        self._marks = torch.zeros(0, dtype=torch.uint8)

    def gradients(self, unused: list[nn.Parameter]) -> None:
        """Drop the gradients of ``unused`` that no rank used. Collective where gradients are averaged."""
        parameters = [] if self._ranks is None else list(self._module.parameters())
        self._send(parameters, unused)
        used_somewhere = set[int]()
        if unused and self._pending is not None:
            self._pending.wait()
            self._pending = None
            # simulated ranks all use the same
            marks = runtime.among_real_ranks(self._marks.tolist) or [False] * len(parameters)
            used_somewhere = {id(parameter) for parameter, mark in zip(parameters, marks, strict=True) if mark}
        for parameter in unused:
            if id(parameter) not in used_somewhere:
                parameter.grad = None

    def _send(self, parameters: Sequence[nn.Parameter], unused: Sequence[nn.Parameter]) -> None:
        """Start to tell the other ranks which parameters this one used."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        if self._ranks is None:
            return
        zeros = {id(parameter) for parameter in unused}
        used = [parameter.grad is not None and id(parameter) not in zeros for parameter in parameters]
        self._marks = torch.tensor(used, dtype=torch.uint8, device="cpu")
        self._pending = dist.all_reduce(self._marks, dist.ReduceOp.MAX, self._ranks.hosts, async_op=True)


@final
class GradientHooks(Moment):
    """Call the hooks of one module's sharded parameters with reduced gradients."""

    def __init__(self, units: Units) -> None:
        self._units = units

    def after_backward(self) -> None:
        for parameter in [hooked for hooked in self._units.hooked() if hooked.grad is not None]:
            hooks: Mapping[int, Callable[[Tensor], Tensor | None]] = parameter._backward_hooks or {}
            for hook in list(hooks.values()):
                assert parameter.grad is not None, "only parameters with a gradient are handed in"
                changed = hook(parameter.grad)
                if changed is not None:
                    parameter.grad = changed
