"""Kubernetes: an Indexed Job, whose index is the node rank, and a headless Service that names the pods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, final

from meshpar.launchers.agent.failures import NO_USE
from meshpar.launchers.targets.documents import fill_yaml
from meshpar.launchers.targets.job import Job, Port, Target, dns_label
from meshpar.training.bounds import Bound, Count


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Kubernetes(Target):
    """Render an Indexed Job of ``batch/v1``.

    Attributes:
        image: container image with meshpar installed.
        namespace: the namespace; empty: kubectl's default.
        claim: the PersistentVolumeClaim mounted at ``workdir``; empty: an empty folder that is deleted with the pod.
        workdir: working directory of the job; relative paths of the recipe start here.
        restarts: how many times a node's pod is restarted.
        port: the port of node 0 to which the nodes connect.
        cpu, memory: limits of a node; empty: none.
        shm: size of /dev/shm; NCCL and data workers need more than the 64 MiB of a container.
        grace_s: seconds between SIGTERM, after which a checkpoint is written, and SIGKILL.
    """

    image: str = "meshpar:latest"
    namespace: str = ""
    claim: str = ""
    workdir: str = "/workspace"
    restarts: Annotated[int, Bound(ge=0)] = 10
    port: Port = 29400
    cpu: str = ""
    memory: str = ""
    shm: str = "16Gi"
    grace_s: Count = 300

    def render(self, job: Job) -> Mapping[str, str]:
        """Return the file for ``kubectl apply`` and the files beside it."""
        name = dns_label(job.name)
        limits = {"nvidia.com/gpu": str(job.gpus_per_node or ""), "cpu": self.cpu, "memory": self.memory}
        storage = {"persistentVolumeClaim": {"claimName": self.claim}} if self.claim else {"emptyDir": {}}
        options = f'--nodes={job.nodes} --nproc={job.ranks_per_node} --node-rank="$JOB_COMPLETION_INDEX" --head={name}-0.{name}:{self.port}'
        values = {
            "name": name,
            "mesh": job.mesh,
            "command": job.made_by,
            "namespace": self.namespace,
            "nodes": job.nodes,
            "backoff": self.restarts * job.nodes,
            "no_use": NO_USE,
            "image": self.image,
            "workdir": self.workdir,
            "words": ["bash", "-c", f'exec meshpar run {options} "$@"', "meshpar", "/job/recipe.yaml"],
            "recipe": job.recipe,
            "limits": {key: value for key, value in limits.items() if value},
            "volume": {"name": "workspace", **storage},
            "shm": self.shm,
            "grace_s": self.grace_s,
        }
        return {"job.yaml": fill_yaml("kubernetes.yaml", values), **job.files()}

    def submit(self, path: Path) -> Sequence[str]:
        """Return the kubectl command that submits the job."""
        return ["kubectl", "apply", "-f", str(path)]
