"""``meshpar run``: a script or a recipe on the ranks of this node."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshpar.errors import LaunchError
from meshpar.launchers.agent.local import launch
from meshpar.launchers.commands.placing import Given, adopted, first_error_of, from_kubeflow, placed, said
from meshpar.launchers.jobs.worker import run_code


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

    If this process is already a rank (of torchrun, or of an srun with one task per rank), it runs as that rank. Otherwise torch's elastic
    agent starts the ranks in this process.

    Args:
        what: a file ending in ``.py``, a module's name, or a recipe.
        arguments: of the script; overrides of the recipe.
        placement: the given options of a :class:`Placement`. Kubeflow's variables
            (``PET_*``) set the others.
        module: whether ``what`` is a module's name.
        logs: the folder of logs; None: ``logs`` in the recipe's output folder, or ``runs/<script>/logs``.
        elastic: ``"replicas"``: each replica of a recipe's mesh is a job of its own, see :mod:`meshpar.launchers.agent.replicas`.

    Raises:
        MeshparError: the first failing rank's error.
    """
    kind = "module" if module else "script" if what.endswith(".py") else "recipe"
    if kind == "script" and not Path(what).is_file():
        raise LaunchError(f"there is no file {what}; give the path of a script, -m MODULE, or a recipe")
    given: Given = {**from_kubeflow(os.environ), **said(placement)}
    if kind == "recipe":
        from meshpar.launchers.commands import run_recipe  # loads all that a job may use, which a script does without

        return run_recipe.run(what, arguments, given, placement, logs, elastic)
    if elastic is not None:
        raise LaunchError(
            f"--elastic starts recipes; {what} is a {kind}: start one job for each replica, with TORCHFT_LIGHTHOUSE, and use "
            "meshpar.training.Replicas in its loop"
        )
    logs = logs or Path("runs") / (Path(what).stem if kind == "script" else what.rpartition(".")[2]) / "logs"
    if (step := adopted(given, placement)) is not None:
        with first_error_of(logs, step):
            return run_code(kind, what, arguments)
    return launch([kind, what, *arguments], placed(given), logs, sys.stdout)
