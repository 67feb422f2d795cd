"""Terms of a launcher and its ranks: variables, which launchers read here alone, tasks, exit codes and waits."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, final

from meshpar.core.errors import LaunchError
from meshpar.process.waiting import STOPPING

_PORTS, _FIRST_PORT = 10_000, 20_000

NO_USE = 78
"""Exit code when another start would fail as well (sysexits.h: EX_CONFIG)."""

RETRY = 75
"""Exit code when another start may succeed (sysexits.h: EX_TEMPFAIL), such as the watchdog's."""

STOPPED = {128 + number for number in STOPPING}
"""Exit codes of ranks that a signal stopped."""

COMPLETE, NO_RESTART = "complete", "no-restart"
"""Marker files in a start's log folder: the job is complete; another start would fail like this one."""

MEETING_S = 900
"""Seconds that agents of different nodes wait for one another."""

SILENT_S = 20.0
"""Seconds without a word after which a node of a replica is lost; a killed one closes its connection at once."""

SHUTDOWN_S = 600
"""Seconds between a signal, after which ranks write a checkpoint, and SIGKILL."""

OTHERS_S = 1.0
"""Seconds that a rank or node gives the others to write their errors, so that the first can be named."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """The task of this node's ranks in one start of a job. The launcher writes it, and each rank reads it."""

    logs: Path
    scratch: Path
    kind: Literal["recipe", "script", "module"] = "recipe"
    what: str = ""
    arguments: tuple[str, ...] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict)
    terminal: bool = False
    most_ranks: int = 0
    launcher: int = field(default_factory=os.getpid)

    def write(self) -> None:
        (self.scratch / _FILE).write_text(json.dumps(asdict(self), default=str), encoding="utf-8")


def read_task(folder: Path) -> RankTask:
    fields = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    paths = {name: Path(fields[name]) for name in ("logs", "scratch")}
    return RankTask(**{**fields, **paths, "arguments": tuple(fields["arguments"])})


_FILE = "task.json"
_tasks: list[RankTask] = []


@contextmanager
def at_work(task: RankTask) -> Iterator[RankTask]:
    """Let :func:`task` find the task of a launcher or of a rank in its process."""
    _tasks.append(task)
    try:
        yield task
    finally:
        _tasks.pop()


def task() -> RankTask | None:
    """Return the task at which this process works; None in one that no launcher of meshpar started."""
    return _tasks[-1] if _tasks else None


def rank() -> int:
    return int(os.environ["RANK"])


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def restarts() -> tuple[int, int]:
    """Return how often torch's agent has started the ranks again, and how often it may."""
    count, limit = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return int(count), int(limit)


def series() -> str:
    """Return the scheduler's id of the job, which its starts share; empty without a scheduler that sets one."""
    return os.environ.get("MESHPAR_JOB_ID", "")


def setting(name: str) -> str:
    return os.environ.get(name, "")


def kubeflow() -> dict[str, str]:
    """Return Kubeflow's variables, which have the names of torchrun's options, without their prefix."""
    return {name.removeprefix("PET_"): value for name, value in os.environ.items() if name.startswith("PET_")}


def inherited(changes: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, **changes}


def suggest(values: Mapping[str, str]) -> None:
    """Set variables that nobody has set, for this process and those that it starts."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def adopt_srun() -> str:
    """Set RANK and the others in a step of several srun tasks; return its id, empty outside and under torchrun."""
    step = {name: value for name, value in os.environ.items() if name.startswith("SLURM_")}
    if "RANK" in os.environ or not {"SLURM_PROCID", "SLURM_STEP_ID"} <= step.keys():
        return ""
    tasks = step.get("SLURM_STEP_NUM_TASKS", "1")
    if not tasks.isdigit():
        raise LaunchError(f"SLURM_STEP_NUM_TASKS is {tasks!r}; expected the number of tasks of this step")
    if int(tasks) < 2:
        return ""
    try:
        job = int(step["SLURM_JOB_ID"]) + int(step["SLURM_STEP_ID"])
        values = {
            "RANK": step["SLURM_PROCID"],
            "WORLD_SIZE": step["SLURM_STEP_NUM_TASKS"],
            "LOCAL_RANK": step["SLURM_LOCALID"],
            "LOCAL_WORLD_SIZE": re.split(r"[(,]", step["SLURM_STEP_TASKS_PER_NODE"])[0],
            "MASTER_ADDR": first_node(step["SLURM_STEP_NODELIST"]),
            "MASTER_PORT": str(_FIRST_PORT + job % _PORTS),
        }
    except (KeyError, ValueError) as error:
        raise LaunchError(
            f"this is a task of a SLURM step, but {error} is missing or cannot be read; start it with srun, or with "
            "torchrun"
        ) from error
    suggest(values)
    return f"{step['SLURM_JOB_ID']}.{step['SLURM_STEP_ID']}-{step.get('SLURM_RESTART_COUNT', '0')}"


def threads(ranks: int) -> int:
    """Return the threads of each of so many ranks of this machine."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, cores // ranks)


def first_node(text: str) -> str:
    """Return the first host of a SLURM node list: ``n[01-04,7],m1`` -> ``n01``, ``rack[1-2]n[3,5]`` -> ``rack1n3``."""
    head = re.match(r"(?:[^\[\],]|\[\d[^\[\]]*\])+(?=,|$)", text)
    if head is None:
        raise LaunchError(f"cannot read SLURM node list {text!r}")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", head[0])


def log_file(logs: Path, rank: int) -> Path:
    return logs / f"rank-{rank}.log"


def start_id() -> str:
    """Return a name for a start of a job, made of time and PID."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
