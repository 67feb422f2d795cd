"""Run a test on several ranks."""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, ParamSpec

import torch
import torch.distributed as dist

P = ParamSpec("P")

PRELOAD = [
    "torch",
    "torch._dynamo",  # FSDP2 loads it in the first forward
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "meshpar",
    "meshpar.testing",
]
"""Modules that are imported once, in the process that every rank is forked from."""


class RankFailure(AssertionError):
    """Raised with the first failing rank's traceback, or the ranks that did not end in time."""


def on_ranks(count: int, *, timeout_s: float = 90.0) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Run the decorated test's body in ``count`` processes, each a rank of one gloo group on the CPU.

    The processes are forked from a server that has torch loaded, meet through a file (no ports), and get one thread each. The first
    failure ends the others and is raised here with its rank's traceback.

    Args:
        count: number of ranks.
        timeout_s: seconds after which the test fails and its processes are ended.

    Raises:
        RankFailure: from the decorated test.
    """

    def decorate(test: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(test)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            launch(test.__module__, test.__qualname__, count, args, dict(kwargs), timeout_s)

        return run

    return decorate


def launch(
    module: str, qualname: str, count: int, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, timeout_s: float = 90.0
) -> None:
    """Run ``module.qualname(*args, **kwargs)`` on ``count`` ranks, as :func:`on_ranks` does.

    Raises:
        RankFailure: a rank failed, ended early or did not end in ``timeout_s`` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="meshpar-test-") as folder:
        started: list[tuple[Any, Connection]] = []
        try:
            for rank in range(count):
                ours, theirs = context.Pipe(duplex=False)
                job = (module, qualname, rank, count, os.path.join(folder, "store"), tuple(args), dict(kwargs or {}), timeout_s, theirs)
                process = context.Process(target=_rank_main, args=job, daemon=True)
                process.start()
                theirs.close()
                started.append((process, ours))
            _await(started, time.monotonic() + timeout_s, qualname)
        finally:
            for process, ours in started:
                if process.is_alive():
                    process.kill()
                process.join()
                ours.close()


def _await(started: Sequence[tuple[Any, Connection]], deadline: float, name: str) -> None:
    waiting: dict[Any, int] = {ours: rank for rank, (_, ours) in enumerate(started)}
    failures: dict[int, str] = {}
    while waiting:
        # After a first failure the peers may fail because of it; the earliest report is the cause, others get a moment to arrive.
        left = deadline - time.monotonic() if not failures else 0.2
        ready = wait(list(waiting), timeout=max(0.0, left))
        if not ready:
            break
        connection: Any
        for connection in ready:
            rank = waiting.pop(connection)
            try:
                report = connection.recv()
            except EOFError:
                started[rank][0].join(5)
                report = f"rank {rank} ended without a message, exit code {started[rank][0].exitcode}"
            if report is not None:
                failures[rank] = report
    if failures:
        rank = next(iter(failures))
        raise RankFailure(f"{name} failed on rank {rank} of {len(started)} (also on {sorted(set(failures) - {rank})}):\n{failures[rank]}")
    if waiting:
        raise RankFailure(f"{name}: ranks {sorted(waiting.values())} of {len(started)} did not end in time")


def _rank_main(
    module: str,
    qualname: str,
    rank: int,
    count: int,
    store: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout_s: float,
    report: Connection,
) -> None:
    torch.set_num_threads(1)
    try:
        body: Any = importlib.import_module(module)
        for part in qualname.split("."):
            body = getattr(body, part)
        body = getattr(body, "__wrapped__", body)
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, count), rank=rank, world_size=count, timeout=timedelta(seconds=max(5.0, timeout_s - 5))
        )
        torch.manual_seed(0)
        body(*args, **kwargs)
        dist.barrier()
        report.send(None)
    except BaseException:  # noqa: BLE001  whatever ended this rank is reported, and the process ends
        with contextlib.suppress(OSError):
            report.send(traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Gloo's threads can abort an interpreter that takes its time to end.
        os._exit(0)
