"""Gradients of a step in the order of the tree: partial sums of micro-batches, and the factor of the average."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshpar._torch.tensors import foreach_add_, gradient_hooks, tree_map_only
from meshpar.core import runtime
from meshpar.core.errors import MeshparError
from meshpar.passes.pipeline.running import Layers
from meshpar.step.moment import Guarded, Moment
from meshpar.tensors.placements import local_gradient, local_tensor

Gradients = dict[nn.Parameter, Tensor]


@final
class TreeOfGradients(Moment):
    """The gradients of the micro-batches of a step, of each of which one backward leaves the sum over ranks."""

    def __init__(self, guarded: Guarded, ranks: int, layers: Layers | None) -> None:
        self._module, self._units, self._part, self._layers = guarded.module, guarded.units, 1.0 / ranks, layers
        for name in guarded.resolved.blocks:
            self._module.get_submodule(name).register_forward_pre_hook(_view_inputs, with_kwargs=True)
        # of each chunk: levels of the tree, and sums
        self._sums: dict[int, list[tuple[int, Gradients]]] = {}
        # micro-batches that have yet to come: 2 several, 1 the last
        self.left, self._due, self._running = 0, False, 0
        self._scaled: Any = None

    def before_micro_batch(self, left: int) -> None:
        """Expect a backward; without one for the micro-batch before, that counts as zero. 0 ``left`` end the step."""
        more_than_said = self.left == 1 and left == 2
        if self._due and not more_than_said:
            self._push({})
        elif left and not self.left and self._has_gradients():
            raise MeshparError(_EARLIER)
        self.left, self._due = left, left > 0
        self._running = 0 if self._layers is None else self._layers.edges.turn.chunk
        if not left:
            self._finish()

    def before_backward(self, roots: Iterable[Any], *, reaches: Callable[[], bool]) -> None:
        """Divide the gradient of the loss by the number of data ranks, whose gradients are summed, not averaged."""
        # Before the backward: divided afterwards, what the loss's scale underflows would follow the mesh.
        if not reaches():
            return
        if not self._due and (self.left or self._has_gradients()):
            raise MeshparError(_TWICE if self.left else _EARLIER)
        if any(map(gradient_hooks, [*self._module.parameters(), *self._units.shards()])):
            raise MeshparError(_HOOKED)
        if self._layers is not None and self._layers.edges.turn.stage != self._layers.portion.last:
            return
        root, *more_roots = roots
        if more_roots:
            raise MeshparError(_ROOTS)
        if self._part < 1.0:
            node: Any = root.grad_fn if isinstance(root, Tensor) else root
            scale = partial(tree_map_only, Tensor, partial(torch.mul, other=self._part))
            self._scaled = node.register_prehook(scale)

    def close_backward(self) -> None:
        if self._scaled is not None:
            self._scaled.remove()
            self._scaled = None

    def after_backward(self) -> None:
        """Add a micro-batch's gradients to those before it; leave the sum of all after the last one."""
        if not self._due:
            return
        self._units.hide()
        grads: Gradients = {}
        for parameter in self._module.parameters():
            if parameter.grad is not None:
                local_gradient(parameter)  # leaves it divided as the parameter is
                grads[parameter], parameter.grad = parameter.grad, None
        self._push(grads)
        self._due = False
        if self.left == 1:
            self._finish()

    def _push(self, grads: Gradients) -> None:
        sums, level = self._sums.setdefault(self._running, []), 0
        while sums and sums[-1][0] == level:
            grads, level = _added(sums.pop()[1], grads), level + 1
        sums.append((level, grads))

    def _finish(self) -> None:
        self.left = 0
        for sums in self._sums.values():
            _, total = sums.pop()
            while sums:
                total = _added(sums.pop()[1], total)
            for parameter, grad in total.items():
                parameter.grad = grad
        self._sums.clear()

    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._module.parameters())

    def before_step(self, optimizer: Optimizer, *, trains: bool) -> None:
        if trains and self.left:
            raise MeshparError(_INSIDE)
        for group in optimizer.param_groups if trains else ():
            dtypes = {parameter.dtype for parameter in group["params"] if runtime.on_host(parameter.device.type)}
            if group.get("fused") and dtypes:
                raise MeshparError(_FUSED)
            if half := [dtype for dtype in dtypes if dtype.itemsize < 4]:
                raise MeshparError(_HALF.format(half[0]))

    def leave_step(self, *, by_error: bool) -> None:
        self.left, self._due = 0, False
        self._sums.clear()

    def after_failed_backward(self) -> None:
        self.leave_step(by_error=True)


def _view_inputs(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - of hooks
    """Let the gradients of a block's input be summed before those of its other uses, as in a unit of shards."""
    return tree_map_only(Tensor, lambda x: x.view_as(x) if x.requires_grad else x, (args, kwargs))


@torch.no_grad()
def _added(left: Gradients, right: Gradients) -> Gradients:
    """Return the sum, in the memory of ``left`` where both have a gradient; a missing one is zero."""
    every = right | left
    common = [parameter for parameter in left if parameter in right]
    if common:
        foreach_add_(*([local_tensor(grads[parameter]) for parameter in common] for grads in (left, right)))
    for parameter in left.keys() ^ right.keys():
        # ranks add zeros, which turn -0.0 into 0.0
        local_tensor(every[parameter]).add_(0.0)
    return every


_EARLIER = (
    "same_bits adds up gradients in the order of a tree over the micro-batches of a step, and parameters have "
    "gradients from before this backward; use par.accumulate(micro_batches), or call par.backward(micro_batches, "
    "loss); each step begins after zero_grad()"
)
_TWICE = "same_bits takes one backward a micro-batch, and this is the second; add the losses and call backward() once"
_HOOKED = (
    "a hook on a parameter gets the gradient of a micro-batch of all ranks, whose samples follow the mesh under "
    "same_bits; change gradients between the last backward and the step instead"
)
_ROOTS = "same_bits takes the backward of one loss, and got several tensors; add them and call backward() on the sum"
_FUSED = (
    "fused=True computes the last elements of a shard on a CPU by other instructions, so that weights differ by the "
    "mesh in their last bits; under same_bits use fused=False, or foreach=True"
)
_HALF = (
    "the optimizer trains parameters of {}, which CPUs add with a factor by other instructions at the end of a shard, "
    "so that weights differ by the mesh in their last bits; under same_bits keep parameters in float32, and compute in "
    "another dtype by param_dtype"
)
_INSIDE = (
    "optimizer.step() came between the micro-batches of par.accumulate, of which same_bits leaves gradients after the "
    "last backward alone; step after the loop"
)
