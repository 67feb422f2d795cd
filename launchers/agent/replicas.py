"""Start the replicas of this node, each a job of its own that is started again when it fails: ``--elastic=replicas``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import final

from meshpar import runtime
from meshpar.checkpoints import CheckpointManager
from meshpar.errors import LaunchError, ReplicaError
from meshpar.launchers.agent.failures import RETRY
from meshpar.launchers.recipes.recipe import Recipe
from meshpar.mesh import MeshSpec
from meshpar.training import Lighthouse

_POLL_S = 0.2
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


def launch_replicas(recipe: Recipe, division: Division, head: str, node_rank: int, restarts: int | None, logs: Path | None) -> int:
    """Run this node's replicas until they end, and return the exit code: 0 if one of them has completed the job.

    The lighthouse runs in this process on node 0, unless ``TORCHFT_LIGHTHOUSE`` names another. This process also holds the run's folder
    for the job, of which any replica may write.

    Args:
        recipe: of the whole job.
        division: its replicas.
        head: ``host:port`` of the lighthouse; empty on one node.
        node_rank: number of this node.
        restarts: how often a replica is started again; None: as often as needed.
        logs: folder of logs; None: ``logs`` in the run's folder.

    Raises:
        ReplicaError: no replica of this node could complete the job; another start resumes from the newest checkpoint.
    """
    logs = (logs or recipe.folder / "logs").absolute()
    with ExitStack() as stack:
        address = runtime.lighthouse()
        if not address:
            address = f"http://{head}"
            if not node_rank:
                served = Lighthouse(int(head.rpartition(":")[2] or 0), patience_s=recipe.patience)
                stack.callback(served.close)
                address = f"http://{head or f'127.0.0.1:{served.port}'}"
        if not node_rank:
            manager = stack.enter_context(CheckpointManager(recipe.folder / "checkpoints"))
            manager.own()
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshpar-")))
        path = folder / f"{recipe.name}.yaml"
        path.write_text(recipe.model_copy(update={"mesh": str(division.mesh)}).to_yaml(), encoding="utf-8")
        command = [sys.executable, "-m", "meshpar.launchers", "run", "--nproc", str(division.ranks)]
        command += ["--restarts", str(_RESTARTS if restarts is None else restarts)]
        running = []
        for number in division.here:
            known = {"TORCHFT_LIGHTHOUSE": address, "MESHPAR_REPLICA": str(number), "MESHPAR_REPLICAS": str(division.count)}
            known["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(_threads(division))
            words = [*command, "--logs", str(logs / f"replica-{number}"), str(path)]
            running.append(subprocess.Popen(words, env={**os.environ, **known}, start_new_session=True))
        before = {number: signal.signal(number, lambda got, _: _pass_on(running, got)) for number in _SIGNALS}
        try:
            while any(process.poll() is None for process in running):
                time.sleep(_POLL_S)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    codes = [process.returncode for process in running]
    stopped = [code for code in codes if code > 128]
    if 0 in codes or stopped:
        return 0 if 0 in codes else max(stopped)
    told = ", ".join(f"replica {number} ended with exit code {code}" for number, code in zip(division.here, codes))
    if RETRY in codes:
        raise ReplicaError(f"{told}; start the job again, which resumes from its newest checkpoint")
    raise LaunchError(f"{told}; see the messages above")


def _threads(division: Division) -> int:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, cores // (division.ranks * len(division.here)))


def _pass_on(running: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in running:
        if process.poll() is None:
            process.send_signal(number)
