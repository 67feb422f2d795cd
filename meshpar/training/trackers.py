"""Trackers: plugins that show a run's records elsewhere; TensorBoard, Weights & Biases, Trackio and MLflow.

A plugin (entry-point group ``meshpar.trackers``) is called with a :class:`TrackedRun` and its options. An optional
member ``requires`` is the package that it needs and meshpar's extra that installs it.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, final

from meshpar.core.errors import MeshparError
from meshpar.process.imports import need
from meshpar.training.metrics import Ended, Metrics

_ROOM = 32 << 20  # bytes on the disk for what W&B and Trackio have in memory


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The facts of a run that a tracker gets.

    Attributes:
        name, folder: of the run.
        id: the same at each start of the run.
        step: the last step that counts; later ones that the tracker has, of a start that failed, are void.
        facts: ``recipe``, ``plan``, ``environment`` and ``commit``, as far as they are known; plain data.
    """

    name: str
    id: str
    folder: Path
    step: int
    facts: Mapping[str, Any]


class Tracker(Protocol):
    """A tracker, as a protocol. One thread makes it and calls it; an error or a delay here affects nothing else."""

    def send(self, records: Sequence[Metrics]) -> None:
        """Take records in order: ``step``, ``time`` (seconds since 1970), finite values. After an error they are sent
        again to a new tracker; one that is refused alone, while a later one is taken, is set aside.
        """

    def close(self, ended: Ended) -> None:
        """Send what is left, and end; ``ended`` is ``"stopped"`` also where a new tracker follows after an error."""


def _values(record: Metrics) -> dict[str, float]:
    return {name: value for name, value in record.items() if name not in ("step", "time")}


@final
class TensorBoard:
    """Write TensorBoard scalars, one per value, to ``tensorboard`` in the run's folder."""

    requires: ClassVar[tuple[str, str]] = ("tensorboard", "train")

    def __init__(self, run: TrackedRun) -> None:
        self._step = run.step
        self._writer: Any = need("torch.utils.tensorboard").SummaryWriter(
            str(run.folder / "tensorboard"), purge_step=run.step + 1 if run.step else None
        )

    def send(self, records: Sequence[Metrics]) -> None:
        """Write every value at its step."""
        for record in records:
            self._step = int(record["step"])
            for name, value in _values(record).items():
                self._writer.add_scalar(name, value, int(record["step"]), walltime=record.get("time"))
        self._writer.flush()

    def close(self, ended: Ended) -> None:
        """Write how the run ended as a text, flush and close."""
        self._writer.add_text("run", ended, self._step)
        self._writer.close()


@final
class WandB:
    """Log to Weights & Biases; a resumed run continues the same W&B run.

    Options are ``wandb.init``'s; ``mode``: ``offline`` writes files alone, for ``wandb sync``; None: as WANDB_MODE
    says.
    """

    requires: ClassVar[tuple[str, str]] = ("wandb", "wandb")

    def __init__(
        self,
        run: TrackedRun,
        *,
        project: str = "meshpar",
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: Literal["online", "offline"] | None = None,
    ) -> None:
        wandb: Any = need("wandb", extra="wandb")
        self._folder = run.folder / "wandb"
        _check_room(self._folder)
        if (mode or wandb.setup().settings.mode) == "online" and not wandb.login(prompt=False):
            raise MeshparError("W&B has no API key; run `wandb login`, set WANDB_API_KEY, or set mode: offline")
        # what is not uploaded when a run ends stays on the disk, for `wandb sync`
        settings = wandb.Settings(console="off", silent=True, init_timeout=30.0, finish_timeout=5.0)
        placed = {"project": project, "entity": entity, "group": group, "tags": list(tags), "mode": mode}
        named = {"id": run.id, "name": run.name, "dir": str(run.folder), "config": dict(run.facts)}
        self._run: Any = wandb.init(**placed, **named, resume="allow", reinit="create_new", settings=settings)
        self._run.define_metric("*", step_metric="step")

    def send(self, records: Sequence[Metrics]) -> None:
        """Log every record with its time."""
        _check_room(self._folder, self._run)
        for record in records:
            stamp = {"_timestamp": record["time"]} if "time" in record else {}
            self._run.log({"step": int(record["step"]), **_values(record), **stamp})

    def close(self, ended: Ended) -> None:
        """Finish the W&B run; the exit code of one that failed is 1, and 143 (SIGTERM) of one that was stopped."""
        self._run.finish(exit_code={"complete": 0, "failed": 1, "stopped": 143}[ended])


@final
class Trackio:
    """Log to Trackio: on this machine (in TRACKIO_DIR), or to a Space; a resumed run continues the same Trackio run.

    ``space_id``: name of the Space; None: as TRACKIO_SPACE_ID and TRACKIO_SERVER_URL say, else on this machine.
    """

    requires: ClassVar[tuple[str, str]] = ("trackio", "trackio")

    def __init__(self, run: TrackedRun, *, project: str = "meshpar", space_id: str | None = None) -> None:
        trackio: Any = need("trackio", extra="trackio")
        self._folder = Path(trackio.utils.TRACKIO_DIR)
        _check_room(self._folder)
        # its measurements of the machine would run in this process
        how = {"resume": "allow", "embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
        self._run: Any = trackio.init(project, f"{run.name}-{run.id}", space_id=space_id, config=dict(run.facts), **how)

    def send(self, records: Sequence[Metrics]) -> None:
        """Log every record at its step."""
        _check_room(self._folder, self._run)
        for record in records:
            self._run.log(_values(record), step=int(record["step"]))

    def close(self, ended: Ended) -> None:
        """Finish the Trackio run; Trackio has no state of a run, so that a failed one gets a value ``failed``."""
        if ended == "failed":
            self._run.log({"failed": 1.0})
        self._run.finish()


def _check_room(folder: Path, run: Any = None) -> None:  # noqa: ANN401 - of a tracker
    """Raise OSError on a disk that is nearly full: W&B and Trackio raise no error for what they cannot write."""
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(folder).free < _ROOM:
        if run is not None:
            run.finish()  # writes what it has in memory
        raise OSError(errno.ENOSPC, f"less than {_ROOM >> 20} MiB are free for the tracker", str(folder))


@final
class MLflow:
    """Log to an MLflow server or store; a resumed run continues the same MLflow run.

    ``uri``: of the server or store; None: as MLFLOW_TRACKING_URI says. ``experiment`` is made if there is none.
    """

    requires: ClassVar[tuple[str, str]] = ("mlflow", "mlflow")

    def __init__(self, run: TrackedRun, *, uri: str | None = None, experiment: str = "meshpar") -> None:
        mlflow: Any = need("mlflow", extra="mlflow")
        self._metric = mlflow.entities.Metric
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        existing = self._client.get_experiment_by_name(experiment)
        if existing:
            number = existing.experiment_id
        else:  # MLflow's own place of artifacts, without a server, is the working directory
            served = self._client.tracking_uri.startswith("http")
            number = self._client.create_experiment(experiment, None if served else (run.folder / "mlflow").as_uri())
        runs = self._client.search_runs([number], f"tags.`meshpar.id` = '{run.id}'", max_results=1)
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._client.create_run(number, tags={"meshpar.id": run.id}, run_name=run.name).info.run_id
            self._client.log_batch(self._id, params=[mlflow.entities.Param(*fact) for fact in _flat(run.facts)])
        if commit := run.facts.get("commit"):
            self._client.set_tag(self._id, "mlflow.source.git.commit", commit)
        if "recipe" in run.facts:
            self._client.log_text(self._id, json.dumps(run.facts["recipe"], indent=1), "recipe.json")

    def send(self, records: Sequence[Metrics]) -> None:
        """Log every value at its step and time."""
        metrics = [
            self._metric(_key(name), float(value), int(record.get("time", 0.0) * 1000), int(record["step"]))
            for record in records
            for name, value in _values(record).items()
        ]
        self._client.log_batch(self._id, metrics=metrics)  # in requests of at most 1,000

    def close(self, ended: Ended) -> None:
        """Mark the MLflow run as finished, failed, or killed where it was stopped."""
        status = {"complete": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}[ended]
        self._client.set_terminated(self._id, status)


def _key(name: str) -> str:
    return re.sub(r"[^\w\-./ ]", "_", name)


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield facts by dotted name; a value is cut to MLflow's 6,000 characters."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield _key(f"{prefix}{name}"), str(value)[:6000]
