"""Agents as processes: replicas of a job, which start again after a failure, and nodes simulated on this machine."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from meshpar.checkpoints import CheckpointManager
from meshpar.core.errors import LaunchError, ReplicaError
from meshpar.core.mesh import MeshSpec
from meshpar.launchers.agent import terms
from meshpar.launchers.agent.check_in import children
from meshpar.launchers.agent.meeting import NodeMeeting, Start, free_port, publish
from meshpar.launchers.agent.terms import COMPLETE, NO_USE, RETRY, SHUTDOWN_S, STOPPED
from meshpar.launchers.recipes.recipe import Recipe
from meshpar.process.waiting import STOPPING, heard, put_back
from meshpar.training import Lighthouse
from meshpar.training.lighthouse import lighthouse_address

_POLL_S, _ANSWER_S, _TELL_S, _WAIT_S = 0.2, 5.0, 10.0, 900.0
_FOLLOW_S = 10.0  # in which ranks end by themselves after those of another node failed
_RESTARTS = 1000
_RUN = (sys.executable, "-m", "meshpar.launchers", "run")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """The replicas of a job and those ``here``: ranks, mesh and nodes of each; ``node``: this node's number there."""

    count: int
    here: Sequence[int]
    ranks: int
    mesh: MeshSpec
    nodes: int = 1
    node: int = 0

    @property
    def ranks_here(self) -> int:
        return self.ranks // self.nodes

    def recipe(self, whole: Recipe) -> Recipe:
        """Return the recipe of each replica, from that of the whole job."""
        return whole.model_copy(update={"mesh": str(self.mesh)})


def check_elastic(elastic: str) -> None:
    if elastic != "replicas":
        raise LaunchError(
            f"--elastic is {elastic!r}; expected replicas (--nodes MIN:MAX is the job that restarts on fewer nodes)"
        )


def divide_replicas(mesh: MeshSpec, nodes: int, node_rank: int) -> Division:
    """Return the replicas of a mesh on ``nodes`` nodes; raises LaunchError if nodes cannot share them evenly."""
    count = mesh.axes.get("dp_replicate", 1)
    if count < 2:
        raise LaunchError(f"--elastic=replicas: the mesh {mesh} has one replica; write dp_replicate=2 or more")
    if count % nodes and nodes % count:
        raise LaunchError(
            f"--elastic=replicas: {count} replicas on {nodes} nodes; expected whole replicas on each node, or whole "
            f"nodes for each replica: use a multiple or a divisor of {nodes} for dp_replicate, or other --nodes"
        )
    inner = MeshSpec({**mesh.axes, "dp_replicate": 1})
    span, per_node = max(1, nodes // count), max(1, count // nodes)
    first = node_rank // span * per_node
    here, ranks = range(first, first + per_node), mesh.size // count
    return Division(count=count, here=here, ranks=ranks, mesh=inner, nodes=span, node=node_rank % span)


def launch_replicas(
    recipe: Recipe, division: Division, head: str, node_rank: int, restarts: int | None, logs: Path | None
) -> int:
    """Run this node's replicas, and return the exit code; ``head``: the lighthouse's address, or its file."""
    logs = (logs or recipe.folder / "logs").absolute()
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        lighthouse = lighthouse_address() or head
        if not node_rank:
            if not lighthouse_address():
                lighthouse = _serve_lighthouse(stack, head, recipe.patience)
            manager = stack.enter_context(CheckpointManager(recipe.folder / "checkpoints"))
            manager.own()
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshpar-")))
        path = folder / f"{recipe.name}.yaml"
        path.write_text(division.recipe(recipe).to_yaml(), encoding="utf-8")
        restarts = _RESTARTS if restarts is None else restarts
        addresses = recipe.folder / "logs"  # which all nodes see, unlike a folder of ``logs``
        replicas = [
            _Replica(number, division, path, lighthouse, logs, restarts, addresses / f"replica-{number}.address")
            for number in division.here
        ]

        def stop(number: int) -> None:
            for replica in replicas:
                replica.stop(number)

        with handling(heard(), stop), ThreadPoolExecutor(len(replicas)) as pool:
            codes = list(pool.map(_Replica.run, replicas))
    if 0 in codes:
        (logs / COMPLETE).touch()
        return 0
    stopped = [code for code in codes if code > 128]
    if stopped:
        return max(stopped)
    if set(codes) == {NO_USE}:
        return NO_USE
    ends = ", ".join(f"replica {number} ended with exit code {code}" for number, code in zip(division.here, codes))
    if RETRY in codes:
        raise ReplicaError(f"{ends}; start the job again, which resumes from its newest checkpoint")
    raise LaunchError(f"{ends}; correct what failed, which their messages above say, and start the job again")


def _serve_lighthouse(stack: ExitStack, head: str, patience_s: float) -> str:
    """Serve the lighthouse, and return where; with a file, also its address is there for the other nodes."""
    shared = Path(head) if "/" in head else None
    port = int(head.rpartition(":")[2] or 0) if shared is None else 0
    served = Lighthouse(port, host="[::]" if head else "127.0.0.1", patience_s=patience_s)
    stack.callback(served.close)
    if shared is not None:
        publish(shared, f"{socket.gethostname()}:{served.port}")
    return head or f"127.0.0.1:{served.port}"


@final
class _Replica:
    """A replica of this node, which is started again where it could not go on with the others."""

    def __init__(
        self, number: int, division: Division, recipe: Path, lighthouse: str, logs: Path, restarts: int, address: Path
    ) -> None:
        """``lighthouse``: its URL, address or file; ``address``: the ``file`` of :class:`NodeMeeting`."""
        self._number, self._division, self._place, self._complete = number, division, lighthouse, logs / COMPLETE
        self._was_complete = self._complete.exists()  # a run that now goes on
        self._meeting = NodeMeeting(address, number, division.node, division.nodes)
        self._restarts, self._recipe, self._logs = restarts, recipe, logs / f"replica-{number}"
        threads = terms.threads(division.ranks_here * len(division.here))
        changes = {
            "MESHPAR_REPLICA": str(number),
            "MESHPAR_REPLICAS": str(division.count),
            "MESHPAR_FIRST_DEVICE": str(division.here.index(number) * division.ranks_here),
            "OMP_NUM_THREADS": terms.setting("OMP_NUM_THREADS") or str(threads),
        }
        if terms.series():  # starts without a step are counted for each replica
            changes["MESHPAR_JOB_ID"] = f"{terms.series()}-{number}"
        self._environment = terms.inherited(changes)
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = self._signals = 0

    def run(self) -> int:
        """Run the replica until it ends; return its exit code, 0 also if others completed the job without it."""
        # one node's agent has restarted the ranks after other failures
        again = (RETRY,) if self._division.nodes == 1 else (RETRY, 1)
        code = RETRY
        with self._meeting as meeting:
            for _ in range(1 + self._restarts):
                start = meeting.gather(lambda: bool(self._stopped) or self._is_complete(), _WAIT_S)
                address = self._lighthouse() if start is not None else ""
                if start is not None and address:
                    code = self._run(start, address)
                    if code not in again or self._stopped:
                        break
                elif start is None or meeting.lost is None:
                    received = next(iter(meeting.codes.values()), None)
                    unstarted = 128 + self._stopped if self._stopped else RETRY
                    code = received if received is not None else 0 if self._is_complete() else unstarted
                    meeting.tell(code)
                    if received not in again or self._stopped:
                        break
        return 0 if self._is_complete() else code

    def _run(self, start: Start, address: str) -> int:
        """Run the ranks of this node, and return how the replica's ranks ended."""
        meeting, deadline = self._meeting, math.inf
        series = {"MESHPAR_JOB_ID": start.series} if self._division.nodes > 1 else {}
        variables = {**series, **self._environment, "TORCHFT_LIGHTHOUSE": address}
        division = self._division
        command = [*_RUN, f"--nproc={division.ranks_here}", f"--logs={self._logs}"]
        if division.nodes == 1:
            command.append(f"--restarts={self._restarts}")
        else:
            command += [f"--nodes={division.nodes}", f"--node-rank={division.node}"]
            command += [f"--head={start.head}", f"--run-id={start.run_id}"]
        command.append(str(self._recipe))
        self._process = process = subprocess.Popen(command, env=variables, start_new_session=True)
        while meeting.lost is None and not self._has_ended(process):
            meeting.keep()
            failed = [code for code in meeting.codes.values() if code]
            if failed:
                deadline = min(deadline, time.monotonic() + (SHUTDOWN_S if set(failed) <= STOPPED else _FOLLOW_S))
            if time.monotonic() > deadline:
                _kill(process)
        if meeting.lost is None:
            code = process.returncode
            as_told = code in (0, NO_USE, *STOPPED) or not self._stopped or self._division.nodes == 1
            meeting.tell(code if as_told else 128 + self._stopped)
        while meeting.lost is None and (verdict := meeting.verdict()) is None and self._signals < 2:
            meeting.keep()
            time.sleep(_POLL_S)
        if meeting.lost is None:
            return verdict if verdict is not None else 128 + self._stopped
        lost = meeting.names(meeting.lost)
        self._note(f"lost {lost}; the replica's ranks end, and start again when this node is back")
        _kill(process)
        return 128 + self._stopped if self._stopped else RETRY

    def _has_ended(self, process: subprocess.Popen[bytes]) -> bool:
        with suppress(subprocess.TimeoutExpired):
            process.wait(None if self._division.nodes == 1 else _POLL_S)
        return process.returncode is not None

    def stop(self, number: int) -> None:
        self._stopped, self._signals = number, self._signals + 1
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _is_complete(self) -> bool:
        return self._complete.exists() and not self._was_complete

    def _lighthouse(self) -> str:
        """Return the lighthouse's address; empty if the job has ended, or nothing answers for long."""
        began = reported = time.monotonic()
        while not (self._stopped or self._is_complete() or self._meeting.codes or self._meeting.lost is not None):
            self._meeting.keep()
            address = self._place.removeprefix("http://").rstrip("/")
            if "/" in address:
                address = Path(address).read_text(encoding="utf-8").strip() if Path(address).exists() else ""
            host, _, port = address.rpartition(":")
            with suppress(OSError):
                socket.create_connection((host.strip("[]"), int(port or 0)), timeout=_ANSWER_S).close()
                return f"http://{address}"
            now = time.monotonic()
            if now - began > _WAIT_S:
                self._note(f"no lighthouse at {self._place} within {_WAIT_S:.0f} s; does node 0 run?")
                break
            if now - reported >= _TELL_S:
                self._note(f"waits for the lighthouse of node 0 at {self._place}")
                reported = now
            time.sleep(_POLL_S)
        return ""

    def _note(self, text: str) -> None:
        print(f"replica {self._number}: {text}", file=sys.stderr, flush=True)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGSTOP)  # it starts no more ranks
        for pid in (*children(of=process.pid), process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


@contextmanager
def handling(signals: Sequence[signal.Signals], handle: Callable[[int], None]) -> Iterator[None]:
    """Call ``handle`` with the number of each of these signals, until the ``with`` block ends."""
    before = {number: signal.signal(number, lambda got, _: handle(got)) for number in signals}
    try:
        yield
    finally:
        put_back(before)


def launch_nodes_here(recipe: Recipe, nodes: int, nproc: int) -> int:
    """Run a recipe on ``nodes`` agents of this machine with ``nproc`` ranks each; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="meshpar-") as folder:
        path = Path(folder) / f"{recipe.name}.yaml"
        path.write_text(recipe.to_yaml(), encoding="utf-8")
        head = f"127.0.0.1:{free_port()}"
        agent = [*_RUN, f"--nodes={nodes}", f"--nproc={nproc}", f"--head={head}", f"--run-id={Path(folder).name}"]
        commands = [[*agent, f"--node-rank={node}", str(path)] for node in range(nodes)]
        running = [subprocess.Popen(command, start_new_session=True) for command in commands]
        with handling(heard(), lambda number: _send(running, number)):
            codes = await_all(running)
    failed = [node for node, code in enumerate(codes) if code not in (0, *(128 + number for number in STOPPING))]
    if failed:
        raise LaunchError(f"node {failed[0]} of {nodes} ended with exit code {codes[failed[0]]}; see its message above")
    return max(codes)


def await_all(running: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    asked = False
    while any(process.poll() is None for process in running):
        if not asked and any(process.poll() not in (None, 0) for process in running):
            _send(running, signal.SIGTERM)
            asked = True
        time.sleep(_POLL_S)
    return [process.returncode for process in running]


def _send(running: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in running:
        if process.poll() is None:
            process.send_signal(number)
