"""``meshpar train``, and ``meshpar run`` of a recipe, on nodes or as replicas."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from meshpar.core import runtime
from meshpar.core.errors import FullMemoryError, LaunchError, PlanError, RecipeError
from meshpar.core.mesh import MeshSpec, is_auto
from meshpar.launchers.agent import local, replicas
from meshpar.launchers.agent.failures import tell_first
from meshpar.launchers.agent.local import Given, launch_local, launch_recipe, node_range, place_ranks
from meshpar.launchers.agent.replicas import Division, check_elastic, divide_replicas, launch_replicas
from meshpar.launchers.agent.terms import adopt_srun
from meshpar.launchers.jobs import build
from meshpar.launchers.jobs.checks import check_job, machine_problems
from meshpar.launchers.jobs.job import run_job
from meshpar.launchers.jobs.worker import end_with_parent
from meshpar.launchers.recipes.loading import load_recipe, resolve
from meshpar.launchers.recipes.recipe import Recipe
from meshpar.launchers.recipes.yamlfile import apply_overrides, parse_document
from meshpar.process.waiting import exit_code_of
from meshpar.training.lighthouse import lighthouse_address, this_replica

_TRIAL = """
data.accumulate=1 same_bits=false data.validation_fraction=0 data.validation_paths=[]
training.steps=3 training.epochs=null training.log_every=1 training.validate_every=null training.tensorboard=false
training.forecast=false schedule.steps=3 schedule.warmup_steps=0 trackers={} evaluations={}
checkpoint.resume=auto checkpoint.every=null checkpoint.best=null
"""


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
    """Train a recipe and return the exit code.

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
    recipe = load_recipe(source, overrides, trust=True)
    adopt_srun()
    tell_origins(recipe)
    if runtime.launched():
        if nproc is not None:
            raise RecipeError(
                "--nproc starts ranks, but this process is already a rank; give the number to torchrun or srun"
            )
        if runtime.is_main() and not quiet:
            show(recipe)
        return run_as_rank(recipe) or 0
    ranks = build.world_size_of(recipe) if nproc is None else nproc
    if find_batch:
        recipe = find_batch_size(recipe, lambda candidate: launch_local(candidate, ranks), memory)
    if nodes > 1:
        check(recipe, ranks * nodes, [])
        return replicas.launch_nodes_here(recipe, nodes, ranks)
    return launch(recipe, ranks, quiet=quiet)


def launch(recipe: Recipe, ranks: int, *, quiet: bool = False) -> int:
    """Check a recipe and run it: in this process for one rank, else on processes of this machine."""
    check(recipe, ranks, machine_problems(recipe, ranks))
    if not quiet:
        show(recipe)
    return exit_code_of(run_job(recipe).stopped) if ranks == 1 else launch_local(recipe, ranks)


@record  # torchrun shows the error of the rank that failed first
def run_as_rank(recipe: Recipe) -> int:
    """Check and run a recipe in a process that another launcher made a rank, and return the exit code."""
    check(recipe, runtime.world_size(), [])
    return exit_code_of(run_job(recipe).stopped)


def check(recipe: Recipe, ranks: int, found: Sequence[str], *, replica: bool = False) -> None:
    """Raise PlanError with the problems ``found`` and those of a recipe, or of a ``replica``'s, on ``ranks`` ranks."""
    problems = [*found, *check_job(recipe, ranks, replica=replica)]
    if problems:
        raise PlanError(problems)


def tell_origins(recipe: Recipe) -> None:
    """Print which of a recipe's own classes are imported from where: a job runs them, as it runs a script."""
    if runtime.is_main() and (line := recipe.classes.origins()):
        print(line, file=sys.stderr)


def show(recipe: Recipe) -> None:
    print(recipe.to_yaml(), file=sys.stderr)
    for note in recipe.notes:
        print(f"note: {note}", file=sys.stderr)


def run_recipe(
    source: str,
    overrides: Sequence[str],
    given: Given,
    placement: Mapping[str, object],
    logs: Path | None,
    elastic: str | None,
) -> int:
    """Run a recipe for ``meshpar run``; ``given`` is ``placement`` with Kubeflow's variables."""
    recipe = load_recipe(source, overrides, trust=True)
    step = None if elastic is not None else local.adopt_rank(given, placement)
    tell_origins(recipe)
    if elastic is not None:
        return _run_replicas(recipe, given, logs, elastic)
    if step is not None:
        with tell_first(logs or recipe.folder / "logs", runtime.rank(), step):
            if runtime.is_main():
                show(recipe)
            return run_as_rank(recipe) or 0
    here = place_ranks(given, partial(_ranks_here, recipe))
    check(recipe, here.ranks * here.nodes, machine_problems(recipe, here.ranks))
    if this_replica()[1]:
        end_with_parent()
    elif not here.node_rank:
        show(recipe)
    return launch_recipe(recipe, here, logs)


def _run_replicas(recipe: Recipe, given: Given, logs: Path | None, elastic: str) -> int:
    check_elastic(elastic)
    if odd := [f"--{name.replace('_', '-')}" for name in ("rejoin_s", "run_id", "meeting_s") if name in given]:
        why = "the recipe's patience bounds the waits of replicas"
        raise LaunchError(f"--elastic=replicas does not support {', '.join(odd)}; leave out such options: {why}")
    division = division_of(recipe, given)
    head, node_rank, nodes = given.get("head", ""), given.get("node_rank", 0), node_range(str(given.get("nodes", 1)))[1]
    if nodes > 1 and not (head or lighthouse_address()):
        raise LaunchError(
            f"{nodes} nodes require --head for the replicas' lighthouse: HOST:PORT with a free port of node 0, or "
            "FOLDER/FILE that all nodes see, into which node 0 writes its address"
        )
    replica, ranks = division.recipe(recipe), division.ranks_here * len(division.here)
    check(replica, division.ranks, machine_problems(replica, ranks), replica=True)
    if not node_rank:
        show(recipe)
    return launch_replicas(recipe, division, head, node_rank, given.get("restarts"), logs)


def division_of(recipe: Recipe, given: Given) -> Division:
    least, nodes = node_range(str(given.get("nodes", 1)))
    if least != nodes:
        raise LaunchError("--elastic=replicas and --nodes MIN:MAX are two kinds of elastic jobs; give --nodes a number")
    ranks = local.ranks_on_node(given, nodes, partial(_ranks_here, recipe))
    return divide_replicas(MeshSpec.placed(recipe.mesh, ranks * nodes, ranks), nodes, given.get("node_rank", 0))


def _ranks_here(recipe: Recipe, nodes: int) -> int:
    """Return the number of ranks on this node, from the recipe's mesh or this machine's accelerators."""
    if nodes == 1:
        return build.world_size_of(recipe)
    if not runtime.on_host(build.device_type(recipe)):
        return local.accelerators()
    world = build.world_size_of(recipe)
    if is_auto(recipe.mesh) or -1 in MeshSpec(recipe.mesh).axes.values():
        return world  # of one node: such a mesh takes as many nodes as there are
    if world % nodes:
        raise LaunchError(
            f"the mesh {recipe.mesh} has {world} ranks, which {nodes} nodes cannot share evenly; change the mesh or "
            "--nodes"
        )
    return world // nodes


def find_batch_size(recipe: Recipe, run: Callable[[Recipe], int], memory: int | None) -> Recipe:
    """Return the recipe with the largest micro-batch in ``memory`` bytes per rank and the same samples per step."""
    if memory is None and runtime.on_host(build.device_type(recipe)):
        raise RecipeError(
            "--find-batch-size on a CPU needs --memory 4GiB, or another limit per rank: there is no device memory to "
            "fill"
        )
    whole = recipe.data.micro_batch * recipe.data.accumulate
    sizes, best = [size for size in range(1, whole + 1) if whole % size == 0], 0
    low, high = 0, len(sizes) - 1
    while low <= high:
        middle = (low + high + 1) // 2
        peak = try_batch(recipe, run, sizes[middle])
        fits = peak is not None and (memory is None or peak <= memory)
        used = "runs out of memory" if peak is None else f"{peak / 2**30:.2f} GiB a rank{'' if fits else ', too much'}"
        print(f"micro-batch {sizes[middle]}: {used}", file=sys.stderr, flush=True)
        if fits:
            best, low = sizes[middle], middle + 1
        else:
            high = middle - 1
    if not best:
        raise RecipeError(
            "not even a micro-batch of 1 fits; shard more (mesh), recompute (ActivationCheckpoint) or shorten the "
            "sequence"
        )
    fields = [f"data.micro_batch={best}", f"data.accumulate={whole // best}"]
    print(f"found: {' '.join(fields)}, {whole} samples per data rank and step, as before", file=sys.stderr)
    return _override(recipe, fields)


def try_batch(recipe: Recipe, run: Callable[[Recipe], int], size: int) -> int | None:
    """Train a few steps with a micro-batch of ``size``; return a rank's peak in bytes, None if it exceeds memory."""
    with tempfile.TemporaryDirectory(prefix="meshpar-batch-") as folder:
        fields = [f"output={folder}", f"data.micro_batch={size}", *_TRIAL.split()]
        try:
            stopped = run(_override(recipe, fields))
        except FullMemoryError:
            return None
        if stopped:
            raise SystemExit(stopped)
        lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    peaks = [record["memory_gib"] for record in map(json.loads, lines) if record.get("memory_gib")]
    return int(max(peaks) * 2**30)


def _override(recipe: Recipe, fields: list[str]) -> Recipe:
    document = parse_document(recipe.to_yaml(), recipe.name)
    apply_overrides(document, fields)
    return resolve(document, trust=True)
