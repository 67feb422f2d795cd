"""Stop when asked: a signal on any rank becomes one decision of all, at the end of the same step."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, final

import torch
import torch.distributed as dist

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # the last: SLURM, before the time limit
_SAME_S = 1.0  # one Ctrl-C may arrive twice: from the terminal and from the launcher that passes it on


@final
class StopRequest:
    """Turn SIGTERM, SIGINT and SIGUSR1 into a request that the ranks agree on; a second SIGINT interrupts at once.

    A context manager. Collective: every rank enters it. The ranks' flags are joined by a small all-reduce of CPU memory on a
    group of its own, which runs beside the next step: agreement comes one step after the request, and nothing waits for it.
    Outside the main thread, where Python allows no signal handlers, only :meth:`request` asks.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._group: dist.ProcessGroup | None = None
        self._flag = torch.zeros((), dtype=torch.int32)
        self._work: dist.Work | None = None
        self._asked = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def request(self, reason: str) -> None:
        """Ask all ranks to stop; needed on one of them only."""
        self.reason = self.reason or reason

    def __enter__(self) -> StopRequest:
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def agreed(self) -> bool:
        """Tell, at the end of a step, whether the ranks had agreed to stop by the end of the step before.

        Collective: every rank calls it after every step.
        """
        if self._group is None:
            return self.reason is not None
        stop = self._finish()
        self._flag.fill_(int(self.reason is not None))
        self._work = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return stop

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._group is not None and kind is None:  # after an error the other ranks may never come
            self._finish()
            dist.destroy_process_group(self._group)

    def _finish(self) -> bool:
        if self._work is None:
            return False
        self._work.wait()
        self._work = None
        stop = bool(self._flag)
        if stop:
            self.request("another rank was asked to stop")
        return stop

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and self.reason is not None and now - self._asked > _SAME_S:
            raise KeyboardInterrupt
        self._asked = now if self.reason is None else self._asked
        self.request(signal.Signals(number).name)
