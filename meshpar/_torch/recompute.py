"""Composable recomputation, and what selective recomputation sees.

- ``checkpoint``: private, with no public form that keeps parameter names (pytorch/pytorch#87664). Its ``_no_hook`` can
  be entered once; a second backward through one forward enters it once more, so that ours takes its place.
- ``ignore_profiler_marks``: torch's own list of operators to ignore lacks them; it goes when the list has them.
- ``in_checkpoint``: whose hooks on saved tensors are in force.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, ParamSpec, TypeVar, final

import torch
import torch.utils.checkpoint
from torch import nn
from torch.distributed._composable import checkpoint_activation
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from meshpar._torch.patches import Undo, set_attribute

__all__ = ["checkpoint", "ignore_profiler_marks", "in_checkpoint", "recompute_again", "set_recomputed", "unseen"]

P = ParamSpec("P")
R = TypeVar("R")


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


def unseen(inner: Callable[P, R]) -> Callable[P, R]:
    """Let selective recomputation, which requires the same operators each time, not see what a function computes."""

    @functools.wraps(inner)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if isinstance(_get_current_dispatch_mode(), _CachingTorchDispatchMode | _CachedTorchDispatchMode):
            with _pop_mode_temporarily():
                return inner(*args, **kwargs)
        return inner(*args, **kwargs)

    return run


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
