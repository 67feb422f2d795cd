"""Connect all nodes within a time limit before their agents start, and name the missing nodes."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, final

import torch.distributed as dist

from meshpar.core.errors import LaunchError
from meshpar.launchers.agent.terms import start_id
from meshpar.process.waiting import Waiting

_CONNECT_S, _POLL_S = 5.0, 0.05
_ANSWER_S = 10.0  # in which member 0's word reaches the others
_READ_S = 5.0


@final
class RollCall:
    """An exchange of plain data by a store, which names the members that do not come. All call it in the same order."""

    def __init__(
        self,
        store: dist.Store,
        member: int,
        count: int,
        wait_s: float,
        explain: Callable[[Sequence[Any]], str],
        *,
        kind: str = "rank",
        at: str = "rank 0",
    ) -> None:
        """``explain``: makes the error's message of the values, None of members that did not come in ``wait_s``."""
        self.member, self._count, self._wait_s = member, count, wait_s
        self._store, self._explain, self._kind, self._at = store, explain, kind, at

    def gather(self, name: str, value: object) -> list[Any]:
        """Return every member's value, in order; raises LaunchError on every member that connected."""
        self._store.set(f"{name}/{self.member}", json.dumps(value))
        if self.member == 0:
            self._store.set(f"{name}/all", json.dumps(self._collect(name)))
        waiting = Waiting(self._wait_s + _ANSWER_S)
        while not self._store.check([f"{name}/all"]):
            if not waiting.more(f"{self._kind} 0's list of all {self._kind}s"):
                raise LaunchError(
                    f"{self._kind} 0 connected and then did not answer for {self._wait_s:.0f} s; see its log"
                )
        values: list[Any] = json.loads(self._store.get(f"{name}/all"))
        if None in values:
            self._let_read(name, [member for member, value in enumerate(values) if value is not None])
            raise LaunchError(self._explain(values))
        return values

    def part(self) -> None:
        """Wait, within a time limit, until all members have read: the store may be member 0's own."""
        self._let_read("part", range(self._count))

    def _let_read(self, name: str, members: Collection[int]) -> None:
        self._store.set(f"{name}/read/{self.member}", "")
        deadline, keys = time.monotonic() + _READ_S, [f"{name}/read/{member}" for member in members]
        while self.member == 0 and time.monotonic() < deadline and not all(self._store.check([key]) for key in keys):
            time.sleep(_POLL_S)

    def _collect(self, name: str) -> list[Any]:
        values: dict[int, Any] = {}
        waiting, missing = Waiting(self._wait_s), [*range(self._count)]
        while True:
            for member in [member for member in missing if self._store.check([f"{name}/{member}"])]:
                values[member] = json.loads(self._store.get(f"{name}/{member}"))
            missing = [member for member in missing if member not in values]
            if not missing or not waiting.more(
                f"{self._kind}s {', '.join(map(str, missing))} to connect to {self._at}"
            ):
                return [values.get(member) for member in range(self._count)]


def unreached(host: str, port: int, wait_s: float, whom: str) -> str:
    """Wait until a port accepts connections; return why it did not within ``wait_s`` seconds, or an empty text."""
    waiting = Waiting(wait_s)
    while True:
        try:
            socket.create_connection((host, port), timeout=min(_CONNECT_S, wait_s)).close()
        except OSError as error:
            if not waiting.more(f"{whom} at {host}:{port} ({error})"):
                return str(error)
        else:
            return ""


@contextmanager
def check_in_nodes(head: str, node_rank: int, nodes: int, run_id: str, wait_s: float) -> Iterator[str]:
    """Wait for all nodes at node 0's store and yield the start's id; raises LaunchError naming the missing nodes."""
    reach_head(head, node_rank, wait_s)
    host, _, port = head.rpartition(":")
    try:
        how: dict[str, Any] = {"timeout": timedelta(seconds=wait_s), "wait_for_workers": False, "multi_tenant": True}
        store = dist.TCPStore(host, int(port), is_master=node_rank == 0, **how)
    except dist.DistError as error:
        why = str(error).splitlines()[0]
        if node_rank:
            raise _unanswered(head, wait_s, why) from error
        raise LaunchError(
            f"cannot listen at {head} ({why}); give --head a name of this host, which is node 0, and a free port"
        ) from error

    def explain(facts: Sequence[Any]) -> str:
        missing = ", ".join(str(node) for node, fact in enumerate(facts) if fact is None)
        connected = ", ".join(f"{node} ({fact['host']})" for node, fact in enumerate(facts) if fact is not None)
        return f"these nodes did not connect to {head} within {wait_s:.0f} s: {missing}; connected: {connected}"

    space = dist.PrefixStore(f"check-in/{run_id}", store)
    if space.add(f"count/{node_rank}", 1) > 1:
        other = json.loads(space.get(f"node/{node_rank}"))["host"]
        raise LaunchError(
            f"node rank {node_rank} is already used by {other}; give each node its own --node-rank, and each start "
            "its own --run-id"
        )
    roll = RollCall(space, node_rank, nodes, wait_s, explain, kind="node", at=head)
    facts = roll.gather("node", {"host": socket.gethostname(), "id": run_id or start_id()})
    yield facts[0]["id"]


def reach_head(head: str, node_rank: int | None, wait_s: float) -> None:
    """Wait until node 0 answers, except on node 0 and on a node without a number; raises LaunchError."""
    host, _, port = head.rpartition(":")
    if node_rank and (why := unreached(host, int(port), wait_s, "node 0")):
        raise _unanswered(head, wait_s, why)


def _unanswered(head: str, wait_s: float, why: str) -> LaunchError:
    return LaunchError(
        f"node 0 does not answer at {head} within {wait_s:.0f} s; check that node 0 runs, its host name and its port "
        f"({why})"
    )


@contextmanager
def announce_joining(head: str, nodes: str, wait_s: float) -> Iterator[None]:
    """Print every ten seconds which nodes are awaited: torch's elastic rendezvous waits silently."""
    ended = threading.Event()

    def tell() -> None:
        waiting = Waiting(wait_s)
        while not ended.is_set() and not children() and waiting.more(f"{nodes} nodes to join at {head}"):
            pass

    thread = threading.Thread(target=tell, name="meshpar-joining", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def children(mark: Path | None = None, *, of: int | None = None) -> list[int]:
    """Return the child processes of a process (this one), with ``mark`` those that have it as an argument."""
    pids: list[int] = []
    for path in Path(f"/proc/{of or os.getpid()}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended by now
            pids += map(int, path.read_text(encoding="ascii").split())
    if mark is None:
        return pids
    marked = []
    for pid in pids:
        with suppress(OSError):  # it may be gone by now
            marked += [pid] if os.fsencode(mark) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") else []
    return marked
