"""Start the ranks of a job on this machine, with torch's elastic launcher, and tell how it ended."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from meshpar import errors
from meshpar.errors import LaunchError, MeshparError
from meshpar.launchers.recipe import Recipe

SHUTDOWN_S = 600
"""Seconds that ranks have to write a checkpoint after a signal, before they are killed."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def launch_local(recipe: Recipe, ranks: int) -> int:
    """Run a job on ``ranks`` processes of this machine.

    SIGTERM and SIGINT (Ctrl-C) are passed on to the ranks, which write a checkpoint and stop; nothing is left running.

    Returns:
        The exit code: 0, or 128 + the signal that stopped it.

    Raises:
        MeshparError: the first failing rank's error, as it was raised there.
        LaunchError: a rank failed otherwise; with its traceback.
    """
    with tempfile.TemporaryDirectory(prefix="meshpar-") as folder, _signals_restored():
        path = Path(folder) / "recipe.yaml"
        path.write_text(recipe.to_yaml(), encoding="utf-8")
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            run_id=Path(folder).name,
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle=",".join(each.name for each in _SIGNALS),
            shutdown_timeout=SHUTDOWN_S,
        )
        _set_environment(ranks)
        try:
            elastic_launch(config, sys.executable)("-m", "meshpar.launchers.worker", str(path))
        except ChildFailedError as failed:
            codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
            raise _first_error(Path(folder), codes) from None
        except SignalException as stop:
            _end_ranks(path)
            if any(Path(folder).rglob("error.json")):
                raise _first_error(Path(folder), {}) from None
            return 128 + int(stop.sigval)
    return 0


def _set_environment(ranks: int) -> None:
    """Set what the ranks inherit."""
    # Without it, every restart of workers fails in gloo's connectFullMesh (torch 2.13).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    # The launcher's own reports of a failure; what a rank raised is told once, by whoever called.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def _signals_restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_ranks(recipe: Path) -> None:
    """End ranks that are left: the user was not willing to wait for them, or they did not stop in time."""
    for path in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        for child in map(int, path.read_text(encoding="ascii").split()):
            with suppress(OSError):  # it may be gone by now
                if os.fsencode(recipe) in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                    os.kill(child, signal.SIGKILL)


def _first_error(folder: Path, exit_codes: dict[int, int]) -> MeshparError:
    """Return what ended the job: a rank that was killed, or the error that a rank wrote first; the others' come of it."""
    killed = {rank: -code for rank, code in exit_codes.items() if code < 0 and code != -signal.SIGTERM}
    if killed:
        rank, number = next(iter(sorted(killed.items())))
        out_of_memory = "; the kernel does this to a process when memory runs out" if number == signal.SIGKILL else ""
        return LaunchError(f"rank {rank} was ended by {signal.Signals(number).name}{out_of_memory}")
    found = {path.parent.name: json.loads(path.read_text(encoding="utf-8"))["message"] for path in folder.rglob("error.json")}
    if not found:
        return LaunchError(f"ranks ended without a word, exit codes {exit_codes}; their output above may say why")
    rank_text, first = min(found.items(), key=lambda item: item[1]["extraInfo"]["seconds"])
    return _as_raised(rank_text, first)


def _as_raised(rank: str, told: dict[str, Any]) -> MeshparError:
    kind = getattr(errors, told["kind"], None)
    if told["kind"] == "PlanError":
        return MeshparError(told["message"])
    if isinstance(kind, type) and issubclass(kind, MeshparError):
        return kind(told["message"])
    return LaunchError(f"rank {rank} failed with {told['kind']}: {told['message']}\n{told['extraInfo']['py_callstack']}".rstrip())
