"""How long tests wait: bounds are written for a quiet machine, and are as much longer as this machine is slower now."""

import math
import time
from collections.abc import Callable


class Patience:
    """How many times as long as on a quiet machine a piece of work takes, measured at most every 20 seconds."""

    def __init__(self) -> None:
        self._factor, self._measured = 1.0, -math.inf

    def factor(self) -> float:
        if time.monotonic() - self._measured > 20:
            began, used = time.monotonic(), time.process_time()
            while time.process_time() - used < 0.1:
                pass
            self._measured = time.monotonic()
            self._factor = min(
                10.0, max(self._factor / 2, (self._measured - began) / 0.1, 1.0)
            )  # it may be busy again in a moment
        return self._factor


PATIENCE = Patience()


def patient(seconds: float) -> float:
    """Return what takes so many seconds on a quiet machine, in seconds of this one now."""
    return PATIENCE.factor() * seconds


def until(
    true: Callable[[], object], seconds: float = 180, *, every: float = 0.02, report: Callable[[], str] = str
) -> None:
    """Wait until something is true, or fail with what ``report`` returns after so many seconds of a quiet machine."""
    while not true():
        assert seconds > 0, f"it is not so in time\n{report()}"
        began = time.monotonic()
        time.sleep(every)
        seconds -= (time.monotonic() - began) / PATIENCE.factor()
