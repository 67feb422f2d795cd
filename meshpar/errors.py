"""The exceptions of meshpar, one tree."""

from __future__ import annotations

from collections.abc import Sequence


class MeshparError(Exception):
    """Anything that meshpar refuses or cannot do; catch this one to catch them all."""


class MeshError(MeshparError, ValueError):
    """A mesh whose text, names or sizes do not fit."""


class LayoutError(MeshparError, ValueError):
    """A model's description that does not match the model."""


class PlanError(MeshparError, ValueError):
    """A plan that cannot run on this model and mesh.

    Attributes:
        problems: every problem found, one line each, in the same order on every rank.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''} in this plan"
        super().__init__("\n".join([count, *(f"  {number}. {text}" for number, text in enumerate(self.problems, 1))]))

    def __reduce__(self) -> tuple[type[PlanError], tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)


class ParallelError(MeshparError, RuntimeError):
    """An error raised inside a parallel module, told with the module's name, its placements, the likely cause and the remedy."""


class CheckpointError(MeshparError):
    """A checkpoint that cannot be written, read or trusted."""


class StoreError(CheckpointError):
    """An object store that refuses a request or does not answer: no word on the checkpoints in it."""


class RecipeError(MeshparError, ValueError):
    """A recipe that cannot be read or does not fit; the message names the line, the key and the nearest valid one."""


class LaunchError(MeshparError):
    """A job that cannot be started or has failed."""


class RepeatedFailureError(LaunchError):
    """A job that is not started again, because its last starts failed before their first step."""


class ReplicaError(LaunchError):
    """A replica that cannot go on with the others; another start resumes from them or from the newest checkpoint."""


class PreflightError(LaunchError):
    """A machine that does not fit the job: what the doctor found before training."""


def brief(error: Exception) -> str:
    """Return an error's type and what it says, in at most 200 characters: errors about a file's contents may quote all of them.

    Not ``repr``: that of a UnicodeDecodeError is the whole file.
    """
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= 200 else f"{text[:197]}..."
