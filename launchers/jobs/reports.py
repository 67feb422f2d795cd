"""Reports of a job: its reporters, the summary at its start, and the comparison with its forecast."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, final

import torch

from meshpar.core import registry, runtime
from meshpar.forecasting.hardware import profiles
from meshpar.forecasting.report import Forecast, feedback
from meshpar.launchers.jobs import build, datasets
from meshpar.launchers.recipes.recipe import Recipe
from meshpar.parallelized import Parallelized
from meshpar.passes.pipeline.portion import all_parameters
from meshpar.training.elastic import Replicas
from meshpar.training.lighthouse import this_replica
from meshpar.training.loop import Trainer
from meshpar.training.metrics import Console, Ended, Metrics, Reporter
from meshpar.training.send_to_trackers import Trackers, facts_of

log = logging.getLogger(__name__)

_WARM = 2  # reports of the first steps, which also allocate, compile and tune
_LONGEST = 300  # characters of a failure that are printed; the log has the rest


def add_reporters(recipe: Recipe, par: Parallelized, trainer: Trainer, stack: contextlib.ExitStack) -> None:
    """Give the trainer of rank 0 its reporters, which ``stack`` closes: of replicas, those of the one that leads."""
    make = functools.partial(_reporters, recipe, trainer)
    if trainer.replicas is not None:
        trainer.reports.reporters = (Elected(trainer.replicas, make),)
    else:
        reporters = make(trainer.step)
        trainer.reports.reporters = (*reporters, *forecast_feedback(recipe, par.device, reporters[0]))

    def close(reporter: Reporter) -> None:
        reporter.close(trainer.ended)  # which is known when this is called

    for reporter in trainer.reports.reporters:
        stack.callback(close, reporter)


def _reporters(recipe: Recipe, trainer: Trainer, step: int) -> tuple[Reporter, ...]:
    boards: dict[str, dict[str, Any]] = {"tensorboard": {}} if recipe.training.tensorboard else {}
    unit = getattr(recipe.find(registry.OBJECTIVE, recipe.training.objective), "unit", "tok")
    trackers = Trackers(
        recipe.folder,
        {**boards, **recipe.trackers},
        step=step,
        name=recipe.name,
        facts={"recipe": recipe.plain(), **facts_of(trainer.par)},
        code=recipe.code or ".",
    )
    return Console(lambda: trainer.total_steps, step=step, unit=unit), trackers


def print_summary(recipe: Recipe, par: Parallelized, trainer: Trainer, origin: str) -> None:
    """Print the job's size, data and schedule, and the ``origin`` of its state."""
    data, schedule, settings = trainer.data, trainer.course.planned, trainer.settings
    every = all_parameters(par.module)
    parameters = sum(parameter.numel() for parameter in every)
    trained = sum(parameter.numel() for parameter in every if parameter.requires_grad)
    part = f", {trained:,} of them trained," if trained < parameters else ""
    packed = datasets.examples_of(recipe) == "tokens"
    unit = f"sequences = {data.global_batch * recipe.data.sequence_length:,} tokens" if packed else "examples"
    ranks = par.data_size * (this_replica()[1] or 1)
    passes = "".join(f", {pass_.name}" for pass_ in par.plan.passes)
    changed = trainer.course.follows_samples and trainer.course.batch != data.global_batch
    lines = [
        f"{parameters:,} parameters{part} on {str(par.spec) or 'one process'} ({par.device.type}){passes}",
        f"{data.samples}, {data.steps_per_epoch:,} steps an epoch; a step: {data.global_batch:,} {unit} "
        f"({recipe.data.micro_batch} x {recipe.data.accumulate} micro-batches x {ranks} data ranks)",
        f"peak learning rate {schedule.lr:g} (scale_lr: {recipe.optimizer.scale_lr}), {schedule.name} over "
        f"{schedule.steps:,} steps{f' of {trainer.course.batch:,} samples' if changed else ''}",
    ]
    if trainer.complete and not trainer.validations.owes:
        kind = "steps" if settings.steps is not None and trainer.step >= settings.steps else "epochs"
        lines.append(
            f"all {getattr(settings, kind)} {kind} are done already, after step {trainer.step}; raise training.{kind} "
            "to continue"
        )
    elif origin:
        lines += f"resuming after step {trainer.step} from {origin}".split("\n")
    for line in lines:
        trainer.reports.reporters[0].note(line)


@final
class Elected:
    """Reporters of this replica while it leads; another one's write to the same files before and after."""

    def __init__(self, replicas: Replicas, make: Callable[[int], Sequence[Reporter]]) -> None:
        """``make``: returns the reporters of a run that has made so many steps."""
        self._replicas, self._make = replicas, make
        self._reporters: Sequence[Reporter] = ()
        self._term = 0

    def report(self, record: Metrics) -> None:
        for reporter in self._leading():
            reporter.report(record)

    def note(self, text: str) -> None:
        for reporter in self._leading():
            reporter.note(text)

    def close(self, ended: Ended = "stopped") -> None:
        for reporter in self._reporters:
            reporter.close(ended)
        self._reporters = ()

    def _leading(self) -> Sequence[Reporter]:
        if not self._replicas.leads or self._term != self._replicas.term:
            self.close()  # another one has written since: the open files are no longer the run's
        if self._replicas.leads and not self._reporters:
            self._term = self._replicas.term
            self._reporters = self._make(self._replicas.step - bool(self._replicas.counted))
        return self._reporters


@final
class ForecastFeedback:
    """A reporter that prints one comparison with a forecast; a late or failed forecast is one line."""

    def __init__(
        self, recipe: Recipe, hardware: str, console: Reporter, counted: Literal["cuda", "cpu"] = "cuda"
    ) -> None:
        """Start the forecast in a thread; ``counted``: ``"cuda"`` also compares peak memory."""
        self._recipe, self._hardware, self._console, self._counted = recipe, hardware, console, counted
        self._forecast: Forecast | None = None
        self._failure, self._reports = "", 0
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name="forecast", daemon=True)
        self._ranks = runtime.world_size()
        self._thread.start()

    def report(self, record: Metrics) -> None:
        """Compare the first record after the warm-up and after the forecast is complete."""
        if self._thread is None or "tokens_per_second" not in record:
            return
        self._reports += 1
        if self._reports <= _WARM or self._thread.is_alive():
            return
        self._thread, forecast = None, self._forecast
        if forecast is None:
            self._console.note(f"no forecast to compare with: {self._failure}")
            return
        seconds = forecast.batch.tokens * forecast.trace.data_size / record["tokens_per_second"]
        # on a CPU it is the whole process
        peak = int(record["memory_gib"] * 2**30) if self._counted == "cuda" else None
        findings = feedback(forecast, peak=peak, seconds=seconds)
        for line in findings.lines:
            self._console.note(f"forecast: {line}")
        for line in findings.warnings:
            self._console.note(f"warning: {line}")

    def note(self, text: str) -> None:
        """Ignore the text."""

    def close(self, ended: Ended = "complete") -> None:
        self._thread = None

    def _run(self) -> None:
        try:
            self._forecast = build.forecast_job(self._recipe, self._hardware, self._ranks)
        except Exception as error:  # a job trains on, whatever its forecast does
            log.info("no forecast", exc_info=True)
            self._failure = " ".join(str(error).split())[:_LONGEST] or type(error).__name__


def forecast_feedback(recipe: Recipe, device: torch.device, console: Reporter) -> list[Reporter]:
    """Return the reporter if the recipe requests a forecast, on hardware with a profile."""
    wanted = recipe.training.forecast
    hardware = wanted if isinstance(wanted, str) else profile_of(device) if wanted else None
    counted: Literal["cuda", "cpu"] = "cuda" if device.type == "cuda" else "cpu"
    return [] if hardware is None else [ForecastFeedback(recipe, hardware, console, counted=counted)]


def profile_of(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    words = torch.cuda.get_device_name(device).lower().replace("-", " ").split()
    return next((name for name in profiles() if name in words), None)


@contextlib.contextmanager
def show_bytes() -> Iterator[Callable[[int, int], None]]:
    """Yield what shows how many bytes of how many are done."""
    if not sys.stderr.isatty():
        line = _Lines()
        yield lambda done, total: line(f"{done / 2**30:.2f} of {total / 2**30:.2f} GiB")
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    with Progress(BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=Console(stderr=True)) as bar:
        task: Any = bar.add_task("")
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def show_parts(name: str) -> Iterator[Callable[[str, int, int], None]]:
    """Yield what shows a part of the work and how many of its pieces, called ``name``, are done."""
    if not sys.stderr.isatty():
        line = _Lines()
        yield lambda part, done, total: line(f"{part}: {done} of {total} {name}")
        return
    from rich.console import Console

    with Console(stderr=True).status(name) as status:
        yield lambda part, done, total: status.update(f"{part}: {done} of {total} {name}")


@final
class _Lines:
    """Prints what it is called with, if the last line is old enough."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, text: str) -> None:
        if time.monotonic() - self._last >= 10.0:
            self._last = time.monotonic()
            print(text, file=sys.stderr, flush=True)
