"""SkyPilot: a managed job on any cloud or cluster that SkyPilot supports."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, final

from meshpar.core.errors import LaunchError
from meshpar.launchers.targets.job import Job, Launched, Port, Shell, Target, ask, fill_yaml
from meshpar.training.settings import Bound


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SkyPilot(Target):
    """Render a task file.

    Attributes:
        accelerators: SkyPilot's name of the GPU, such as H100 or H100:8; required for a job with GPUs.
        setup: lines of shell that prepares a node.
        bucket: storage of the runs, such as ``s3://runs``, in which each run has a folder of its own; empty: the nodes'
            disks, whose content is lost with the nodes.
        port: the port of node 0 to which the nodes connect.
        restarts: how many times a managed job is restarted after a failure.
        patch: a YAML file with further fields of the job file, or with a document of another ``kind``; can be given
            several times.
    """

    shares_disks: ClassVar[bool] = False

    accelerators: str = ""
    setup: Shell = Shell("pip install 'meshpar[train]'")
    bucket: str = ""
    port: Port = 29400
    restarts: Annotated[int, Bound(ge=0)] = 10
    patch: tuple[str, ...] = ()

    def render(self, job: Job) -> Mapping[str, str]:
        """Return the task file and the files beside it; raises LaunchError without the name of the job's GPUs."""
        if job.gpus_per_node and not self.accelerators:
            raise LaunchError("skypilot requires the name of the GPUs; add -o accelerators=H100, or another name")
        # The bucket's folder of the run is mounted where the job writes, relative or absolute.
        name, _, count = self.accelerators.partition(":")
        if count and count != str(job.gpus_per_node):
            raise LaunchError(
                f"accelerators={self.accelerators} and --gpus-per-node {job.gpus_per_node} are two numbers of GPUs; "
                f"write -o accelerators={name}, or --gpus-per-node {count}"
            )
        relative = job.run.is_relative_to(Path.cwd())
        folder = job.run.relative_to(Path.cwd() if relative else "/")
        source = {"source": f"{self.bucket.rstrip('/')}/{folder}", "mode": "MOUNT"}
        mounts = {f"~/sky_workdir/{folder}" if relative else str(job.run): source}
        recipe = f'recipe=$(mktemp -d)/recipe.yaml\nprintf %s {shlex.quote(job.recipe)} > "$recipe"'
        values = {
            **job.values(),
            "ranks": job.ranks_per_node,
            "accelerators": f"{name}:{job.gpus_per_node}" if job.gpus_per_node else "",
            "restarts": self.restarts,
            "setup": self.setup,
            "mounts": mounts if self.bucket else {},
            "port": self.port,
            "recipe": recipe if job.recipe else "",
            "work": shlex.join(job.script) or '"$recipe"',
        }
        return {"job.yaml": fill_yaml("skypilot.yaml", values, self.patch), **job.files()}

    def submit(self, path: Path) -> Sequence[str]:
        return ["sky", "jobs", "launch", "--yes", "--detach-run", str(path)]

    def states(self, jobs: Sequence[Launched]) -> Sequence[tuple[str, str]]:
        rows = json.loads(ask(["sky", "jobs", "queue", "--all", "--output=json"]))
        newest_last = {row["job_name"]: row["status"] or "" for row in sorted(rows, key=lambda row: row["job_id"])}
        return [(job.label, newest_last.get(job.label, "")) for job in jobs]

    def status(self, job: Launched) -> str:
        """Return the table of ``sky jobs queue``, which has no filter by name."""
        return ask(["sky", "jobs", "queue"])

    def logs(self, job: Launched, *, follow: bool) -> Sequence[str]:
        return ["sky", "jobs", "logs", "--follow" if follow else "--no-follow", f"--name={job.label}"]

    def cancel(self, job: Launched) -> str:
        return ask(["sky", "jobs", "cancel", "--yes", f"--name={job.label}"])
