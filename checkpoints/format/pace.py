"""Choose by measurement how bytes are copied from file to file: the cheapest way differs between machines, and from
minute to minute.

Measured on Linux 6.18: the kernel puts a write of 512 KiB into one large piece of free memory. That is the cheapest
while there are such pieces. Where free memory is fragmented, or a virtual machine's host has taken large pieces back,
the same write takes two to four times the CPU time of ``cp``, which writes 64 KiB at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

from meshpar.checkpoints.storage.files import BLOCK_BYTES

TURN_BYTES = 4 << 20  # copied in one way before the next choice
_LEAST_BYTES = 1 << 20  # of a turn whose cost counts: less is mostly overhead
_KEPT = 0.997  # of a cost, at each turn of another way: so that each way is tried again


@final
@dataclass(frozen=True, slots=True)
class Way:
    """One way to copy: by writes of ``block_bytes``, from the page cache itself (``mapped``) or through a buffer."""

    block_bytes: int
    mapped: bool


WAYS = (Way(BLOCK_BYTES, mapped=True), Way(BLOCK_BYTES, mapped=False), Way(64 << 10, mapped=True))


@final
class Pace:
    """Choose, at each turn, the way that took the least CPU time a byte when it was last used.

    CPU time and not wall time: what other processes and the disk do at the moment does not count.

    Args:
        ways: the ways to choose from; each is tried once, in this order, before the first choice.
        clock: returns seconds.
    """

    def __init__(self, ways: Sequence[Way] = WAYS, clock: Callable[[], float] = time.thread_time) -> None:
        self._costs, self._clock = dict.fromkeys(ways, 0.0), clock

    @contextmanager
    def turn(self, count: int) -> Iterator[Way]:
        """Yield the way in which to copy the next ``count`` bytes."""
        way = min(self._costs, key=lambda name: self._costs[name])
        began = self._clock()
        yield way
        if count >= _LEAST_BYTES:
            self._costs = {name: cost * _KEPT for name, cost in self._costs.items()}
            self._costs[way] = (self._clock() - began) / count
