"""Starts of a job that made no new step: a job whose last two starts made none is not started again."""

from __future__ import annotations

import os
from pathlib import Path

from meshpar.errors import RepeatedFailureError

MOST = 2
"""Number of starts in a row without a new step after which a job ends."""


def begin(logs: Path) -> None:
    """Note a start of a recipe; rank 0 calls this before anything else.

    Raises:
        RepeatedFailureError: the last two starts made no new step.
    """
    if in_vain(logs):
        raise RepeatedFailureError(IN_VAIN)
    start = f"{logs.name}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if start not in _starts(logs):  # nodes that join an elastic job start its ranks again, which is no failure
        with _file(logs).open("a", encoding="utf-8") as file:
            file.write(f"{start}\n")


def made_step(logs: Path) -> None:
    """Note that this start has made a new step."""
    _file(logs).unlink(missing_ok=True)


def failed_at(logs: Path, step: int) -> None:
    """Note how many steps were complete when this start failed; the next start makes a new step after these."""
    _file(logs).with_suffix(".failed-at").write_text(str(step), encoding="utf-8")


def last_failed_at(logs: Path) -> int:
    """Return how many steps were complete when a start of the job failed last; -1: none did."""
    file = _file(logs).with_suffix(".failed-at")
    return int(file.read_text(encoding="utf-8")) if file.exists() else -1


def in_vain(logs: Path) -> bool:
    """Return whether the last two starts made no new step."""
    return len(_starts(logs)) >= MOST


IN_VAIN = (
    f"the job's last {MOST} starts made no new step, so it is not started again; "
    "correct the first error in their logs, then submit the job anew"
)


def _starts(logs: Path) -> list[str]:
    file = _file(logs)
    return file.read_text(encoding="utf-8").split() if file.exists() else []


def _file(logs: Path) -> Path:
    """Return the file beside the folders of all starts; the scheduler's job has its id in MESHPAR_JOB_ID."""
    return logs.parent / f"{os.environ.get('MESHPAR_JOB_ID') or logs.name}.no-step"
