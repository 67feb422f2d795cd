"""Run a test on several ranks, in processes that other tests use; a test restores them, or misses it loudly."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from operator import is_
from pathlib import Path
from typing import Any, ParamSpec

import torch
import torch.distributed as dist

from meshpar._torch import groups
from meshpar.core import mesh, runtime
from meshpar.exchange import ranks as step_ranks

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


def on_ranks(
    count: int | str, *, timeout_s: float = 90.0, fresh: str = ""
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Run the decorated test's body in ``count`` processes, each a rank of one gloo group on the CPU.

    The processes are forked from a server that has torch loaded, meet through a file, get one thread each, and run the
    next test of as many ranks, too. The first failure ends all of them and is raised here with its rank's traceback.
    Parameters and fixtures of pytest are copied to each rank, so they must be picklable.

    Args:
        count: number of ranks, or the name of the test's parameter that has it: a number, or a mesh such as
            "dp_shard=2,tp=2".
        timeout_s: seconds after which the test fails and its processes are ended.
        fresh: why this test needs new processes that end with it, such as "ends a rank" or "counts all groups"; needed
            only if it leaves something behind (hooks of the whole process, unfinished collectives).

    Raises:
        RankFailure: from the test; also where one without a reason leaves a patch of meshpar or torch behind.
    """

    def decorate(test: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(test)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            size: Any = count
            if isinstance(size, str):
                size = inspect.signature(test).bind(*args, **kwargs).arguments[size]
            size = mesh.MeshSpec(size).size if isinstance(size, str) else size
            launch(test.__module__, test.__qualname__, size, args, dict(kwargs), timeout_s, fresh)

        return run

    return decorate


def launch(
    module: str,
    qualname: str,
    count: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout_s: float = 90.0,
    fresh: str = "",
) -> None:
    """Run ``module.qualname(*args, **kwargs)`` on ``count`` ranks, as :func:`on_ranks` does.

    Raises:
        RankFailure: a rank failed, ended early or did not end in ``timeout_s`` seconds.
    """
    ranks = None if fresh else _KEPT.pop(count, None)
    if ranks is not None and ranks.timeout_s < timeout_s:
        ranks.close()
        ranks = None
    ranks = ranks or RankProcesses(count, timeout_s, keep=not fresh)
    try:
        ranks.run(module, qualname, tuple(args), dict(kwargs or {}), timeout_s)
    except BaseException:
        ranks.kill()
        raise
    if fresh or ranks.runs >= _MOST_RUNS:
        ranks.close()
    else:
        _KEPT[count] = ranks
    while sum(_KEPT) > _MOST_RANKS:
        _KEPT.pop(next(iter(_KEPT))).close()  # the one that has rested longest


class RankProcesses:
    """Processes of one group that run one test after another (``runs``); a failure is the last that they run."""

    def __init__(self, count: int, timeout_s: float, keep: bool) -> None:
        self._count, self.timeout_s, self._keep, self.runs = count, timeout_s, keep, 0
        self._folder = tempfile.TemporaryDirectory(prefix="meshpar-test-")
        self._started: list[tuple[Any, Connection]] = []

    def run(self, module: str, qualname: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float) -> None:
        self.runs += 1
        deadline = time.monotonic() + timeout_s
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        for rank in range(len(self._started), self._count):
            ours, theirs = context.Pipe()
            job = (rank, self._count, os.path.join(self._folder.name, "store"), self.timeout_s, self._keep, theirs)
            process = context.Process(target=_rank_main, args=job, daemon=True)
            process.start()
            theirs.close()
            self._started.append((process, ours))
        for _, ours in self._started:
            with contextlib.suppress(OSError):  # it has ended, as its report will say
                ours.send((module, qualname, args, kwargs))
        _await(self._started, deadline, qualname)

    def kill(self) -> None:
        for process, _ in self._started:
            process.kill()
        self.close()

    def close(self) -> None:
        for _, ours in self._started:
            ours.close()  # which a rank that waits for its next test sees
        for process, _ in self._started:
            process.join(10)
            process.kill()
            process.join()
        self._folder.cleanup()


_KEPT: dict[int, RankProcesses] = {}  # by their number
_MOST_RUNS, _MOST_RANKS = 160, 8  # so that neither what tests leave in a process nor processes at rest pile up


def _await(started: Sequence[tuple[Any, Connection]], deadline: float, name: str) -> None:
    waiting: dict[Any, int] = {ours: rank for rank, (_, ours) in enumerate(started)}
    failures: dict[int, str] = {}
    while waiting:
        # After a first failure the peers may fail because of it: others get a moment to arrive.
        seconds = deadline - time.monotonic() if not failures else 0.2
        ready = wait(list(waiting), timeout=max(0.0, seconds))
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
        also = sorted(set(failures) - {rank})
        raise RankFailure(f"{name} failed on rank {rank} of {len(started)} (also on {also}):\n{failures[rank]}")
    if waiting:
        raise RankFailure(f"{name}: ranks {sorted(waiting.values())} of {len(started)} did not end in time")


def _rank_main(rank: int, count: int, store: str, timeout_s: float, keep: bool, asked: Connection) -> None:
    gc.freeze()  # what the server has loaded: to look for garbage there would copy its pages into each rank
    faulthandler.enable()  # a crash of native code says where
    torch.set_num_threads(1)
    try:
        groups.share_gloo_device(runtime.connects_lazily)  # kept ranks open many groups
        shared, patience = dist.FileStore(store, count), timedelta(seconds=max(5.0, timeout_s - 5))
        dist.init_process_group("gloo", store=shared, rank=rank, world_size=count, timeout=patience)
        if keep:  # an equal mesh is the same one: its groups are open, and what DTensor has planned for it still holds
            mesh._built = functools.cache(mesh._built)
            step_ranks.own_group = functools.cache(step_ranks.own_group)
        before = ProcessState() if keep else None
        while True:
            try:
                module, qualname, args, kwargs = asked.recv()
            except EOFError:  # closed by the test's process, or with it
                break
            body: Any = importlib.import_module(module)
            for part in qualname.split("."):
                body = getattr(body, part)
            torch.manual_seed(0)
            with runtime.kept_environment():
                getattr(body, "__wrapped__", body)(*args, **kwargs)
            dist.barrier()
            del args, kwargs
            if before is not None:
                before.restore(qualname)
                step_ranks.count_models_anew()
            asked.send(None)
    except BaseException:  # noqa: BLE001  whatever ended this rank is reported, and the process ends
        with contextlib.suppress(OSError):
            asked.send(traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Gloo's threads can abort an interpreter that takes its time to end.
        os._exit(0)


_WATCHED = ("torch", "torch.distributed", "torch.nn.functional", "torch.nn.modules", "torch.optim", "torch.utils")
_TORCH, _MESHPAR = (str(Path(file).parent) + os.sep for file in (torch.__file__, Path(__file__).parent))


class ProcessState:
    """Settings of this process, and the functions of meshpar and torch, before a test."""

    def __init__(self) -> None:
        self._folder = os.getcwd()
        self._names: dict[str, dict[str, Any]] = {}
        self._classes: dict[str, dict[str, type]] = {}
        self._seen: set[str] = set()
        self._watched: list[str] = []
        list(self._replaced())

    def restore(self, test: str) -> None:
        """Put settings back; raises AssertionError if ``test`` left a function, or a constant of meshpar, changed."""
        os.chdir(self._folder)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)
        gc.collect()  # a module of the test may still have its patches in torch
        changed = sorted(f"{space}.{key}" for space, key, now in self._replaced() if not _is_expected(space, now))
        if changed:
            raise AssertionError(
                f"{test} left {', '.join(changed)} changed in ranks that run the next test, expected everything as it "
                "was; patch with pytest.MonkeyPatch.context(), or write @on_ranks(..., fresh='the reason')"
            )

    def _replaced(self) -> Iterator[tuple[str, str, Any]]:
        """Yield names of meshpar, and the best known of torch, that stand for other things than at the last call."""
        new = sys.modules.keys() - self._seen
        self._seen |= new
        watched = {name for name in new if name in _WATCHED or name.rpartition(".")[0] in _WATCHED[1:]}
        self._watched += [name for name in new if name in watched or _is_ours(name)]
        for name in self._watched:
            namespace = vars(sys.modules[name]) if name in sys.modules else {}
            if not _is_same(self._names.get(name), namespace):
                yield from self._compared(name, namespace)
                classes = {key: value for key, value in namespace.items() if issubclass(type(value), type)}
                self._classes[name] = {key: kind for key, kind in classes.items() if kind.__module__ == name}
            for key, kind in self._classes[name].items():
                if not _is_same(self._names.get(f"{name}.{key}"), vars(kind)):
                    yield from self._compared(f"{name}.{key}", vars(kind))

    def _compared(self, space: str, namespace: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
        """Yield what is replaced in one module or class, and keep what it holds now."""
        earlier, self._names[space] = self._names.get(space, {}), dict(namespace)
        kinds = (int, float, str, tuple) if _is_ours(space) and space in sys.modules else ()
        for key, before in earlier.items():
            now = namespace.get(key, before)
            if now is before or (issubclass(type(before), type) and before.__module__ == space):
                continue  # of a class its methods are compared
            if all(callable(value) or issubclass(type(value), kinds) for value in (before, now)):
                yield space, key, now


def _is_same(known: Mapping[str, Any] | None, namespace: Mapping[str, Any]) -> bool:
    return known is not None and len(known) == len(namespace) and all(map(is_, known.values(), namespace.values()))


def _is_ours(space: str) -> bool:
    return space.partition(".")[0] == "meshpar"


def _is_expected(space: str, function: object) -> bool:
    """Return whether torch, or meshpar in torch, wraps it once for a whole process, as the compiler does."""
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    return file.startswith(_TORCH) or (file.startswith(_MESHPAR) and space.startswith("torch"))
