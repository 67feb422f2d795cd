"""Stop requests: a signal on any rank stops all ranks at the end of the same step."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, final

import torch
import torch.distributed as dist

from meshpar import runtime

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # the last: SLURM, before the time limit
_NUMBERS = {each.name: int(each) for each in _SIGNALS}
_OTHERWISE = 1  # a request that is no signal; less than any signal's number
_SAME_S = 1.0  # one Ctrl-C may arrive twice: from the terminal and from the launcher that passes it on


@final
class StopRequest:
    """Convert SIGTERM, SIGINT and SIGUSR1 to a stop request on which all ranks agree. A second SIGINT interrupts at once.

    A context manager. Collective: every rank enters it. A small all-reduce of CPU memory on a separate group combines the ranks' flags and
    overlaps with the next step: the ranks agree one step after the request, and nothing waits. A flag is the signal's number, so that all
    ranks report the same signal. Outside the main thread, where Python allows no signal handlers, only :meth:`request` works.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._group: dist.ProcessGroup | None = None
        self._flag = torch.zeros((), dtype=torch.int32)
        self._work: dist.Work | None = None
        self._asked = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def request(self, reason: str) -> None:
        """Request that all ranks stop; one rank is enough."""
        if self.reason is None:
            self.reason, self._asked = reason, time.monotonic()

    def __enter__(self) -> StopRequest:
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = runtime.new_host_group("stop")
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def agreed(self) -> bool:
        """Return, at the end of a step, whether the ranks had agreed to stop by the end of the step before.

        Collective: every rank calls it after every step.
        """
        if self._group is None:
            return self.reason is not None
        stop = self._finish()
        self._flag.fill_(0 if self.reason is None else _NUMBERS.get(self.reason, _OTHERWISE))
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
        flag = int(self._flag)
        if flag:
            self.request("another rank was asked to stop")
        if flag > _OTHERWISE:
            self.reason = signal.Signals(flag).name  # also where this rank has got another one
        return bool(flag)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason is not None and time.monotonic() - self._asked > _SAME_S:
            raise KeyboardInterrupt
        self.request(signal.Signals(number).name)
