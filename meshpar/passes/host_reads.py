"""Values that the host reads from a device in a forward: on their own stream, and once where blocks are recomputed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from meshpar._torch.calls import unseen
from meshpar.core import runtime

T = TypeVar("T")


def begin_read(start: Callable[[], Callable[[], T]]) -> Callable[[], T]:
    """Start to read values, and return a function that waits for them; a recomputation gets what its forward read."""
    tape = _TAPE.get()
    return start() if tape is None else tape.begin_read(start)


@contextmanager
def beside(device: torch.device) -> Iterator[Callable[[Tensor], Callable[[], Tensor]]]:
    """Compute on a stream of its own; yield what starts to copy a tensor to the host and returns a wait for it."""
    if runtime.on_host(device):
        yield lambda values: lambda: values
        return
    module, stream = torch.get_device_module(device), _stream(device)
    stream.wait_stream(module.current_stream())

    def to_host(values: Tensor) -> Callable[[], Tensor]:
        there = torch.empty(values.shape, dtype=values.dtype, pin_memory=True, device="cpu")
        there.copy_(values, non_blocking=True)
        done = stream.record_event()

        def wait() -> Tensor:
            done.synchronize()
            return there

        return wait

    with module.stream(stream):
        yield to_host


@functools.cache
def _stream(device: torch.device) -> Any:
    return torch.get_device_module(device).Stream(device)


_TAPE: ContextVar[_Tape | None] = ContextVar("_TAPE", default=None)


@contextmanager
def with_variables(context: Mapping[ContextVar[Any], Any]) -> Iterator[None]:
    """Give context variables these values inside of the ``with`` block."""
    tokens = [(name, name.set(value)) for name, value in context.items() if name.get(_NONE) is not value]
    try:
        yield
    finally:
        for name, token in reversed(tokens):
            name.reset(token)


_NONE = object()


def unrecorded() -> AbstractContextManager[None]:
    """Let values be read here that a recomputation will not read."""
    return with_variables({_TAPE: None})


def read_once() -> tuple[Callable[[], AbstractContextManager[None]], ...]:
    """Return what makes the contexts of a block's forward and of its recomputation, which gets what forward read."""
    values: list[Any] = []
    return tuple(lambda again=again: with_variables({_TAPE: _Tape(values, again=again)}) for again in (False, True))


@final
class _Tape:
    """The values that one run of a block reads, in their order."""

    def __init__(self, values: list[Any], *, again: bool) -> None:
        self._values, self._earlier = values, iter(values) if again else None

    def begin_read(self, start: Callable[[], Callable[[], T]]) -> Callable[[], T]:
        if self._earlier is not None:
            value = next(self._earlier)
            return lambda: value  # type: ignore[no-any-return]
        wait = unseen(start)()

        def read() -> T:
            value = unseen(wait)()
            self._values.append(value)
            return value

        return read
