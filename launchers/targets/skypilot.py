"""SkyPilot: a managed job on any cloud or cluster that SkyPilot supports."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, final

from meshpar.errors import LaunchError
from meshpar.launchers.targets.documents import fill_yaml
from meshpar.launchers.targets.job import Job, Port, Shell, Target, dns_label
from meshpar.training.bounds import Bound


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SkyPilot(Target):
    """Render a task file.

    Attributes:
        accelerators: SkyPilot's name of the GPU, such as H100; required for a job with GPUs.
        setup: lines of shell that prepares a node.
        bucket: storage of the run's folder, such as ``s3://runs``; empty: the nodes' disks, whose content is lost with the nodes.
        port: the port of node 0 to which the nodes connect.
        restarts: how many times a managed job is restarted after a failure.
    """

    accelerators: str = ""
    setup: Shell = Shell("pip install 'meshpar[train]'")
    bucket: str = ""
    port: Port = 29400
    restarts: Annotated[int, Bound(ge=0)] = 10

    def render(self, job: Job) -> Mapping[str, str]:
        """Return the task file and the files beside it.

        Raises:
            LaunchError: the job has GPUs and ``accelerators`` is empty.
        """
        if job.gpus_per_node and not self.accelerators:
            raise LaunchError("skypilot requires the name of the GPUs; add -o accelerators=H100, or another name")
        values = {
            "name": dns_label(job.name),
            "mesh": job.mesh,
            "command": job.made_by,
            "nodes": job.nodes,
            "ranks": job.ranks_per_node,
            "accelerators": f"{self.accelerators}:{job.gpus_per_node}" if job.gpus_per_node else "",
            "restarts": self.restarts,
            "setup": self.setup,
            "mounts": {f"~/sky_workdir/{_relative(job)}": {"source": self.bucket, "mode": "MOUNT"}} if self.bucket else {},
            "port": self.port,
            "recipe": f'recipe=$(mktemp -d)/recipe.yaml\nprintf %s {shlex.quote(job.recipe)} > "$recipe"',
            "words": '"$recipe"',
        }
        return {"job.yaml": fill_yaml("skypilot.yaml", values), **job.files()}

    def submit(self, path: Path) -> Sequence[str]:
        """Return the SkyPilot command that submits a managed job, which SkyPilot recovers when its machines are lost."""
        return ["sky", "jobs", "launch", "--yes", str(path)]


def _relative(job: Job) -> str:
    return str(job.folder.relative_to(Path.cwd())) if job.folder.is_relative_to(Path.cwd()) else f"runs/{job.name}"
