"""Start processes: load torch quickly, be a rank of srun's step, or simulate several nodes on one machine."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from meshpar.core.errors import LaunchError
from meshpar.launchers import environment
from meshpar.process.signals import STOPPING, heard, put_back

if TYPE_CHECKING:
    from meshpar.launchers.recipes.recipe import Recipe  # loads all that a job may use

_PORTS, _FIRST_PORT = 10_000, 20_000
_FREE_PORTS = range(20_000, 32_768)
_POLL_S = 0.2


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import large packages without garbage collection of their definitions: saves a second with torch."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def adopt_srun() -> str:
    """Set RANK and the others from srun's variables; return the step's id, empty outside of such a step."""
    known = environment.srun()
    if not known:
        return ""
    try:
        nodes = known["SLURM_STEP_NODELIST"]
        per_node = known["SLURM_STEP_TASKS_PER_NODE"]
        job = int(known["SLURM_JOB_ID"]) + int(known["SLURM_STEP_ID"])
        values = {
            "RANK": known["SLURM_PROCID"],
            "WORLD_SIZE": known["SLURM_STEP_NUM_TASKS"],
            "LOCAL_RANK": known["SLURM_LOCALID"],
            "LOCAL_WORLD_SIZE": re.split(r"[(,]", per_node)[0],
            "MASTER_ADDR": first_node(nodes),
            "MASTER_PORT": str(_FIRST_PORT + job % _PORTS),
        }
    except (KeyError, ValueError) as error:
        raise LaunchError(
            f"this is a task of a SLURM step, but {error} is missing or cannot be read; start it with srun, or with "
            "torchrun"
        ) from error
    environment.suggest(values)
    return f"{known['SLURM_JOB_ID']}.{known['SLURM_STEP_ID']}-{known.get('SLURM_RESTART_COUNT', '0')}"


def first_node(text: str) -> str:
    """Return the first host of a SLURM node list: ``n[01-04,7],m1`` -> ``n01``, ``rack[1-2]n[3,5]`` -> ``rack1n3``."""
    head = re.match(r"(?:[^\[\],]|\[\d[^\[\]]*\])+(?=,|$)", text)
    if head is None:
        raise LaunchError(f"cannot read SLURM node list {text!r}")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", head[0])


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
        meeting = [
            "--nodes",
            str(nodes),
            "--nproc",
            str(nproc),
            "--head",
            f"127.0.0.1:{free_port()}",
            "--run-id",
            Path(folder).name,
        ]
        agent = [sys.executable, "-m", "meshpar.launchers", "run", *meeting]
        running = [
            subprocess.Popen([*agent, "--node-rank", str(node), str(path)], start_new_session=True)
            for node in range(nodes)
        ]
        with handling(heard(), lambda number: _pass_on(running, number)):
            codes = _await(running)
    failed = [node for node, code in enumerate(codes) if code not in (0, *(128 + number for number in STOPPING))]
    if failed:
        raise LaunchError(f"node {failed[0]} of {nodes} ended with exit code {codes[failed[0]]}; see its message above")
    return max(codes)


def _await(running: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Wait for all nodes; if one fails, ask the others to stop."""
    asked = False
    while any(process.poll() is None for process in running):
        if not asked and any(process.poll() not in (None, 0) for process in running):
            _pass_on(running, signal.SIGTERM)
            asked = True
        time.sleep(_POLL_S)
    return [process.returncode for process in running]


def _pass_on(running: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in running:
        if process.poll() is None:
            process.send_signal(number)


def free_port() -> int:
    """Return a free port below the kernel's ephemeral range (32768), so that it stays free for some seconds."""
    first = os.getpid() % len(_FREE_PORTS)  # processes that ask at the same time begin at different ports
    for port in (*_FREE_PORTS[first:], *_FREE_PORTS[:first]):
        with socket.socket() as server, suppress(OSError):  # taken
            server.bind(("", port))
            return port
    raise LaunchError(f"all ports from {_FREE_PORTS[0]} to {_FREE_PORTS[-1]} are in use; free one of them")
