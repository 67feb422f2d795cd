"""``meshpar doctor``: start the ranks, or be one."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from meshpar import runtime
from meshpar.errors import LaunchError
from meshpar.launchers.agent import slurm
from meshpar.launchers.agent.local import launch
from meshpar.launchers.commands.placing import placed, refuse_placement, said
from meshpar.launchers.jobs.worker import run_code

_RANK = "meshpar.launchers.doctor.rank"


def run_doctor(mesh: str, placement: Mapping[str, object], *, folder: Path | None, profile: Path | None, wait_s: float) -> int:
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
        slurm.adopt()
        if runtime.launched():
            refuse_placement(placement)
            return run_code("module", _RANK, arguments)
    with tempfile.TemporaryDirectory(prefix="meshpar-doctor-") as logs:
        # Rank 0 prints the report; the exit code of findings is no failure of a rank.
        found = Path(logs) / "findings"
        os.environ["MESHPAR_FINDINGS"] = str(found)
        try:
            code = launch(["module", _RANK, *arguments], placed({**given, "meeting_s": int(wait_s)}), Path(logs), sys.stdout)
        except LaunchError as error:
            raise LaunchError(f"the doctor could not finish: {error}") from error
        return 1 if found.exists() else code
