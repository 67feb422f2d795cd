"""One log file per rank with its standard output and error; rank 0's is printed as it grows.

torch's elastic agent has logs of its own (DefaultLogsSpecs, ``tee``, TailLog), which this module does not use:

- It opens a file for standard output and another for standard error, empty at every restart. Here both are one file, in
  the order in which they were written, and the starts of a rank follow each other in it.
- It names files by the rank on its node. Here the name has the rank of the job, which is known in the rank only.
- TailLog copies a file from its beginning. A job that an engine starts again would show the output of its earlier
  starts once more.
- It cannot leave a rank its terminal, which progress bars and Ctrl-C need.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, final

from meshpar.process.signals import Lenient

_EVERY_S = 0.1


def log_file(logs: Path, rank: int) -> Path:
    """Return the path of a rank's log."""
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
        """Write to both; escape sequences go to the terminal alone."""
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
