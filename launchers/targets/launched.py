"""``meshpar jobs``: what was launched, as the folders of the launches and the engines' own commands know it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from meshpar.checkpoints.storage.disk import ReadFile
from meshpar.checkpoints.storage.files import inside, read_json
from meshpar.core import registry
from meshpar.core.errors import LaunchError, MeshparError
from meshpar.launchers.targets.job import Launched, Target, make_target
from meshpar.state.drawing import table

LAUNCH = "launch.json"
"""File in a launch's folder with its target, the target's options, and the engine's answer to the submission."""


def list_jobs(root: Path) -> str:
    """Return a table of the launches of the runs in ``root``, or of the run ``root``."""
    depths = ("", "*/", "*/*/")  # not all of it: checkpoints have many files
    found = [
        _read(path)
        for path in sorted((path for depth in depths for path in root.glob(f"{depth}launches/*/{LAUNCH}")), key=_number)
    ]
    if not found:
        raise LaunchError(f"no launches in {root}; expected {root}/NAME/launches/001, which `meshpar launch` writes")
    known: dict[Path, tuple[str, str]] = {}
    notes = []
    for name in dict.fromkeys(name for name, _, _ in found):
        mine = [(target, job) for job_name, target, job in found if job_name == name]
        try:
            states = mine[0][0].states([job for _, job in mine])
        except LaunchError as error:
            states = [("", "?")] * len(mine)
            notes.append(f"note: {error}")
        known.update(zip((job.folder for _, job in mine), states))
    rows = [
        (str(_short(job.folder)), name, known[job.folder][0] or "-", _state(known[job.folder][1], job))
        for name, _, job in found
    ]
    return "\n".join([*table(("LAUNCH", "TARGET", "JOB", "STATE"), rows), *notes])


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
    found = (
        folder / LAUNCH
        if (folder / LAUNCH).exists()
        else max(folder.glob(f"launches/*/{LAUNCH}"), key=_number, default=None)
    )
    if found is None:
        raise LaunchError(
            f"{folder} is no launch; expected a run's folder, such as runs/NAME, or one of runs/NAME/launches"
        )
    return found


def _number(path: Path) -> tuple[Path, int, str]:
    """Return what orders launches by run and number: 1000 comes after 999."""
    return path.parents[1], len(path.parent.name), path.parent.name


def _read(path: Path) -> tuple[str, Target, Launched]:
    """Return the target's name, the target and the job."""
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
