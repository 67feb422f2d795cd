"""SLURM: a batch script with one agent per node, or an array of replicas; failed jobs are requeued."""

from __future__ import annotations

import math
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, final

from meshpar.core.errors import LaunchError
from meshpar.launchers.agent.replicas import divide_replicas
from meshpar.launchers.agent.terms import COMPLETE, NO_RESTART, NO_USE
from meshpar.launchers.targets.job import RECIPE, Job, Launched, Shell, Target, ask, fill
from meshpar.training.settings import Bound, Count

_OPTIONS = ("time", "partition", "account", "qos", "constraint", "reservation", "gres", "cpus-per-task")
_WRITTEN = {
    *("job-name", "chdir", "output", "open-mode", "nodes", "ntasks", "ntasks-per-node", "gpus-per-node", "exclusive"),
    *("requeue", "no-requeue", "no-kill", "signal", "wrap"),
}
_OUTPUT = "slurm-*.out"
_EARLY_S = 60  # by which SLURM may send the signal before --signal says


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm(Target):
    """Render a batch script.

    Attributes:
        time: the time limit in SLURM's format; empty: the partition's.
        partition, account, qos, constraint, reservation: options of sbatch; empty: the cluster's defaults.
        gres: generic resources of a node, instead of ``--gpus-per-node``.
        cpus_per_task: CPUs of a node for the job; 0: the whole node (``--exclusive``).
        signal_s: seconds before the time limit at which the job writes a checkpoint and is requeued.
        max_requeues: how many times a job that failed is requeued. Requeues at the time limit are not counted.
        restarts: how many times the ranks of an elastic job restart within one start of the job.
        rejoin_s: for an elastic job: seconds without an answer after which a node is lost, and then seconds in which
            others may join.
        meshpar: path of the command on the nodes; empty: what ``setup`` puts on the path, else this environment's.
        sbatch: further options of sbatch, ``--mem=0 --exclude=n7``; can be given several times.
        image: container image with meshpar installed, in which each node's task runs; empty: no container. For pyxis
            such as ``registry#team/train:1`` or ``train.sqsh``, for apptainer such as ``train.sif`` or
            ``docker://team/train:1``.
        container: runtime of the image: ``pyxis`` or ``apptainer``.
        mounts: further folders that the container sees under the same path, or as ``SOURCE:TARGET``; it always sees the
            working directory and the run's folder. Can be given several times.
        setup: lines of shell that run first, such as ``module load cuda``.
    """

    time: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    gres: str = ""
    cpus_per_task: int = 0
    signal_s: Annotated[int, Bound(ge=1, le=65535)] = 300
    max_requeues: Annotated[int, Bound(ge=0)] = 10
    restarts: Annotated[int, Bound(ge=0)] = 10
    rejoin_s: Count = 15
    meshpar: str = ""
    sbatch: tuple[str, ...] = ()
    image: str = ""
    container: str = "pyxis"
    mounts: tuple[str, ...] = ()
    setup: Shell = Shell("")

    def problems(self) -> Iterator[str]:
        try:
            words = self._further()
        except ValueError as error:
            yield f"sbatch: {error} in {' '.join(self.sbatch)!r}; close the quotes"
            words = []
        for word in words:
            name, _, value = word.removeprefix("--").partition("=")
            if not re.fullmatch(r"--[a-z][a-z-]*(=.*)?", word):
                yield f"sbatch: {word!r} is not a long option; write --NAME or --NAME=VALUE, such as --mem=0"
            elif name in _OPTIONS:
                yield f"sbatch: --{name} is an option of its own; write -o {name.replace('-', '_')}={value or 'VALUE'}"
            elif name in _WRITTEN:
                yield f"sbatch: meshpar writes --{name}, which its batch script depends on; leave it out"
            elif name == "array" and not value.endswith("%1"):
                tasks = value.partition("%")[0]
                yield (
                    f"sbatch: the tasks of --array={value} would train in one folder; write --array={tasks}%1 to run "
                    "them in turn"
                )
        if self.container not in ("pyxis", "apptainer"):
            yield f"container={self.container}: expected pyxis or apptainer"
        limit = _seconds(self.time or "UNLIMITED")
        if limit is None:
            yield (
                f"time={self.time}: expected MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, "
                "DAYS-HOURS[:MINUTES[:SECONDS]] or UNLIMITED"
            )
        elif limit <= self.signal_s + _EARLY_S:
            yield (
                f"time={self.time} is {limit:.0f} s; it must be above {self.signal_s + _EARLY_S} s: "
                f"signal_s={self.signal_s} for the checkpoint, and SLURM's signal may come {_EARLY_S} s earlier; "
                "raise time, or lower signal_s"
            )

    def render(self, job: Job) -> Mapping[str, str]:
        options = {name: getattr(self, name.replace("-", "_")) for name in _OPTIONS}
        options["gpus-per-node"] = 0 if self.gres else job.gpus_per_node
        lines = [f"#SBATCH --{name}={shlex.quote(str(value))}" for name, value in options.items() if value]
        replicas = job.elastic == "replicas"  # of which two on a node would be lost together
        span = _nodes_of_a_replica(job)
        tasks = "one task a node" if span == 1 else f"one task a replica of {span} nodes"
        lines += ["#SBATCH --exclusive"] if replicas or not self.cpus_per_task else []
        lines += [f"#SBATCH {shlex.quote(word)}" for word in self._further()]
        if replicas:
            if any(word.startswith("--array=") for word in self._further()):
                raise LaunchError(f"sbatch: --elastic=replicas makes an array of its own, {tasks}; leave --array out")
            lines.append(f"#SBATCH --array=0-{job.nodes // span - 1}")
        lines += ["#SBATCH --no-kill  # a lost node does not end the job"] if job.elastic == "nodes" else []
        if self.meshpar:  # with the ``~`` and the variables of the nodes
            word = re.sub(r'(["`\\])', r"\\\1", self.meshpar)
            command = f'"{re.sub("^~(?=/)", "$HOME", word)}"'
        else:
            here = shlex.quote(str(Path(sys.executable).parent / "meshpar"))
            command = "meshpar" if self.image else f'"$(command -v meshpar || echo {here})"' if self.setup else here
        # the lines with which the tasks of an array find the one that puts their replicas together
        meeting = {"run": shlex.quote(str(job.run)), "complete": COMPLETE}
        values = {
            **job.values(),
            **meeting,
            "name": shlex.quote(job.name),
            "tasks": f"an array of {tasks}" if replicas else "one task a node",
            "output": shlex.quote(str(job.folder / ("slurm-%A_%a.out" if replicas else "slurm-%j.out"))),
            "cwd": shlex.quote(str(Path.cwd())),
            "nodes": span if replicas else job.nodes,
            "options": "\n".join(lines),
            "signal_s": self.signal_s,
            "least_s": self.signal_s + _EARLY_S,
            "stopped": 128 + signal.SIGUSR1,
            "setup": self.setup,
            "max_requeues": self.max_requeues,
            "cpus": f"--cpus-per-task={self.cpus_per_task} " if self.cpus_per_task else "",
            "on_failure": "--kill-on-bad-exit=0 --no-kill" if job.elastic == "nodes" else "--kill-on-bad-exit=1",
            "container": self._container(job),
            "meeting": f"\n{fill('replicas.sbatch', meeting).rstrip()}" if replicas else "",
            "placement": self._placement(job),
            "work": shlex.join(job.work(str(job.folder / RECIPE))),
            "meshpar": command,
            "no_use": NO_USE,
            "no_restart": NO_RESTART,
        }
        return {"job.sbatch": fill("job.sbatch", values), **job.files()}

    def _further(self) -> list[str]:
        return [word for text in self.sbatch for word in shlex.split(text)]

    def _container(self, job: Job) -> str:
        """Return what stands before the task's command: options of srun for pyxis, or a command of apptainer."""
        if not self.image:
            return ""
        cwd, mounts = str(Path.cwd()), ",".join(dict.fromkeys([str(Path.cwd()), str(job.run), *self.mounts]))
        if self.container == "apptainer":
            gpus = ["--nv"] if job.gpus_per_node else []
            return shlex.join(["apptainer", "exec", *gpus, "--bind", mounts, "--pwd", cwd, self.image]) + " "
        pairs = ",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in mounts.split(","))
        words = [f"--container-image={self.image}", f"--container-mounts={pairs}", f"--container-workdir={cwd}"]
        return f"{shlex.join(words)} "

    def _placement(self, job: Job) -> str:
        """Return the options of ``meshpar run``, some with variables of the batch script."""
        if job.elastic == "replicas":
            words = f"--elastic=replicas --nodes={job.nodes} --restarts={self.restarts}"
            span = _nodes_of_a_replica(job)
            node = "SLURM_ARRAY_TASK_ID" if span == 1 else f"((SLURM_ARRAY_TASK_ID * {span} + SLURM_NODEID))"
            return f'{words} \\\n  --node-rank="${node}" --head="$MESHPAR_LOGS/head" --logs="$MESHPAR_LOGS"'
        again = f"--restarts={self.restarts} --rejoin-s={self.rejoin_s} " if job.elastic else ""
        words = f"--nodes={'1:' if job.elastic else ''}{job.nodes} {again}--nproc={job.ranks_per_node}"
        return f'{words} \\\n  --node-rank="$SLURM_NODEID" --head="$MESHPAR_HEAD" --run-id="$MESHPAR_RUN_ID"'

    def submit(self, path: Path) -> Sequence[str]:
        return ["sbatch", str(path)]

    def states(self, jobs: Sequence[Launched]) -> Sequence[tuple[str, str]]:
        """Return numbers and states by squeue, sacct, or without accounting the job's own marker."""
        rows = _queue()
        every = [_numbers(job, rows) for job in jobs]
        ended: dict[str, str] = {}
        gone = sorted({number for numbers in every for number in numbers} - {number for number, *_ in rows})
        if gone:
            fields = ["--parsable2", "--allocations", "--format=JobIDRaw,State"]
            with suppress(LaunchError):  # a cluster without accounting
                done = ask(["sacct", "--noheader", *fields, f"--jobs={','.join(gone)}"])
                ended = dict(line.split("|", 1) for line in done.splitlines())
        answers = []
        for job, numbers in zip(jobs, every):
            states = [state for number, state, _ in rows if number in numbers]
            for number in [number for number in numbers if number in gone]:
                complete = any(job.folder.parent.parent.glob(f"logs/{number}-*/{COMPLETE}"))
                states.append(ended.get(number) or ("COMPLETED" if complete else "ended"))
            answers.append((",".join(numbers), ",".join(dict.fromkeys(states))))
        return answers

    def status(self, job: Launched) -> str:
        numbers = ",".join(_numbers(job, _queue()))
        with suppress(LaunchError):  # squeue refuses a number that it has forgotten
            line = "--format=%i: %T for %M of %l on %N, reason: %r"
            return ask(["squeue", "--noheader", "--states=all", f"--jobs={numbers}", line])
        return ""

    def logs(self, job: Launched, *, follow: bool) -> Sequence[str]:
        files = sorted(map(str, job.folder.glob(_OUTPUT)))
        if not files:
            raise LaunchError(f"there is no output in {job.folder} yet; the job has not started")
        return ["tail", "--quiet", "--lines=+1", *(["--follow"] if follow else []), *files]

    def cancel(self, job: Launched) -> str:
        return ask(["scancel", *_numbers(job, _queue())])


def _nodes_of_a_replica(job: Job) -> int:
    """Return how many nodes a replica spans: 1 where a node has whole ones, or none may be lost."""
    return divide_replicas(job.mesh, job.nodes, 0).nodes if job.elastic == "replicas" and job.mesh is not None else 1


def _queue() -> list[list[str]]:
    """Return number, state and job file of this user's jobs that SLURM still knows."""
    lines = ask(["squeue", "--me", "--noheader", "--states=all", "--format=%F|%T|%o"]).splitlines()
    return [line.split("|", 2) for line in lines]


def _numbers(job: Launched, rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the numbers of a launch's jobs: from its submission, its output, and SLURM."""
    submitted = re.findall(r"^Submitted batch job (\d+)", job.submitted)
    # an array's tasks append their own numbers
    wrote = [re.findall(r"\d+", path.stem)[0] for path in job.folder.glob(_OUTPUT)]
    queued = [number for number, _, file in rows if file == str(job.file)]
    return sorted({*submitted, *wrote, *queued}, key=int)


def _seconds(limit: str) -> float | None:
    """Return a time limit of SLURM in seconds; None if SLURM would refuse it."""
    if limit.upper() in ("UNLIMITED", "INFINITE", "-1", "0"):
        return math.inf
    days = re.fullmatch(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if days:
        day, hours, minutes, seconds = (int(number or 0) for number in days.groups())
        return ((day * 24 + hours) * 60 + minutes) * 60 + seconds
    if not re.fullmatch(r"\d+(:\d+){0,2}", limit):
        return None
    hours, minutes, seconds = map(int, {0: f"0:{limit}:0", 1: f"0:{limit}", 2: limit}[limit.count(":")].split(":"))
    return (hours * 60 + minutes) * 60 + seconds
