"""An accelerator's branches with real numbers on CPUs: each backward runs in a thread of its own."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from meshpar.core import runtime
from meshpar.exchange.ranks import Looks


@contextmanager
def backward_apart() -> Iterator[None]:
    """Run outer backwards as for an accelerator: in a thread without the caller's context variables."""
    inner: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:
            return inner(*args, **kwargs)
        results: list[Any] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                results.append(inner(*args, **kwargs))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work, name="backward")
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = inner  # type: ignore[attr-defined]


@contextmanager
def accelerated(*, looks: int = 1) -> Iterator[None]:
    """Let this rank choose as beside an accelerator, where ranks look at what they compare ``looks`` times."""
    (first, Looks.FIRST), (queues, runtime.queues) = (Looks.FIRST, looks), (runtime.queues, lambda device: True)  # type: ignore[assignment]
    try:
        with backward_apart(), mock.patch.object(torch.cpu, "empty_cache", lambda: None, create=True):
            yield
    finally:
        Looks.FIRST, runtime.queues = first, queues  # type: ignore[assignment]
