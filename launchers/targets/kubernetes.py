"""Kubernetes: an Indexed Job, whose index is the node rank, and a headless Service that names the pods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from meshpar.launchers.agent.failures import NO_USE
from meshpar.launchers.targets.job import Job, dns_label, fill, indented


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Kubernetes:
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
    restarts: int = 10
    port: int = 29400
    cpu: str = ""
    memory: str = ""
    shm: str = "16Gi"
    grace_s: int = 300

    def render(self, job: Job) -> Mapping[str, str]:
        """Return the file for ``kubectl apply`` and the files beside it."""
        name = dns_label(job.name)
        limits = {"nvidia.com/gpu": str(job.gpus_per_node)} if job.gpus_per_node else {}
        limits |= {key: value for key, value in (("cpu", self.cpu), ("memory", self.memory)) if value}
        resources = [" " * 12 + f'{key}: "{value}"' for key, value in limits.items()]
        volume = f"persistentVolumeClaim:\n            claimName: {self.claim}" if self.claim else "emptyDir: {}"
        values = {
            "name": name,
            "mesh": job.mesh,
            "command": " ".join(job.command),
            "namespace": f"  namespace: {self.namespace}" if self.namespace else "",
            "nodes": job.nodes,
            "backoff": self.restarts * job.nodes,
            "no_use": NO_USE,
            "image": self.image,
            "workdir": self.workdir,
            "ranks": job.ranks_per_node,
            "port": self.port,
            "recipe": indented(job.recipe, 4),
            "resources": "\n".join(["          resources:", "            limits:", *("  " + each for each in resources)]) if limits else "",
            "volume": volume,
            "volume_note": "" if self.claim else "  # checkpoints go with the pod: give a PersistentVolumeClaim (claim=NAME)",
            "shm": self.shm,
            "grace_s": self.grace_s,
        }
        return {"job.yaml": fill("kubernetes.yaml", values), **job.files()}

    def submit(self, path: Path) -> Sequence[str]:
        """Return the kubectl command that submits the job."""
        return ["kubectl", "apply", "-f", str(path)]
