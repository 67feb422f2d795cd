"""Examine the machines without a collective: facts, clocks, connections, and the checkpoint folder."""

from __future__ import annotations

import json
import shutil
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist

from meshpar.core import runtime
from meshpar.core.errors import LaunchError
from meshpar.core.waiting import Waiting
from meshpar.launchers.agent.check_in import unreached
from meshpar.launchers.doctor.checks import GIB, Facts, Finding, all_findings, collect, hosts_of, ranks_text
from meshpar.launchers.doctor.devices import health

_READ_S = 2.0
_TOLD_S = 10.0  # in which rank 0's word reaches the others
CONNECT_S = 3.0
_NEIGHBOURS = 8  # hosts that each host connects to, at most


@final
class Meeting:
    """Exchange plain data between all ranks. Every rank makes every call, in the same order."""

    def __init__(self, wait_s: float, name: str = "doctor") -> None:
        """Connect within ``wait_s`` seconds; keys of different names are separate. Raises LaunchError."""
        self.rank, self.world = runtime.rank(), runtime.world_size()
        self._wait_s = wait_s
        place = runtime.settings("MASTER_")
        if self.rank and {"MASTER_ADDR", "MASTER_PORT"} <= place.keys():  # in Python, so that Ctrl-C ends the wait
            unreached(place["MASTER_ADDR"], int(place["MASTER_PORT"]), wait_s, "rank 0")
        try:
            self._store = runtime.meeting_store(name, timeout_s=wait_s)
        except dist.DistError as error:
            raise LaunchError(
                f"rank 0 does not answer at {place.get('MASTER_ADDR')}:{place.get('MASTER_PORT')} within {wait_s:.0f} "
                "s; check that its node runs, that its name resolves to the same address here, and that the port is "
                f"open ({_first_line(error)})"
            ) from error

    def gather(self, name: str, value: object) -> list[Any]:
        """Return every rank's value in rank order; raises LaunchError that names ranks which did not connect."""
        self._store.set(f"{name}/{self.rank}", json.dumps(value))
        if self.rank == 0:
            found = self._collect(name)
            missing = [rank for rank in range(self.world) if rank not in found]
            self._store.set(
                f"{name}/all",
                json.dumps({"found": [found.get(rank) for rank in range(self.world)], "missing": missing}),
            )
        gathered = self._told(name)
        if gathered["missing"]:
            self._let_read(name, set(range(self.world)) - set(gathered["missing"]))
            raise LaunchError(missing_text(gathered["missing"], gathered["found"], self._wait_s))
        return list(gathered["found"])

    def part(self) -> None:
        """Wait, within a time limit, until all ranks have read: the store may be rank 0's own."""
        self._let_read("part", set(range(self.world)))

    def _let_read(self, name: str, came: set[int]) -> None:
        """Keep the store, which may be rank 0's, open until the other ranks have read from it."""
        self._store.set(f"{name}/read/{self.rank}", "")
        deadline = time.monotonic() + _READ_S
        while (
            self.rank == 0
            and time.monotonic() < deadline
            and not all(self._store.check([f"{name}/read/{rank}"]) for rank in came)
        ):
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
        gathered: dict[str, Any] = json.loads(self._store.get(f"{name}/all"))
        return gathered


def missing_text(missing: Sequence[int], found: Sequence[Mapping[str, Any] | None], wait_s: float) -> str:
    """Return a message with the ranks that did not connect, their nodes, and what to check."""
    came = [fact for fact in found if isinstance(fact, Mapping)]
    per_node = next((fact["ranks_per_node"] for fact in came if fact.get("ranks_per_node")), None)
    hosts = {fact["rank"] // per_node: fact["host"] for fact in came} if per_node and came and "host" in came[0] else {}
    places = []
    for rank in missing:
        node = rank // per_node if per_node else None
        where = (
            ""
            if node is None
            else f" (on {hosts[node]})"
            if node in hosts
            else f" (on node {node}, of which no rank connected)"
        )
        places.append(f"{rank}{where}")
    return (
        f"ranks did not connect within {wait_s:.0f} s: {', '.join(places)}; check that their nodes run, read their "
        "logs, and check that they reach rank 0's port"
    )


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """The folder of checkpoints, and the bytes that they require (0: unknown)."""

    path: Path
    bytes: int = 0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of an examination.

    Attributes:
        facts: the facts of each rank.
        findings: the faults.
        notes: remarks that are not faults.
    """

    facts: tuple[Facts, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()


def examine(meeting: Meeting, device: torch.device, folder: Folder | None) -> Report:
    """Examine all machines by exchanges with bounded waits, without a collective. Every rank calls it."""
    mine = collect(device)
    mine["device"]["health"] = health(mine["device"]["id"])
    facts = meeting.gather("facts", mine)
    now = time.time()  # all ranks have just read the same answer; a slow file system below would look like a clock
    firsts = {fact["host"]: fact["rank"] for fact in reversed(facts)}
    speaks = meeting.rank in firsts.values()
    token = None if folder is None or meeting.rank else _leave_token(folder.path)
    with ExitStack() as stack:
        place = _listen(stack) if speaks else None
        met = meeting.gather("met", {"time": now, "listens": place, "token": token})
        for fact, other in zip(facts, met):
            fact["clock"] = other["time"]
        own = {
            "unreached": _unreached(meeting.rank, firsts, met) if speaks else [],
            "folder": _looked(folder.path, met[0]["token"]) if folder is not None and speaks else None,
        }
        seen = meeting.gather("seen", own)
    meeting.part()
    if token is not None:
        (folder.path / token["name"]).unlink(missing_ok=True)  # type: ignore[union-attr]
    findings = all_findings(facts)
    findings += _connection_findings(facts, seen)
    if folder is not None:
        findings += _folder_findings(facts, folder, met[0]["token"], [look["folder"] for look in seen])
    return Report(facts=tuple(facts), findings=tuple(findings))


def _listen(stack: ExitStack) -> list[Any]:
    """Open a port for other hosts to connect to, at the address from which this host reaches rank 0's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        head = runtime.settings("MASTER_")
        with suppress(OSError):  # it stays 127.0.0.1, which the others then cannot reach and say so
            asking.connect((head["MASTER_ADDR"], int(head["MASTER_PORT"])))
        address = asking.getsockname()[0]
    address = address if address != "0.0.0.0" else "127.0.0.1"
    return [address, stack.enter_context(socket.create_server((address, 0), backlog=64)).getsockname()[1]]


def _unreached(rank: int, firsts: dict[str, int], met: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """Return the hosts that this one cannot connect to, with the reason."""
    others = list(firsts.items())
    mine = next(place for place, (_, first) in enumerate(others) if first == rank)
    ring = (others[mine + 1 :] + others[:mine])[:_NEIGHBOURS]
    failed = []
    for host, first in ring:
        address, port = met[first]["listens"]
        try:
            socket.create_connection((address, port), timeout=CONNECT_S).close()
        except OSError as error:
            failed.append([host, f"{address}:{port}", str(error)])
    return failed


def _connection_findings(facts: Sequence[Facts], seen: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    failed = [(fact["host"], *other) for fact, look in zip(facts, seen) for other in look["unreached"]]
    if failed:
        yield Finding(
            what="hosts that cannot connect to each other",
            where="; ".join(f"{here} to {there} at {address}: {why}" for here, there, address, why in failed[:8]),
            do="open all ports between the nodes (the operating system chooses the ports of collectives), and check "
            "routes and host names",
            severs=True,
        )


def _leave_token(path: Path) -> dict[str, str]:
    """Write a file that the other hosts look for; return its name, and an error if there is one."""
    name = f".doctor-{uuid.uuid4().hex[:12]}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(name, encoding="utf-8")
    except OSError as error:
        return {"name": name, "error": str(error)}
    return {"name": name}


def _looked(path: Path, token: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {"shared": (path / token["name"]).exists(), "error": None, "free": None}
    own = path / f"{token['name']}-{socket.gethostname()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        own.write_text("", encoding="utf-8")
        own.unlink()
        found["free"] = shutil.disk_usage(path).free
    except OSError as error:
        found["error"] = str(error)
    return found


def _folder_findings(
    facts: Sequence[Facts], folder: Folder, token: dict[str, str], seen: Sequence[dict[str, Any] | None]
) -> Iterator[Finding]:
    looked = [(fact["host"], look) for fact, look in zip(facts, seen) if look is not None]
    failed = [(host, look["error"]) for host, look in looked if look["error"]]
    if failed:
        yield Finding(
            what=f"the checkpoint folder {folder.path} cannot be written",
            where="; ".join(f"{host}: {error}" for host, error in failed),
            do="mount it there, correct its owner and mode, or choose another output",
        )
    apart = [host for host, look in looked if not look["shared"] and not look["error"]]
    if apart and "error" not in token:
        yield Finding(
            what=f"the checkpoint folder {folder.path} is not shared: a file written by {facts[0]['host']} is missing",
            where=", ".join(apart),
            do="put the output on a file system that all nodes mount; otherwise checkpoints cannot be restored",
        )
    low = [(host, look["free"]) for host, look in looked if look["free"] is not None and look["free"] < folder.bytes]
    if low:
        yield Finding(
            what=f"too little free space for the checkpoints, which take about {folder.bytes / GIB:.1f} GiB",
            where="; ".join(f"{host}: {free / GIB:.1f} GiB free in {folder.path}" for host, free in low),
            do="keep fewer checkpoints (checkpoint.keep), free some space, or choose another output",
        )


def summary(facts: Sequence[Facts]) -> str:
    """Return one line that lists ranks and hosts."""
    hosts = hosts_of(facts)
    return (
        f"{len(facts)} rank{'s' if len(facts) > 1 else ''} on {len(hosts)} host{'s' if len(hosts) > 1 else ''}: "
        f"{ranks_text(facts)}"
    )
