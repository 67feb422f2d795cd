"""Before a job trains: the doctor, and the largest micro-batch (``--find-batch-size``)."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch

from meshpar.core import runtime
from meshpar.core.errors import FullMemoryError, PreflightError, RecipeError
from meshpar.launchers.agent.local import MEETING_S
from meshpar.launchers.doctor.examine import Folder, Meeting, Report
from meshpar.launchers.doctor.rank import computed, examined, mesh_of
from meshpar.launchers.doctor.report import findings_text
from meshpar.launchers.jobs import build, datasets
from meshpar.launchers.recipes.loading import resolve
from meshpar.launchers.recipes.recipe import Recipe
from meshpar.launchers.recipes.yamlfile import apply_overrides, parse_document
from meshpar.training import elastic_job

_LATER_S = 120.0  # by which the time-out of collectives exceeds the watchdog's
_SKEW_S = 10.0
_STATE = 3  # AdamW: a parameter and its two moments, in float32
_STEPS = 3


@contextmanager
def opened(recipe: Recipe, data: datasets.Data, kind: str) -> Iterator[torch.device]:
    """Open the process group, after the doctor: ``warn`` prints its findings, ``fail`` raises PreflightError."""
    timeout_s = patience_s(recipe)
    if recipe.preflight == "off" or not runtime.launched() or runtime.world_size() == 1:
        with runtime.distributed(kind, timeout_s=timeout_s) as device:
            yield device
        return
    meeting = Meeting(MEETING_S, "preflight")  # held to the end: its store may be rank 0's own
    report = examined(meeting, mesh_of(recipe.mesh), runtime.device(kind), _folder(recipe, data))
    _tell(recipe, report)
    with runtime.distributed(kind, timeout_s=timeout_s) as device:
        _tell(recipe, computed(replace(report, findings=()), device))
        yield device


def patience_s(recipe: Recipe) -> float:
    """Return the time-out of collectives: longer than the watchdog's, which names the missing ranks."""
    if elastic_job.replica()[1]:
        return recipe.patience + _SKEW_S  # the other replicas go on by then
    return max(runtime.DEFAULT_TIMEOUT_S, (recipe.watchdog or 0.0) + _LATER_S)


def _folder(recipe: Recipe, data: datasets.Data) -> Folder | None:
    if not recipe.kept.mounted:
        return None  # no node mounts a store
    model = build.build_model(recipe, data.vocab_size, data.facts)
    size = sum(parameter.numel() for parameter in model.parameters()) * 4 * _STATE
    return Folder(path=recipe.folder.absolute() / "checkpoints", bytes=size * ((recipe.checkpoint.keep or 1) + 1))


def _tell(recipe: Recipe, report: Report) -> None:
    if not report.findings:
        return
    text = f"preflight found {len(report.findings)}:\n{findings_text(report.findings)}"
    if recipe.preflight == "fail":
        raise PreflightError(text)
    if runtime.is_main():
        print(text, file=sys.stderr)


@final
@dataclass(frozen=True, slots=True)
class Trial:
    """A micro-batch and its peak memory of a rank in bytes; None: it ran out of memory."""

    micro_batch: int
    peak: int | None


def find_batch_size(recipe: Recipe, run: Callable[[Recipe], int], memory: int | None) -> Recipe:
    """Return the recipe with the largest micro-batch in ``memory`` bytes per rank and the same samples per step."""
    if memory is None and runtime.on_host(build.device_type(recipe)):
        raise RecipeError(
            "--find-batch-size on a CPU needs --memory 4GiB, or another limit per rank: there is no device memory to "
            "fill"
        )
    whole = recipe.data.micro_batch * recipe.data.accumulate
    sizes, best = [size for size in range(1, whole + 1) if whole % size == 0], 0
    low, high = 0, len(sizes) - 1
    while low <= high:
        middle = (low + high + 1) // 2
        trial = try_batch(recipe, run, sizes[middle])
        fits = trial.peak is not None and (memory is None or trial.peak <= memory)
        used = "runs out of memory" if trial.peak is None else f"{trial.peak / 2**30:.2f} GiB a rank"
        print(
            f"micro-batch {trial.micro_batch}: {used}{'' if fits or trial.peak is None else ', too much'}",
            file=sys.stderr,
            flush=True,
        )
        if fits:
            best, low = sizes[middle], middle + 1
        else:
            high = middle - 1
    if not best:
        raise RecipeError(
            "not even a micro-batch of 1 fits; shard more (mesh), recompute (ActivationCheckpoint) or shorten the "
            "sequence"
        )
    print(
        f"found: data.micro_batch={best} data.accumulate={whole // best}, {whole} samples per data rank and step, as "
        "before",
        file=sys.stderr,
    )
    return _with(recipe, [f"data.micro_batch={best}", f"data.accumulate={whole // best}"])


def try_batch(recipe: Recipe, run: Callable[[Recipe], int], size: int) -> Trial:
    """Train a few steps with a micro-batch of ``size`` in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="meshpar-batch-") as folder:
        overrides = [
            f"output={folder}",
            f"data.micro_batch={size}",
            "data.accumulate=1",
            f"training.steps={_STEPS}",
            "training.epochs=null",
        ]
        overrides += [
            "training.log_every=1",
            "training.validate_every=null",
            "training.tensorboard=false",
            "trackers={}",
            "evaluations={}",
            "checkpoint.resume=auto",
        ]
        overrides += [
            "data.validation_fraction=0",
            "data.validation_paths=[]",
            f"schedule.steps={_STEPS}",
            "schedule.warmup_steps=0",
        ]
        overrides += ["checkpoint.every=null", "checkpoint.best=null", "training.forecast=false"]
        try:
            stopped = run(_with(recipe, overrides))
        except FullMemoryError:
            return Trial(size, None)
        if stopped:
            raise SystemExit(stopped)
        lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    peaks = [record["memory_gib"] for record in map(json.loads, lines) if record.get("memory_gib")]
    return Trial(size, int(max(peaks) * 2**30))


def _with(recipe: Recipe, overrides: list[str]) -> Recipe:
    document = parse_document(recipe.to_yaml(), recipe.name)
    apply_overrides(document, overrides)
    return resolve(document, trust=True)
