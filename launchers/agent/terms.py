"""What a launcher and its ranks agree on: a task as one value, exit codes, marker files and waits."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, final

from meshpar.process.signals import STOPPING

NO_USE = 78
"""Exit code when another start would fail as well (sysexits.h: EX_CONFIG): problems of a recipe or plan, a failed
preflight, or starts that make no step."""

RETRY = 75
"""Exit code of a replica that cannot go on with the others, when another start may succeed (sysexits.h:
EX_TEMPFAIL).
"""

STOPPED = {128 + number for number in STOPPING}
"""Exit codes of ranks that a signal stopped."""

COMPLETE, NO_RESTART = "complete", "no-restart"
"""Marker files in a start's log folder: the job is complete; another start would fail like this one."""

MEETING_S = 900
"""Seconds that agents of different nodes wait for one another."""

SILENT_S = 20.0
"""Seconds without a word after which a node of a replica is lost. A killed node is noticed at once, because its
connection closes.
"""

SHUTDOWN_S = 600
"""Seconds between a signal, after which ranks write a checkpoint, and SIGKILL."""

OTHERS_S = 1.0
"""Seconds that a rank or node gives the others to write their errors, so that the first can be named."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """Describe what the ranks of this node do in one start of a job. The launcher writes it, and each rank reads it.

    Attributes:
        logs: folder of the start's logs, which nodes may share.
        scratch: folder of this machine for errors that cannot be written to the logs, as on a full disk.
        kind: what is run.
        what: path of the script, or name of the module; empty for a recipe.
        arguments: of the script or module.
        recipe: the resolved recipe, see :meth:`meshpar.launchers.recipes.recipe.Recipe.sent`.
        terminal: whether rank 0 writes to the launcher's terminal.
        most_ranks: number of ranks of an elastic job without lost nodes; 0 in any other job.
        launcher: number of the launcher's process, with which the ranks end.
    """

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
        """Write the task into its folder ``scratch``, as JSON."""
        (self.scratch / _FILE).write_text(json.dumps(asdict(self), default=str), encoding="utf-8")


def read_task(folder: Path) -> RankTask:
    """Return the task that :meth:`RankTask.write` wrote into a folder."""
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
