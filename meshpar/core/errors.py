"""The exceptions of meshpar, one tree."""

from __future__ import annotations

import time
from collections.abc import Sequence

from meshpar.process.secrets import redact


class MeshparError(Exception):
    """Base class of all errors of meshpar: catch it to catch them all."""


class MeshError(MeshparError, ValueError):
    """Raised for a mesh whose text, names or sizes are invalid."""


class LayoutError(MeshparError, ValueError):
    """Raised for a layout that does not match its model."""


class PlanError(MeshparError, ValueError):
    """Raised for a plan that cannot run on this model and mesh.

    Attributes:
        problems: every problem found, one line each, in the same order on every rank.
    """

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''} in this plan"
        super().__init__("\n".join([count, *(f"  {number}. {text}" for number, text in enumerate(self.problems, 1))]))

    def __reduce__(self) -> tuple[type[PlanError], tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)


class ParallelError(MeshparError, RuntimeError):
    """Raised inside a parallel module, with the module's name, its placements, the likely cause and the remedy."""


class CheckpointError(MeshparError):
    """Raised for a checkpoint that cannot be written, read or trusted."""


class StoreError(CheckpointError):
    """Raised for an object store that refuses a request or does not answer; its checkpoints may be intact."""


class RecipeError(MeshparError, ValueError):
    """Raised for a recipe that is unreadable or invalid; names the line, the key and the nearest valid key."""


class LaunchError(MeshparError):
    """Raised for a job that cannot start or has failed."""


class RepeatedFailureError(LaunchError):
    """Raised for a job that is not started again, because its last starts failed before their first step."""


class FullMemoryError(LaunchError):
    """Raised for a rank that ran out of memory, or was killed, as the kernel does when memory runs out."""


class ReplicaError(LaunchError):
    """Raised for a replica that cannot continue with the others; it can start again and resume from them."""


class PreflightError(LaunchError):
    """Raised for machines that do not fit the job. The message has the findings of the doctor."""


def brief(error: BaseException) -> str:
    """Return an error's type and message, redacted, in at most 200 characters: ``repr`` may quote a whole file."""
    text = redact(f"{type(error).__name__}: {error}")
    return text if len(text) <= 200 else f"{text[:197]}..."


def shown(value: object) -> str:
    """Return a value as a message has it, in at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; empty where the error has no message."""
    return str(error).partition("\n")[0]


notes: dict[str, str] = {}
"""A part of an error's message that is torch's own -> what to do, which its traceback shows at its end."""


def note(error: BaseException) -> None:
    """Add what to do to an error of torch's that is known."""
    for said, remedy in () if isinstance(error, MeshparError) else notes.items():
        if said in str(error):
            error.add_note(remedy)


def seen_at(error: BaseException) -> float:
    """Return when this error was asked about first, in seconds since the epoch: peers fail before it tells."""
    seconds: float = error.__dict__.setdefault("_meshpar_seen_at", time.time())
    return seconds
