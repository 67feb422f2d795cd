"""The calls of a parallel module, by ``forward`` or a method, and of its parts."""

from __future__ import annotations

import functools
import inspect
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, final

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from meshpar._torch.autograd import in_backward
from meshpar._torch.calls import eager
from meshpar._torch.patches import Undo
from meshpar.core.errors import MeshparError
from meshpar.step.forwards import set_forward

PUBLISHED = re.compile(r"(en|de)code(_\w+)?|embed|forward_\w+|get_\w+_features")
"""Names of methods that models publish beside ``forward`` and that enter as it does."""


_COMPILED: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def watch_compiled() -> Undo:
    """Remember what ``torch.compile(module)`` returns."""

    def keep(owner: nn.Module, name: str, child: nn.Module | None) -> None:
        if name == "_orig_mod" and child is not None:
            _COMPILED[child] = weakref.ref(owner)

    handle = register_module_module_registration_hook(keep)

    def undo() -> bool:
        handle.remove()
        return True

    return undo


def compiled_form(module: nn.Module) -> nn.Module:
    """Return what ``torch.compile(module)`` returned and somebody still has, else the module."""
    reference = _COMPILED.get(module)
    form = reference() if reference is not None else None
    return module if form is None else form


class Explains(Protocol):
    """Tells errors in the user's terms."""

    def told(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return ``run(*args, **kwargs)``, and raise another error in the place of one whose cause is known."""


@final
class Calls:
    """The calls of one module; ``depth``: how many run in one another. Errors are told by ``explanation``."""

    def __init__(self, module: nn.Module, explanation: Explains | None) -> None:
        self._module, self._explanation = module, explanation
        self.depth = 0
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
            if PUBLISHED.fullmatch(name):
                self.register_method(name)
            elif explained and not _is_of_a_library(kind, name):
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
        return run(*args, **kwargs) if self._explanation is None else self._explanation.told(run, args, kwargs)

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

    def only_inside(self, parts: Mapping[str, nn.Module], why: str) -> None:
        """Refuse calls of parts of the module from outside of it; ``why`` ends the message."""

        def check(name: str, block: nn.Module, args: object) -> None:
            if not self.depth and not in_backward():
                raise MeshparError(f"{name} ({type(block).__name__}) is called from outside of the module, where {why}")

        for name, part in parts.items():
            if part not in self._guarded:
                part.register_forward_pre_hook(eager(functools.partial(check, name)), prepend=True)
        self._guarded.update(parts.values())

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


def _is_of_a_library(kind: type, name: str) -> bool:
    """Return whether a method is torch's or transformers', which compute with weights in forward alone."""
    owner = next(base for base in kind.__mro__ if name in vars(base))
    return owner.__module__.startswith(("torch.", "transformers."))
