"""Kubeflow Trainer v2: a TrainJob, whose operator makes the pods and tells each its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from meshpar.launchers.targets.job import Job, dns_label, fill, indented


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """A TrainJob of ``trainer.kubeflow.org/v1alpha1``.

    Attributes:
        image: with meshpar installed.
        namespace: empty: kubectl's own.
        runtime: the ClusterTrainingRuntime; it says where the checkpoints' volume is mounted.
        workdir: where the job runs; empty: the image's.
        cpu, memory: requested for a node; empty: not said.
    """

    image: str = "meshpar:latest"
    namespace: str = ""
    runtime: str = "torch-distributed"
    workdir: str = ""
    cpu: str = ""
    memory: str = ""

    def render(self, job: Job) -> Mapping[str, str]:
        """Return the file for ``kubectl apply`` and what lies beside it."""
        limits = {"nvidia.com/gpu": str(job.gpus_per_node)} if job.gpus_per_node else {}
        limits |= {key: value for key, value in (("cpu", self.cpu), ("memory", self.memory)) if value}
        lines = ["    resourcesPerNode:", "      limits:", *(f'        {key}: "{value}"' for key, value in limits.items())]
        values = {
            "name": dns_label(job.name),
            "mesh": job.mesh,
            "command": " ".join(job.command),
            "namespace": f"  namespace: {self.namespace}" if self.namespace else "",
            "runtime": self.runtime,
            "image": self.image,
            "nodes": job.nodes,
            "ranks": job.ranks_per_node,
            "resources": "\n".join(lines) if limits else "",
            "enter": f"        cd {self.workdir}" if self.workdir else "",
            "recipe": indented(job.recipe, 8),
        }
        return {"job.yaml": fill("trainjob.yaml", values), **job.files()}

    def submit(self, path: Path) -> Sequence[str]:
        """Return kubectl's command."""
        return ["kubectl", "apply", "-f", str(path)]
