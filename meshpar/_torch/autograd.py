"""Detect a backward that runs, and call hooks before every backward.

- ``part_here``: before torch 2.13 the gradient of a DTensor's part has no gradient itself.
- ``check_backwards``, ``check_norms_of``: ``torch.autograd.grad``, ``backward`` and ``torch.nn.utils.clip_grad_norm_``
  have no hook for what they are asked.
- ``next_node``: autograd's number of the node that it makes next, by which units know their own; private without a
  public form.
- ``StorageWeakRef``: tells whose memory a saved tensor is, and does not keep it; not documented.
- ``in_backward``, ``at_end_of_backward``: where autograd is; FSDP2 and DDP read the same, with no public form.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from meshpar._torch import BEFORE_2_13
from meshpar._torch.patches import Undo, set_attribute
from meshpar._torch.pytree import tree_leaves

__all__ = [
    "Node",
    "StorageWeakRef",
    "accumulates",
    "at_end_of_backward",
    "check_backwards",
    "check_norms_of",
    "in_backward",
    "keep_version",
    "next_node",
    "part_here",
]


class _Part(torch.autograd.Function):
    """Return the part of a DTensor here, whose gradient has a gradient, which torch before 2.13 cuts off."""

    @staticmethod
    def forward(ctx: Any, whole: DTensor) -> torch.Tensor:
        ctx.whole = whole.device_mesh, whole.placements, whole.shape, whole.stride()
        return whole._local_tensor.view_as(whole._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> DTensor:
        mesh, placements, shape, stride = ctx.whole
        return DTensor.from_local(grad.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride)


def part_here(whole: DTensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, as autograd knows it."""
    part: torch.Tensor = _Part.apply(whole) if BEFORE_2_13 else whole.to_local()
    return part


keep_version: Any = torch.autograd._unsafe_preserve_version_counter
"""Let tensors keep the number by which autograd knows of writes: what was written is put back before anybody reads
it.
"""


def accumulates(parameter: torch.Tensor) -> bool:
    """Return whether the backward that runs now would leave a gradient in ``parameter``; ``torch.autograd.grad`` does
    not.
    """
    return in_backward() and torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)


def check_backwards(
    wanted: Callable[[list[Any]], None], roots: Callable[[list[Any]], None], failed: Callable[[], None]
) -> Undo:
    """Let functions look at each backward before it runs, by ``backward`` or ``torch.autograd.grad``.

    Args:
        wanted: looks at what the gradients are asked of, by ``torch.autograd.grad`` or ``backward(inputs=...)``.
            Autograd knows nothing of FSDP2's shards: it calls them unused, or with ``allow_unused`` answers None.
        roots: looks at the tensors and nodes from which the backward starts.
        failed: is called where the backward ended with an error.
    """
    undone = [
        _check_tensors(torch.autograd, name, {"inputs": wanted, starts: roots}, failed)
        for name, starts in (("grad", "outputs"), ("backward", "tensors"))
    ]
    return lambda: all(undo() for undo in undone)


def check_norms_of(check: Callable[[list[Any]], None]) -> Undo:
    """Let ``check`` look at the gradients of which ``torch.nn.utils.clip_grad_norm_`` computes a norm."""
    return _check_tensors(torch.nn.utils.clip_grad, "_get_total_norm", {"tensors": check})


def next_node() -> int:
    """Return the number of the node that autograd makes next in this thread; a graph's nodes are numbered in the
    order of their making.
    """
    return torch.autograd._get_sequence_nr()


def _check_tensors(
    owner: Any, name: str, checks: Mapping[str, Callable[[list[Any]], None]], failed: Callable[[], None] = lambda: None
) -> Undo:
    """Let ``checks``, by argument, look at the tensors and nodes that a function of ``owner`` gets."""
    inner = getattr(owner, name)
    if hasattr(inner, "_meshpar_checked"):  # somebody wrapped it, so that undoing left it
        return lambda: True
    places = list(inspect.signature(inner).parameters)

    def checked(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(places, args)) | kwargs
        for argument, check in checks.items():
            values, leaves = given.get(argument, ()), list[Any]()
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


def in_backward() -> bool:
    """Return whether autograd runs a backward in this thread; a forward that runs there is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(run: Callable[[], None]) -> None:
    """Run something when the backward that runs now is through; after what was asked for earlier."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(run)
