"""Kubernetes: an Indexed Job, whose index is the node rank, and a headless Service that gives the pods names."""

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
    """An Indexed Job of ``batch/v1``.

    Attributes:
        image: with meshpar installed.
        namespace: empty: kubectl's own.
        claim: the PersistentVolumeClaim mounted at ``workdir``; empty: an empty folder that goes with the pod.
        workdir: where the job runs; relative paths of the recipe begin here.
        restarts: how often a node's pod is started again.
        port: where node 0 is met.
        cpu, memory: requested for a node; empty: not said.
        shm: of /dev/shm; NCCL and data workers need more than the 64 MiB that a container has.
        grace_s: seconds between SIGTERM, at which a checkpoint is written, and the end.
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
        """Return the file for ``kubectl apply`` and what lies beside it."""
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
        """Return kubectl's command."""
        return ["kubectl", "apply", "-f", str(path)]
