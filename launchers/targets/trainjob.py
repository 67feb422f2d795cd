"""Kubeflow Trainer v2: a TrainJob, whose operator creates the pods and sets their ``PET_`` variables."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from meshpar.launchers.targets.documents import fill_yaml
from meshpar.launchers.targets.job import Job
from meshpar.launchers.targets.kubectl import KUEUE, OnKubernetes

_RUN = 'recipe=$(mktemp -d)/recipe.yaml\nprintf %s "$1" > "$recipe"\nexec meshpar run "$recipe"\n'

_SCRIPT = 'exec meshpar run "$@"\n'


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob(OnKubernetes):
    """Render a TrainJob of ``trainer.kubeflow.org/v1alpha1``.

    Attributes:
        image: container image with meshpar installed.
        namespace: the namespace; empty: kubectl's default.
        runtime: the ClusterTrainingRuntime, which defines the mount of the checkpoints' volume.
        workdir: working directory of the job; empty: the image's.
        kueue: Kueue's LocalQueue, which starts the job; empty: none.
        cpu, memory: limits of a node; empty: none.
        patch: a YAML file with further fields of the job file, or with a document of another ``kind``; can be given several times.
    """

    image: str = "meshpar:latest"
    namespace: str = ""
    runtime: str = "torch-distributed"
    workdir: str = ""
    kueue: str = ""
    cpu: str = ""
    memory: str = ""
    patch: tuple[str, ...] = ()

    def render(self, job: Job) -> Mapping[str, str]:
        """Return the file for kubectl and the files beside it."""
        limits = {"nvidia.com/gpu": str(job.gpus_per_node or ""), "cpu": self.cpu, "memory": self.memory}
        enter = f"cd {shlex.quote(self.workdir)}\n" if self.workdir else ""
        values = {
            "name": job.label,
            "labels": {KUEUE: self.kueue} if self.kueue else {},
            "suspend": True if self.kueue else "",
            "shape": job.shape,
            "command": job.made_by,
            "namespace": self.namespace,
            "runtime": self.runtime,
            "image": self.image,
            "nodes": job.nodes,
            "ranks": job.ranks_per_node,
            "limits": {key: value for key, value in limits.items() if value},
            "work": [f"{enter}{_RUN if job.recipe else _SCRIPT}", "meshpar", *job.work(job.recipe)],
        }
        return {"job.yaml": fill_yaml("trainjob.yaml", values, self.patch), **job.files()}
