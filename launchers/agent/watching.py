"""Start the watchdog of a job."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from meshpar import runtime
from meshpar.launchers.agent.failures import record_stall
from meshpar.watchdog import Watchdog

_CONNECT_S = 60.0


@contextmanager
def watched(stall_s: float | None, progress: Callable[[], object], moves: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Watch the code inside the ``with`` block; does nothing if ``stall_s`` is None or there is one rank.

    Args:
        stall_s: seconds without progress after which the watchdog ends the job.
        progress: returns a new value when the job has made progress, such as the step.
        moves: returns another value when work moves in which there is neither step nor collective: validation, writing.
    """
    if stall_s is None or runtime.world_size() == 1 or not runtime.launched():
        yield
        return
    rank, logs = runtime.rank(), os.environ.get("MESHPAR_LOGS")
    store = runtime.meeting_store("watchdog", timeout_s=_CONNECT_S)

    def record(verdict: str, sure: bool) -> None:
        if logs is not None:
            record_stall(Path(logs), rank, verdict, cause=sure)

    with Watchdog(stall_s, store, progress, rank=rank, world_size=runtime.world_size(), moves=moves, on_stall=record):
        yield
