"""``meshpar launch``: check a job, render it for a scheduler, and submit it on request."""

from __future__ import annotations

import glob
import itertools
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from meshpar.core import registry
from meshpar.core.errors import LaunchError, MeshError, PlanError
from meshpar.core.mesh import MeshSpec, is_auto
from meshpar.launchers.agent.replicas import divided
from meshpar.launchers.jobs import build
from meshpar.launchers.jobs.data_checks import untried
from meshpar.launchers.jobs.elastic import replica_problems
from meshpar.launchers.recipes.loading import load_recipe
from meshpar.launchers.recipes.recipe import Recipe
from meshpar.launchers.targets.job import COMMAND, Job, Target, ask, make_target
from meshpar.launchers.targets.launched import LAUNCH
from meshpar.process.homes import expanded
from meshpar.process.leftovers import write_durably
from meshpar.process.secrets import REMEDY, secret_words
from meshpar.training.template import TEMPLATES
from meshpar.training.text import STDLIB

ELASTIC = ("nodes", "replicas")
"""The kinds of elastic jobs."""

CHECK_S = 600
"""Seconds within which a script's own check must end."""

SUBMIT_S = 900
"""Seconds within which an engine must accept a job; SkyPilot may start its controller first."""


def launch_job(
    target: str,
    what: str,
    arguments: Sequence[str],
    *,
    nodes: int,
    gpus_per_node: int,
    nproc: int | None = None,
    mesh: str | None = None,
    elastic: str = "",
    preflight: str | None = None,
    options: Sequence[str] = (),
    submit: bool = False,
    module: bool = False,
    check: str | None = None,
) -> str:
    """Render a job into a folder of its own in the run's folder, and return a summary as text.

    Args:
        target: name of a plugin of ``meshpar.launchers``.
        what: a file ending in ``.py``, a module's name, or a recipe: a file, or a name.
        arguments: of the script; fields of the recipe to set.
        nodes: number of nodes.
        gpus_per_node: accelerators per node; 0: run on CPUs.
        nproc: ranks per node; None: one per accelerator.
        mesh: replaces the recipe's mesh. ``auto`` (or ``auto,cp=2,tp=4``): shards and the written axes inside a node,
            replicas across.
        elastic: ``"nodes"``: continue with fewer nodes when some are lost; ``"replicas"``: a lost replica costs a step;
            empty: neither.
        preflight: ``warn``, ``fail`` or ``off``; None: the recipe's value, or ``warn`` if that is ``off``.
        options: options of the target, ``partition=gpu``.
        submit: whether to submit the job.
        module: whether ``what`` is a module's name.
        check: arguments with which a script is first run here, in one process: the job is rendered if it ends with 0.

    Raises:
        MeshparError: listing every problem.
    """
    ranks = nproc or gpus_per_node
    if not ranks:
        raise LaunchError(
            "the number of ranks per node is 0; pass --gpus-per-node, or for CPUs --gpus-per-node 0 --nproc RANKS"
        )
    if words := secret_words([*arguments, *options, *shlex.split(check or "")]):
        raise LaunchError(
            f"{', '.join(words)}: this looks like a credential, and the job file and {COMMAND} are readable files; "
            f"{REMEDY}"
        )
    plugin = make_target(target, registry.plugin(registry.LAUNCHERS, target), options)
    if elastic not in ("", *ELASTIC):
        raise LaunchError(f"--elastic is {elastic!r}; expected {' or '.join(ELASTIC)}")
    if elastic and target != "slurm":
        raise LaunchError(f"--elastic requires the target slurm; {target} restarts the whole job after a failure")
    notes: Sequence[str] = ()
    place: _Place = {"nodes": nodes, "gpus_per_node": gpus_per_node, "ranks_per_node": ranks, "elastic": elastic}
    if module or what.endswith(".py"):
        run, work = _script(what, arguments, module=module, mesh=mesh, preflight=preflight, elastic=elastic)
        if check is None:
            notes = [
                "the script is not checked here; --check ARGUMENTS first runs it with these in one process, such as "
                "--check=--dry-run"
            ]
        else:
            _run_check(["-m", what] if module else [what], [*arguments, *shlex.split(check)])
    elif check is not None:
        raise LaunchError(f"--check is for scripts, and {what} is a recipe, which is always checked; leave it out")
    else:
        run, work, notes = _recipe(what, arguments, place, mesh, preflight, shares_disks=plugin.shares_disks)
    job, files = _written(plugin, run, {**work, **place, "command": ("meshpar", *sys.argv[1:])})
    path = job.folder / next(iter(files))
    mesh_text = f", {job.mesh}" if job.mesh else ""
    lines = [
        f"{job.name}: {nodes * ranks} ranks{mesh_text} on {nodes} x {ranks}",
        *(f"  {job.folder / name}" for name in files),
    ]
    lines += [f"note: {note}" for note in (*notes, *plugin.notes(job))]
    command = plugin.submit(path)
    note: Mapping[str, object] = {"target": target, "options": list(options), "file": path.name, "label": job.label}
    write_durably(job.folder / LAUNCH, json.dumps(note) + "\n")
    if submit:
        answer = ask(command, SUBMIT_S)
        write_durably(job.folder / LAUNCH, json.dumps({**note, "submitted": answer}) + "\n")
    lines.append(answer if submit else f"submit it: {shlex.join(command)}")
    return "\n".join(lines)


class _Place(TypedDict):
    nodes: int
    gpus_per_node: int
    ranks_per_node: int
    elastic: str


def _placed(mesh: str, nodes: int, ranks: int) -> MeshSpec:
    try:
        return MeshSpec.placed(mesh, nodes * ranks, ranks)
    except MeshError as error:
        advice = f"pass --mesh auto, or a --mesh of {nodes} x {ranks} ranks, or other --nodes and --nproc"
        raise MeshError(f"{str(error).partition(';')[0]}; {advice}") from error


def _script(
    what: str, arguments: Sequence[str], *, module: bool, mesh: str | None, preflight: str | None, elastic: str
) -> tuple[Path, dict[str, Any]]:
    """Return a script's folder of runs, and the job's fields that describe the script."""
    if not module and not Path(what).is_file():
        raise LaunchError(f"there is no file {what}; give the path of a script, -m MODULE, or a recipe")
    for option, given in (
        ("--mesh", mesh),
        ("--preflight", preflight),
        ("--elastic=replicas", elastic == "replicas" or None),
    ):
        if given is not None:
            raise LaunchError(
                f"{option} is for recipes, and {what} is a {'module' if module else 'script'}; leave it out"
            )
    name = what.rpartition(".")[2] if module else Path(what).stem
    return (Path("runs") / name).absolute(), {"name": name, "script": (*(["-m"] if module else []), what, *arguments)}


def _recipe(
    what: str, arguments: Sequence[str], place: _Place, mesh: str | None, preflight: str | None, *, shares_disks: bool
) -> tuple[Path, dict[str, Any], Sequence[str]]:
    """Return a recipe's folder of runs, the job's fields that describe it, and notes; raises every problem."""
    nodes, ranks = place["nodes"], place["ranks_per_node"]
    wants = arguments if mesh is None else [*arguments, f"mesh={_placed(mesh, nodes, ranks)}"]
    wants = wants if preflight is None else [*wants, f"preflight='{preflight}'"]
    recipe = load_recipe(what, wants, disks=shares_disks, trust=True)
    if line := recipe.classes.origins():
        print(line, file=sys.stderr)
    spec = _placed(recipe.mesh, nodes, ranks)
    if is_auto(recipe.mesh if mesh is None else mesh):
        recipe = _hybrid(recipe)
    wanted = "warn" if preflight is None and recipe.preflight == "off" else recipe.preflight
    recipe = recipe.model_copy(update={"mesh": str(spec), "preflight": wanted}).noting(recipe.notes)
    found = _problems_or_notes(recipe, spec, nodes, place["gpus_per_node"], place["elastic"], shares_disks=shares_disks)
    fields = {"name": recipe.name, "recipe": recipe.to_yaml(), "mesh": spec}
    return recipe.folder.absolute(), fields, [*recipe.notes, *found]


def _run_check(script: Sequence[str], arguments: Sequence[str]) -> None:
    """Run a script here, with its output on this terminal; raise LaunchError unless it ends with 0."""
    shown = shlex.join([*script, *arguments])
    try:
        code = subprocess.run([sys.executable, *script, *arguments], timeout=CHECK_S, check=False).returncode
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"the check {shown} did not end within {CHECK_S} s; give it less to do, or leave out --check"
        ) from error
    if code:
        raise LaunchError(f"the check {shown} ended with exit code {code}; correct the script or its arguments")


def _written(plugin: Target, run: Path, fields: Mapping[str, Any]) -> tuple[Job, Mapping[str, str]]:
    """Write the job's files to a new folder, so that a queued job never reads files of a later launch."""
    for number in itertools.count(1):
        job = Job(run=run, folder=run / "launches" / f"{number:03}", **fields)
        if job.folder.exists():
            continue
        files = plugin.render(job)
        try:
            job.folder.mkdir(parents=True)
        except FileExistsError:  # another launch was quicker
            continue
        (run / "logs").mkdir(exist_ok=True)
        for name, text in files.items():
            (job.folder / name).write_text(text, encoding="utf-8")
        return job, files
    raise AssertionError


def _hybrid(recipe: Recipe) -> Recipe:
    """Return the recipe with HybridShard instead of FullyShard, because ``mesh: auto`` puts replicas across nodes."""
    passes = tuple(
        {"HybridShard" if name == "FullyShard" else name: given for name, given in pass_.items()}
        for pass_ in recipe.passes
    )
    note = "mesh auto: FullyShard became HybridShard, with the same options" if passes != recipe.passes else None
    return recipe.model_copy(update={"passes": passes}).noting([*recipe.notes, *([note] if note else [])])


def _problems_or_notes(
    recipe: Recipe, spec: MeshSpec, nodes: int, gpus_per_node: int, elastic: str, *, shares_disks: bool
) -> Sequence[str]:
    """Raise PlanError with every problem, or return notes about what only the job itself can check."""
    seen, notes = (recipe, list(untried(recipe))) if shares_disks else _seen_from_here(recipe)
    ranks, replica = spec.size, elastic == "replicas"
    if replica:
        division = divided(spec, nodes, 0)
        seen, ranks = None if seen is None else division.recipe(seen), division.ranks
    problems = list(replica_problems(recipe)) if replica and seen is None else []
    problems += [] if seen is None else build.check_job(seen, ranks, replica=replica)
    if gpus_per_node and recipe.device == "cpu":
        problems.append(
            f"the recipe has device: cpu and the job has {gpus_per_node} GPUs per node; remove one of the two"
        )
    if not gpus_per_node and recipe.device not in ("auto", "cpu"):
        problems.append(f"the recipe has device: {recipe.device} and the job has no GPUs; pass --gpus-per-node")
    if problems:
        raise PlanError(problems)
    return notes


def _seen_from_here(recipe: Recipe) -> tuple[Recipe | None, list[str]]:
    """Return the recipe without files that are not here, None without its model, and a note for each."""
    notes: list[str] = []

    def absent(field: str, *paths: object) -> bool:
        found = [str(path) for path in paths if path not in (None, STDLIB) and not expanded(Path(str(path))).exists()]
        found = [path for path in found if not glob.glob(str(expanded(Path(path))))]
        notes.extend(f"{field}: {path} is not on this machine; the job checks it when it starts" for path in found)
        return bool(found)

    data = recipe.data
    tokenizer = None if data.tokenizer in (None, "bytes", "bpe") else data.tokenizer
    mixed = [path for part in data.mix for path in (*part.paths, *part.validation_paths)]
    templates = [
        template for template in (data.template, *(part.template for part in data.mix)) if template not in TEMPLATES
    ]
    fields = (
        ("data.paths", data.paths),
        ("data.validation_paths", data.validation_paths),
        ("data.mix", mixed),
        ("data.template", templates),
    )
    missing = [absent(field, *paths) for field, paths in fields]
    if any(missing):
        other = {
            "source": "stdlib",
            "paths": (),
            "validation_paths": (),
            "validation_fraction": 0.1,
            "mix": (),
            "template": None,
        }
        data = data.model_copy(update=other)
    if absent("data.tokenizer", tokenizer):
        data = data.model_copy(update={"tokenizer": None})
    resume = recipe.checkpoint.resume
    if resume not in ("auto", "never") and absent("checkpoint.resume", resume):
        recipe = recipe.model_copy(update={"checkpoint": recipe.checkpoint.model_copy(update={"resume": "auto"})})
    models = [("model", recipe.model), *([] if recipe.teacher is None else [("teacher.model", recipe.teacher.model)])]
    configs: list[tuple[str, Any]] = [(name, section) for name, section in models]
    unknown = [
        absent(f"{name}.config", section.config)
        for name, section in configs
        if isinstance(getattr(section, "config", None), str)
    ]
    gone = [absent(f"{name}.weights", section.weights) for name, section in configs]
    if any(unknown) or any(gone[1:]):
        return None, [
            *notes,
            "the plan is checked when the job starts, because the model's files are not on this machine",
        ]
    return recipe.model_copy(update={"data": data.model_copy(update={"cache": "."}), "output": "."}), notes
