"""Stop requests: a signal on any rank stops all ranks at the same place."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any, final

import torch
import torch.distributed as dist

from meshpar.core import runtime
from meshpar.core.errors import MeshparError
from meshpar.process.waiting import STOPPING, heard, put_back

_NUMBERS = {signal_.name: int(signal_) + 1 for signal_ in STOPPING}
_OTHERWISE = 1  # a request that is no signal; less than any signal's number + 1
_SAME_S = 1.0  # one Ctrl-C may arrive twice: from the terminal and from the launcher that passes it on
_LONG_S = 1.0  # between two calls of agreed(), from which on the ranks wait for each other's answer


@final
class StopAskedError(MeshparError):
    """Raised on all ranks where a stop request ends a wait; the message is the request's reason."""


@final
class StopRequest:
    """Convert the signals of :mod:`meshpar.process.waiting` to a stop request on which all ranks agree.

    A context manager, which may be entered again inside. Collective: every rank enters it. A small asynchronous
    all-reduce on CPUs combines the ranks' flags (which name the signal), so the ranks agree one call of :meth:`agreed`
    after the request. A second SIGINT interrupts at once. Outside the main thread only :meth:`request` works.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._group: dist.ProcessGroup | None = None
        # who asks, whether the time since the last call was long, whether work beside the training failed and goes on
        self._flags = torch.zeros(4, dtype=torch.int32)
        self._work: dist.Work | None = None
        self.heard, self._waits, self._entered = False, False, 0
        self._asked, self._called = 0.0, time.monotonic()
        # whether interrupt() may raise where the main thread is now; and whether it was called
        self.interrupts, self._late = False, False
        self._before: dict[signal.Signals, Any] = {}

    def request(self, reason: str) -> None:
        """Request that all ranks stop; one rank is enough."""
        if self.reason is None:
            self.reason, self._asked = reason, time.monotonic()

    def __enter__(self) -> StopRequest:
        self._entered += 1
        if self._entered > 1:
            return self
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = runtime.new_host_group("stop")
        if threading.current_thread() is threading.main_thread():
            for number in heard():
                self._before[number] = signal.signal(number, self._handle)
        self._called = time.monotonic()
        return self

    def agreed(self) -> bool:
        """Return whether the ranks have agreed to stop. Collective: after every step and part of longer work."""
        if self._group is None:
            return self.reason is not None
        self._finish()
        if not self.heard:
            now = time.monotonic()
            self._send(int(now - self._called > _LONG_S))
            if self._waits:
                self._finish()
            self._called = time.monotonic()
        return self.heard

    def meet(self, failure: str, *, works: bool, within_s: float) -> tuple[list[str], bool]:
        """Wait for the other ranks; return all failures, and whether a rank still works. Collective; TimeoutError."""
        if self._group is None:
            self.heard = self.reason is not None
            return [failure] if failure else [], works
        self._finish()
        self._send(0, int(bool(failure)), int(works))
        assert self._work is not None
        until, pause_s = time.monotonic() + within_s, 1e-5
        while not self._work.is_completed():  # signals are heard meanwhile
            if time.monotonic() > until:
                raise TimeoutError(f"no answer within {within_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        failed, going_on = self._flags[2:].tolist()
        self._finish()
        texts = [failure] * dist.get_world_size()
        if failed:
            dist.all_gather_object(texts, failure, group=self._group)
        return [text for text in texts if text], bool(going_on)

    def asked_for_s(self) -> float:
        """Return the seconds since this rank was asked to stop; 0 if it was not."""
        return 0.0 if self.reason is None else time.monotonic() - self._asked

    def interrupt(self) -> None:
        """Raise StopAskedError in the main thread while ``interrupts`` is set there; from another thread."""
        if self._before and self.reason in _NUMBERS:
            self._late = True
            signal.pthread_kill(threading.main_thread().ident or 0, signal.Signals(_NUMBERS[self.reason] - 1))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._entered -= 1
        if self._entered:
            return
        put_back(self._before)
        if self._group is not None and kind is None:  # after an error the other ranks may never come
            self._finish()
            dist.destroy_process_group(self._group)

    def _send(self, *flags: int) -> None:
        asks = 0 if self.reason is None else _NUMBERS.get(self.reason, _OTHERWISE)
        self._flags = torch.tensor([asks, *flags, *(0 for _ in range(3 - len(flags)))], dtype=torch.int32)
        self._work = dist.all_reduce(self._flags, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _finish(self) -> None:
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        flag, long, *_ = self._flags.tolist()
        self._waits = bool(long)
        if flag:
            self.heard = True
            self.request("another rank was asked to stop")
        if flag > _OTHERWISE:
            self.reason = signal.Signals(flag - 1).name  # also where this rank has got another one

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._late:
            self._late = False
            if self.interrupts:
                raise StopAskedError(f"it did not end after {self.reason}")
        elif number == signal.SIGINT and self.reason is not None and time.monotonic() - self._asked > _SAME_S:
            raise KeyboardInterrupt
        self.request(signal.Signals(number).name)
