"""What a person sees on the terminal: rank 0's log as it grows, which each start appends to, and progress."""

from __future__ import annotations

import codecs
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, final

from meshpar.process.signals import Lenient

_EVERY_S, _LINE_S = 0.1, 10.0


def log_file(logs: Path, rank: int) -> Path:
    return logs / f"rank-{rank}.log"


def redirect(logs: Path, rank: int) -> None:
    """Redirect this process's output, including C's writes, to its log; later starts append to it."""
    logs.mkdir(parents=True, exist_ok=True)
    with log_file(logs, rank).open("ab") as file:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    if isinstance(sys.stdout, io.TextIOWrapper):  # it was made for what the process began with
        sys.stdout.reconfigure(line_buffering=True)
    sys.stdout, sys.stderr = Lenient(sys.stdout), Lenient(sys.stderr)  # type: ignore[assignment]


def copy_output(logs: Path, rank: int) -> None:
    """Write to the terminal and to the log; control sequences (a progress bar) go to the terminal alone."""
    logs.mkdir(parents=True, exist_ok=True)
    file = log_file(logs, rank).open("a", encoding="utf-8", buffering=1)
    sys.stdout, sys.stderr = _Both(sys.stdout, file), _Both(sys.stderr, file)  # type: ignore[assignment]


@final
class _Both:
    """Write to a terminal's stream and to a file; either may fail."""

    def __init__(self, terminal: TextIO, file: TextIO) -> None:
        self._terminal, self._file = Lenient(terminal), Lenient(file)

    def write(self, text: str) -> int:
        if "\x1b" not in text and "\r" not in text:
            self._file.write(text)
        return self._terminal.write(text)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as the terminal's
        return getattr(self._terminal, name)


@final
class Shown:
    """Copy a file to a stream as it grows. A context manager; its exit copies the rest."""

    def __init__(self, path: Path, to: TextIO) -> None:
        self._path, self._to = path, to
        self._position = path.stat().st_size if path.exists() else 0
        # a character may be written in two parts
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="meshpar-log", daemon=True)

    def __enter__(self) -> Shown:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._end.wait(_EVERY_S):
            self._copy()
        self._copy()

    def _copy(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            text = file.read()
        self._position += len(text)
        if text:
            with suppress(OSError):  # `meshpar run ... | head`, or a full disk: the log has every line
                self._to.write(self._decoder.decode(text))
                self._to.flush()


def start_id() -> str:
    """Return a name for a start of a job, made of time and PID."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


@contextmanager
def show_bytes() -> Iterator[Callable[[int, int], None]]:
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
def show_parts(name: str) -> Iterator[Callable[[str, int, int], None]]:
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
