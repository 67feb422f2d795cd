"""Run one rank for the agent: ``python -m meshpar.launchers.jobs.worker LOGS FOLDER``; the folder has its task."""

from __future__ import annotations

import builtins
import ctypes
import io
import os
import runpy
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn, TextIO, final

from meshpar.core.errors import LaunchError, MeshparError
from meshpar.launchers.agent import terms
from meshpar.launchers.agent.failures import exit_code, forget, note_os_exit, note_start, note_sys_exit, record
from meshpar.launchers.agent.stacks import answer_requests
from meshpar.launchers.agent.terms import STOPPED, RankTask, at_work, log_file, read_task
from meshpar.process.imports import quick_imports
from meshpar.process.secrets import redact
from meshpar.process.waiting import Lenient, exit_code_of, heard

_SET_DEATH_SIGNAL = 1  # linux/prctl.h: PR_SET_PDEATHSIG


def main() -> int:
    """Run the task. The command line names the logs for whoever looks for a job's processes."""
    _, folder = sys.argv[1:]
    with at_work(read_task(Path(folder))) as assigned, answer_requests(assigned.logs, terms.rank()):
        return _run(assigned, terms.rank())


def _run(assigned: RankTask, rank: int) -> int:
    """Run a task as one rank. An error is recorded for the launcher, which prints only the first error of all ranks."""
    folder = assigned.logs
    (copy_output if rank == 0 and assigned.terminal else redirect)(folder, rank)
    forget(folder, rank)
    note_os_exit(folder, rank)
    end_with_parent(assigned.launcher)
    try:
        if assigned.kind == "recipe":
            return run_recipe(assigned)
        return run_code(assigned.kind, assigned.what, assigned.arguments)
    except KeyboardInterrupt:
        if assigned.kind != "recipe":
            raise
        if rank == 0:
            print("interrupted by SIGINT: nothing was saved since the last checkpoint", file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(128 + signal.SIGINT)  # waits for no thread, such as one that tokenises
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            note_sys_exit(folder, rank, error)
        if isinstance(error, SystemExit) and error.code in (None, 0, *STOPPED):
            raise
        record(folder, rank, error, hide=__file__)
        if rank:  # the launcher shows rank 0's log, and the error itself once
            print(redact(traceback.format_exc()), file=sys.stderr, end="")
        if isinstance(error, MeshparError) and exit_code(error) in (terms.NO_USE, terms.RETRY) and terms.restarts()[1]:
            os.kill(os.getppid(), signal.SIGTERM)  # the agent restarts ranks whatever their error is
        return 1


def redirect(logs: Path, rank: int) -> None:
    """Redirect this process's output, including C's writes, to its log; later starts append to it."""
    logs.mkdir(parents=True, exist_ok=True)
    with log_file(logs, rank).open("ab") as file:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    if isinstance(sys.stdout, io.TextIOWrapper):  # it was made for what the process began with
        sys.stdout.reconfigure(line_buffering=True)
    sys.stdout, sys.stderr = Lenient(sys.stdout), Lenient(sys.stderr)  # type: ignore[assignment]


def copy_output(logs: Path, rank: int) -> None:
    """Write to the terminal and to the log; control sequences (a progress bar) go to the terminal alone."""
    logs.mkdir(parents=True, exist_ok=True)
    file = log_file(logs, rank).open("a", encoding="utf-8", buffering=1)
    sys.stdout, sys.stderr = _Both(sys.stdout, file), _Both(sys.stderr, file)  # type: ignore[assignment]


@final
class _Both:
    """Write to a terminal's stream and to a file; either may fail."""

    def __init__(self, terminal: TextIO, file: TextIO) -> None:
        self._terminal, self._file = Lenient(terminal), Lenient(file)

    def write(self, text: str) -> int:
        if "\x1b" not in text and "\r" not in text:
            self._file.write(text)
        return self._terminal.write(text)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as the terminal's
        return getattr(self._terminal, name)


def run_recipe(assigned: RankTask) -> int:
    with quick_imports():
        from meshpar.launchers.jobs.build import fit_recipe
        from meshpar.launchers.jobs.job import run_job
        from meshpar.launchers.recipes.recipe import received

    if terms.rank() == 0:
        note_start(assigned.logs)
    recipe = received(assigned.recipe)
    notes = len(recipe.notes)
    recipe = fit_recipe(recipe, terms.world_size(), assigned.most_ranks)
    if terms.rank() == 0:
        for note in recipe.notes[notes:]:
            print(f"note: {note}", file=sys.stderr)
    return exit_code_of(run_job(recipe).stopped)


def run_code(kind: str, what: str, arguments: Sequence[str]) -> int:
    """Run a script or module as ``__main__``, so that spawned processes can load its file."""
    sys.argv = [what, *arguments]
    if signal.SIGUSR1 in heard():
        signal.signal(signal.SIGUSR1, _unheard)
    if kind == "module":
        sys.path.insert(0, os.getcwd())
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return 0
    sys.path[0] = str(Path(what).resolve().parent)
    main_module = ModuleType("__main__")
    main_module.__dict__.update(__file__=what, __builtins__=builtins)
    code = compile(Path(what).read_bytes(), what, "exec")
    sys.modules["__main__"] = main_module
    exec(code, main_module.__dict__)
    return 0


def _unheard(number: int, frame: FrameType | None) -> NoReturn:
    """End a script that does not listen when its time is over: a failure, no stop with a checkpoint."""
    error = LaunchError(
        "SIGUSR1 asked the script to save and stop, but the script has no handler for it, so nothing is saved; set "
        "one by signal.signal(signal.SIGUSR1, ...), save a checkpoint, and end with sys.exit(128 + signal.SIGUSR1)"
    )
    if (assigned := terms.task()) is not None:
        record(assigned.logs, terms.rank(), error)
    os._exit(1)


def end_with_parent(parent: int | None = None) -> None:
    """Get SIGTERM, then SIGKILL, after ``parent`` (default: the current one) ends; exit if it has ended."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
    if parent is not None and os.getppid() != parent:
        sys.exit(f"the launcher, process {parent}, ended while this rank started; start the job again")
    launcher = os.pidfd_open(os.getppid())
    limit_s = float(terms.setting("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or terms.SHUTDOWN_S)

    def follow() -> None:
        select.select([launcher], [], [])
        time.sleep(limit_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, name="meshpar-launcher", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
