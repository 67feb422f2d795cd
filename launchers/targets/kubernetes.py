"""Kubernetes: an Indexed Job, whose index is the node rank, and a headless Service that names the pods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, final

import yaml

from meshpar.errors import LaunchError
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
        patch: a YAML file with further fields of the job file, or with a document of another ``kind``; can be given several times.
    """

    shares_disks: ClassVar[bool] = False

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
    patch: tuple[str, ...] = ()

    def render(self, job: Job) -> Mapping[str, str]:
        """Return the file for ``kubectl apply`` and the files beside it."""
        name = dns_label(job.name)
        limits = {"nvidia.com/gpu": str(job.gpus_per_node or ""), "cpu": self.cpu, "memory": self.memory}
        storage = {"persistentVolumeClaim": {"claimName": self.claim}} if self.claim else {"emptyDir": {}}
        options = f'--nodes={job.nodes} --nproc={job.ranks_per_node} --node-rank="$JOB_COMPLETION_INDEX" --head={name}-0.{name}:{self.port}'
        values = {
            "name": name,
            "shape": job.shape,
            "command": job.made_by,
            "namespace": self.namespace,
            "nodes": job.nodes,
            "backoff": self.restarts * job.nodes,
            "no_use": NO_USE,
            "image": self.image,
            "workdir": self.workdir,
            "work": ["bash", "-c", f'exec meshpar run {options} "$@"', "meshpar", *job.work("/job/recipe.yaml")],
            "recipe": job.recipe,
            "limits": {key: value for key, value in limits.items() if value},
            "volume": {"name": "workspace", **storage},
            "shm": self.shm,
            "grace_s": self.grace_s,
        }
        text = fill_yaml("kubernetes.yaml", values, self.patch)
        if self.patch:
            _validate(text)
        return {"job.yaml": text, **job.files()}

    def submit(self, path: Path) -> Sequence[str]:
        """Return the kubectl command that submits the job."""
        return ["kubectl", "apply", "-f", str(path)]


def _validate(text: str) -> None:
    """Check a patched file against Kubernetes's schema if kubernetes-validate is installed; otherwise kubectl does when it is applied."""
    try:
        import kubernetes_validate
    except ImportError:
        return
    for document in yaml.safe_load_all(text):
        try:
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
        except kubernetes_validate.ValidationError as error:
            place = ".".join(map(str, error.path))
            raise LaunchError(f"the patched {document['kind']} is not valid: {place}: {error.message}; correct the patch") from error
