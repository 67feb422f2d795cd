"""Ranks as threads that take turns, on a network with NCCL's rules for messages: a hang is found at once."""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from meshpar.passes.pipeline import messages, running


class Hang(BaseException):
    """All ranks that have not ended wait for one another."""


class Broken(AssertionError):
    """A message and its receive differ."""


@dataclass(eq=False)
class Group:
    """Ranks that exchange tensors; the backend is ``"nccl"`` or ``"gloo"``."""

    ranks: tuple[int, ...]
    backend: str = "nccl"
    title: str = "pp"


@dataclass(eq=False)
class Work:
    """A call of a rank: ``peer`` -1 means all of the group, ``then`` combines what all ranks gave."""

    network: Network
    kind: str
    value: Any
    peer: int = -1
    then: Callable[[list[Any]], None] | None = None
    done: bool = False

    def wait(self, *_: object) -> bool:
        self.network.block(lambda: self.done, f"{self.kind} {self.peer if self.peer >= 0 else ''}")
        return True

    def is_completed(self) -> bool:
        return self.done


@dataclass
class Network:
    """The ranks of a run; ``eager``: one communicator a group, else one a pair, whose first call ``connects``."""

    size: int
    eager: bool = True
    connects: bool = True
    calls: list[tuple[int, str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = dist.HashStore()
        self.world = Group(tuple(range(self.size)))
        self.hosts = Group(self.world.ranks, "gloo", "hosts")
        self._groups: list[Group] = []
        self._queues: dict[Any, deque[Work]] = {}
        self._called: dict[Any, set[int]] = {}
        self._made = [0] * self.size
        self._local, self._turn, self._ended = threading.local(), threading.Semaphore(0), False
        self._turns = [threading.Semaphore(0) for _ in range(self.size)]
        self._ready: list[tuple[Callable[[], bool], str] | None] = [(lambda: True, "the begin")] * self.size

    @property
    def rank(self) -> int:
        """The rank that runs."""
        return self._local.rank

    def block(self, ready: Callable[[], bool], what: str) -> None:
        """Let other ranks run until ``ready``."""
        if ready():
            return
        self._ready[self.rank] = ready, what
        self._turn.release()
        self._turns[self.rank].acquire()
        if self._ended:
            raise Hang(what)

    def run(self, program: Callable[[int], Any]) -> list[Any]:
        """Run a program on every rank and return the results; raise :class:`Hang` if all wait for one another."""
        results, errors = [None] * self.size, list[BaseException]()

        def work(rank: int) -> None:
            self._local.rank = rank
            self._turns[rank].acquire()
            try:
                if not self._ended:
                    results[rank] = program(rank)
            except Hang:
                pass
            except BaseException as error:
                errors.append(error)
            self._ready[rank] = None
            self._turn.release()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        with self._patched():
            for thread in threads:
                thread.start()
            while any(self._ready) and not errors:
                able = [rank for rank, waits in enumerate(self._ready) if waits is not None and waits[0]()]
                if not able:
                    break
                for rank in able:
                    self._turns[rank].release()
                    self._turn.acquire()
            waiting = {rank: waits[1] for rank, waits in enumerate(self._ready) if waits is not None}
            self._ended = True
            for rank in waiting:
                self._turns[rank].release()
                self._turn.acquire()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
        if waiting:
            raise Hang(f"ranks wait for one another: {waiting}")
        return results

    def call(self, group: Group, kind: str, value: Any, peer: int = -1, tag: int = 0, then: Any = None) -> Work:
        """Make one call of the rank that runs."""
        self.calls.append((self.rank, group.title, kind))
        work, lane = Work(self, kind, value, peer, then), (group,) if peer < 0 else self._lane(group, kind, peer, tag)
        if self.connects and peer >= 0 and group.backend == "nccl":
            pair = (self.rank, peer) if kind == "send" else (peer, self.rank)
            called = self._called.setdefault((*lane, *(pair if self.eager else sorted(pair))), set())
            called.add(self.rank)
            self.block(lambda: len(called) == 2, f"the first {kind} {peer} in {group.title}")
        self._queues.setdefault((lane, self.rank), deque()).append(work)
        self._match(group, lane, self.rank)
        return work

    def _lane(self, group: Group, kind: str, peer: int, tag: int) -> tuple[Any, ...]:
        """Return what names the queue of a message."""
        if group.backend == "gloo":
            return group, tag, *((self.rank, peer) if kind == "send" else (peer, self.rank))
        return (group,) if self.eager else (group, *sorted((self.rank, peer)))

    def _match(self, group: Group, lane: Any, rank: int) -> None:
        """End calls whose counterparts are first in their queues, too."""
        while queue := self._queues[lane, rank]:
            first = queue[0]
            if first.peer < 0:
                queues = [self._queues.get((lane, other)) for other in group.ranks]
                if not all(one and one[0].peer < 0 for one in queues):
                    return
                ended = [one.popleft() for one in queues]
                if len({one.kind for one in ended}) > 1:
                    raise Broken(f"ranks call {[one.kind for one in ended]} at the same time in {group.title}")
                first.then([one.value for one in ended])
            else:
                other = self._queues.get((lane, first.peer))
                if not other or other[0].peer != rank or {first.kind, other[0].kind} != {"send", "recv"}:
                    return
                ended = [queue.popleft(), other.popleft()]
                sent, room = (next(one.value for one in ended if one.kind == kind) for kind in ("send", "recv"))
                if (sent.numel(), sent.dtype) != (room.numel(), room.dtype):
                    raise Broken(f"{group.title}: {sent.shape} of {sent.dtype} for {room.shape} of {room.dtype}")
                room.copy_(sent.reshape(room.shape))
            for one in ended:
                one.done = True
            for other_rank in group.ranks if first.peer < 0 else (first.peer,):
                if other_rank != rank and self._queues.get((lane, other_rank)):
                    self._match(group, lane, other_rank)

    def _patched(self) -> ExitStack:
        """Let the functions of ``torch.distributed`` that stages call talk by this network."""
        world = self.world

        def new_group(ranks: Sequence[int] | None = None, **kwargs: Any) -> Group:
            number = self._made[self.rank]
            self._made[self.rank] += 1
            if number == len(self._groups):
                title = str(kwargs.get("group_desc") or f"group {number}")
                self._groups.append(Group(tuple(ranks or world.ranks), kwargs.get("backend") or "nccl", title))
            assert self._groups[number].ranks == tuple(ranks or world.ranks), "groups are made in one order"
            return self._groups[number]

        def message(kind: str, wait: bool) -> Callable[..., Any]:
            def call(tensor: Tensor, *, group: Group, group_src: int = -1, group_dst: int = -1, tag: int = 0) -> Any:
                work = self.call(group, kind, tensor, group.ranks[max(group_src, group_dst)], tag)
                return work.wait() if wait else work

            return call

        def collective(group: Group | None, kind: str, value: Any, then: Callable[[list[Any]], None]) -> None:
            self.call(group or world, kind, value, then=then).wait()

        def all_gather(output: Tensor, given: Tensor, group: Group) -> None:
            def then(pairs: list[tuple[Tensor, Tensor]]) -> None:
                for whole, _ in pairs:
                    whole.copy_(torch.cat([part.flatten() for _, part in pairs]))

            collective(group, "all_gather", (output, given), then)

        def all_reduce(tensor: Tensor, group: Group) -> None:
            def then(every: list[Tensor]) -> None:
                total = torch.stack(every).sum(0)
                for one in every:
                    one.copy_(total)

            collective(group, "all_reduce", tensor, then)

        def broadcast(tensor: Tensor, group: Group, group_src: int) -> None:
            def then(every: list[Tensor]) -> None:
                for one in every:
                    one.copy_(every[group_src])

            collective(group, "broadcast", tensor, then)

        def broadcast_objects(objects: list[Any], group: Group, group_src: int, device: object) -> None:
            def then(every: list[list[Any]]) -> None:
                for one in every:
                    one[:] = copy.deepcopy(every[group_src])

            collective(group, "broadcast_objects", objects, then)

        def gather_objects(objects: list[Any], mine: Any, group: Group) -> None:
            def then(every: list[tuple[list[Any], Any]]) -> None:
                for one, _ in every:
                    one[:] = [given for _, given in every]

            collective(group, "gather_objects", (objects, mine), then)

        stack = ExitStack()
        for name, function in {
            "get_rank": lambda group=None: (group or world).ranks.index(self.rank),
            "get_world_size": lambda group=None: len((group or world).ranks),
            "get_process_group_ranks": lambda group: list((group or world).ranks),
            "get_backend": lambda group=None: (group or world).backend,
            "new_group": new_group,
            "isend": message("send", wait=False),
            "irecv": message("recv", wait=False),
            "send": message("send", wait=True),
            "recv": message("recv", wait=True),
            "all_reduce": all_reduce,
            "broadcast": broadcast,
            "broadcast_object_list": broadcast_objects,
            "all_gather_object": gather_objects,
        }.items():
            stack.enter_context(mock.patch.object(dist, name, function))
        stack.enter_context(mock.patch.object(running, "all_gather", all_gather))
        stack.enter_context(mock.patch.object(messages, "share_timeout", lambda groups: None))
        stack.enter_context(mock.patch.object(messages, "default_store", lambda: self.store))
        return stack
