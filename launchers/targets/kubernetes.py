"""Kubernetes, by kubectl: an Indexed Job, a JobSet, or a TrainJob of Kubeflow Trainer v2."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, final

import yaml

from meshpar.core.errors import LaunchError
from meshpar.launchers.agent.terms import NO_USE
from meshpar.launchers.recipes.yamlfile import BoundedLoader
from meshpar.launchers.targets.job import Job, Launched, Port, Target, ask, fill_yaml
from meshpar.training.settings import Bound, Count

KUEUE = "kueue.x-k8s.io/queue-name"
"""Label with the LocalQueue of a job; Kueue starts the job, which is created suspended."""

_BOUNDED = ["--request-timeout=20s"]
_PODS = {
    "Job": "batch.kubernetes.io/job-name",
    **dict.fromkeys(("JobSet", "TrainJob"), "jobset.sigs.k8s.io/jobset-name"),
}
"""Label of a job's pods, by the job's kind; a TrainJob makes a JobSet of its own name."""
_PART = "node"  # name of a JobSet's only replicated job
# OpenShift runs containers as users without a home folder.
_HOME = '[ -w "${HOME:-}" ] || export HOME=$(mktemp -d)\n'
_RUN = 'recipe=$(mktemp -d)/recipe.yaml\nprintf %s "$1" > "$recipe"\nexec meshpar run "$recipe"\n'
_SCRIPT = 'exec meshpar run "$@"\n'


class OnKubernetes(Target):
    """A target whose job file is for kubectl. Every launch has its own name there, so that it changes no other one."""

    shares_disks: ClassVar[bool] = False

    def submit(self, path: Path) -> Sequence[str]:
        """Return the kubectl command that submits the job; unlike ``apply`` it changes no object of another run."""
        return ["kubectl", "create", "-f", str(path)]

    def states(self, jobs: Sequence[Launched]) -> Sequence[tuple[str, str]]:
        files = [word for job in jobs for word in ("-f", str(job.file))]
        answer = ask(["kubectl", "get", *_BOUNDED, "--ignore-not-found", "--output=json", *files])
        read: dict[str, Any] = json.loads(answer) if answer else {"items": []}
        entries = [entry for entry in read.get("items", [read]) if entry["kind"] in _PODS]
        states = {entry["metadata"]["name"]: _state(entry) for entry in entries}
        return [(job.label, states.get(job.label, "")) for job in jobs]

    def status(self, job: Launched) -> str:
        objects = ask(["kubectl", "get", *_BOUNDED, "--ignore-not-found", "-f", str(job.file)])
        return f"{objects}\n{ask(['kubectl', 'get', 'pods', *_BOUNDED, '--output=wide', *_selected(job)])}"

    def logs(self, job: Launched, *, follow: bool) -> Sequence[str]:
        bounded = ["--follow", "--max-log-requests=1024"] if follow else _BOUNDED
        return ["kubectl", "logs", *bounded, "--all-containers", "--prefix", "--tail=-1", *_selected(job)]

    def cancel(self, job: Launched) -> str:
        return ask(["kubectl", "delete", *_BOUNDED, "--ignore-not-found", "--wait=false", "-f", str(job.file)])


def _selected(job: Launched) -> list[str]:
    try:
        documents = list(yaml.load_all(job.file.read_text(encoding="utf-8"), Loader=BoundedLoader))
        ours = next(document for document in documents if document["kind"] in _PODS)
        namespace, name = ours["metadata"].get("namespace"), ours["metadata"]["name"]
    except (OSError, yaml.YAMLError, StopIteration, ValueError, LookupError, TypeError, AttributeError) as error:
        raise LaunchError(f"cannot read the job file {job.file}: {error}; use the commands of its engine") from error
    return [*([f"--namespace={namespace}"] if namespace else []), f"--selector={_PODS[ours['kind']]}={name}"]


def _state(job: Mapping[str, Any]) -> str:
    """Return a Job's, JobSet's or TrainJob's last condition that holds, or whether its pods are ready."""
    status: Mapping[str, Any] = job.get("status", {})
    true = [condition["type"] for condition in status.get("conditions", []) if condition["status"] == "True"]
    ended = [state for state in ("Failed", "Complete", "Completed", "Suspended") if state in true]
    pods = [status, *status.get("replicatedJobsStatus", []), *status.get("jobsStatus", [])]
    return ended[0] if ended else "Running" if any(pod.get("ready") for pod in pods) else "Pending"


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
        jobset: render a JobSet (``jobset.x-k8s.io/v1alpha2``), which restarts all pods together, instead of an Indexed
            Job.
        kueue: Kueue's LocalQueue, which starts the job; empty: none.
        volcano: Volcano's queue, which starts all pods together; empty: none.
        port: the port of node 0 to which the nodes connect.
        cpu, memory: limits of a node; empty: none.
        shm: size of /dev/shm; NCCL and data workers need more than the 64 MiB of a container.
        grace_s: seconds between SIGTERM, after which a checkpoint is written, and SIGKILL.
        root: let the containers run as root; otherwise Kubernetes refuses an image whose user is root.
        token: mount the token of the pods' service account, which the cluster's API accepts.
        patch: a YAML file with further fields of the job file, or with a document of another ``kind``; can be given
            several times.
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
    root: bool = False
    token: bool = False
    patch: tuple[str, ...] = ()

    def problems(self) -> Iterator[str]:
        if self.kueue and self.volcano:
            yield "kueue and volcano: each starts the job by itself; give one of them"

    def notes(self, job: Job) -> Iterator[str]:
        """Yield a note where checkpoints would be lost with the pods."""
        output = str(yaml.safe_load(job.recipe)["output"]) if job.recipe else ""
        if not self.claim and "://" not in output and not output.startswith("/"):
            lost = "is a folder that each pod has for itself and loses at its end, with the run's checkpoints and logs"
            yield f"without -o claim=NAME, {self.workdir} {lost}"

    def render(self, job: Job) -> Mapping[str, str]:
        name = job.label
        head = f"{name}-{_PART}-0-0.{name}" if self.jobset else f"{name}-0.{name}"
        storage = {"persistentVolumeClaim": {"claimName": self.claim}} if self.claim else {"emptyDir": {}}
        ranks = f"--nodes={job.nodes} --nproc={job.ranks_per_node}"
        options = f'{ranks} --node-rank="$JOB_COMPLETION_INDEX" --head={head}:{self.port}'
        values = {
            **_shared(self, job),
            "scheduler": "volcano" if self.volcano else "",
            "group": {"scheduling.k8s.io/group-name": name} if self.volcano else {},
            "queue": self.volcano,
            "backoff": self.restarts * job.nodes,
            "restarts": self.restarts,
            "no_use": NO_USE,
            "owner": "jobset.sigs.k8s.io/jobset-uid" if self.jobset else "batch.kubernetes.io/controller-uid",
            "workdir": self.workdir,
            "work": ["bash", "-c", f'{_HOME}exec meshpar run {options} "$@"', "meshpar", *job.work("/job/recipe.yaml")],
            "recipe": job.recipe,
            "volume": {"name": "workspace", **storage},
            "shm": self.shm,
            "token": self.token,
            "security": {} if self.root else {"runAsNonRoot": True},
            "grace_s": self.grace_s,
        }
        text = fill_yaml("kubernetes.yaml", values, self.patch, self._kept)
        if self.patch:
            _validate(text)
        return {"job.yaml": text, **job.files()}

    def _kept(self, documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the documents of the template that this job has, the job last."""
        kinds = {document["kind"]: document for document in documents}
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


def _validate(text: str) -> None:
    """Check a patched file against Kubernetes's schema if kubernetes-validate is installed."""
    try:
        import kubernetes_validate
    except ImportError:
        return
    for document in yaml.safe_load_all(text):
        if document["kind"] == "PodGroup":
            continue
        checked = document
        if document["kind"] == "JobSet":  # the Job inside of it; the cluster checks the rest
            inner = document["spec"]["replicatedJobs"][0]["template"]
            checked = {**document, "apiVersion": "batch/v1", "kind": "Job", **inner}
        try:
            kubernetes_validate.validate(checked, kubernetes_validate.latest_version(), strict=True)
        except kubernetes_validate.ValidationError as error:
            where = f"{'.'.join(map(str, error.path))}: {error.message}"
            raise LaunchError(f"the patched {document['kind']} is not valid: {where}; correct the patch") from error


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
        patch: a YAML file with further fields of the job file, or with a document of another ``kind``; can be given
            several times.
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
        enter = f"cd {shlex.quote(self.workdir)}\n" if self.workdir else ""
        values = {
            **_shared(self, job),
            "runtime": self.runtime,
            "ranks": job.ranks_per_node,
            "work": [f"{enter}{_HOME}{_RUN if job.recipe else _SCRIPT}", "meshpar", *job.work(job.recipe)],
        }
        return {"job.yaml": fill_yaml("trainjob.yaml", values, self.patch), **job.files()}


def _shared(target: Kubernetes | TrainJob, job: Job) -> dict[str, object]:
    limits = {"nvidia.com/gpu": str(job.gpus_per_node or ""), "cpu": target.cpu, "memory": target.memory}
    return {
        **job.values(),
        "namespace": target.namespace,
        "labels": {KUEUE: target.kueue} if target.kueue else {},
        "suspend": True if target.kueue else "",
        "image": target.image,
        "limits": {key: value for key, value in limits.items() if value},
    }
