"""``meshpar launch``: render a job for an engine, check it first, and hand it over where asked."""

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
    """Render a job into the run's folder and return what to tell.

    Args:
        target: a plugin of ``meshpar.launchers``.
        source: the recipe.
        overrides: of the recipe.
        nodes: of the job.
        gpus_per_node: accelerators of a node; 0: CPUs.
        nproc: ranks of a node; None: one an accelerator.
        mesh: instead of the recipe's. ``auto`` (``auto,tp=8``): shards and tp inside a node, replicas across.
        elastic: go on with fewer nodes when some are lost.
        preflight: what the doctor's findings do at the start; None: the recipe's, and where that is off, warn.
        options: of the target, ``partition=gpu``.
        submit: hand it over.

    Raises:
        MeshparError: everything that does not fit.
    """
    ranks = nproc or gpus_per_node
    if not ranks:
        raise LaunchError("say what a node has: --gpus-per-node, or --nproc for ranks on CPUs (--gpus-per-node 0)")
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
    """Return the recipe with HybridShard for FullyShard: a mesh by topology has replicas across the nodes."""
    passes = tuple({"HybridShard" if name == "FullyShard" else name: given for name, given in each.items()} for each in recipe.passes)
    note = "mesh auto: FullyShard became HybridShard, with the same options" if passes != recipe.passes else None
    return recipe.model_copy(update={"passes": passes}).noting([*recipe.notes, *([note] if note else [])])


def _refuse_problems(recipe: Recipe, spec: MeshSpec, gpus_per_node: int, *, elastic: bool, target: str) -> None:
    problems = build.check_job(recipe, spec.size)
    if gpus_per_node and recipe.device == "cpu":
        problems.append(f"the recipe says device: cpu and the job has {gpus_per_node} GPUs a node; drop one of the two")
    if not gpus_per_node and recipe.device not in ("auto", "cpu"):
        problems.append(f"the recipe says device: {recipe.device} and the job has no GPUs; give --gpus-per-node")
    if elastic and target != "slurm":
        problems.append(f"--elastic is for slurm; {target} starts the whole job again after a failure")
    if problems:
        raise PlanError(problems)


def _submitted(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise LaunchError(f"{command[0]} is not on this machine; submit where it is: {' '.join(command)}") from error
    if done.returncode:
        raise LaunchError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()
