"""Simulate several nodes on one machine, with one agent each, to test a job of several nodes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from meshpar.errors import LaunchError
from meshpar.launchers.recipes.recipe import Recipe

_POLL_S = 0.2
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def launch_nodes_here(recipe: Recipe, nodes: int, nproc: int) -> int:
    """Run a recipe on ``nodes`` agents of this machine with ``nproc`` ranks each, and return the exit code.

    The ranks see a job of several nodes: ``mesh: auto`` puts replicas across the nodes and shards inside each.

    Raises:
        LaunchError: a node failed; its own message was printed before.
    """
    with tempfile.TemporaryDirectory(prefix="meshpar-") as folder:
        path = Path(folder) / f"{recipe.name}.yaml"
        path.write_text(recipe.to_yaml(), encoding="utf-8")
        meeting = ["--nodes", str(nodes), "--nproc", str(nproc), "--head", f"127.0.0.1:{free_port()}", "--run-id", Path(folder).name]
        agent = [sys.executable, "-m", "meshpar.launchers", "run", *meeting]
        running = [subprocess.Popen([*agent, "--node-rank", str(node), str(path)], start_new_session=True) for node in range(nodes)]
        before = {number: signal.signal(number, lambda got, _: _pass_on(running, got)) for number in _SIGNALS}
        try:
            codes = _await(running)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    failed = [node for node, code in enumerate(codes) if code not in (0, 128 + signal.SIGTERM, 128 + signal.SIGINT)]
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
    """Return a free port outside the kernel's ephemeral range (32768 and up), so that it stays free for some seconds."""
    for port in range(20000 + os.getpid() % 10000, 32768):
        with socket.socket() as server, suppress(OSError):  # taken
            server.bind(("", port))
            return port
    raise LaunchError("all ports from 20000 to 32767 are in use; free one of them")
