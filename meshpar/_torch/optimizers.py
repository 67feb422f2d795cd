"""Places around and inside of an optimizer's step.

- ``before_steps``: torch removes a hook of all optimizers in a step only with an error; frames tell who is in one.
- ``adafactor_on``: no public place is between Adafactor's state and its arithmetic, but ``_init_group``.
- ``check_loads``: torch compares the sizes of groups before it calls hooks of all optimizers, of which there is none.
- ``check_empty``: torch refuses an optimizer of no parameters before any hook knows of it.
- ``check_scalers``: a ``GradScaler`` has no hook for the optimizers that it is called with.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from meshpar._torch.calls import Undo, check_calls, set_attribute, undo_all


def before_steps(run: Callable[..., Any]) -> Undo:
    """Call ``run`` before every optimizer's step. Undoing waits while a thread is in a step."""
    hook, torchs = register_optimizer_step_pre_hook(run), vars(sys.modules[Optimizer.__module__])

    def undo() -> bool:
        # which iterates over the hooks
        frames = (frame for top in sys._current_frames().values() for frame, _ in traceback.walk_stack(top))
        if any(frame.f_globals is torchs for frame in frames):
            return False
        hook.remove()
        return True

    return undo


def check_scalers(check: Callable[[Optimizer], None]) -> Undo:
    """Call ``check`` with each optimizer whose gradients a ``torch.amp.GradScaler`` unscales, or that it steps."""

    def checked(scaler: object, optimizer: Optimizer, *args: object, **kwargs: object) -> None:
        check(optimizer)

    return undo_all([check_calls(torch.amp.GradScaler, name, checked) for name in ("unscale_", "step")])


def check_loads(check: Callable[[Optimizer, dict[str, Any]], None]) -> Undo:
    """Call ``check`` with each optimizer that loads a state, and the state."""
    return check_calls(Optimizer, "load_state_dict", lambda optimizer, state_dict: check(optimizer, state_dict))


def check_empty(check: Callable[[str], None]) -> Undo:
    """Call ``check`` with the name of each kind of optimizer that is built of no parameters."""
    inner = Optimizer.__init__

    @functools.wraps(inner)
    def __init__(optimizer: Optimizer, params: Any, *args: Any, **kwargs: Any) -> None:
        params = params if isinstance(params, Tensor) else list(params)
        if not isinstance(params, Tensor) and not params:
            check(type(optimizer).__name__)
        inner(optimizer, params, *args, **kwargs)

    return set_attribute(Optimizer, "__init__", __init__)


class AdafactorOn:
    """Let an Adafactor's step work on what ``replace(parameter, grad, state)`` returns in their place."""

    replace: Callable[[Tensor, Tensor, dict[str, Any]], tuple[Any, Any, dict[str, Any]]]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [{**group, "foreach": False} for group in vars(self)["param_groups"]]

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> bool:
        parent: Any = super()
        has_complex: bool = parent._init_group(group, *lists)
        parameters, grads, rows, columns, variances, _ = lists
        for at, (parameter, grad) in enumerate(zip(parameters, grads, strict=True)):
            replaced = self.replace(parameter, grad, self.state[parameter])  # type: ignore[attr-defined]
            parameters[at], grads[at], state = replaced
            rows[at], columns[at], variances[at] = (state.get(key) for key in ("row_var", "col_var", "variance"))
        return has_complex


@functools.cache
def _adafactor_on(kind: type, replace: Callable[..., Any]) -> type:
    return type(kind.__name__, (AdafactorOn, kind), {"replace": staticmethod(replace)})


def adafactor_on(optimizer: torch.optim.Adafactor, replace: Callable[..., Any]) -> Any:
    """Return an optimizer that shares everything with ``optimizer`` and steps on what ``replace`` returns."""
    kind: Any = type(optimizer)
    stands_in: Any = object.__new__(_adafactor_on(kind, replace))
    stands_in.__dict__ = optimizer.__dict__
    return stands_in
