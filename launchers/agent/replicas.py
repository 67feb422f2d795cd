"""Start the replicas of this node, each a job of its own that is started again when it fails: ``--elastic=replicas``."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from meshpar import runtime
from meshpar.checkpoints import CheckpointManager
from meshpar.errors import LaunchError, ReplicaError
from meshpar.launchers.agent.failures import NO_USE, RETRY
from meshpar.launchers.agent.local import COMPLETE
from meshpar.launchers.recipes.recipe import Recipe
from meshpar.mesh import MeshSpec
from meshpar.training import Lighthouse

_POLL_S, _ANSWER_S, _TELL_S, _WAIT_S = 0.2, 5.0, 10.0, 900.0
_RESTARTS = 1000
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """The replicas of a job.

    Attributes:
        count: number of replicas of the job.
        here: numbers of those on this node.
        ranks: number of ranks of each.
        mesh: of each.
    """

    count: int
    here: Sequence[int]
    ranks: int
    mesh: MeshSpec

    def recipe(self, whole: Recipe) -> Recipe:
        """Return the recipe of each replica, from that of the whole job."""
        return whole.model_copy(update={"mesh": str(self.mesh)})


def check_elastic(elastic: str) -> None:
    """Raise LaunchError if ``--elastic`` is not ``replicas``."""
    if elastic != "replicas":
        raise LaunchError(f"--elastic is {elastic!r}; expected replicas (--nodes MIN:MAX is the job that restarts on fewer nodes)")


def divided(mesh: MeshSpec, nodes: int, node_rank: int) -> Division:
    """Return the replicas of a resolved mesh on ``nodes`` nodes.

    Raises:
        LaunchError: there is one replica, or a replica spans nodes.
    """
    count = mesh.axes.get("dp_replicate", 1)
    if count < 2:
        raise LaunchError(f"--elastic=replicas: the mesh {mesh} has one replica; write dp_replicate=2 or more")
    if count % nodes:
        raise LaunchError(
            f"--elastic=replicas: {count} replicas on {nodes} nodes: a replica that spans nodes is not supported; use a multiple of "
            f"{nodes} for dp_replicate, or --nodes MIN:MAX, which resumes from the newest checkpoint"
        )
    each = count // nodes
    inner = MeshSpec({**mesh.axes, "dp_replicate": 1})
    return Division(count=count, here=range(node_rank * each, (node_rank + 1) * each), ranks=mesh.size // count, mesh=inner)


def launch_replicas(
    recipe: Recipe, division: Division, head: str, node_rank: int, restarts: int | None, logs: Path | None, *, quiet: bool = False
) -> int:
    """Run this node's replicas until they end, and return the exit code: 0 if the job is complete.

    The lighthouse runs in this process on node 0, unless ``TORCHFT_LIGHTHOUSE`` names another. This process also holds the run's folder
    for the job, of which any replica may write.

    Args:
        recipe: of the whole job.
        division: its replicas.
        head: ``host:port`` of the lighthouse, or a file that all nodes share, into which node 0 writes it; empty on one node.
        node_rank: number of this node.
        restarts: how often a replica is started again; None: as often as needed.
        logs: folder of logs; None: ``logs`` in the run's folder.
        quiet: write what the replicas print to ``replica-N.txt`` in the folder of logs.

    Raises:
        ReplicaError: no replica of this node could complete the job; another start resumes from the newest checkpoint.
    """
    logs = (logs or recipe.folder / "logs").absolute()
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        place = runtime.lighthouse() or head
        if not node_rank:
            if not runtime.lighthouse():
                place = _served(stack, head, recipe.patience)
            manager = stack.enter_context(CheckpointManager(recipe.folder / "checkpoints"))
            manager.own()
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshpar-")))
        path = folder / f"{recipe.name}.yaml"
        path.write_text(division.recipe(recipe).to_yaml(), encoding="utf-8")
        restarts = _RESTARTS if restarts is None else restarts
        kept = [_Replica(number, division, path, place, logs, restarts, quiet=quiet) for number in division.here]
        before = {number: signal.signal(number, lambda got, _: _pass_on(kept, got)) for number in _SIGNALS}
        try:
            with ThreadPoolExecutor(len(kept)) as pool:
                codes = list(pool.map(_Replica.run, kept))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    if 0 in codes:
        (logs / COMPLETE).touch()
        return 0
    stopped = [code for code in codes if code > 128]
    if stopped:
        return max(stopped)
    if set(codes) == {NO_USE}:
        return NO_USE
    told = ", ".join(f"replica {number} ended with exit code {code}" for number, code in zip(division.here, codes))
    if RETRY in codes:
        raise ReplicaError(f"{told}; start the job again, which resumes from its newest checkpoint")
    raise LaunchError(f"{told}; see {f'what they printed in {logs}' if quiet else 'the messages above'}")


def _served(stack: ExitStack, head: str, patience_s: float) -> str:
    """Serve the lighthouse, and return where; with a file, also its address is there for the other nodes."""
    shared = Path(head) if "/" in head else None
    served = Lighthouse(int(head.rpartition(":")[2] or 0) if shared is None else 0, patience_s=patience_s)
    stack.callback(served.close)
    if shared is not None:
        shared.parent.mkdir(parents=True, exist_ok=True)
        new = shared.with_name(f"{shared.name}.new")
        new.write_text(f"{socket.gethostname()}:{served.port}\n", encoding="utf-8")
        new.replace(shared)
    return head or f"127.0.0.1:{served.port}"


@final
class _Replica:
    """A replica of this node, which is started again where it could not go on with the others."""

    def __init__(self, number: int, division: Division, recipe: Path, place: str, logs: Path, restarts: int, *, quiet: bool) -> None:
        """``place``: see the ``head`` of :func:`launch_replicas`."""
        self._prints = logs / f"replica-{number}.txt" if quiet else None
        self._number, self._place, self._restarts, self._complete = number, place, restarts, logs / COMPLETE
        self._was_complete = self._complete.exists()  # a run that now goes on
        self._command = [sys.executable, "-m", "meshpar.launchers", "run", "--nproc", str(division.ranks), "--restarts", str(restarts)]
        self._command += ["--logs", str(logs / f"replica-{number}"), str(recipe)]
        self._environment = {**os.environ, "MESHPAR_REPLICA": str(number), "MESHPAR_REPLICAS": str(division.count)}
        self._environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(_threads(division))
        if "MESHPAR_JOB_ID" in os.environ:  # starts without a step are counted for each replica
            self._environment["MESHPAR_JOB_ID"] = f"{os.environ['MESHPAR_JOB_ID']}-{number}"
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = 0

    def run(self) -> int:
        """Run the replica until it ends, and return its exit code; 0 also where the others have completed the job without it."""
        code = RETRY
        for _ in range(1 + self._restarts):
            address = self._lighthouse()
            if not address:
                return 0 if self._is_complete() else 128 + self._stopped if self._stopped else RETRY
            known = {**self._environment, "TORCHFT_LIGHTHOUSE": address}
            with self._prints.open("ab") if self._prints else nullcontext() as file:
                self._process = subprocess.Popen(self._command, env=known, start_new_session=True, stdout=file, stderr=file)
            code = self._process.wait()
            if code != RETRY or self._stopped:
                break
        return 0 if self._is_complete() else code

    def stop(self, number: int) -> None:
        """Pass a signal on."""
        self._stopped = number
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _is_complete(self) -> bool:
        return self._complete.exists() and not self._was_complete

    def _lighthouse(self) -> str:
        """Return the lighthouse's address when it answers; empty if the job is complete, was stopped, or nothing answers for long."""
        began = told = time.monotonic()
        while not (self._stopped or self._is_complete()):
            address = self._place.removeprefix("http://").rstrip("/")
            if "/" in address:
                address = Path(address).read_text(encoding="utf-8").strip() if Path(address).exists() else ""
            host, _, port = address.rpartition(":")
            with suppress(OSError):
                socket.create_connection((host.strip("[]"), int(port or 0)), timeout=_ANSWER_S).close()
                return f"http://{address}"
            now = time.monotonic()
            if now - began > _WAIT_S:
                print(f"replica {self._number}: no lighthouse at {self._place} within {_WAIT_S:.0f} s; does node 0 run?", file=sys.stderr)
                break
            if now - told >= _TELL_S:
                print(f"replica {self._number} waits for the lighthouse of node 0 at {self._place}", file=sys.stderr, flush=True)
                told = now
            time.sleep(_POLL_S)
        return ""


def _threads(division: Division) -> int:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, cores // (division.ranks * len(division.here)))


def _pass_on(kept: Sequence[_Replica], number: int) -> None:
    for each in kept:
        each.stop(number)
