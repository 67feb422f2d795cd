"""Calls of modules, functions and optimizers, beside the compiler, and changes of torch for the whole process.

Such a change lasts as long as a parallel module that needs it.

- ``eager``: ``torch.compiler.disable`` loads the compiler where it decorates, and each call makes a dozen more.
- ``as_one_operator``: an option of the compiler, which older releases lack; torch has no public list of its options.
- ``enter_by``: a call of a module, with its hooks inside; ``nn.Module`` has no public place around both.
- ``check_functional_calls``: looked up by ``torch.func.functional_call``, also by those who imported that by name.
- ``assert_async``: a check that does not wait for the device; private without a public form.
- ``uncompiled``: what ``nn.Module.compile`` keeps, and nothing takes away.
- ``in_backward``: whether a backward calls; FSDP2 and DDP read the same, with no public form.
- ``unseen``, ``without_modes``: what selective recomputation must not record; without a public form.
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
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, ParamSpec, TypeVar, cast, final

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.nn.utils import stateless
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _python_dispatch
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

Undo = Callable[[], bool]
"""Undoes a change; returns False where it cannot be undone now. The garbage collector may call it anywhere."""


def set_attribute(owner: object, name: str, value: object) -> Undo:
    """Set an attribute; undoing it leaves what others set since alone."""
    before = getattr(owner, name)
    setattr(owner, name, value)

    def undo() -> bool:
        if getattr(owner, name) is value:
            setattr(owner, name, before)
        return True

    return undo


def undo_all(changes: Sequence[Undo]) -> Undo:
    """Undo several changes, those that are added later, too: every one, also where one cannot be undone now."""

    def undo() -> bool:
        undone = [change() for change in changes]
        return all(undone)

    return undo


@final
@dataclass(slots=True)
class _TorchChange:
    """A change, those that need it, and what undoes it; None where it is not made."""

    needed_by: set[object] = field(default_factory=set)
    undo: Undo | None = None


_CHANGES: dict[str, _TorchChange] = {}


def while_lives(owner: object, name: str, make: Callable[[], Undo]) -> None:
    """Change torch by ``make``, unless ``name`` is changed already; undo it when the last ``owner`` is gone."""
    change, mark = _CHANGES.setdefault(name, _TorchChange()), object()
    change.needed_by.add(mark)
    if change.undo is None:
        change.undo = make()
    weakref.finalize(owner, _leave, change, mark).atexit = False


def _leave(change: _TorchChange, mark: object) -> None:
    change.needed_by.discard(mark)
    if change.needed_by or change.undo is None:
        return
    if change.undo():
        change.undo = None
    else:
        _Later(change, mark)


@final
class _Later:
    """Garbage by its making, so that the next collection tries once more."""

    def __init__(self, change: _TorchChange, mark: object) -> None:
        self._change, self._mark, self._myself = change, mark, self

    def __del__(self) -> None:
        if not sys.is_finalizing():
            _leave(self._change, self._mark)


P = ParamSpec("P")
R = TypeVar("R")

assert_async = torch._assert_async
without_modes = _python_dispatch._disable_current_modes


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Keep ``torch.compile`` out of ``function`` and what it calls: the function itself, so that calls cost no more."""
    return _skip(function, _FrameAction.SKIP)


def _skip(function: Callable[P, R], called: _FrameAction) -> Callable[P, R]:
    """Leave ``function`` alone, wherever a compiler meets it, and do as ``called`` says with what it calls."""
    plain: Any = function.func if isinstance(function, functools.partial) else function
    set_code_exec_strategy(plain.__code__, _FrameExecStrategy(_FrameAction.SKIP, called))
    # how torch's own ``disable`` tells a trace to stop here
    plain._torchdynamo_disable = True
    return function


def as_one_operator(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function into what selective recomputation sees as one operator, where torch can."""
    options: dict[str, Any] = {"wrap_inductor_compiled_regions": True}
    can = options.keys() <= set(torch._inductor.list_options())
    return cast("Callable[P, R]", torch.compile(function, options=options if can else None))


def enter_by(module: Any, call: Callable[..., Any]) -> None:
    """Let every call of ``module``, with its hooks, go through ``call``, which is never compiled."""

    def entered(self: object, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    module._call_impl = MethodType(_skip(entered, _FrameAction.DEFAULT), module)


def in_backward() -> bool:
    """Return whether autograd runs a backward in this thread; a forward that runs there is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def unseen(inner: Callable[P, R]) -> Callable[P, R]:
    """Let selective recomputation, which requires the same operators each time, not see what a function computes."""

    @functools.wraps(inner)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        mode = _python_dispatch._get_current_dispatch_mode() if torch._C._len_torch_dispatch_stack() else None
        if isinstance(mode, _CachingTorchDispatchMode | _CachedTorchDispatchMode):
            with _python_dispatch._pop_mode_temporarily():
                return inner(*args, **kwargs)
        return inner(*args, **kwargs)

    return run


@contextmanager
def uncompiled(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Let modules, which ``module.compile()`` compiled, run as they are written."""
    compiled = {module: module._compiled_call_impl for module in modules}
    try:
        for module in compiled:
            module._compiled_call_impl = None
        yield
    finally:
        for module, call in compiled.items():
            module._compiled_call_impl = call


def check_calls(owner: object, name: str, check: Callable[..., object]) -> Undo:
    """Call ``check`` with the arguments of each call of an attribute of ``owner``, before it."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return inner(*args, **kwargs)

    return set_attribute(owner, name, call)


def check_functional_calls(check: Callable[[torch.nn.Module], None]) -> Undo:
    """Call ``check`` with each module that ``torch.func.functional_call`` is about to call."""
    return check_calls(stateless, "_functional_call", lambda module, *_, **__: check(module))


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
