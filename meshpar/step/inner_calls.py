"""The calls of a parallel module and its parts, and the changes that meshpar made to them: what forwards compute."""

from __future__ import annotations

import functools
import inspect
import re
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from meshpar._torch.autograd import in_backward
from meshpar._torch.calls import eager
from meshpar.core.errors import MeshparError
from meshpar.process.waiting import reads_of

PUBLISHED = re.compile(r"(en|de)code(_\w+)?|embed|forward_\w+|get_\w+_features")
"""Names of methods that models publish beside ``forward`` and that enter as it does."""

Explain = Callable[[Exception], Exception]
"""Returns the error to raise in the place of one that is handled: itself where its cause is not known."""


@final
class Calls:
    """The calls of one module; ``depth``: how many run in one another. Errors are told by ``explain``."""

    def __init__(self, module: nn.Module, explain: Explain | None) -> None:
        self._module, self._explain = module, explain
        self.depth, self.reads = 0, reads_of(module)
        self.has_values = False
        # of units that a method of the module's own calls in inference mode, which they leave
        self.outside: dict[nn.Module, ExitStack] = {}
        self._method: Callable[..., Any] | None = None
        self._explained: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._guarded: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def install(self, *, explained: bool) -> None:
        """Let published methods enter as ``forward`` does; explain errors of the user's others where ``explained``."""
        kind, forward = type(self._module), self._module.forward

        def dispatch(*args: Any, **kwargs: Any) -> Any:
            if not self.depth and not in_backward():  # module.forward(...) of the user's own
                return self._module(*args, **kwargs)
            method, self._method = self._method, None
            return (method or forward)(*args, **kwargs)

        set_forward(self._module, dispatch)
        for name in dir(kind):
            if (
                hasattr(nn.Module, name)
                or name.startswith("_")
                or not inspect.isfunction(inspect.getattr_static(kind, name))
            ):
                continue
            owner = next(base for base in kind.__mro__ if name in vars(base))
            if PUBLISHED.fullmatch(name):
                self.register_method(name)
            # torch's and transformers' compute with weights in forward alone
            elif explained and not owner.__module__.startswith(("torch.", "transformers.")):
                self._explain_method(name)

    def register_method(self, name: str) -> None:
        """Let the module's method ``name`` enter as ``forward`` does."""
        module: Any = self._module
        bound = getattr(module, name, None)
        if not callable(bound):
            raise MeshparError(f"{type(module).__name__} has no method {name!r}; give the name of one")

        @functools.wraps(bound)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.depth:
                return bound(*args, **kwargs)
            self._method = bound
            return module(*args, **kwargs)

        setattr(module, name, call)

    def _explain_method(self, name: str) -> None:
        bound = getattr(self._module, name)

        @functools.wraps(bound)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.explained(bound, args, kwargs)

        setattr(self._module, name, call)

    def explained(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return ``run(*args, **kwargs)``; errors are explained in the user's terms where the guards are on."""
        try:
            return run(*args, **kwargs)
        except Exception as error:
            explained = error if self._explain is None else self._explain(error)
            if explained is error:
                raise
            raise explained from error

    def explain_parts(self, parts: Iterable[nn.Module]) -> None:
        """Explain errors of parts that are called from outside of the module, like those of the module's own calls."""

        def call(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self.depth:
                return inner(*args, **kwargs)
            return self.explained(inner, args, kwargs)

        for part in parts:
            if part not in self._explained:
                self._explained.add(part)
                set_forward(part, functools.partial(call, part.forward))

    def only_inside(
        self, parts: Mapping[str, nn.Module], why: str, *, entered: Collection[str] = ()
    ) -> Callable[[nn.Module], None]:
        """Refuse calls of parts of the module from outside of it; ``why`` ends the message.

        Calls of parts that are ``entered`` by a door of their own are refused where it calls what is returned.
        """
        names = {part: name for name, part in parts.items()}

        def check(part: nn.Module, args: object = ()) -> None:
            if not self.depth and part in names and not in_backward():
                what = f"{names[part]} ({type(part).__name__})"
                raise MeshparError(f"{what} is called from outside of the module, where {why}")

        for part, name in names.items():
            if part not in self._guarded and name not in entered:
                part.register_forward_pre_hook(eager(check), prepend=True)
        self._guarded.update(names)
        return check

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Let blocks be called as they are inside of a call of the module."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def leave(self) -> None:
        """Leave a call of the module, of ``forward`` or the method that it was."""
        self.depth -= 1
        self._method = None


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Step = Callable[[Tensor], Tensor]


@final
@dataclass(slots=True, kw_only=True)
class Changes:
    """The changes of one module.

    Attributes:
        before: the ``forward`` that the instance had of its own before, or one that stays; None: its class's.
        forward: the forward that computes now; None where none was put on.
        attributes: plain attributes that were changed -> their values before.
        product: how a linear layer multiplies, ``(x, weight, bias) -> y``; None: as torch does.
        around: what a head does before and after its one product, where that is all that it does.
        exchange: how the ranks that hold a part of the positions each exchange them; None: each rank holds all.
        reads_parameters: the forward takes this rank's part of the module's own parameters itself.
        sees: by the ranks that hold parameters whole, the modules whose parameters this one sees as plain tensors.
        aside: not empty: during one call of the model another forward computes; the instance's own of before, None
            where it had none.
    """

    before: Callable[..., Any] | None = None
    forward: Callable[..., Any] | None = None
    attributes: dict[str, Any] = field(default_factory=dict)
    product: Product | None = None
    around: tuple[Step, Step] | None = None
    exchange: Any = None
    reads_parameters: bool = False
    sees: dict[str, list[nn.Module]] = field(default_factory=dict)
    aside: list[Callable[..., Any] | None] = field(default_factory=list)


def installed(module: nn.Module) -> Changes | None:
    """Return the module's record, None where meshpar changed nothing of it."""
    return module.__dict__.get("_meshpar")


def record(module: nn.Module) -> Changes:
    """Return the module's record, made where there is none."""
    return module.__dict__.setdefault("_meshpar", Changes())


def set_forward(
    module: Any, forward: Callable[..., Any], *, reads_parameters: bool = False, stays: bool = False
) -> None:
    """Let ``module`` compute by ``forward``; ``stays``: also where the module computes as it was written."""
    changes = record(module)
    if changes.forward is None:
        changes.before = module.__dict__.get("forward")
    changes.forward = functools.update_wrapper(forward, module.forward)
    if stays:
        changes.before = changes.forward
    changes.reads_parameters |= reads_parameters
    module.forward = changes.forward


def set_attribute(module: nn.Module, name: str, value: Any) -> None:
    """Set a plain attribute (a count of heads) to this rank's."""
    record(module).attributes.setdefault(name, module.__dict__[name])
    setattr(module, name, value)


def own_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return a ``forward`` that somebody else put on this instance; None where its class's computes."""
    changes, forward = installed(module), module.__dict__.get("forward")
    if changes is None or changes.forward is None:
        return forward
    return changes.before if forward is changes.forward else forward


@contextmanager
def in_place_of(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Let ``module`` compute something else (a loss, not logits) during a call of its model; trials do not see it."""
    changes, instance_forward = record(module), module.__dict__.get("forward")
    changes.aside.append(instance_forward)
    module.forward = forward
    try:
        yield
    finally:
        changes.aside.pop()
        _put(module, instance_forward)


def own_state(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module as they are without :func:`in_place_of`."""
    state, changes = dict(vars(module)), installed(module)
    if changes is not None and changes.aside:
        del state["forward"]
        if changes.aside[0] is not None:
            state["forward"] = changes.aside[0]
    return state


CONTAINERS = (list, dict, set, deque)


def items_in(value: Any) -> list[Any]:
    """Return what a container holds, the values of a dictionary after its keys; nothing of anything else."""
    return [*value, *value.values()] if isinstance(value, dict) else [*value] if type(value) in CONTAINERS else []


def refill(value: Any, items: Sequence[Any]) -> None:
    """Let a container hold what :func:`items_in` returned of it."""
    if [*map(id, items_in(value))] == [*map(id, items)]:
        return
    value.clear()
    if isinstance(value, dict):
        for key, item in zip(items, items[len(items) // 2 :]):
            value[key] = item
    else:
        (value.update if isinstance(value, set) else value.extend)(items)


def _put(module: Any, forward: Callable[..., Any] | None) -> None:
    module.__dict__.pop("forward", None)
    if forward is not None:
        module.forward = forward


def undo_changes(module: nn.Module) -> None:
    """Let a copy of a module, and all that is in it, compute as their authors wrote them."""
    for child in module.modules():
        if (changes := installed(child)) is not None:
            child.__dict__.update(changes.attributes)
            _put(child, changes.before)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Have a module in evaluation mode inside of the ``with`` block; each module in it has its own mode back after."""
    training = [child for child in module.modules() if child.training]
    module.eval()
    try:
        yield
    finally:
        for child in training:
            child.training = True
