"""Messages between the hosts of ranks: the largest of their numbers in a few hops, and a tree of ranks.

Gloo's maximum goes twice around a ring of all ranks: 2 (P - 1) hops. Messages between two ranks travel on connections
of their own, so that a thread can send them beside collectives.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from meshpar._torch.groups import EXCHANGES, default_store, shared_timeout
from meshpar.core import runtime

FAN_OUT = 16
"""To how many ranks at most one rank sends in one hop."""


@final
class Messages:
    """Tensors in host memory and plain data between two ranks of a group. Two ranks connect when they first talk.

    A message reaches the receive of its tag; those of one tag arrive in the order in which they were sent.

    Args:
        name: what they are for. The ranks of a group open those of one name in the same order.
        group: the ranks; None: all.
        timeout_s: bound in seconds on each message; None: that of the default group.
    """

    def __init__(self, name: str, group: dist.ProcessGroup | None = None, timeout_s: float | None = None) -> None:
        store, ranks = default_store(), group or dist.group.WORLD
        assert ranks is not None
        self.rank, self.size, title = ranks.rank(), ranks.size(), f"messages of {name} {ranks.group_name}"
        number = store.add(f"{title}, rank {self.rank}", 1)  # a rank may have left earlier ones that failed
        self._timeout = shared_timeout() if timeout_s is None else timedelta(seconds=timeout_s)
        with runtime.connecting_lazily():
            gloo: Any = dist.ProcessGroupGloo
            here = dist.PrefixStore(f"{title}/{number}", store)
            self._gloo = gloo(here, self.rank, self.size, self._timeout or dist.default_pg_timeout)

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> dist.Work:
        """Begin to send a tensor to a rank of the group."""
        work: dist.Work = self._gloo.send([tensor], to, tag)
        return work

    def receive(self, into: Tensor, source: int, tag: int = 0) -> dist.Work:
        """Begin to receive a tensor from a rank of the group."""
        work: dist.Work = self._gloo.recv([into], source, tag)
        return work


_OPEN: weakref.WeakKeyDictionary[dist.ProcessGroup, Messages] = weakref.WeakKeyDictionary()


def hops(ranks: int, most: int = FAN_OUT) -> list[list[int]]:
    """Return for each hop the distances over which every rank sends what it knows, around the circle of ranks.

    After a hop a rank knows the numbers of so many times more ranks before it; the last distances may reach some
    again, which changes no maximum (dissemination; Hensgen, Finkel and Manber 1988). Hops are as few as ``most`` ranks
    a hop allow, and messages as few as those hops allow.
    """
    count = next(count for count in itertools.count(1) if most**count >= ranks)
    base = next(base for base in range(2, most + 1) if base**count >= ranks)
    return [[far for far in range(base**hop, base ** (hop + 1), base**hop) if far < ranks] for hop in range(count)]


@final
class LargestByHops:
    """The largest of each of the numbers of all ranks of a group, which a thread exchanges. Collective.

    Args:
        numbers: as many on every rank, in host memory.
        group: the ranks.
        most: to how many ranks at most one rank sends in a hop.
    """

    def __init__(self, numbers: Tensor, group: dist.ProcessGroup, most: int = FAN_OUT) -> None:
        if group not in _OPEN:
            _OPEN[group] = Messages("the largest", group)
        self._messages, self._most, self._largest = _OPEN[group], most, numbers.detach().clone()
        EXCHANGES[group] = number = EXCHANGES.get(group, 0) + 1
        self._first_tag = number % (1 << 20) << 5  # a hop has one
        self._end: Future[Tensor] = Future()
        threading.Thread(target=self._run, name="meshpar-largest", daemon=True).start()

    def wait(self) -> Tensor:
        """Wait for the exchange, and return the numbers; raises RuntimeError where a rank has ended, or is late."""
        return self._end.result()

    def _run(self) -> None:
        rank, size, largest = self._messages.rank, self._messages.size, self._largest
        try:
            for tag, distances in enumerate(hops(size, self._most), self._first_tag):
                came = [torch.empty_like(largest) for _ in distances]
                works = [self._messages.receive(into, (rank - far) % size, tag) for far, into in zip(distances, came)]
                works += [self._messages.send(largest, (rank + far) % size, tag) for far in distances]
                for work in works:
                    work.wait()
                largest = torch.stack([largest, *came]).amax(0)
            self._end.set_result(largest)
        except BaseException as error:  # noqa: BLE001 - raised again by the reader
            self._end.set_exception(error)
