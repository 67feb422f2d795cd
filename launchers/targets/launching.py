"""``meshpar launch``: check a job, render it for a scheduler, and submit it on request."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from meshpar import registry
from meshpar.errors import LaunchError, PlanError
from meshpar.launchers.jobs import build
from meshpar.launchers.recipes.recipe import Recipe, load_recipe
from meshpar.launchers.targets.job import Job, make_target
from meshpar.mesh import MeshSpec, is_auto


def launch_job(
    target: str,
    source: str,
    overrides: Sequence[str],
    *,
    nodes: int,
    gpus_per_node: int,
    nproc: int | None = None,
    mesh: str | None = None,
    elastic: bool = False,
    preflight: str | None = None,
    options: Sequence[str] = (),
    submit: bool = False,
) -> str:
    """Render a job into the run's folder and return a summary as text.

    Args:
        target: name of a plugin of ``meshpar.launchers``.
        source: the recipe: a file, or a name.
        overrides: fields of the recipe to set.
        nodes: number of nodes.
        gpus_per_node: accelerators per node; 0: run on CPUs.
        nproc: ranks per node; None: one per accelerator.
        mesh: replaces the recipe's mesh. ``auto`` (or ``auto,tp=8``): shards and tp inside a node, replicas across nodes.
        elastic: continue with fewer nodes when some are lost.
        preflight: ``warn``, ``fail`` or ``off``; None: the recipe's value, or ``warn`` if that is ``off``.
        options: options of the target, ``partition=gpu``.
        submit: whether to submit the job.

    Raises:
        MeshparError: listing every problem.
    """
    ranks = nproc or gpus_per_node
    if not ranks:
        raise LaunchError("the number of ranks per node is 0; pass --gpus-per-node, or for CPUs --gpus-per-node 0 --nproc RANKS")
    plugin = make_target(target, registry.plugin("meshpar.launchers", target), options)
    wants = overrides if mesh is None else [*overrides, f"mesh={MeshSpec.placed(mesh, nodes * ranks, ranks)}"]
    wants = wants if preflight is None else [*wants, f"preflight='{preflight}'"]
    recipe = load_recipe(source, wants)
    spec = MeshSpec.placed(recipe.mesh, nodes * ranks, ranks)
    if is_auto(recipe.mesh if mesh is None else mesh):
        recipe = _hybrid(recipe)
    wanted = "warn" if preflight is None and recipe.preflight == "off" else recipe.preflight
    recipe = recipe.model_copy(update={"mesh": str(spec), "preflight": wanted}).noting(recipe.notes)
    _refuse_problems(recipe, spec, gpus_per_node, elastic=elastic, target=target)
    folder = recipe.folder.absolute()
    job = Job(
        name=recipe.name,
        folder=folder,
        recipe=recipe.to_yaml(),
        mesh=spec,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        ranks_per_node=ranks,
        elastic=elastic,
        command=("meshpar", *sys.argv[1:]),
    )
    files = plugin.render(job)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    path = folder / next(iter(files))
    told = [f"{job.name}: {spec.size} ranks, {spec} on {nodes} x {ranks}", *(f"  {folder / name}" for name in files)]
    told += [f"note: {note}" for note in recipe.notes]
    command = plugin.submit(path)
    told.append(_submitted(command) if submit else f"submit it: {' '.join(command)}")
    return "\n".join(told)


def _hybrid(recipe: Recipe) -> Recipe:
    """Return the recipe with HybridShard instead of FullyShard, because ``mesh: auto`` puts replicas across nodes."""
    passes = tuple({"HybridShard" if name == "FullyShard" else name: given for name, given in each.items()} for each in recipe.passes)
    note = "mesh auto: FullyShard became HybridShard, with the same options" if passes != recipe.passes else None
    return recipe.model_copy(update={"passes": passes}).noting([*recipe.notes, *([note] if note else [])])


def _refuse_problems(recipe: Recipe, spec: MeshSpec, gpus_per_node: int, *, elastic: bool, target: str) -> None:
    problems = build.check_job(recipe, spec.size)
    if gpus_per_node and recipe.device == "cpu":
        problems.append(f"the recipe has device: cpu and the job has {gpus_per_node} GPUs per node; remove one of the two")
    if not gpus_per_node and recipe.device not in ("auto", "cpu"):
        problems.append(f"the recipe has device: {recipe.device} and the job has no GPUs; pass --gpus-per-node")
    if elastic and target != "slurm":
        problems.append(f"--elastic requires the target slurm; {target} restarts the whole job after a failure")
    if problems:
        raise PlanError(problems)


def _submitted(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise LaunchError(f"{command[0]} is not installed here; submit from a machine that has it: {' '.join(command)}") from error
    if done.returncode:
        raise LaunchError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()
