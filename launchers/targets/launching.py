"""``meshpar launch``: check, render and submit a job for a scheduler; ``meshpar jobs``: the state of such jobs."""

from __future__ import annotations

import glob
import itertools
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, final

from meshpar.checkpoints.storage.disk import ReadFile
from meshpar.checkpoints.storage.files import inside, read_json
from meshpar.core import registry
from meshpar.core.errors import LaunchError, MeshError, MeshparError, PlanError
from meshpar.core.mesh import MeshSpec, is_auto
from meshpar.launchers.agent.replicas import divide_replicas
from meshpar.launchers.jobs.checks import check_job, replica_problems, untried
from meshpar.launchers.recipes.loading import load_recipe
from meshpar.launchers.recipes.recipe import Recipe
from meshpar.launchers.targets.job import COMMAND, Job, Launched, Target, ask, make_target
from meshpar.process.imports import expanded
from meshpar.process.leftovers import write_durably
from meshpar.process.secrets import REMEDY, secret_words
from meshpar.state.drawing import table
from meshpar.training.template import TEMPLATES
from meshpar.training.text import STDLIB

ELASTIC = ("nodes", "replicas")
"""The kinds of elastic jobs."""

LAUNCH = "launch.json"
"""File in a launch's folder with its target, the target's options, and the engine's answer to the submission."""

CHECK_S = 600
"""Seconds within which a script's own check must end."""

SUBMIT_S = 900
"""Seconds within which an engine must accept a job; SkyPilot may start its controller first."""


@final
@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """The options of ``meshpar launch``; ``check``: arguments with which a script is first run here, in one process."""

    target: str
    what: str
    arguments: Sequence[str] = ()
    _: KW_ONLY
    nodes: int
    gpus_per_node: int
    nproc: int | None = None
    mesh: str | None = None
    elastic: str = ""
    preflight: str | None = None
    options: Sequence[str] = ()
    submit: bool = False
    module: bool = False
    check: str | None = None

    @property
    def ranks_per_node(self) -> int:
        return self.nproc or self.gpus_per_node

    def place_mesh(self, text: str) -> MeshSpec:
        nodes, ranks = self.nodes, self.ranks_per_node
        try:
            return MeshSpec.placed(text, nodes * ranks, ranks)
        except MeshError as error:
            advice = f"pass --mesh auto, or a --mesh of {nodes} x {ranks} ranks, or other --nodes and --nproc"
            raise MeshError(f"{str(error).partition(';')[0]}; {advice}") from error


def launch_job(asked: LaunchRequest) -> str:
    """Render a job into a new folder of the run, submit it on request, and return a summary; raises every problem."""
    if not asked.ranks_per_node:
        raise LaunchError(
            "the number of ranks per node is 0; pass --gpus-per-node, or for CPUs --gpus-per-node 0 --nproc RANKS"
        )
    if words := secret_words([*asked.arguments, *asked.options, *shlex.split(asked.check or "")]):
        raise LaunchError(
            f"{', '.join(words)}: this looks like a credential, and the job file and {COMMAND} are readable files; "
            f"{REMEDY}"
        )
    plugin = make_target(asked.target, registry.plugin(registry.LAUNCHERS, asked.target), asked.options)
    if asked.elastic not in ("", *ELASTIC):
        raise LaunchError(f"--elastic is {asked.elastic!r}; expected {' or '.join(ELASTIC)}")
    if asked.elastic and asked.target != "slurm":
        raise LaunchError(f"--elastic requires the target slurm; {asked.target} restarts the whole job after a failure")
    if asked.module or asked.what.endswith(".py"):
        run, fields, notes = _script(asked)
    elif asked.check is not None:
        raise LaunchError(
            f"--check is for scripts, and {asked.what} is a recipe, which is always checked; leave it out"
        )
    else:
        run, fields, notes = _recipe(asked, shares_disks=plugin.shares_disks)
    ranks = asked.ranks_per_node
    fields |= {"nodes": asked.nodes, "gpus_per_node": asked.gpus_per_node, "ranks_per_node": ranks}
    job, files = _write_files(plugin, run, {**fields, "elastic": asked.elastic, "command": ("meshpar", *sys.argv[1:])})
    path = job.folder / next(iter(files))
    mesh = f", {job.mesh}" if job.mesh else ""
    lines = [f"{job.name}: {asked.nodes * ranks} ranks{mesh} on {asked.nodes} x {ranks}"]
    lines += [f"  {job.folder / name}" for name in files]
    lines += [f"note: {note}" for note in (*notes, *plugin.notes(job))]
    command = plugin.submit(path)
    launch = {"target": asked.target, "options": list(asked.options), "file": path.name, "label": job.label}
    write_durably(job.folder / LAUNCH, json.dumps(launch) + "\n")
    if asked.submit:
        answer = ask(command, SUBMIT_S)
        write_durably(job.folder / LAUNCH, json.dumps({**launch, "submitted": answer}) + "\n")
    return "\n".join([*lines, answer if asked.submit else f"submit it: {shlex.join(command)}"])


def _script(asked: LaunchRequest) -> tuple[Path, dict[str, Any], Sequence[str]]:
    """Check a script; return its folder of runs, the job's fields that describe it, and notes."""
    what, module = asked.what, asked.module
    if not module and not Path(what).is_file():
        raise LaunchError(f"there is no file {what}; give the path of a script, -m MODULE, or a recipe")
    replicas = asked.elastic == "replicas" or None
    for option, value in (("--mesh", asked.mesh), ("--preflight", asked.preflight), ("--elastic=replicas", replicas)):
        if value is not None:
            kind = "module" if module else "script"
            raise LaunchError(f"{option} is for recipes, and {what} is a {kind}; leave it out")
    name = what.rpartition(".")[2] if module else Path(what).stem
    words = ["-m", what] if module else [what]
    notes = []
    if asked.check is None:
        notes.append(
            "the script is not checked here; --check ARGUMENTS first runs it with these in one process, such as "
            "--check=--dry-run"
        )
    else:
        command = [*words, *asked.arguments, *shlex.split(asked.check)]
        shown = shlex.join(command)
        try:
            code = subprocess.run([sys.executable, *command], timeout=CHECK_S, check=False).returncode
        except subprocess.TimeoutExpired as error:
            raise LaunchError(
                f"the check {shown} did not end within {CHECK_S} s; give it less to do, or leave out --check"
            ) from error
        if code:
            raise LaunchError(f"the check {shown} ended with exit code {code}; correct the script or its arguments")
    return (Path("runs") / name).absolute(), {"name": name, "script": (*words, *asked.arguments)}, notes


def _recipe(asked: LaunchRequest, *, shares_disks: bool) -> tuple[Path, dict[str, Any], Sequence[str]]:
    """Check a recipe; return its folder of runs, the job's fields that describe it, and notes."""
    fields = [*asked.arguments]
    fields += [] if asked.mesh is None else [f"mesh={asked.place_mesh(asked.mesh)}"]
    fields += [] if asked.preflight is None else [f"preflight='{asked.preflight}'"]
    recipe = load_recipe(asked.what, fields, disks=shares_disks, trust=True)
    if line := recipe.classes.origins():
        print(line, file=sys.stderr)
    spec = asked.place_mesh(recipe.mesh)
    passes, notes = recipe.passes, list(recipe.notes)
    if is_auto(recipe.mesh if asked.mesh is None else asked.mesh):  # which puts replicas across nodes
        passes = tuple(
            {"HybridShard" if name == "FullyShard" else name: options for name, options in pass_.items()}
            for pass_ in passes
        )
    if passes != recipe.passes:
        notes.append("mesh auto: FullyShard became HybridShard, with the same options")
    preflight = "warn" if asked.preflight is None and recipe.preflight == "off" else recipe.preflight
    changes = {"passes": passes, "mesh": str(spec), "preflight": preflight}
    recipe = recipe.model_copy(update=changes).noting(notes)
    notes = [*recipe.notes, *_check_recipe(recipe, spec, asked, shares_disks=shares_disks)]
    return recipe.folder.absolute(), {"name": recipe.name, "recipe": recipe.to_yaml(), "mesh": spec}, notes


def _check_recipe(recipe: Recipe, spec: MeshSpec, asked: LaunchRequest, *, shares_disks: bool) -> Sequence[str]:
    """Raise PlanError with every problem, or return notes about what only the job itself can check."""
    visible, notes = (recipe, list(untried(recipe))) if shares_disks else _visible_here(recipe)
    ranks, replica = spec.size, asked.elastic == "replicas"
    if replica:
        division = divide_replicas(spec, asked.nodes, 0)
        visible, ranks = None if visible is None else division.recipe(visible), division.ranks
    problems = [] if visible is None else check_job(visible, ranks, replica=replica)
    if replica and visible is None:
        problems += [f"{recipe.where(field)}: {text}" for field, text in replica_problems(recipe)]
    if asked.gpus_per_node and recipe.device == "cpu":
        gpus = f"{asked.gpus_per_node} GPUs per node"
        problems.append(f"the recipe has device: cpu and the job has {gpus}; remove one of the two")
    if not asked.gpus_per_node and recipe.device not in ("auto", "cpu"):
        problems.append(f"the recipe has device: {recipe.device} and the job has no GPUs; pass --gpus-per-node")
    if problems:
        raise PlanError(problems)
    return notes


def _visible_here(recipe: Recipe) -> tuple[Recipe | None, list[str]]:
    """Return the recipe without files that are not here, None without its model, and a note for each."""
    notes: list[str] = []

    def absent(field: str, *paths: object) -> bool:
        homes = {str(path): expanded(Path(str(path))) for path in paths if path not in (None, STDLIB)}
        missing = [path for path, home in homes.items() if not home.exists() and not glob.glob(str(home))]
        notes.extend(f"{field}: {path} is not on this machine; the job checks it when it starts" for path in missing)
        return bool(missing)

    data, resume = recipe.data, recipe.checkpoint.resume
    templates = [data.template, *(part.template for part in data.mix)]
    files: dict[str, Sequence[object]] = {
        "data.paths": data.paths,
        "data.validation_paths": data.validation_paths,
        "data.mix": [path for part in data.mix for path in (*part.paths, *part.validation_paths)],
        "data.template": [template for template in templates if template not in TEMPLATES],
    }
    missing = [absent(field, *paths) for field, paths in files.items()]
    if any(missing):
        empty: dict[str, Any] = {"paths": (), "validation_paths": (), "mix": (), "template": None}
        data = data.model_copy(update={"source": "stdlib", "validation_fraction": 0.1, **empty})
    if data.tokenizer not in (None, "bytes", "bpe") and absent("data.tokenizer", data.tokenizer):
        data = data.model_copy(update={"tokenizer": None})
    if resume not in ("auto", "never") and absent("checkpoint.resume", resume):
        recipe = recipe.model_copy(update={"checkpoint": recipe.checkpoint.model_copy(update={"resume": "auto"})})
    unknown = False
    owners: tuple[tuple[str, Any], ...] = (("model", recipe), ("teacher.model", recipe.teacher))
    for name, owner in owners:
        if owner is not None:
            config = getattr(owner.model, "config", None)
            unknown |= absent(f"{name}.config", config) if isinstance(config, str) else False
            unknown |= absent(f"{name}.weights", owner.model.weights) and owner is not recipe
    if unknown:
        notes.append("the plan is checked when the job starts, because the model's files are not on this machine")
        return None, notes
    return recipe.model_copy(update={"data": data.model_copy(update={"cache": "."}), "output": "."}), notes


def _write_files(plugin: Target, run: Path, fields: Mapping[str, Any]) -> tuple[Job, Mapping[str, str]]:
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


def list_jobs(root: Path) -> str:
    """Return a table of the launches of the runs in ``root``, or of the run ``root``."""
    launches = find_launches(root)
    if not launches:
        raise LaunchError(f"no launches in {root}; expected {root}/NAME/launches/001, which `meshpar launch` writes")
    states, notes = ask_states(launches)
    rows = [
        (str(_short(job.folder)), name, states[job.folder][0] or "-", _state(states[job.folder][1], job))
        for name, _, job in launches
    ]
    return "\n".join([*table(("LAUNCH", "TARGET", "JOB", "STATE"), rows), *notes])


def find_launches(root: Path, damaged: dict[Path, LaunchError] | None = None) -> list[tuple[str, Target, Launched]]:
    """Return name of the target, target and job of each launch in ``root``; put errors by folder in ``damaged``."""
    depths = ("", "*/", "*/*/")  # not all of it: checkpoints have many files
    launches = []
    for file in sorted((path for depth in depths for path in root.glob(f"{depth}launches/*/{LAUNCH}")), key=_number):
        try:
            launches.append(_read(file))
        except LaunchError as error:
            if damaged is None:
                raise
            damaged[file.parent.absolute()] = error
    return launches


def ask_states(launches: Sequence[tuple[str, Target, Launched]]) -> tuple[dict[Path, tuple[str, str]], list[str]]:
    """Return the number and the state of each launch's job by its folder, and why an engine did not tell them."""
    states, notes = dict[Path, tuple[str, str]](), list[str]()
    targets = {name: target for name, target, _ in reversed(launches)}
    for name in dict.fromkeys(name for name, _, _ in launches):
        jobs = [job for job_name, _, job in launches if job_name == name]
        try:
            states.update(zip((job.folder for job in jobs), targets[name].states(jobs)))
        except LaunchError as error:
            states.update((job.folder, ("", "?")) for job in jobs)
            notes.append(f"note: {error}")
    return states, notes


def job_status(folder: Path) -> str:
    """Return a launch's (or a run's newest launch's) state and the engine's description of its job."""
    name, target, job = _read(_file(folder))
    ((number, state),) = target.states([job])
    head = f"{_short(job.folder)}: {name} {number or job.label}, {_state(state, job)}"
    return "\n".join([head, target.status(job)]) if state else head


def show_logs(folder: Path, *, follow: bool) -> int:
    """Print a job's output and return the exit code of the engine's command."""
    _, target, job = _read(_file(folder))
    command = target.logs(job, follow=follow)
    try:
        return subprocess.run(command, check=False).returncode
    except FileNotFoundError as error:
        raise LaunchError(
            f"{command[0]} is not installed here; read the ranks' logs in {job.folder.parent.parent / 'logs'}"
        ) from error


def cancel_job(folder: Path) -> str:
    """End a job and return the engine's answer; raises LaunchError if the engine does not know it."""
    _, target, job = _read(_file(folder))
    ((number, state),) = target.states([job])
    if not state:
        raise LaunchError(f"{_short(job.folder)} cannot be cancelled: {_state(state, job)}")
    return target.cancel(job) or f"cancelled {number}"


def _state(state: str, job: Launched) -> str:
    return state or ("not known to the engine any more" if job.submitted else "not submitted")


def _short(folder: Path) -> Path:
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


def _file(folder: Path) -> Path:
    newest = max(folder.glob(f"launches/*/{LAUNCH}"), key=_number, default=None)
    file = folder / LAUNCH if (folder / LAUNCH).exists() else newest
    if file is None:
        raise LaunchError(
            f"{folder} is no launch; expected a run's folder, such as runs/NAME, or one of runs/NAME/launches"
        )
    return file


def _number(path: Path) -> tuple[Path, int, str]:
    """Return what orders launches by run and number: 1000 comes after 999."""
    return path.parents[1], len(path.parent.name), path.parent.name


def _read(path: Path) -> tuple[str, Target, Launched]:
    try:
        read = read_json(ReadFile(path, links=False))
        name, folder = read["target"], path.parent.absolute()
        file, label = folder / inside(read["file"]), read["label"]
        job = Launched(folder=folder, file=file, label=label, submitted=read.get("submitted", ""))
        return name, make_target(name, registry.plugin(registry.LAUNCHERS, name), read["options"]), job
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, MeshparError) as error:
        raise LaunchError(
            f"cannot read {path} ({error}); launch the job again, or use the commands of its engine"
        ) from error
