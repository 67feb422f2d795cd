"""Kubeflow Trainer v2: a TrainJob, whose operator creates the pods and sets their ``PET_`` variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from meshpar.launchers.targets.job import Job, dns_label, fill, indented


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """Render a TrainJob of ``trainer.kubeflow.org/v1alpha1``.

    Attributes:
        image: container image with meshpar installed.
        namespace: the namespace; empty: kubectl's default.
        runtime: the ClusterTrainingRuntime, which defines the mount of the checkpoints' volume.
        workdir: working directory of the job; empty: the image's.
        cpu, memory: limits of a node; empty: none.
    """

    image: str = "meshpar:latest"
    namespace: str = ""
    runtime: str = "torch-distributed"
    workdir: str = ""
    cpu: str = ""
    memory: str = ""

    def render(self, job: Job) -> Mapping[str, str]:
        """Return the file for ``kubectl apply`` and the files beside it."""
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
        """Return the kubectl command that submits the job."""
        return ["kubectl", "apply", "-f", str(path)]
