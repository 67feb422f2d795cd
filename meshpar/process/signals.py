"""Signals that ask a process to save and stop, and output that may end before the process does."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TextIO, final

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""SIGHUP: the terminal was closed. SIGUSR1: SLURM sends it before the time limit."""

_UNWRITTEN = (OSError, ValueError, RuntimeError)
"""By which a stream refuses text: a disk, a closed file, one at work that a signal's handler enters."""


def heard() -> tuple[signal.Signals, ...]:
    """Return the signals that stop this process, but for those that its parent ignores (SIGHUP under ``nohup``)."""
    return tuple(number for number in STOPPING if signal.getsignal(number) != signal.SIG_IGN)


def put_back(handlers: Mapping[signal.Signals, Any]) -> None:
    """Set the handlers of before; one of C, which Python does not know and cannot set again, becomes the default."""
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def exit_code_of(reason: str | None) -> int:
    """Return 0 for a complete run, 128 + the signal's number for a stopped one; other reasons count as SIGTERM."""
    return 0 if reason is None else 128 + signal.Signals.__members__.get(reason, signal.SIGTERM)


@final
class Lenient:
    """A stream that loses text it cannot write, as to a full disk or a closed terminal, so that training continues."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with suppress(*_UNWRITTEN):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(*_UNWRITTEN):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as the file's
        return getattr(self._file, name)
