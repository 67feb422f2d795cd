"""Exchange data between ranks through the launcher's store, within a time limit, and name missing ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch.distributed as dist

from meshpar import runtime
from meshpar.errors import LaunchError
from meshpar.launchers.agent.waiting import Waiting, unreached

_READ_S = 2.0
_TOLD_S = 10.0  # in which rank 0's word reaches the others


@final
class Meeting:
    """Exchange plain data between all ranks. Every rank makes every call, in the same order."""

    def __init__(self, wait_s: float, name: str = "doctor") -> None:
        """Connect.

        Args:
            wait_s: seconds within which every rank must connect.
            name: purpose of the exchange; keys of different names are separate.

        Raises:
            LaunchError: rank 0 does not answer.
        """
        self.rank, self.world = runtime.rank(), runtime.world_size()
        self._wait_s = wait_s
        place = runtime.settings("MASTER_")
        if self.rank and {"MASTER_ADDR", "MASTER_PORT"} <= place.keys():  # in Python, so that Ctrl-C ends the wait
            unreached(place["MASTER_ADDR"], int(place["MASTER_PORT"]), wait_s, "rank 0")
        try:
            self._store = runtime.meeting_store(name, timeout_s=wait_s)
        except dist.DistError as error:
            raise LaunchError(
                f"rank 0 does not answer at {place.get('MASTER_ADDR')}:{place.get('MASTER_PORT')} within {wait_s:.0f} s; check that its "
                f"node runs, that its name resolves to the same address here, and that the port is open ({_first_line(error)})"
            ) from error

    def gather(self, name: str, value: object) -> list[Any]:
        """Return every rank's value, in the order of ranks.

        Raises:
            LaunchError: on every rank that connected; the message names the ranks that did not.
        """
        self._store.set(f"{name}/{self.rank}", json.dumps(value))
        if self.rank == 0:
            found = self._collect(name)
            missing = [rank for rank in range(self.world) if rank not in found]
            self._store.set(f"{name}/all", json.dumps({"found": [found.get(rank) for rank in range(self.world)], "missing": missing}))
        told = self._told(name)
        if told["missing"]:
            self._let_read(name, set(range(self.world)) - set(told["missing"]))
            raise LaunchError(missing_text(told["missing"], told["found"], self._wait_s))
        return list(told["found"])

    def part(self) -> None:
        """Wait, within a time limit, until all ranks have read: the store may be rank 0's own."""
        self._let_read("part", set(range(self.world)))

    def _let_read(self, name: str, came: set[int]) -> None:
        """Keep the store, which may be rank 0's, open until the other ranks have read from it."""
        self._store.set(f"{name}/read/{self.rank}", "")
        deadline = time.monotonic() + _READ_S
        while self.rank == 0 and time.monotonic() < deadline and not all(self._store.check([f"{name}/read/{rank}"]) for rank in came):
            time.sleep(0.02)

    def _collect(self, name: str) -> dict[int, Any]:
        found: dict[int, Any] = {}
        waiting = Waiting(self._wait_s)
        while True:
            for rank in set(range(self.world)) - set(found):
                if self._store.check([f"{name}/{rank}"]):
                    found[rank] = json.loads(self._store.get(f"{name}/{rank}"))
            missing = [str(rank) for rank in range(self.world) if rank not in found]
            if not missing or not waiting.more(f"ranks {', '.join(missing)}"):
                return found

    def _told(self, name: str) -> dict[str, Any]:
        waiting = Waiting(self._wait_s + _TOLD_S)
        while not self._store.check([f"{name}/all"]):
            if not waiting.more("rank 0's list of all ranks"):
                raise LaunchError(f"rank 0 connected and then did not answer for {self._wait_s:.0f} s; see its log")
        told: dict[str, Any] = json.loads(self._store.get(f"{name}/all"))
        return told


def missing_text(missing: Sequence[int], found: Sequence[Mapping[str, Any] | None], wait_s: float) -> str:
    """Return a message with the ranks that did not connect, their nodes, and what to check."""
    came = [each for each in found if isinstance(each, Mapping)]
    per_node = next((each["ranks_per_node"] for each in came if each.get("ranks_per_node")), None)
    hosts = {each["rank"] // per_node: each["host"] for each in came} if per_node and came and "host" in came[0] else {}
    places = []
    for rank in missing:
        node = rank // per_node if per_node else None
        where = "" if node is None else f" (on {hosts[node]})" if node in hosts else f" (on node {node}, of which no rank connected)"
        places.append(f"{rank}{where}")
    return (
        f"ranks did not connect within {wait_s:.0f} s: {', '.join(places)}; check that their nodes run, read their logs, and check that "
        "they reach rank 0's port"
    )


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
