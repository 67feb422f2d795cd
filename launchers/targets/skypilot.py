"""SkyPilot: a task that it runs on any cloud or cluster it knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from meshpar.errors import LaunchError
from meshpar.launchers.targets.job import Job, dns_label, fill, indented


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SkyPilot:
    """A task file.

    Attributes:
        accelerators: SkyPilot's name of the GPU, such as H100; needed where the job has GPUs.
        setup: a line of shell that makes a node ready.
        bucket: where the run's folder is kept, such as ``s3://runs``; empty: on the nodes' disks, and lost with them.
        port: where node 0 is met.
        restarts: how often a managed job is started again after a failure.
    """

    accelerators: str = ""
    setup: str = "pip install 'meshpar[train]'"
    bucket: str = ""
    port: int = 29400
    restarts: int = 10

    def render(self, job: Job) -> Mapping[str, str]:
        """Return the task file and what lies beside it.

        Raises:
            LaunchError: the job has GPUs and nobody says which.
        """
        if job.gpus_per_node and not self.accelerators:
            raise LaunchError("skypilot needs the GPUs' name: -o accelerators=H100")
        mounts = f"file_mounts:\n  ~/sky_workdir/{_relative(job)}:\n    source: {self.bucket}\n    mode: MOUNT" if self.bucket else ""
        values = {
            "name": dns_label(job.name),
            "mesh": job.mesh,
            "command": " ".join(job.command),
            "nodes": job.nodes,
            "ranks": job.ranks_per_node,
            "accelerators": f"  accelerators: {self.accelerators}:{job.gpus_per_node}" if job.gpus_per_node else "",
            "restarts": self.restarts,
            "setup": self.setup,
            "mounts": mounts,
            "port": self.port,
            "recipe": indented(job.recipe, 2),
        }
        return {"job.yaml": fill("skypilot.yaml", values), **job.files()}

    def submit(self, path: Path) -> Sequence[str]:
        """Return SkyPilot's command: a managed job, which is recovered when its machines are lost."""
        return ["sky", "jobs", "launch", "--yes", str(path)]


def _relative(job: Job) -> str:
    return str(job.folder.relative_to(Path.cwd())) if job.folder.is_relative_to(Path.cwd()) else f"runs/{job.name}"
