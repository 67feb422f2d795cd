"""Messages between the hosts of ranks: the largest of their numbers in a few hops, and a tree of ranks. Each two ranks
have a connection of their own, which a thread may use during collectives.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
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
    """Tensors in host memory between two ranks of a group, by tags; all ranks open those of a name in one order."""

    def __init__(self, name: str, group: dist.ProcessGroup | None = None, timeout_s: float | None = None) -> None:
        store, ranks = default_store(), group or dist.group.WORLD
        assert ranks is not None
        self.rank, self.size, title = ranks.rank(), ranks.size(), f"messages of {name} {ranks.group_name}"
        number = store.add(f"{title}, rank {self.rank}", 1)  # a rank may have left earlier ones that failed
        self._timeout = shared_timeout() if timeout_s is None else timedelta(seconds=timeout_s)
        with runtime.connecting_lazily():
            gloo: Any = dist.ProcessGroupGloo
            self._store: Any = dist.PrefixStore(f"{title}/{number}", store)
            self._gloo = gloo(self._store, self.rank, self.size, self._timeout or dist.default_pg_timeout)

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> dist.Work:
        """Begin to send a tensor to a rank of the group."""
        work: dist.Work = self._gloo.send([tensor], to, tag)
        return work

    def receive(self, into: Tensor, source: int, tag: int = 0) -> dist.Work:
        """Begin to receive a tensor from a rank of the group."""
        work: dist.Work = self._gloo.recv([into], source, tag)
        return work

    def lost(self, peer: int, *, waited: bool) -> int:
        """Close the connections after an error, so that all ranks fail now; return the rank that one lost first."""
        with suppress(RuntimeError):
            self._store.wait(["lost"], timedelta(seconds=0.01 if waited else 1))
        with suppress(RuntimeError):  # the store has ended, too
            peer = int(self._store.compare_set("lost", "", str(peer)))
        # In a thread: where this rank has not talked to the next one, which has ended, gloo waits to connect.
        closing = threading.Thread(target=self._close, name="meshpar-close", daemon=True)
        closing.start()
        closing.join(1.0)
        return peer

    def _close(self) -> None:
        with suppress(RuntimeError):  # gloo closes all connections at a time-out
            self.receive(torch.empty(0, device="cpu"), (self.rank + 1) % self.size, 1).wait(timedelta(milliseconds=1))


def send_bytes(messages: Messages, data: bytes, to: int) -> list[dist.Work]:
    """Begin to send bytes to a rank."""
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return [messages.send(torch.tensor([len(data)], device="cpu"), to), messages.send(tensor, to)]


def receive_bytes(messages: Messages, source: int, timeout: timedelta) -> bytes:
    """Wait for bytes of a rank."""
    size = torch.zeros(1, dtype=torch.int64, device="cpu")
    messages.receive(size, source).wait(timeout)
    data = bytearray(int(size))
    messages.receive(torch.frombuffer(data, dtype=torch.uint8), source).wait(timeout)
    return bytes(data)


@dataclass(frozen=True, slots=True)
class Branch:
    """A rank's place in a tree: the ranks from itself to ``end`` are below it, and those of its children to theirs."""

    parent: int | None
    children: Sequence[tuple[int, int]]
    end: int


def branch_of(rank: int, ranks: int) -> Branch:
    """Return a rank's place in the tree in which each rank talks to at most :data:`FAN_OUT` others below it."""
    parent, first, end = None, 0, ranks
    while True:
        size = max(1, -(-(end - first - 1) // FAN_OUT))
        children = [(low, min(low + size, end)) for low in range(first + 1, end, size)]
        if rank == first:
            return Branch(parent, children, end)
        parent = first
        first, end = children[(rank - first - 1) // size]


_OPEN: weakref.WeakKeyDictionary[dist.ProcessGroup, Messages] = weakref.WeakKeyDictionary()


def hops(ranks: int, most: int = FAN_OUT) -> list[list[int]]:
    """Return for each hop the distances over which ranks send what they know, around the circle of ranks.

    Dissemination (Hensgen, Finkel and Manber 1988), in as few hops as ``most`` ranks a hop allow.
    """
    count = next(count for count in itertools.count(1) if most**count >= ranks)
    base = next(base for base in range(2, most + 1) if base**count >= ranks)
    return [[far for far in range(base**hop, base ** (hop + 1), base**hop) if far < ranks] for hop in range(count)]


@final
class LargestByHops:
    """The largest of each of the numbers in host memory of all ranks, which a thread exchanges. Collective."""

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
                received = [torch.empty_like(largest) for _ in distances]
                works = [
                    self._messages.receive(into, (rank - far) % size, tag) for far, into in zip(distances, received)
                ]
                works += [self._messages.send(largest, (rank + far) % size, tag) for far in distances]
                for work in works:
                    work.wait()
                largest = torch.stack([largest, *received]).amax(0)
            self._end.set_result(largest)
        except BaseException as error:  # noqa: BLE001 - raised again by the reader
            self._end.set_exception(error)
