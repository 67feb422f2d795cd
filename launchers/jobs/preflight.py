"""Before a job trains: the doctor, and the largest micro-batch (``--find-batch-size``)."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from meshpar.core import runtime
from meshpar.core.errors import FullMemoryError, PreflightError, RecipeError
from meshpar.launchers.agent.terms import MEETING_S
from meshpar.launchers.doctor.examine import Folder, Report, compare_products, examine_all, findings_text, meet, mesh_of
from meshpar.launchers.jobs import build, datasets
from meshpar.launchers.recipes.loading import resolve
from meshpar.launchers.recipes.recipe import Recipe
from meshpar.launchers.recipes.yamlfile import apply_overrides, parse_document
from meshpar.training.lighthouse import this_replica

_LATER_S = 120.0  # by which the time-out of collectives exceeds the watchdog's
_SKEW_S = 10.0
_STATE = 3  # AdamW: a parameter and its two moments, in float32
_TRIAL = """
data.accumulate=1 data.validation_fraction=0 data.validation_paths=[]
training.steps=3 training.epochs=null training.log_every=1 training.validate_every=null training.tensorboard=false
training.forecast=false schedule.steps=3 schedule.warmup_steps=0 trackers={} evaluations={}
checkpoint.resume=auto checkpoint.every=null checkpoint.best=null
"""


@contextmanager
def open_job(recipe: Recipe, data: datasets.Data, kind: str) -> Iterator[torch.device]:
    """Open the process group, after the doctor: ``warn`` prints its findings, ``fail`` raises PreflightError."""
    timeout_s = patience_s(recipe)
    if recipe.preflight == "off" or not runtime.launched() or runtime.world_size() == 1:
        with runtime.distributed(kind, timeout_s=timeout_s) as device:
            yield device
        return
    roll = meet(MEETING_S, "preflight")  # held to the end: its store may be rank 0's own
    report = examine_all(roll, mesh_of(recipe.mesh), runtime.device(kind), _folder(recipe, data))
    _tell(recipe, report)
    with runtime.distributed(kind, timeout_s=timeout_s) as device:
        _tell(recipe, compare_products(replace(report, findings=()), device))
        yield device


def patience_s(recipe: Recipe) -> float:
    """Return the time-out of collectives: longer than the watchdog's, which names the missing ranks."""
    if this_replica()[1]:
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
        peak = try_batch(recipe, run, sizes[middle])
        fits = peak is not None and (memory is None or peak <= memory)
        used = "runs out of memory" if peak is None else f"{peak / 2**30:.2f} GiB a rank{'' if fits else ', too much'}"
        print(f"micro-batch {sizes[middle]}: {used}", file=sys.stderr, flush=True)
        if fits:
            best, low = sizes[middle], middle + 1
        else:
            high = middle - 1
    if not best:
        raise RecipeError(
            "not even a micro-batch of 1 fits; shard more (mesh), recompute (ActivationCheckpoint) or shorten the "
            "sequence"
        )
    fields = [f"data.micro_batch={best}", f"data.accumulate={whole // best}"]
    print(f"found: {' '.join(fields)}, {whole} samples per data rank and step, as before", file=sys.stderr)
    return _override(recipe, fields)


def try_batch(recipe: Recipe, run: Callable[[Recipe], int], size: int) -> int | None:
    """Train a few steps with a micro-batch of ``size``; return a rank's peak in bytes, None if it exceeds memory."""
    with tempfile.TemporaryDirectory(prefix="meshpar-batch-") as folder:
        fields = [f"output={folder}", f"data.micro_batch={size}", *_TRIAL.split()]
        try:
            stopped = run(_override(recipe, fields))
        except FullMemoryError:
            return None
        if stopped:
            raise SystemExit(stopped)
        lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    peaks = [record["memory_gib"] for record in map(json.loads, lines) if record.get("memory_gib")]
    return int(max(peaks) * 2**30)


def _override(recipe: Recipe, fields: list[str]) -> Recipe:
    document = parse_document(recipe.to_yaml(), recipe.name)
    apply_overrides(document, fields)
    return resolve(document, trust=True)
