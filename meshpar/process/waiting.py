"""Waits that are bounded, name whom they wait for and can be interrupted; whom a change of parameters waits for;
signals that ask a process to save and stop, and output that may end before the process does.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO, final

from meshpar.core.errors import MeshparError

EVERY_S = 10.0
"""Seconds between two lines about a wait."""

READS_S = 600.0
"""Seconds that a change of parameters waits for those who read them."""

_POLL_S = 0.05


@final
class Waiting:
    """A wait in Python, which a signal interrupts; torch's stores wait in C++, which none does."""

    def __init__(self, wait_s: float) -> None:
        """Begin a wait of at most ``wait_s`` seconds."""
        self._wait_s, self._began = wait_s, time.monotonic()
        self._told = self._began

    def renew(self) -> None:
        """Begin the time again: whom this waits for has given a sign of life."""
        self._began = time.monotonic()

    def more(self, whom: str) -> bool:
        """Sleep a moment and return whether there is time left; ``whom`` is told every ten seconds."""
        now = time.monotonic()
        if now - self._began > self._wait_s:
            return False
        if now - self._told >= EVERY_S:
            sys.stderr.write(f"meshpar: waiting for {whom}, {now - self._began:.0f} of {self._wait_s:.0f} s\n")
            sys.stderr.flush()
            self._told = now
        time.sleep(_POLL_S)
        return True


@final
class Reads:
    """The reads of a module's parameters under way; ``away``: why these have no memory. Changes :meth:`wait` first."""

    def __init__(self) -> None:
        self.away = ""
        self._open: dict[object, tuple[str, int]] = {}

    def check(self, what: str) -> None:
        """Raise MeshparError where the parameters have no memory; ``what`` would use them."""
        if self.away:
            raise MeshparError(f"{what} was called {self.away}")

    def begin(self, what: str, *, beside: bool = False) -> Callable[[], None]:
        """Note a read and return what notes its end; ``beside``: another thread reads, for which this one can wait."""
        self.check(what)
        read = object()
        self._open[read] = what, 0 if beside else threading.get_ident()

        def end() -> None:
            self._open.pop(read, None)

        return end

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Note a read for the block."""
        end = self.begin(what)
        try:
            yield
        finally:
            end()

    def wait(self, change: str) -> None:
        """Wait until nobody reads the parameters that ``change`` changes; MeshparError if this thread reads them."""
        self.check(change)
        waiting = Waiting(READS_S)
        while reads := list(self._open.values()):
            what, thread = reads[0]
            if thread == threading.get_ident():
                raise MeshparError(
                    f"{change} would change parameters that {what} still reads; read it to its end, or close it, before"
                )
            if not waiting.more(f"{what}, which reads the parameters that {change} changes"):
                raise MeshparError(
                    f"{change} waited {READS_S:.0f} s for {what}, which still reads the parameters; look at what holds "
                    "it up (a full or slow disk), then try again"
                )


_READS: weakref.WeakKeyDictionary[object, Reads] = weakref.WeakKeyDictionary()


def reads_of(module: object) -> Reads:
    """Return the reads of an outermost module's parameters."""
    return _READS.setdefault(module, Reads())


_WAITING: weakref.WeakKeyDictionary[object, Reads] = weakref.WeakKeyDictionary()


def loads_wait(module: Any) -> list[Any]:  # noqa: ANN401 - an nn.Module, which this floor does not import
    """Let ``load_state_dict`` of a module and of its parts wait for reads; return the handles that end it."""
    _WAITING.update({part: reads_of(module) for part in module.modules()})
    return [part.register_load_state_dict_pre_hook(_wait_before_load) for part in module.modules()]


def _wait_before_load(module: object, *_: object) -> None:
    """Wait for reads of a part's outermost module; a function of a file, so that modules can be pickled meanwhile."""
    if module in _WAITING:
        _WAITING[module].wait("load_state_dict()")


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
