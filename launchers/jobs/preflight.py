"""Run the doctor before a job trains: ``preflight: warn | fail | off`` in its recipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from meshpar import runtime
from meshpar.errors import PreflightError
from meshpar.launchers.agent.local import MEETING_S
from meshpar.launchers.doctor.examine import Folder, Meeting, Report
from meshpar.launchers.doctor.rank import examined, measured, mesh_of
from meshpar.launchers.doctor.report import findings_text, rate_text
from meshpar.launchers.jobs import build
from meshpar.launchers.recipes.recipe import Recipe

_LATER_S = 120.0  # by which the time-out of collectives exceeds the watchdog's
_SKEW_S = 10.0
_STATE = 3  # AdamW: a parameter and its two moments, in float32


@contextmanager
def opened(recipe: Recipe, data: build.Data, kind: str) -> Iterator[torch.device]:
    """Run the doctor, then open a job's process group as :func:`meshpar.runtime.distributed` does.

    ``warn`` prints the findings, ``fail`` ends the job with them before training, ``off`` skips the doctor, and so does a single process.

    Raises:
        PreflightError: the findings, the same on every rank.
        LaunchError: ranks did not connect within the time in which nodes must; another start may succeed.
    """
    timeout_s = patience_s(recipe)
    if recipe.preflight == "off" or not runtime.launched() or runtime.world_size() == 1:
        with runtime.distributed(kind, timeout_s=timeout_s) as device:
            yield device
        return
    spec = mesh_of(recipe.mesh)
    meeting = Meeting(MEETING_S, "preflight")  # held to the end: its store may be rank 0's own
    report = examined(meeting, spec, runtime.device(kind), _folder(recipe, data))
    _tell(recipe, report)
    with runtime.distributed(kind, timeout_s=timeout_s) as device:
        report = measured(replace(report, findings=()), spec, device)
        _tell(recipe, report)
        if runtime.is_main():
            speeds = (f"{each.axis}={each.ranks} {each.operation} {rate_text(each.bus)}" for each in report.speeds)
            print(f"preflight: {', '.join(speeds)}", file=sys.stderr)
        yield device


def patience_s(recipe: Recipe) -> float:
    """Return the time-out of collectives in seconds: longer than the watchdog's, which names the ranks that did not arrive."""
    if runtime.replica()[1]:
        return recipe.patience + _SKEW_S  # the other replicas go on by then
    return max(runtime.DEFAULT_TIMEOUT_S, (recipe.watchdog or 0.0) + _LATER_S)


def _folder(recipe: Recipe, data: build.Data) -> Folder | None:
    if not isinstance(recipe.kept, Path):
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
