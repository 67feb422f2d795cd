"""``meshpar train``: read a recipe, check it, and run it in this process or on ranks of this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.errors import record

from meshpar import runtime
from meshpar.errors import PlanError, RecipeError
from meshpar.launchers.agent import slurm
from meshpar.launchers.agent.local import launch_local
from meshpar.launchers.agent.nodes_here import launch_nodes_here
from meshpar.launchers.jobs import build
from meshpar.launchers.jobs.batch_size import find_batch_size
from meshpar.launchers.jobs.job import run_job
from meshpar.launchers.jobs.worker import code_of
from meshpar.launchers.recipes.recipe import Recipe, load_recipe


def train_recipe(
    source: str,
    overrides: Sequence[str] = (),
    *,
    nproc: int | None = None,
    quiet: bool = False,
    nodes: int = 1,
    find_batch: bool = False,
    memory: int | None = None,
) -> int:
    """Train a recipe and return the exit code; see :func:`meshpar.launchers.agent.local.launch_local`.

    Args:
        source: a file, or the name of a recipe that comes with meshpar.
        overrides: fields to set, ``training.steps=50``.
        nproc: number of ranks on this machine, or on each of ``nodes``.
        quiet: do not print the recipe.
        nodes: number of nodes to simulate on this machine.
        find_batch: find the largest micro-batch first.
        memory: memory limit of a rank in bytes for ``find_batch``.

    Raises:
        MeshparError: the recipe has problems, or the run failed.
    """
    recipe = load_recipe(source, overrides)
    slurm.adopt()
    if runtime.launched():
        if nproc is not None:
            raise RecipeError("--nproc starts ranks, but this process is already a rank; give the number to torchrun or srun")
        if runtime.is_main() and not quiet:
            show(recipe)
        return run_as_rank(recipe) or 0
    ranks = build.world_size_of(recipe) if nproc is None else nproc
    if find_batch:
        recipe = find_batch_size(recipe, lambda each: launch_local(each, ranks), memory)
    if nodes > 1:
        check(recipe, ranks * nodes, [])
        return launch_nodes_here(recipe, nodes, ranks)
    return launch(recipe, ranks, quiet=quiet)


def launch(recipe: Recipe, ranks: int, *, quiet: bool = False) -> int:
    """Check a recipe on ``ranks`` ranks, then run it: in this process for one rank, otherwise on processes of this machine.

    Raises:
        PlanError, RecipeError: the recipe or the plan has problems; raised before any rank starts.
        MeshparError: the run failed.
    """
    check(recipe, ranks, build.machine_problems(recipe, ranks))
    if not quiet:
        show(recipe)
    return code_of(run_job(recipe).stopped) if ranks == 1 else launch_local(recipe, ranks)


@record  # torchrun shows the error of the rank that failed first
def run_as_rank(recipe: Recipe) -> int:
    """Check and run a recipe in a process that another launcher made a rank, and return the exit code."""
    check(recipe, runtime.world_size(), [])
    return code_of(run_job(recipe).stopped)


def check(recipe: Recipe, ranks: int, found: Sequence[str]) -> None:
    """Raise PlanError with the problems ``found`` and with those of a recipe on ``ranks`` ranks."""
    problems = [*found, *build.check_job(recipe, ranks)]
    if problems:
        raise PlanError(problems)


def show(recipe: Recipe) -> None:
    """Print the resolved recipe and its notes."""
    print(recipe.to_yaml(), file=sys.stderr)
    for note in recipe.notes:
        print(f"note: {note}", file=sys.stderr)
