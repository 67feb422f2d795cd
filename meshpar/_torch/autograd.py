"""Call hooks before every backward, and recompute in a backward.

- ``part_here``: before torch 2.13 the gradient of a DTensor's part has no gradient itself.
- ``check_backwards``, ``check_norms_of``: ``torch.autograd.grad``, ``backward`` and ``torch.nn.utils.clip_grad_norm_``
  have no hook for what they are asked.
- ``next_node``: autograd's number of its next node, by which units know their own; without a public form.
- ``StorageWeakRef``: tells whose memory a saved tensor is, and does not keep it; not documented.
- ``at_end_of_backward``: FSDP2 and DDP use the same, with no public form.
- ``checkpoint``: private, with no public form that keeps parameter names (pytorch/pytorch#87664). Its ``_no_hook`` can
  be entered once; a second backward through one forward enters it once more, so that ours takes its place.
- ``ignore_profiler_marks``: torch's own list of operators to ignore lacks them; it goes when the list has them.
- ``in_checkpoint``: whose hooks on saved tensors are in force.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from operator import methodcaller
from typing import Any, final

import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd.graph import Node as Node
from torch.autograd.graph import get_gradient_edge
from torch.distributed._composable import checkpoint_activation
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef

from meshpar._torch import BEFORE_2_13
from meshpar._torch.calls import Undo, in_backward, set_attribute, undo_all
from meshpar._torch.tensors import tree_leaves

__all__ = ["checkpoint", "ignore_profiler_marks", "in_backward", "in_checkpoint", "recompute_again", "set_recomputed"]


class _PartHere(torch.autograd.Function):
    """Return the part of a DTensor here, whose gradient has a gradient, which torch before 2.13 cuts off."""

    @staticmethod
    def forward(ctx: Any, whole: DTensor) -> torch.Tensor:
        ctx.whole = whole.device_mesh, whole.placements, whole.shape, whole.stride()
        return whole._local_tensor.view_as(whole._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> DTensor:
        mesh, placements, shape, stride = ctx.whole
        return DTensor.from_local(grad.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride)


part_here: Callable[[Any], Any] = _PartHere.apply if BEFORE_2_13 else methodcaller("to_local")
"""Returns this rank's part of a DTensor, as autograd knows it."""


def accumulates(parameter: torch.Tensor) -> bool:
    """Return whether the backward that runs leaves a gradient in ``parameter``; ``torch.autograd.grad`` does not."""
    return in_backward() and torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)


def check_backwards(
    wanted: Callable[[list[Any]], None], roots: Callable[[list[Any]], None], failed: Callable[[], None]
) -> Undo:
    """Let functions look at each backward: what its gradients are asked of, its roots, and its failure."""
    grad = _check_tensors(torch.autograd, "grad", {"inputs": wanted, "outputs": roots}, failed)
    backward = _check_tensors(torch.autograd, "backward", {"inputs": wanted, "tensors": roots}, failed)
    return undo_all([grad, backward])


def check_norms_of(check: Callable[[list[Any]], None]) -> Undo:
    """Let ``check`` look at the gradients of which ``torch.nn.utils.clip_grad_norm_`` computes a norm."""
    return _check_tensors(torch.nn.utils.clip_grad, "_get_total_norm", {"tensors": check})


next_node: Callable[[], int] = torch.autograd._get_sequence_nr
"""Returns the number of the node that autograd makes next in this thread; nodes are numbered as they are made."""


def _check_tensors(
    owner: Any, name: str, checks: Mapping[str, Callable[[list[Any]], None]], failed: Callable[[], None] = lambda: None
) -> Undo:
    """Let ``checks``, by argument, look at the tensors and nodes that a function of ``owner`` gets."""
    inner = getattr(owner, name)
    if hasattr(inner, "_meshpar_checked"):  # somebody wrapped it, so that undoing left it
        return lambda: True
    parameters = list(inspect.signature(inner).parameters)

    def checked(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(parameters, args)) | kwargs
        for argument, check in checks.items():
            values, leaves = arguments.get(argument, ()), list[Any]()
            for value in values if type(values) in (list, tuple) else (values,):
                leaves += (value,) if isinstance(value, torch.Tensor) else tree_leaves(value)
            check([leaf for leaf in leaves if isinstance(leaf, torch.Tensor | Node)])
        try:
            return inner(*args, **kwargs)
        except BaseException:
            failed()
            raise

    checked._meshpar_checked = True  # type: ignore[attr-defined]
    return set_attribute(owner, name, functools.wraps(inner)(checked))


def at_end_of_backward(run: Callable[[], None]) -> None:
    """Run something when the backward that runs now is through; after what was asked for earlier."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(run)


def ignore_profiler_marks() -> Undo:
    """Let selective recomputation ignore profiler marks, which FSDP2 makes in a recomputation alone."""
    profiler, ignored = torch.ops.profiler, torch.utils.checkpoint.SAC_IGNORED_OPS
    marks = {profiler._record_function_enter_new.default, profiler._record_function_exit._RecordFunction}
    return set_attribute(torch.utils.checkpoint, "SAC_IGNORED_OPS", ignored | marks)


@final
class _WithoutHook:
    """A module's recomputation, whose own hooks would recompute inside of it."""

    def __init__(self, module: nn.Module, inner: AbstractContextManager[Any] | None = None) -> None:
        self._state: Any = checkpoint.state(module)
        self._inner = nullcontext() if inner is None else inner

    def __enter__(self) -> None:
        self._state.enable_hook = False
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._state.enable_hook = True
        self._inner.__exit__(*error)


def recompute_again() -> Undo:
    """Let a module under :func:`checkpoint` be recomputed in each of several backwards through one forward."""
    return set_attribute(checkpoint_activation, "_no_hook", _WithoutHook)


def set_recomputed(module: nn.Module, recomputed: bool) -> None:
    """Let a module under :func:`checkpoint` be recomputed, or not for a while; others stay as they are."""
    with suppress(AssertionError, AttributeError):
        state: Any = checkpoint.state(module)
        state.enable_hook = recomputed


def in_checkpoint() -> bool:
    """Return whether the code that runs is inside of ``torch.utils.checkpoint``, and not yet recomputed."""
    # torch has no types for it
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore[reportAttributeAccessIssue]
    return hooks is not None and hooks[0].__qualname__.startswith("_checkpoint_hook.")
