"""Forecast a recipe's job, and compare the first steps of a running job with its forecast."""

from __future__ import annotations

import logging
import threading
from typing import Any, Literal, final

import torch
from torch import nn

from meshpar.core import runtime
from meshpar.core.errors import RecipeError
from meshpar.forecasting.api import forecast
from meshpar.forecasting.hardware import Hardware
from meshpar.forecasting.report import Forecast, feedback
from meshpar.forecasting.step import Batch, ObjectiveLoss
from meshpar.launchers.jobs import build, datasets
from meshpar.launchers.recipes.conflicts import folder_problems
from meshpar.launchers.recipes.recipe import Recipe
from meshpar.launchers.recipes.sections import Own
from meshpar.plan import Plan
from meshpar.training.metrics import Ended, Metrics, Reporter


def batch_of(recipe: Recipe) -> Batch:
    """Return what a data rank trains on in a step, with samples of full length."""
    data = recipe.data
    return Batch(
        sequence=datasets.sequence_of(recipe),
        micro_batch=data.micro_batch,
        accumulate=data.accumulate,
        examples=build.examples_of(recipe),
        target=data.target_length,
        reduce_each=recipe.training.reduce_each,
        documents=datasets.several_documents(recipe),
    )


def forecast_job(
    recipe: Recipe, hardware: Hardware | str, ranks: int, *, plan: Plan | None = None, **options: Any
) -> Forecast:
    """Forecast a recipe's step, or that of another ``plan``; ``options`` are those of :func:`meshpar.forecast`."""
    model = build.build_shape(recipe)
    layout = build.layout_of(recipe, model)
    teacher: tuple[Plan, nn.Module] | None = None
    if recipe.teacher is not None:
        if missing := list(folder_problems(recipe.teacher.model)):
            raise RecipeError(f"teacher.model.{missing[0]}; train and export the teacher first")
        teacher = build.teacher_plan_of(recipe), build.teacher_shape(recipe)
    loss = ObjectiveLoss(build.objective_of(recipe, None if teacher is None else teacher[1]))
    return forecast(
        plan or build.plan_of(recipe),
        model,
        batch_of(recipe),
        hardware=hardware,
        world_size=ranks,
        layout=layout,
        loss=loss,
        teacher=teacher,
        optimizer=build.optimizer_of(recipe) if isinstance(recipe.optimizer, Own) else None,
        **options,
    )


log = logging.getLogger(__name__)

_WARM = 2
"""Reports to skip: the first steps also allocate, compile and tune."""

_LONGEST = 300
"""Characters of a failure that are printed; the log has the rest."""


def profile_of(device: torch.device) -> str | None:
    """Return the hardware profile of a device; None if there is none."""
    if device.type != "cuda":
        return None
    from meshpar.forecasting.hardware import profiles

    words = torch.cuda.get_device_name(device).lower().replace("-", " ").split()
    return next((name for name in profiles() if name in words), None)


@final
class ForecastFeedback:
    """A reporter that prints one comparison with a forecast; a late or failed forecast is one line."""

    def __init__(
        self, recipe: Recipe, hardware: str, console: Reporter, counted: Literal["cuda", "cpu"] = "cuda"
    ) -> None:
        """Start the forecast in a thread; ``counted``: ``"cuda"`` also compares peak memory."""
        self._recipe, self._hardware, self._console, self._counted = recipe, hardware, console, counted
        self._forecast: Any = None
        self._failure = ""
        self._reports = 0
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, args=(runtime.world_size(),), name="forecast", daemon=True
        )
        self._thread.start()

    def report(self, record: Metrics) -> None:
        """Compare the first record after the warm-up and after the forecast is complete."""
        if self._thread is None or "tokens_per_second" not in record:
            return
        self._reports += 1
        if self._reports <= _WARM or self._thread.is_alive():
            return
        self._thread = None
        if self._forecast is None:
            self._console.note(f"no forecast to compare with: {self._failure}")
            return
        made = self._forecast
        data_ranks = made.trace.data_size
        seconds = made.batch.tokens * data_ranks / record["tokens_per_second"]
        # on a CPU it is the whole process
        peak = int(record["memory_gib"] * 2**30) if self._counted == "cuda" else None
        findings = feedback(made, peak=peak, seconds=seconds)
        for line in findings.lines:
            self._console.note(f"forecast: {line}")
        for line in findings.warnings:
            self._console.note(f"warning: {line}")

    def note(self, text: str) -> None:
        """Ignore the text."""

    def close(self, ended: Ended = "complete") -> None:
        """Abandon a running forecast; it ends with the process."""
        self._thread = None

    def _run(self, ranks: int) -> None:

        try:
            self._forecast = forecast_job(self._recipe, self._hardware, ranks)
        except Exception as error:  # a job trains on, whatever its forecast does
            log.info("no forecast", exc_info=True)
            self._failure = " ".join(str(error).split())[:_LONGEST] or type(error).__name__


def forecast_feedback(recipe: Recipe, device: torch.device, console: Reporter) -> list[Reporter]:
    """Return the reporter if the recipe requests a forecast, on hardware with a profile."""
    wanted = recipe.training.forecast
    hardware = wanted if isinstance(wanted, str) else profile_of(device) if wanted else None
    if hardware is None:
        return []
    return [ForecastFeedback(recipe, hardware, console, counted="cuda" if device.type == "cuda" else "cpu")]
