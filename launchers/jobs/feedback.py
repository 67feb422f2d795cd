"""The forecast of a running job, held against its first steps."""

from __future__ import annotations

import logging
import threading
from typing import Any, Literal, final

import torch

from meshpar import runtime
from meshpar.launchers.jobs import build
from meshpar.launchers.recipes.recipe import Recipe
from meshpar.training.metrics import Metrics, Reporter

log = logging.getLogger(__name__)

_WARM = 2
"""Reports before the one that counts: the first steps also allocate, compile and tune."""

_LONGEST = 300
"""Characters of a failure that are told; the log has the rest."""


def profile_of(device: torch.device) -> str | None:
    """Return the hardware profile of a device, None where there is none."""
    if device.type != "cuda":
        return None
    from meshpar.forecasting.hardware import profiles

    words = torch.cuda.get_device_name(device).lower().replace("-", " ").split()
    return next((name for name in profiles() if name in words), None)


@final
class ForecastFeedback:
    """A reporter that makes the job's forecast beside its first steps, says once how the two compare, and then rests.

    A forecast that fails, or comes late, is told in one line and stops nothing.
    """

    def __init__(self, recipe: Recipe, hardware: str, console: Reporter, counted: Literal["cuda", "cpu"] = "cuda") -> None:
        """Begin to forecast, in a process of its own; ``counted``: whose kernels run, and whether the device counts its tensors' bytes."""
        self._recipe, self._hardware, self._console, self._counted = recipe, hardware, console, counted
        self._forecast: Any = None
        self._failure = ""
        self._reports = 0
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, args=(runtime.world_size(),), name="forecast", daemon=True
        )
        self._thread.start()

    def report(self, record: Metrics) -> None:
        """Take a record; the first warm one after the forecast is there counts."""
        if self._thread is None or "tokens_per_second" not in record:
            return
        self._reports += 1
        if self._reports <= _WARM or self._thread.is_alive():
            return
        self._thread = None
        if self._forecast is None:
            self._console.note(f"no forecast to compare with: {self._failure}")
            return
        from meshpar.forecasting.feedback import feedback

        made = self._forecast
        data_ranks = made.trace.data_size
        seconds = made.batch.tokens * data_ranks / record["tokens_per_second"]
        peak = int(record["memory_gib"] * 2**30) if self._counted == "cuda" else None  # on a CPU it is the whole process
        told = feedback(made, peak=peak, seconds=seconds)
        for line in told.lines:
            self._console.note(f"forecast: {line}")
        for line in told.warnings:
            self._console.note(f"warning: {line}")

    def note(self, text: str) -> None:
        """Leave it out."""

    def close(self) -> None:
        """Leave a forecast that is under way behind; it ends with the process."""
        self._thread = None

    def _run(self, ranks: int) -> None:
        from meshpar.forecasting.api import forecast
        from meshpar.forecasting.step import Batch, ObjectiveLoss

        try:
            data = self._recipe.data
            batch = Batch(sequence=data.sequence_length, micro_batch=data.micro_batch, accumulate=data.accumulate)
            model = build.build_model(self._recipe, build.vocab_size_of(self._recipe))
            loss = ObjectiveLoss(build.objective_of(self._recipe))  # a causal language model's: see forecast_feedback
            self._forecast = forecast(build.plan_of(self._recipe), model, batch, hardware=self._hardware, world_size=ranks, loss=loss)
        except Exception as error:  # a job trains on, whatever its forecast does
            log.info("no forecast", exc_info=True)
            self._failure = " ".join(str(error).split())[:_LONGEST] or type(error).__name__


def forecast_feedback(recipe: Recipe, device: torch.device, console: Reporter) -> list[Reporter]:
    """Return the reporter where a forecast is wanted and can be held against something: causal language models on known hardware."""
    wanted = recipe.training.forecast
    hardware = wanted if isinstance(wanted, str) else profile_of(device) if wanted else None
    if hardware is None or recipe.training.objective != "causal_lm":
        return []
    return [ForecastFeedback(recipe, hardware, console, counted="cuda" if device.type == "cuda" else "cpu")]
