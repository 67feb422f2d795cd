"""Start ranks on this node: ``meshpar run`` of a script or a recipe, and ``meshpar doctor``."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshpar.core import runtime
from meshpar.core.errors import LaunchError
from meshpar.launchers import environment
from meshpar.launchers.agent.local import launch
from meshpar.launchers.agent.starting import adopt_srun
from meshpar.launchers.commands.placing import (
    Given,
    adopted,
    first_error_of,
    from_kubeflow,
    placed,
    refuse_placement,
    said,
)
from meshpar.launchers.jobs.worker import run_code

_RANK = "meshpar.launchers.doctor.rank"


def run(
    what: str,
    arguments: Sequence[str],
    placement: Mapping[str, object],
    *,
    module: bool = False,
    logs: Path | None = None,
    elastic: str | None = None,
) -> int:
    """Run a script, a module or a recipe, and return the exit code.

    If this process is already a rank (of torchrun, or of an srun with one task per rank), it runs as that rank.
    Otherwise torch's elastic agent starts the ranks in this process.

    Args:
        what: a file ending in ``.py``, a module's name, or a recipe.
        arguments: of the script; overrides of the recipe.
        placement: the given options of a :class:`Placement`. Kubeflow's variables
            (``PET_*``) set the others.
        module: whether ``what`` is a module's name.
        logs: the folder of logs; None: ``logs`` in the recipe's output folder, or ``runs/<script>/logs``.
        elastic: ``"replicas"``: each replica of a recipe's mesh is a job of its own, see
            :mod:`meshpar.launchers.agent.replicas`.

    Raises:
        MeshparError: the first failing rank's error.
    """
    kind = "module" if module else "script" if what.endswith(".py") else "recipe"
    if kind == "script" and not Path(what).is_file():
        raise LaunchError(f"there is no file {what}; give the path of a script, -m MODULE, or a recipe")
    given: Given = {**from_kubeflow(environment.kubeflow()), **said(placement)}
    if kind == "recipe":
        # loads all that a job may use, which a script does without
        from meshpar.launchers.commands.train import run_recipe

        return run_recipe(what, arguments, given, placement, logs, elastic)
    if elastic is not None:
        raise LaunchError(
            f"--elastic starts recipes; {what} is a {kind}: start one job for each replica, with TORCHFT_LIGHTHOUSE, "
            "and use meshpar.training.Replicas in its loop"
        )
    logs = logs or Path("runs") / (Path(what).stem if kind == "script" else what.rpartition(".")[2]) / "logs"
    if (step := adopted(given, placement)) is not None:
        with first_error_of(logs, step):
            return run_code(kind, what, arguments)
    return launch({"kind": kind, "what": what, "arguments": tuple(arguments)}, placed(given), logs, sys.stdout)


def run_doctor(
    mesh: str, placement: Mapping[str, object], *, folder: Path | None, profile: Path | None, wait_s: float
) -> int:
    """Run the doctor and return the exit code: 0 without findings, 1 with findings.

    Args:
        mesh: the mesh to check.
        placement: the given options of ``nproc``, ``nodes``, ``node_rank`` and ``head``.
        folder: the folder of checkpoints to check; None: none.
        profile: the file for a measured hardware profile; None: measure none.
        wait_s: seconds within which all ranks must connect.

    Raises:
        LaunchError: a rank failed, or ranks did not connect.
    """
    arguments = [f"mesh={mesh}", f"wait={wait_s}"]
    arguments += [f"folder={folder.absolute()}"] if folder is not None else []
    arguments += [f"profile={profile.absolute()}"] if profile is not None else []
    given = said(placement)
    if "nodes" not in given:
        adopt_srun()
        if runtime.launched():
            refuse_placement(placement)
            return run_code("module", _RANK, arguments)
    with tempfile.TemporaryDirectory(prefix="meshpar-doctor-") as logs:
        # Rank 0 prints the report; the exit code of findings is no failure of a rank.
        found = Path(logs) / "findings"
        work = {"kind": "module", "what": _RANK, "arguments": (*arguments, f"findings={found}")}
        try:
            code = launch(work, placed({**given, "meeting_s": int(wait_s)}), Path(logs), sys.stdout)
        except LaunchError as error:
            raise LaunchError(f"the doctor could not finish: {error}") from error
        return 1 if found.exists() else code
