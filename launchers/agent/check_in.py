"""Connect all nodes within a time limit before their agents start, and name the missing nodes."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from meshpar.core.errors import LaunchError
from meshpar.core.waiting import Waiting
from meshpar.launchers.agent.rank_logs import start_id

_CONNECT_S = 5.0
_TOLD_S = 10.0  # in which node 0's word reaches the others


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
def checked_in(head: str, node_rank: int, nodes: int, run_id: str, wait_s: float) -> Iterator[str]:
    """Wait for all nodes at node 0's store and yield the start's id; raises LaunchError naming the missing nodes."""
    reach_head(head, node_rank, wait_s)
    host, _, port = head.rpartition(":")
    try:
        store = dist.TCPStore(
            host,
            int(port),
            is_master=node_rank == 0,
            timeout=timedelta(seconds=wait_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistError as error:
        why = str(error).splitlines()[0]
        if node_rank:
            raise _unanswered(head, wait_s, why) from error
        raise LaunchError(
            f"cannot listen at {head} ({why}); give --head a name of this host, which is node 0, and a free port"
        ) from error
    space = dist.PrefixStore(f"check-in/{run_id}", store)
    if space.add(f"count/{node_rank}", 1) > 1:
        other = space.get(f"host/{node_rank}").decode()
        raise LaunchError(
            f"node rank {node_rank} is already used by {other}; give each node its own --node-rank, and each start "
            "its own --run-id"
        )
    space.set(f"host/{node_rank}", socket.gethostname())
    if node_rank == 0:
        space.set("id", run_id or start_id())
        space.set("missing", ",".join(map(str, _missing(space, nodes, wait_s, head))))
    missing = _told(space, nodes, wait_s, head)
    if missing:
        came = ", ".join(
            f"{node} ({space.get(f'host/{node}').decode()})" for node in range(nodes) if str(node) not in missing
        )
        _let_read(space, node_rank, [node for node in range(nodes) if str(node) not in missing])
        raise LaunchError(
            f"these nodes did not connect to {head} within {wait_s:.0f} s: {', '.join(missing)}; connected: {came}"
        )
    yield space.get("id").decode()


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
def told_while_joining(head: str, nodes: str, wait_s: float) -> Iterator[None]:
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
    found: list[int] = []
    for path in Path(f"/proc/{of or os.getpid()}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended by now
            found += map(int, path.read_text(encoding="ascii").split())
    return [pid for pid in found if mark is None or os.fsencode(mark) in _words(pid)]


def _words(process: int) -> list[bytes]:
    with suppress(OSError):  # it may be gone by now
        return Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    return []


def _absent(store: dist.Store, nodes: int) -> list[int]:
    return [node for node in range(nodes) if not store.check([f"host/{node}"])]


def _missing(store: dist.Store, nodes: int, wait_s: float, head: str) -> list[int]:
    waiting = Waiting(wait_s)
    while (missing := _absent(store, nodes)) and waiting.more(
        f"nodes {', '.join(map(str, missing))} to connect to {head}"
    ):
        pass
    return missing


def _let_read(store: dist.Store, node_rank: int, came: list[int]) -> None:
    """Keep node 0's store open until the other nodes have read the result."""
    store.set(f"read/{node_rank}", "")
    deadline = time.monotonic() + _TOLD_S
    while node_rank == 0 and time.monotonic() < deadline and not all(store.check([f"read/{node}"]) for node in came):
        time.sleep(0.05)


def _told(store: dist.Store, nodes: int, wait_s: float, head: str) -> list[str]:
    waiting = Waiting(wait_s + _TOLD_S)
    while not store.check(["missing"]):
        if not waiting.more(f"nodes {', '.join(map(str, _absent(store, nodes))) or '0'} to connect to {head}"):
            raise LaunchError(f"node 0 connected and then did not answer for {wait_s:.0f} s; see its log")
    return list(filter(None, store.get("missing").decode().split(",")))
