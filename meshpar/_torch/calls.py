"""Calls of modules and functions, beside the compiler.

- ``eager``: ``torch.compiler.disable`` loads the compiler where it decorates, torch's own form at the first call.
- ``as_one_operator``: an option of the compiler, which older releases lack; torch has no public list of its options.
- ``enter_by``: a call of a module, with its hooks inside; ``nn.Module`` has no public place around both.
- ``check_functional_calls``: looked up by ``torch.func.functional_call``, also by those who imported that by name.
- ``assert_async``: a check that does not wait for the device; private without a public form.
- ``uncompiled``: what ``nn.Module.compile`` keeps, and nothing takes away.
- ``without_modes``: selective recomputation must not record a try inside of a forward; without a public form.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch._compile import _disable_dynamo
from torch.nn.utils import stateless
from torch.utils import _python_dispatch

from meshpar._torch.patches import Undo, set_attribute

P = ParamSpec("P")
R = TypeVar("R")

assert_async = torch._assert_async
without_modes = _python_dispatch._disable_current_modes


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Keep ``torch.compile`` out of ``function``, like ``torch.compiler.disable``, which loads the compiler at once."""
    return cast("Callable[P, R]", _disable_dynamo(function))


def as_one_operator(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function into what selective recomputation sees as one operator, where torch can."""
    options: dict[str, Any] = {"wrap_inductor_compiled_regions": True}
    can = options.keys() <= set(torch._inductor.list_options())
    return cast("Callable[P, R]", torch.compile(function, options=options if can else None))


def enter_by(module: Any, call: Callable[..., Any]) -> None:
    """Let every call of ``module``, with its hooks, go through ``call``, which is never compiled."""

    @torch.compiler.disable(recursive=False)
    def entered(self: object, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    module._call_impl = MethodType(entered, module)


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


def check_functional_calls(check: Callable[[torch.nn.Module], None]) -> Undo:
    """Call ``check`` with each module that ``torch.func.functional_call`` is about to call."""
    inner = stateless._functional_call

    @functools.wraps(inner)
    def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        check(module)
        return inner(module, *args, **kwargs)

    return set_attribute(stateless, "_functional_call", call)
