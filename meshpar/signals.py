"""Signals that ask a process to save and stop, and output that may end before the process does."""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import Any, TextIO, final

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""SIGHUP: the terminal was closed. SIGUSR1: SLURM sends it before the time limit."""


def heard() -> tuple[signal.Signals, ...]:
    """Return the signals that stop this process; those that its parent ignores, such as SIGHUP under ``nohup``, stay ignored."""
    return tuple(each for each in STOPPING if signal.getsignal(each) != signal.SIG_IGN)


def exit_code_of(reason: str | None) -> int:
    """Return 0 for a complete run, and 128 + the signal's number for one that was asked to stop; other reasons count as SIGTERM."""
    return 0 if reason is None else 128 + signal.Signals.__members__.get(reason, signal.SIGTERM)


@final
class Lenient:
    """A stream that loses the text that it cannot write, as to a full disk or a closed terminal; training continues."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """Write as much as possible."""
        with suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """Write the text that the stream still holds, if possible."""
        with suppress(OSError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as the file's
        return getattr(self._file, name)
