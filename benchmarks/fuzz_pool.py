"""A pool of rank processes that serve one case after another, and what became of a case.

The processes are forked once from a server that has torch loaded. For each case the first of them form a gloo group
over a file of its own. A process that hangs, dies or raises something unforeseen is ended, and a new one takes its
place.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import logging
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, final

from meshpar.testing import PRELOAD

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.support.patience import patient

CLASSES = ("exact", "refused", "alike", "wrong", "raw", "hang", "broken")
"""What a case can come to. ``alike``: it fails in one process, as it may, and on ranks; ``broken``: it may not, a
fault of the fuzzer.
"""
VERBS = (
    "use|check|change|run|look|hand|cut|draw|move|replace|give|build|call|pass|drop|leave|add|take|make|write|load|keep|"
    "turn|let|set|list|cast|name|pad|tie|remove|would|wrap|ask|save"
)
REMEDY = re.compile(rf"[;\n:.,][^;\n]*\b(?:{VERBS})\b", re.IGNORECASE)
"""What a message contains that says what to do, after what happened."""
LEFT = re.compile(r"timed? ?out|Connection closed by peer|Connection reset by peer", re.IGNORECASE)
"""What a rank says whose peers did not come, or gave up first."""
MIXED = re.compile(
    r"mixed torch\.Tensor and DTensor|only accepts torch\.Tensor but got .*DTensor|must have the same mesh"
    r"|with different meshes|in loading state_dict"
)
"""How torch refuses sharded tensors beside whole ones, in code that calls torch alone and that no module on the mesh
can hear of.
"""
CASES = 25
"""After so many cases the processes are replaced: gloo's threads of groups that were destroyed stay, and slow the
others down.
"""
GRACE_S = 1.0
"""How long the other ranks may take to say what became of them after a first failure."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a case: one of ``CLASSES``, what says so, and where; and whether all ranks came to it within
    ``GRACE_S``.
    """

    kind: str
    together: bool = True
    text: str = ""
    trace: str = ""
    seconds: float = 0.0

    @property
    def cause(self) -> str:
        """The text without what differs between two cases of one cause: numbers and names of blocks."""
        return re.sub(r"\d+", "0", next((line for line in self.text.splitlines() if line.strip()), ""))[:160]


@final
class Pool:
    """Rank processes, until they are closed.

    Args:
        size: the most ranks that a case may ask for.
        timeout_s: seconds of a quiet machine after which a case counts as hanging; its collectives give up after half
            of them.
    """

    def __init__(self, size: int = 8, timeout_s: float = 30.0) -> None:
        self._timeout_s = timeout_s
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*PRELOAD, "torch._dynamo", "meshpar.passes"])
        self._folder = tempfile.TemporaryDirectory(prefix="meshpar-fuzz-")
        self._cases = 0
        self._ranks: list[tuple[Any, Any]] = [self._start() for _ in range(size)]

    def close(self) -> None:
        """End the processes."""
        for process, _ in self._ranks:
            process.kill()
        for process, _ in self._ranks:
            process.join()
        self._folder.cleanup()

    def _start(self) -> tuple[Any, Any]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=serve, args=(theirs, self._folder.name), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def run(self, source: str, ranks: int) -> Outcome:
        """Run a case's script on so many ranks and return what became of it."""
        timeout_s, began, self._cases = patient(self._timeout_s), time.monotonic(), self._cases + 1
        folder = Path(self._folder.name) / str(self._cases)
        folder.mkdir()
        (folder / "case.py").write_text(source)
        for rank, (_, connection) in enumerate(self._ranks[:ranks]):
            connection.send((str(folder), rank, ranks, timeout_s))
        reports = self._collect(ranks, began + timeout_s)
        outcome = judge(
            reports,
            {rank: self._stack(rank) for rank in range(ranks) if rank not in reports} if len(reports) < ranks else {},
        )
        clean = len(reports) == ranks and {report["kind"] for report in reports.values()} in (
            {"exact"},
            {"refused"},
            {"alike"},
            {"wrong"},
        )
        if self._cases % CASES == 0:
            self._replace(len(self._ranks))
        elif not clean:
            self._replace(ranks)
        return replace(outcome, seconds=time.monotonic() - began)

    def _collect(self, ranks: int, deadline: float) -> dict[int, dict[str, Any]]:
        waiting: dict[Any, int] = {connection: rank for rank, (_, connection) in enumerate(self._ranks[:ranks])}
        reports: dict[int, dict[str, Any]] = {}
        while waiting and (ready := wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    reports[rank] = connection.recv()
                except (EOFError, OSError):
                    reports[rank] = {"kind": "raw", "at": time.monotonic(), **self._death(rank)}
                if reports[rank]["kind"] not in ("exact", "wrong"):
                    deadline = min(deadline, time.monotonic() + patient(GRACE_S))
        return reports

    def _death(self, rank: int) -> dict[str, str]:
        """Return how a rank ended, and what it wrote last."""
        process, _ = self._ranks[rank]
        process.join(5)
        code, wrote = process.exitcode or 0, self._errors(rank)
        why = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        said = next((line.strip() for line in wrote.splitlines() if "what():" in line), "")
        return {"text": f"the process died {why} {said}", "trace": wrote}

    def _stack(self, rank: int) -> str:
        """Return where a rank that does not answer is."""
        process, _ = self._ranks[rank]
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.1)
        return self._errors(rank)

    def _errors(self, rank: int) -> str:
        path = Path(self._folder.name) / f"errors-{self._ranks[rank][0].pid}"
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""

    def _replace(self, ranks: int) -> None:
        for process, connection in self._ranks[:ranks]:
            process.kill()
            connection.close()
        for process, _ in self._ranks[:ranks]:
            process.join()
        self._ranks[:ranks] = [self._start() for _ in range(ranks)]


def judge(reports: dict[int, dict[str, Any]], missing: dict[int, str]) -> Outcome:
    """Join what the ranks said: the earliest failure is the cause, the others may follow from it."""
    failed = [report for report in reports.values() if report["kind"] not in ("exact", "wrong")]
    failed.sort(key=lambda report: (report["kind"] == "hang", report["at"]))
    if failed:
        first = failed[0]
        together = not missing and {report["kind"] for report in reports.values()} == {first["kind"]}
        return Outcome(kind=first["kind"], together=together, text=first["text"], trace=first.get("trace", ""))
    if missing:
        where = "\n".join(f"rank {rank} is at\n{stack}" for rank, stack in missing.items())
        return Outcome(kind="hang", text=f"ranks {sorted(missing)} did not end", trace=where)
    off = [report["text"] for report in reports.values() if report["kind"] == "wrong"]
    return Outcome(kind="wrong", text=off[0]) if off else Outcome(kind="exact")


# ------------------------------------------------------------------------------------------------------------ in a rank


def serve(connection: Any, folder: str) -> None:
    """Run cases until the parent hangs up."""
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    errors = os.open(Path(folder) / f"errors-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(errors, 2)  # gloo and autograd print what is raised as well
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    faulthandler.enable(file=2)
    while True:
        try:
            command = connection.recv()
        except EOFError:
            return
        connection.send(_case(*command))


def _case(folder: str, rank: int, ranks: int, timeout_s: float) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    stage = "broken"
    try:
        case = _load(Path(folder) / "case.py", rank)
        if getattr(case, "SAME_BITS", False):
            stage = "raw"
        expected = _alone(case, f"{folder}/alone") if rank == 0 and not case.REFUSED else {}
        if rank == 0:
            torch.save(expected, f"{folder}/expected")
        store = dist.FileStore(f"{folder}/store", ranks)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout_s / 2)
        )
        dist.barrier()
        expected, stage = torch.load(f"{folder}/expected"), "raw"
        if isinstance(expected, str):
            stage = "alike"
        got = case.train(case.apply)
        dist.barrier()
        found = (
            ["was not refused"]
            if case.REFUSED
            else [f"one process fails: {expected}"]
            if isinstance(expected, str)
            else []
        )
        found = found or list(case.differences(expected, got, case.TOLERANCE, case.FLOOR))
        report = {"kind": "wrong" if found else "exact", "text": "\n".join(found[:12])}
    except Exception as error:  # noqa: BLE001  what goes wrong is the result
        report = _failure(error, stage)
    report |= {"at": time.monotonic()}
    if report["kind"] in ("exact", "wrong", "refused", "alike") and dist.is_initialized():
        dist.destroy_process_group()
    return report


def _alone(case: Any, store: str) -> Any:
    """Return what one process records, or how it fails where the case says that it may."""
    import torch.distributed as dist

    try:
        if getattr(case, "SAME_BITS", False):
            dist.init_process_group("gloo", store=dist.FileStore(store, 1), rank=0, world_size=1)
        return case.train(case.Alone)
    except Exception as error:
        if not getattr(case, "MAY_FAIL", False):
            raise
        return f"{type(error).__name__}: {error}"[:500]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _load(path: Path, rank: int) -> Any:
    spec = importlib.util.spec_from_file_location(f"case_{path.parent.name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # torch.compile looks a function's module up
    spec.loader.exec_module(module)
    return module


def _failure(error: Exception, stage: str) -> dict[str, Any]:
    from meshpar import MeshparError

    text, trace = f"{type(error).__name__}: {error}", traceback.format_exc()
    if isinstance(error, MeshparError):
        tells = REMEDY.search(str(error)) is not None
        return {"kind": "refused" if tells else "raw", "text": text if tells else f"refused without a remedy: {text}"}
    if stage == "raw" and MIXED.search(text) and not _in_a_module(error):
        return {"kind": "refused", "text": f"torch refuses: {text}"}
    kind = "hang" if stage == "raw" and LEFT.search(text) else stage
    return {"kind": kind, "text": text[:2000], "trace": trace[-4000:]}


def _in_a_module(error: Exception) -> bool:
    """Tell whether an error came out of the drawn model's own code, or through the door of the parallel module."""
    import torch

    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    doors = any(frame.f_globals.get("__name__") == "meshpar.step.forward" for frame in frames)
    return doors or any(
        "REFUSED" in frame.f_globals and isinstance(frame.f_locals.get("self"), torch.nn.Module) for frame in frames
    )
