"""Kubernetes: an Indexed Job, whose index is the node rank, or a JobSet of one, for the scheduler, Kueue or Volcano."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, final

import yaml

from meshpar.errors import LaunchError
from meshpar.launchers.agent.failures import NO_USE
from meshpar.launchers.targets.documents import fill_yaml
from meshpar.launchers.targets.job import Job, Port
from meshpar.launchers.targets.kubectl import KUEUE, OnKubernetes
from meshpar.training.bounds import Bound, Count


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Kubernetes(OnKubernetes):
    """Render an Indexed Job of ``batch/v1``, or a JobSet.

    Attributes:
        image: container image with meshpar installed.
        namespace: the namespace; empty: kubectl's default.
        claim: the PersistentVolumeClaim mounted at ``workdir``; empty: an empty folder that is deleted with the pod.
        workdir: working directory of the job; relative paths of the recipe start here.
        restarts: how many times a node's pod is restarted; with ``jobset``, how many times all pods are.
        jobset: render a JobSet (``jobset.x-k8s.io/v1alpha2``), which restarts all pods together, instead of an Indexed Job.
        kueue: Kueue's LocalQueue, which starts the job; empty: none.
        volcano: Volcano's queue, which starts all pods together; empty: none.
        port: the port of node 0 to which the nodes connect.
        cpu, memory: limits of a node; empty: none.
        shm: size of /dev/shm; NCCL and data workers need more than the 64 MiB of a container.
        grace_s: seconds between SIGTERM, after which a checkpoint is written, and SIGKILL.
        patch: a YAML file with further fields of the job file, or with a document of another ``kind``; can be given several times.
    """

    image: str = "meshpar:latest"
    namespace: str = ""
    claim: str = ""
    workdir: str = "/workspace"
    restarts: Annotated[int, Bound(ge=0)] = 10
    jobset: bool = False
    kueue: str = ""
    volcano: str = ""
    port: Port = 29400
    cpu: str = ""
    memory: str = ""
    shm: str = "16Gi"
    grace_s: Count = 300
    patch: tuple[str, ...] = ()

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the options together."""
        if self.kueue and self.volcano:
            yield "kueue and volcano: each starts the job by itself; give one of them"

    def notes(self, job: Job) -> Iterator[str]:
        """Yield a note where checkpoints would be lost with the pods."""
        output = str(yaml.safe_load(job.recipe)["output"]) if job.recipe else ""
        if not self.claim and "://" not in output and not output.startswith("/"):
            yield (
                f"without -o claim=NAME, {self.workdir} is a folder that each pod has for itself and loses at its end, with the run's "
                "checkpoints and logs"
            )

    def render(self, job: Job) -> Mapping[str, str]:
        """Return the file for kubectl and the files beside it."""
        name = job.label
        head = f"{name}-{_PART}-0-0.{name}" if self.jobset else f"{name}-0.{name}"
        limits = {"nvidia.com/gpu": str(job.gpus_per_node or ""), "cpu": self.cpu, "memory": self.memory}
        storage = {"persistentVolumeClaim": {"claimName": self.claim}} if self.claim else {"emptyDir": {}}
        options = f'--nodes={job.nodes} --nproc={job.ranks_per_node} --node-rank="$JOB_COMPLETION_INDEX" --head={head}:{self.port}'
        values = {
            "name": name,
            "shape": job.shape,
            "command": job.made_by,
            "namespace": self.namespace,
            "labels": {KUEUE: self.kueue} if self.kueue else {},
            "suspend": True if self.kueue else "",
            "scheduler": "volcano" if self.volcano else "",
            "group": {"scheduling.k8s.io/group-name": name} if self.volcano else {},
            "queue": self.volcano,
            "nodes": job.nodes,
            "backoff": self.restarts * job.nodes,
            "restarts": self.restarts,
            "no_use": NO_USE,
            "owner": "jobset.sigs.k8s.io/jobset-uid" if self.jobset else "batch.kubernetes.io/controller-uid",
            "image": self.image,
            "workdir": self.workdir,
            "work": ["bash", "-c", f'exec meshpar run {options} "$@"', "meshpar", *job.work("/job/recipe.yaml")],
            "recipe": job.recipe,
            "limits": {key: value for key, value in limits.items() if value},
            "volume": {"name": "workspace", **storage},
            "shm": self.shm,
            "grace_s": self.grace_s,
        }
        text = fill_yaml("kubernetes.yaml", values, self.patch, self._kept)
        if self.patch:
            _validate(text)
        return {"job.yaml": text, **job.files()}

    def _kept(self, documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the documents of the template that this job has, the job last."""
        kinds = {each["kind"]: each for each in documents}
        if not self.volcano:
            del kinds["PodGroup"]
        if not self.jobset:
            del kinds["JobSet"]
            return list(kinds.values())
        job, jobset = kinds.pop("Job"), kinds["JobSet"]
        del kinds["Service"], job["spec"]["template"]["spec"]["subdomain"]  # a JobSet has both of its own
        job["spec"].pop("suspend", None)
        jobset["spec"]["replicatedJobs"][0]["template"] = {"spec": {**job["spec"], "backoffLimit": 0}}
        return list(kinds.values())


_PART = "node"  # name of a JobSet's only replicated job


def _validate(text: str) -> None:
    """Check a patched file against Kubernetes's schema if kubernetes-validate is installed; otherwise kubectl does when it is submitted."""
    try:
        import kubernetes_validate
    except ImportError:
        return
    for document in yaml.safe_load_all(text):
        known = document
        if document["kind"] == "JobSet":  # the Job inside of it; the cluster checks the rest
            known = {**document, "apiVersion": "batch/v1", "kind": "Job", **document["spec"]["replicatedJobs"][0]["template"]}
        if document["kind"] == "PodGroup":
            continue
        try:
            kubernetes_validate.validate(known, kubernetes_validate.latest_version(), strict=True)
        except kubernetes_validate.ValidationError as error:
            place = ".".join(map(str, error.path))
            raise LaunchError(f"the patched {document['kind']} is not valid: {place}: {error.message}; correct the patch") from error
