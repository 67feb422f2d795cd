"""Start ranks on this node: ``meshpar run`` of a script or a recipe, and ``meshpar doctor``."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshpar.core import runtime
from meshpar.core.errors import LaunchError
from meshpar.launchers.agent import local, terms
from meshpar.launchers.agent.failures import tell_first
from meshpar.launchers.agent.local import Given, launch, place_ranks
from meshpar.launchers.jobs.worker import run_code

_RANK = "meshpar.launchers.doctor.examine"


def run(
    what: str,
    arguments: Sequence[str],
    placement: Mapping[str, object],
    *,
    module: bool = False,
    logs: Path | None = None,
    elastic: str | None = None,
) -> int:
    """Run a script, module or recipe on ranks of this node, or as the rank that this process is."""
    kind = "module" if module else "script" if what.endswith(".py") else "recipe"
    if kind == "script" and not Path(what).is_file():
        raise LaunchError(f"there is no file {what}; give the path of a script, -m MODULE, or a recipe")
    options: Given = {**local.from_kubeflow(terms.kubeflow()), **local.drop_unset(placement)}
    if kind == "recipe":
        # loads all that a job may use, which a script does without
        from meshpar.launchers.commands.train import run_recipe

        return run_recipe(what, arguments, options, placement, logs, elastic)
    if elastic is not None:
        raise LaunchError(
            f"--elastic starts recipes; {what} is a {kind}: start one job for each replica, with TORCHFT_LIGHTHOUSE, "
            "and use meshpar.training.Replicas in its loop"
        )
    logs = logs or Path("runs") / (Path(what).stem if kind == "script" else what.rpartition(".")[2]) / "logs"
    if (step := local.adopt_rank(options, placement)) is not None:
        with tell_first(logs, runtime.rank(), step):
            return run_code(kind, what, arguments)
    return launch({"kind": kind, "what": what, "arguments": tuple(arguments)}, place_ranks(options), logs, sys.stdout)


def run_doctor(
    mesh: str, placement: Mapping[str, object], *, folder: Path | None, profile: Path | None, wait_s: float
) -> int:
    """Run the doctor on ranks of this node, or as a rank; return 1 if there are findings."""
    arguments = [f"mesh={mesh}", f"wait={wait_s}"]
    arguments += [f"folder={folder.absolute()}"] if folder is not None else []
    arguments += [f"profile={profile.absolute()}"] if profile is not None else []
    options = local.drop_unset(placement)
    if "nodes" not in options:
        terms.adopt_srun()
        if runtime.launched():
            local.refuse_placement(placement)
            return run_code("module", _RANK, arguments)
    with tempfile.TemporaryDirectory(prefix="meshpar-doctor-") as logs:
        # Rank 0 prints the report; the exit code of findings is no failure of a rank.
        findings = Path(logs) / "findings"
        work = {"kind": "module", "what": _RANK, "arguments": (*arguments, f"findings={findings}")}
        try:
            code = launch(work, place_ranks({**options, "meeting_s": int(wait_s)}), Path(logs), sys.stdout)
        except LaunchError as error:
            raise LaunchError(f"the doctor could not finish: {error}") from error
        return 1 if findings.exists() else code
