"""Failures of a job: error files of ranks and which failed first, stalls, and starts that made no new step."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NoReturn, final

from meshpar.core import errors
from meshpar.core.errors import LaunchError, MeshparError, PlanError, RepeatedFailureError, seen_at
from meshpar.launchers.agent import terms
from meshpar.launchers.agent.terms import NO_USE, OTHERS_S, RETRY, STOPPED, task
from meshpar.process.leftovers import write_durably
from meshpar.process.secrets import redacted

_EXITS = ("os._exit", "sys.exit")
_FULL_MEMORY = (
    "memory is full; use a smaller data.micro_batch with more data.accumulate (meshpar train RECIPE --find-batch-size "
    "tries them), ActivationCheckpoint, or more shards; meshpar plan RECIPE lists what holds the memory"
)
MOST_STARTS = 2
"""Number of starts in a row without a new step after which a job ends."""
_CONNECT_S = 60.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One rank's error: class, text, seconds since the epoch, and a traceback unless the error is meshpar's own."""

    rank: int
    host: str = field(default_factory=socket.gethostname)
    kind: str = "LaunchError"
    message: str
    trace: str = ""
    problems: tuple[str, ...] = ()
    seconds: float = 0.0
    full: bool = False


def record(logs: Path, rank: int, error: BaseException, *, hide: str = "") -> None:
    """Write a rank's error to the log folder, without the outermost frames of the file ``hide``."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == hide:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    # torch has a class for the full memory of devices alone
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    said = str(error) if isinstance(error, RuntimeError) else ""
    failure = Failure(
        rank=rank,
        kind=type(error).__name__,
        message=str(error),
        trace="" if isinstance(error, MeshparError) else text,
        problems=error.problems if isinstance(error, PlanError) else (),
        seconds=seen_at(error),
        full=named or "can't allocate memory" in said or "out of memory" in said,
    )
    _write(logs, failure)


@contextmanager
def tell_first(logs: Path, rank: int, step: str) -> Iterator[None]:
    """In a ``step`` of srun, let the rank that fails first show its traceback; the others name it in a LaunchError."""
    if not step:  # torchrun does so itself
        yield
        return
    logs = logs / step
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code in (None, 0, *STOPPED):
            raise
        with suppress(OSError):
            logs.mkdir(parents=True, exist_ok=True)
        record(logs, rank, error)
        time.sleep(OTHERS_S)
        first, *_ = *recorded(logs), None
        if first is None or first.rank == rank:
            raise
        then = f"then this one, rank {rank}, with {type(error).__name__}"
        raise LaunchError(
            f"rank {first.rank} on {first.host} failed first, with {first.kind}: {first.message}\n{then}"
        ) from error


def record_stall(logs: Path, rank: int, message: str, *, cause: bool = True) -> None:
    """Write the watchdog's reason: before all other errors if it is the ``cause``, else ordered by time."""
    _write(logs, Failure(rank=rank, message=message, seconds=-1.0 if cause else time.time()))


def note_os_exit(logs: Path, rank: int) -> None:
    """Make ``os._exit`` record its caller: a rank that it ends leaves no other trace."""
    end, process = os._exit, os.getpid()

    def noted(status: int) -> NoReturn:
        if os.getpid() == process and status not in STOPPED and not error_file(logs, rank).exists():
            trace = "".join(traceback.format_stack()[:-1])
            _write(logs, Failure(rank=rank, kind=_EXITS[0], message=str(status), trace=trace, seconds=time.time()))
        end(status)

    os._exit = noted


def note_sys_exit(logs: Path, rank: int, error: SystemExit) -> None:
    """Record who called ``sys.exit`` without an error: the likely cause if other ranks then fail."""
    trace = "".join(traceback.format_tb(error.__traceback__))
    _write(logs, Failure(rank=rank, kind=_EXITS[1], message="0", trace=trace, seconds=seen_at(error)))


def forget(logs: Path, rank: int) -> None:
    for folder in _folders(logs):
        error_file(folder, rank).unlink(missing_ok=True)


def _write(logs: Path, failure: Failure) -> None:
    for folder in _folders(logs):
        path = error_file(folder, failure.rank)
        temporary = path.with_suffix(".tmp")  # others may look at any moment
        try:
            temporary.write_text(json.dumps(redacted(asdict(failure))), encoding="utf-8")
        except OSError:  # the next folder may have room
            continue
        temporary.replace(path)
        return


def _folders(logs: Path) -> list[Path]:
    working = task()
    return [logs] if working is None else [logs, working.scratch]


def record_kills(logs: Path, exit_codes: Mapping[int, int]) -> None:
    """Record ranks that ended without an error of their own, before the errors that follow from it."""
    for rank, code in exit_codes.items():
        written = any(error_file(folder, rank).exists() for folder in _folders(logs))
        if code > 0 and code not in STOPPED and not written:
            message = f"rank {rank} ended with exit code {code} and without a Python error; see its log"
            _write(logs, Failure(rank=rank, message=message))
        if code < 0 and code != -signal.SIGTERM:
            killed = code == -signal.SIGKILL
            why = "; a person or a scheduler does this, or the kernel when memory runs out" if killed else ""
            message = f"rank {rank} was ended by {signal.Signals(-code).name}{why}"
            _write(logs, Failure(rank=rank, message=message, full=killed))


def error_file(logs: Path, rank: int) -> Path:
    return logs / f"rank-{rank}.error.json"


def recorded(logs: Path) -> list[Failure]:
    return [failure for failure in _recorded(logs) if not _is_left(failure)]


def forget_left(logs: Path) -> None:
    """Delete what ranks wrote that left without an error, after a job that is complete."""
    for failure in filter(_is_left, _recorded(logs)):
        error_file(logs, failure.rank).unlink(missing_ok=True)


def _is_left(failure: Failure) -> bool:
    return failure.kind in _EXITS and failure.message == "0"


def _recorded(logs: Path) -> list[Failure]:
    failures = list[Failure]()
    for path in (path for folder in _folders(logs) for path in folder.glob("rank-*.error.json")):
        with suppress(FileNotFoundError):  # another host's launcher forgets the same files when its ranks are done
            fields = json.loads(path.read_text(encoding="utf-8"))
            failures.append(Failure(**{**fields, "problems": tuple(fields["problems"])}))
    return sorted(failures, key=lambda failure: (failure.seconds, failure.rank))


def first_error(logs: Path, exit_codes: Mapping[int, int]) -> MeshparError:
    """Return the error that ended the job: a killed rank's, or the first one recorded on any host."""
    failures = _recorded(logs)
    if not failures:
        codes = dict(exit_codes)
        return LaunchError(f"ranks ended without an error message, exit codes {codes}; see their logs in {logs}")
    first, *_ = recorded(logs) or failures
    exits = [failure for failure in failures if _is_left(failure)]
    before = [exit for exit in exits if exit.seconds < first.seconds or exit.host != first.host]
    if before and first.trace:  # its peers wait for a rank that left
        return LaunchError(f"{_as_raised(before[0])}\nThen {_as_raised(first)}")
    if first.host != socket.gethostname() and exit_codes:
        there = error_file(logs, first.rank)
        return LaunchError(f"rank {first.rank} on {first.host} failed first; see its error there, or in {there}")
    return _as_raised(first)


def exit_code(error: MeshparError) -> int:
    if isinstance(error, errors.ReplicaError):
        return RETRY
    useless = errors.RecipeError | PlanError | errors.MeshError | errors.LayoutError | errors.PreflightError
    return NO_USE if isinstance(error, useless | RepeatedFailureError) else 1


def _as_raised(failure: Failure) -> MeshparError:
    kind = getattr(errors, failure.kind, None)
    if failure.full:
        return errors.FullMemoryError(f"{_told(failure)}\n{_FULL_MEMORY}" if failure.trace else failure.message)
    if kind is PlanError:
        return PlanError(failure.problems)
    if isinstance(kind, type) and issubclass(kind, MeshparError):
        return kind(failure.message)
    if failure.kind in _EXITS:
        return LaunchError(
            f"rank {failure.rank} ended itself with {failure.kind}({failure.message})\n{failure.trace}".rstrip()
        )
    return LaunchError(_told(failure))


def _told(failure: Failure) -> str:
    return f"rank {failure.rank} failed with {failure.kind}: {failure.message}\n{failure.trace}".rstrip()


def note_start(logs: Path) -> None:
    """Note a start of a recipe, on rank 0; raises RepeatedFailureError if the last two made no new step."""
    if in_vain(logs):
        raise RepeatedFailureError(IN_VAIN)
    start = f"{logs.name}/{terms.restarts()[0]}"
    if start not in _starts(logs):  # nodes that join an elastic job start its ranks again, which is no failure
        with _starts_file(logs).open("a", encoding="utf-8") as file:
            file.write(f"{start}\n")


def made_step(logs: Path) -> None:
    _starts_file(logs).unlink(missing_ok=True)


def failed_at(logs: Path, step: int) -> None:
    """Note how many steps were complete when this start failed; the next start makes a new step after these."""
    write_durably(_starts_file(logs).with_suffix(".failed-at"), str(step))


def last_failed_at(logs: Path) -> int:
    """Return how many steps were complete when a start of the job failed last; -1: none did."""
    file = _starts_file(logs).with_suffix(".failed-at")
    return int(file.read_text(encoding="utf-8")) if file.exists() else -1


def in_vain(logs: Path) -> bool:
    return len(_starts(logs)) >= MOST_STARTS


IN_VAIN = (
    f"the job's last {MOST_STARTS} starts made no new step, so it is not started again; "
    "correct the first error in their logs, then submit the job anew"
)


def _starts(logs: Path) -> list[str]:
    file = _starts_file(logs)
    return file.read_text(encoding="utf-8").split() if file.exists() else []


def _starts_file(logs: Path) -> Path:
    """Return the file beside the folders of all starts, named by what they share."""
    return logs.parent / f"{terms.series() or logs.name}.no-step"


@contextmanager
def watch_progress(
    stall_s: float | None, progress: Callable[[], object], moves: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Run a watchdog, unless ``stall_s`` is None or the job has one rank; see :class:`Watchdog`."""
    from meshpar.core import runtime  # both load torch, which a script's rank may do without
    from meshpar.launchers.agent.watchdog import Watchdog

    if stall_s is None or runtime.world_size() == 1 or not runtime.launched():
        yield
        return
    rank, working = runtime.rank(), task()
    store = runtime.meeting_store("watchdog", timeout_s=_CONNECT_S)

    def record(verdict: str, sure: bool) -> None:
        if working is not None:
            record_stall(working.logs, rank, verdict, cause=sure)

    with Watchdog(stall_s, store, progress, rank=rank, world_size=runtime.world_size(), moves=moves, on_stall=record):
        yield
