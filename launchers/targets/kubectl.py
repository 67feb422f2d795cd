"""The common part of the targets on Kubernetes: kubectl submits, lists, prints and deletes the objects of a job file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import yaml

from meshpar.errors import LaunchError
from meshpar.launchers.targets.job import Launched, Target, ask

KUEUE = "kueue.x-k8s.io/queue-name"
"""Label with the LocalQueue of a job; Kueue starts the job, which is created suspended."""

_BOUNDED = ["--request-timeout=20s"]
_PODS = {"Job": "batch.kubernetes.io/job-name", "JobSet": "jobset.sigs.k8s.io/jobset-name", "TrainJob": "jobset.sigs.k8s.io/jobset-name"}
"""Label of a job's pods, by the job's kind; a TrainJob makes a JobSet of its own name."""


class OnKubernetes(Target):
    """A target whose job file is for kubectl. Every launch has its own name there, so that it changes no other one."""

    shares_disks: ClassVar[bool] = False

    def submit(self, path: Path) -> Sequence[str]:
        """Return the kubectl command that submits the job; unlike ``apply`` it leaves objects of another run as they are."""
        return ["kubectl", "create", "-f", str(path)]

    def states(self, jobs: Sequence[Launched]) -> Sequence[tuple[str, str]]:
        """Return names and states by ``kubectl get``."""
        files = [word for job in jobs for word in ("-f", str(job.file))]
        answer = ask(["kubectl", "get", *_BOUNDED, "--ignore-not-found", "--output=json", *files])
        read: dict[str, Any] = json.loads(answer) if answer else {"items": []}
        found = {each["metadata"]["name"]: _state(each) for each in read.get("items", [read]) if each["kind"] in _PODS}
        return [(job.label, found.get(job.label, "")) for job in jobs]

    def status(self, job: Launched) -> str:
        """Return what kubectl says of the job's objects and of its pods."""
        objects = ask(["kubectl", "get", *_BOUNDED, "--ignore-not-found", "-f", str(job.file)])
        return f"{objects}\n{ask(['kubectl', 'get', 'pods', *_BOUNDED, '--output=wide', *_selected(job)])}"

    def logs(self, job: Launched, *, follow: bool) -> Sequence[str]:
        """Return the kubectl command that prints the output of the job's pods."""
        bounded = ["--follow", "--max-log-requests=1024"] if follow else _BOUNDED
        return ["kubectl", "logs", *bounded, "--all-containers", "--prefix", "--tail=-1", *_selected(job)]

    def cancel(self, job: Launched) -> str:
        """Delete the objects of the job file."""
        return ask(["kubectl", "delete", *_BOUNDED, "--ignore-not-found", "--wait=false", "-f", str(job.file)])


def _selected(job: Launched) -> list[str]:
    """Return the options that select the job's pods."""
    try:
        documents = list(yaml.safe_load_all(job.file.read_text(encoding="utf-8")))
        ours = next(each for each in documents if each["kind"] in _PODS)
    except (OSError, yaml.YAMLError, StopIteration) as error:
        raise LaunchError(f"cannot read the job file {job.file}: {error}; restore it from `meshpar launch`") from error
    namespace = ours["metadata"].get("namespace")
    return [*([f"--namespace={namespace}"] if namespace else []), f"--selector={_PODS[ours['kind']]}={ours['metadata']['name']}"]


def _state(job: Mapping[str, Any]) -> str:
    """Return the state of a Job, a JobSet or a TrainJob: its last condition that holds, or whether its pods are ready."""
    status: Mapping[str, Any] = job.get("status", {})
    true = [each["type"] for each in status.get("conditions", []) if each["status"] == "True"]
    ended = [each for each in ("Failed", "Complete", "Completed", "Suspended") if each in true]
    pods = [status, *status.get("replicatedJobsStatus", []), *status.get("jobsStatus", [])]
    return ended[0] if ended else "Running" if any(each.get("ready") for each in pods) else "Pending"
