"""Progress of long work, on standard error: in place on a terminal, elsewhere a line every 10 s."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_LINE_S = 10.0


@contextmanager
def of_bytes() -> Iterator[Callable[[int, int], None]]:
    """Yield what shows how many bytes of how many are done."""
    if not sys.stderr.isatty():
        line = _Lines()
        yield lambda done, total: line(f"{done / 2**30:.2f} of {total / 2**30:.2f} GiB")
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    with Progress(BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=Console(stderr=True)) as bar:
        task: Any = bar.add_task("")
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def of_parts(name: str) -> Iterator[Callable[[str, int, int], None]]:
    """Yield what shows a part of the work and how many of its pieces, called ``name``, are done."""
    if not sys.stderr.isatty():
        line = _Lines()
        yield lambda part, done, total: line(f"{part}: {done} of {total} {name}")
        return
    from rich.console import Console

    with Console(stderr=True).status(name) as status:
        yield lambda part, done, total: status.update(f"{part}: {done} of {total} {name}")


class _Lines:
    """Prints what it is called with, if the last line is old enough."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, text: str) -> None:
        if time.monotonic() - self._last >= _LINE_S:
            self._last = time.monotonic()
            print(text, file=sys.stderr, flush=True)
