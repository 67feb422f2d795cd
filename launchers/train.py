"""``meshpar train``: read the recipe, check it, and run it here or on ranks of this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.errors import record

from meshpar import runtime
from meshpar.errors import PlanError, RecipeError
from meshpar.launchers import build, slurm
from meshpar.launchers.job import run_job
from meshpar.launchers.local import launch_local
from meshpar.launchers.recipe import Recipe, load_recipe


def train_recipe(source: str, overrides: Sequence[str] = (), *, nproc: int | None = None, quiet: bool = False) -> int:
    """Train a recipe and return the exit code; see :func:`meshpar.launchers.local.launch_local`.

    Raises:
        MeshparError: what is wrong with the recipe, or went wrong.
    """
    recipe = load_recipe(source, overrides)
    slurm.adopt()
    if runtime.launched():
        if nproc is not None:
            raise RecipeError("--nproc starts ranks, but this process is a rank already; give the number to torchrun or srun")
        if runtime.is_main() and not quiet:
            _show(recipe)
        return _as_rank(recipe) or 0
    ranks = build.world_size_of(recipe) if nproc is None else nproc
    return launch(recipe, ranks, quiet=quiet)


def launch(recipe: Recipe, ranks: int, *, quiet: bool = False) -> int:
    """Check a recipe on ``ranks`` ranks, then run it: in this process where it is one rank, else on processes of this machine.

    Raises:
        PlanError, RecipeError: everything that does not fit, before any rank starts.
        MeshparError: what went wrong.
    """
    _check(recipe, ranks, build.machine_problems(recipe, ranks))
    if not quiet:
        _show(recipe)
    return exit_code(run_job(recipe).stopped) if ranks == 1 else launch_local(recipe, ranks)


def exit_code(stopped: str | None) -> int:
    """Return 0 for a complete run, and 128 + the signal's number for one that was asked to stop."""
    return 0 if stopped is None else 128 + {"SIGINT": 2, "SIGTERM": 15}.get(stopped, 15)


@record  # torchrun shows the error of the rank that failed first
def _as_rank(recipe: Recipe) -> int:
    _check(recipe, runtime.world_size(), [])
    return exit_code(run_job(recipe).stopped)


def _check(recipe: Recipe, ranks: int, found: Sequence[str]) -> None:
    problems = [*found, *build.check_job(recipe, ranks)]
    if problems:
        raise PlanError(problems)


def _show(recipe: Recipe) -> None:
    print(recipe.to_yaml(), file=sys.stderr)
    for note in recipe.notes:
        print(f"note: {note}", file=sys.stderr)
