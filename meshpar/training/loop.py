"""The training loop: steps, reports, validation, checkpoints."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, InitVar, asdict, dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, final

import torch
import torch.distributed as dist
from torch import nn

from meshpar.core import runtime
from meshpar.core.errors import MeshparError
from meshpar.core.passes import Role
from meshpar.exchange.ranks import check_equal
from meshpar.parallelized import Parallelized
from meshpar.passes.tensor.random import mix
from meshpar.state.averaging import Averaged
from meshpar.training.adamw_and_schedules import HasModes, LossScaler, Schedule, use_evaluation_values
from meshpar.training.data import Batches, TensorBatch
from meshpar.training.documents import check_documents
from meshpar.training.elastic import Change, Replicas
from meshpar.training.evaluation import Evaluation
from meshpar.training.metrics import Ended, Meter, Reporter, Reports
from meshpar.training.objectives import Objective
from meshpar.training.settings import Every, Outcome, TrainSettings
from meshpar.training.step import BatchLosses, TrainStep
from meshpar.training.stop import StopAskedError, StopRequest
from meshpar.training.validating import SideWork, Validations
from meshpar.weights import average_called

log = logging.getLogger(__name__)


class Checkpointer(Protocol):
    """The part of a checkpoint manager that the loop calls. The caller restores checkpoints."""

    def save(
        self,
        step: int,
        par: Parallelized,
        optimizer: torch.optim.Optimizer,
        extra: dict[str, Any],
        *,
        averages: Mapping[str, Averaged] | None = None,
    ) -> object:
        """Save model, optimizer, averages and ``extra`` (plain data) after ``step`` steps. Collective."""

    def amend(self, step: int, extra: dict[str, Any]) -> None:
        """Replace ``extra`` of a saved step: a validation, which comes after the save, has added metrics."""

    def wait(self, *, copied: bool = False) -> None:
        """Wait for saves in the background: until they are committed, or until they have copied the parameters."""


@final
class Course:
    """The length of a run of steps of ``batch`` samples, and the place of each step in the rates' schedule."""

    def __init__(self, schedule: Schedule, settings: TrainSettings, data: Batches) -> None:
        self._schedule, self._settings, self.rate = schedule, settings, 0.0
        self.plan(data, data.global_batch)

    def plan(self, data: Batches, batch: int) -> None:
        """Fit the schedule to the length of a run that began with ``batch``."""
        self.batch, steps = batch, self._settings.steps
        epoch, epochs = math.ceil(len(data.samples) / batch), self._settings.epochs
        self.planned = self._schedule.over(self._settings.total_steps(epoch))
        self.follows_samples = epochs is not None and (steps is None or epochs * epoch < steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {"batch": self.batch, "schedule": asdict(self.planned)}

    def place_of(self, step: int, data: Batches) -> float:
        """Return the place of a step in the schedule, by the present position in the data."""
        return data.steps_at(self.batch) if self.follows_samples else float(step)


@final
class Alone:
    """A job without other replicas, in those terms of :class:`Replicas` that the loop uses."""

    changes: ClassVar[list[Change]] = []

    def begin(self, asked: Callable[[], str | None]) -> list[TensorBatch] | None:
        """Return the next step's micro-batches; None: those of the loader."""
        return None

    def writes(self, *, last: bool) -> bool:
        """Return whether this job writes checkpoints; ``last``: it trains no further."""
        return True

    def alive(self) -> None:
        """Report progress to the others."""


@final
@dataclass(eq=False, repr=False)
class Trainer:
    """Train a parallelized module: construct it and call :meth:`run`.

    >>> Trainer(par, CausalLM(), batches, optimizer, schedule, settings).run()  # doctest: +SKIP

    The loss is the mean over all tokens of all ranks and micro-batches. The loop waits for the device only to report.

    Args:
        par: the parallel module, materialized.
        objective: computes the loss.
        data: training batches of this data rank.
        optimizer: the optimizer of ``par.module``'s parameters.
        schedule: sets the learning rate of every step. Its steps are those of the batch with which the run began: a run
            of ``epochs`` that resumes with another batch has the same rate at the same sample.
        settings: number of steps or epochs, and the intervals of reports, validations and checkpoints.
        validation: validation batches of this data rank, in order (``seed=None``); None: no validation.
        checkpointer: saves checkpoints; None: nothing is saved.
        reporters: receive the records. Pass them on one rank, and none on the others.
        scaler: loss scaler for float16; None: no scaling.
        flops_per_token: training FLOPs of a token, for MFU; None: no MFU.
        averages: averages of the weights by name (:meth:`Parallelized.averaged`), updated and saved.
        validated: which weights are validated: ``"trained"``, ``"averaged"`` for the only average, or a name. Of
            several, the first give ``val/loss``, and each other ``val/NAME/loss``.
        evaluations: of the first of these after each validation; their numbers are ``eval/NAME/...``.
    """

    par: Parallelized
    objective: InitVar[Objective]
    data: Batches
    optimizer: torch.optim.Optimizer
    schedule: InitVar[Schedule]
    settings: TrainSettings
    _: KW_ONLY
    validation: InitVar[Batches | None] = None
    checkpointer: Checkpointer | None = None
    reporters: InitVar[Sequence[Reporter]] = ()
    scaler: InitVar[LossScaler | None] = None
    flops_per_token: InitVar[float | None] = None
    averages: Mapping[str, Averaged] | None = None
    validated: InitVar[str | Sequence[str]] = "trained"
    evaluations: InitVar[Mapping[str, Evaluation] | None] = None

    def __post_init__(
        self,
        objective: Objective,
        schedule: Schedule,
        validation: Batches | None,
        reporters: Sequence[Reporter],
        scaler: LossScaler | None,
        flops_per_token: float | None,
        validated: str | Sequence[str],
        evaluations: Mapping[str, Evaluation] | None,
    ) -> None:
        par, optimizer, settings = self.par, self.optimizer, self.settings
        _check_parts(par, objective, optimizer)
        self.averages = dict(self.averages or {})
        self.step, self._saved = 0, -1
        self.ended: Ended = "failed"
        self.course = Course(schedule, settings, self.data)
        self.replicas: Replicas | None = None  # made with this trainer, whose state it sends to others
        meter = Meter(par, flops_per_token=flops_per_token, world_size=dist.get_world_size())
        self.reports, losses = Reports(reporters, meter), BatchLosses(objective, par.device)
        self._stop: StopRequest | None = None  # of a run
        self._work = TrainStep(par, losses, optimizer, self.averages, settings, scaler)
        names = [validated] if isinstance(validated, str) else validated
        chosen = {name: self.averages.get(average_called(name, self.averages) or "") for name in names}
        weights = {name: partial(_enter_values, self, average) for name, average in chosen.items()}
        self.validations = Validations(
            par, losses, validation, evaluations or {}, settings, weights, lambda: self._peers.alive()
        )

    @property
    def _peers(self) -> Alone | Replicas:
        return Alone() if self.replicas is None else self.replicas

    @property
    def total_steps(self) -> int:
        """Number of steps of the run: those that it has made, and those that are left with the present batch."""
        steps, epochs = self.settings.steps or math.inf, self.settings.epochs
        return int(min(steps, math.inf if epochs is None else self.step + self.data.steps_until(epochs)))

    @property
    def complete(self) -> bool:
        """True when all steps or epochs are done."""
        steps, epochs = self.settings.steps, self.settings.epochs
        return (steps is not None and self.step >= steps) or (epochs is not None and self.data.epoch >= epochs)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resume needs besides model and optimizer: plain data, the same on every rank."""
        state = {"step": self.step, "seed": self.settings.seed, "data": self.data.state_dict(), "makes_up": False}
        state |= {"owes": list(self.validations.owes)} | self.course.state_dict()
        return state | self.reports.state_dict() | self._work.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume, after the caller has restored model and optimizer; raises RecipeError for a state of other data."""
        self.data.load_state_dict(state["data"])
        self.step = self._saved = state["step"]
        self.course.plan(self.data, state.get("batch", self.data.global_batch))
        self.validations.resume(state)
        self.reports.resume(state)
        self._work.resume(state)

    def run(self, stop: StopRequest | None = None) -> Outcome:
        """Train to the end or until a stop request, and save. Collective: every rank calls it.

        Args:
            stop: source of stop requests, which is entered and exited; None: the signals of :class:`StopRequest`.

        Raises:
            MeshparError: a loss or gradient is not finite (the message names the step), ranks have different data or
                parameters, or the model lets the documents of a packed row see each other.
        """
        self.course.plan(self.data, self.course.batch)
        loaders = self.data, self.validations.data
        _check_ranks(self.par, *loaders, self.settings, self.course.planned, self.step)
        every: list[Any] = [loader.samples for loader in loaders if loader is not None]
        samples = next((samples for samples in every if getattr(samples, "separates", False)), None)
        if samples is not None:
            teacher = getattr(self._work.losses.objective, "teacher", None)
            for module in (self.par.module, *([teacher] if isinstance(teacher, nn.Module) else [])):
                check_documents(self.par, module, samples.vocab_size, samples.length)
        self.par.module.train()
        if isinstance(self.optimizer, HasModes):
            self.optimizer.train()
        with stop or StopRequest() as self._stop:
            self.validations.side_work = SideWork(
                self._stop,
                self.par.module,
                in_step=not self.par.resolved.divided(Role.LAYERS),
                moved=self.validations.move,
                before_exit=self._wait_for_saves,
                silent_s=self.settings.silent_s,
                grace_s=self.settings.grace_s,
            )
            batches = iter(self.data)
            if not self.step:
                self.reports.digest(self.par, 0, self.settings.digest_every)
            try:
                stopped = self._make_up() if self.validations.owes else None
                while not self.complete and stopped is None:
                    if counted := self._make_step(batches):
                        self.step += 1
                        self._after_step(epoch_ended=self.data.position()["samples"] == 0)
                    if counted or self.replicas is None:
                        stopped = self._stop_if_asked()
            except StopAskedError as asked:  # while this replica waited for others
                stopped = str(asked)
                self.reports.note(f"asked to stop ({stopped}) after step {self.step}, while waiting for other replicas")
                self._save()
            self._read()
        self._stop = self.validations.side_work = None
        self.ended = "complete" if stopped is None else "stopped"
        return Outcome(steps=self.step, stopped=stopped, values=dict(self.reports.values))

    def validate(self) -> dict[str, float]:
        """Return the means over the validation data, empty if the ranks agreed to stop before its end. Collective."""
        with self.reports.meter.paused():
            return self.validations.validate()

    def _reason(self) -> str | None:
        """Return why this rank was asked to stop."""
        return self._stop and self._stop.reason

    def _wait_for_saves(self, *, copied: bool = False) -> None:
        if self.checkpointer is not None:
            self.checkpointer.wait(copied=copied)

    def _stop_if_asked(self) -> str | None:
        """Save if the ranks have agreed to stop before the run is complete, and return the reason."""
        assert self._stop is not None
        agreed, owes = self._stop.agreed(), self.validations.owes
        if not agreed or (self.complete and not owes):
            return None
        during = ", during its validation" if owes else ""
        self.reports.note(f"asked to stop ({self._stop.reason}) after step {self.step}{during}")
        self._save(last=True)
        return self._stop.reason

    def _make_up(self) -> str | None:
        """Validate after a resume where a validation did not end, and return the reason of another stop."""
        self._peers.begin(self._reason)  # or none of the replicas would report
        if self.validations.owes:
            self._amend(makes_up=True)
            self._pay(again=True)
        return self._stop_if_asked()

    def _make_step(self, batches: Iterator[list[TensorBatch]]) -> bool:
        """Train a step; return whether it counts: a stop request or the other replicas may have ended it."""
        shared = self._peers.begin(self._reason)  # may take over the others' position
        position, schedule_place = self.data.state_dict(), self.course.place_of(self.step, self.data)
        if self._train_step(next(batches) if shared is None else shared, schedule_place):
            return True
        if shared is None:
            self.data.load_state_dict(position)
        return False

    def _train_step(self, micro_batches: list[TensorBatch], place: float) -> bool:
        """Train on micro-batches, with the learning rate at a place of the schedule; return whether the step counts."""
        work, replicas, counted = self._work, self.replicas, None
        self.par.manual_seed(mix(self.settings.seed, self.step, *([] if replicas is None else [replicas.slot])))
        gradients = work.backward(micro_batches, self.data.samples, self._stop if replicas is None else None)
        if gradients is None:
            return False
        tokens, sums = gradients
        if replicas is not None:
            summed = replicas.reduce(tokens, *sums.values())
            if summed is None:
                return False
            # the sums are all ranks' already: one rank of the replica reports them
            counted, reports = int(summed[0]), float(self.par.loss_rank == 0)
            totals = (total.to(self.par.device, torch.float32) * reports for total in summed[1:])
            tokens, sums = int(counted * reports), dict(zip(sums, totals, strict=True))
        self.course.rate = self.course.planned.apply(self.optimizer, place)
        if work.update(self.step):
            self.reports.meter.add(tokens, sums)
            # now, as another replica may get this state before the next report
            self.reports.count(counted)
        return True

    def _after_step(self, *, epoch_ended: bool) -> None:
        settings, last = self.settings, self.complete
        self._read()
        while self._peers.changes:
            change = self._peers.changes.pop(0)
            self.reports.note(str(change))
            replicas = {"replicas": len(change.replicas), "replicas/seconds": change.seconds}
            self.reports.publish({"step": self.step} | replicas)
        if last or self.step % settings.log_every == 0:
            self._report()
        if settings.check_replicas_every and self.step % settings.check_replicas_every == 0:
            with self.reports.meter.paused():
                self.par.check_replicas()
        self.reports.digest(self.par, self.step, settings.digest_every)
        validates = last or _is_due(settings.validate_every, self.step, epoch_ended)
        self.validations.owes = self.validations.all if validates else []
        self.reports.forget(self.validations.owes)
        # before the validation, which may fail: its metrics are added to the checkpoint
        if last or _is_due(settings.checkpoint_every, self.step, epoch_ended):
            self._save(last=last)
        self._pay()

    def _pay(self, *, again: bool = False) -> None:
        """Validate and evaluate as owed, beside the training, and add the metrics to the checkpoint of this step."""
        if not self.validations.owes:
            return
        self._read()
        before = list(self.validations.owes)
        with self.reports.meter.paused():
            errors = self.validations.pay(self.step, self.reports)
        if again or self.validations.owes != before:
            self._amend()
        if errors and self.settings.on_error == "stop":
            self._save(last=True)
            raise MeshparError("\n".join([*errors, "the run ends, because validation.on_error is stop"]))
        if errors and runtime.is_main():
            log.warning("%s; training continues", "; ".join(errors))

    def _report(self) -> None:
        """Sum the ranks' values; an accelerator's are read after the next step was submitted. Collective."""
        meter, work = self.reports.meter, self._work
        if not meter.used:
            return
        numbers = {"lr": self.course.rate, "epoch": self.data.epoch, "step": self.step}
        numbers |= {"skipped": work.skips.count} if work.skips.count else {}
        meter.begin(numbers, {**work.norms, "first_bad": work.skips.first_bad, **work.load.take()})
        if not runtime.queues(self.par.device):
            self._read()

    def _read(self) -> None:
        """Publish the pending record, if there is one, and raise if a norm was not finite."""
        if (record := self.reports.read()) is None:
            return
        self._work.skips.check(int(record.pop("first_bad")))
        if not self.reports.tokens and (self.complete or record["epoch"]):
            raise MeshparError(
                f"no label of the first {self.step} steps counted (all are -100), so nothing was learned; give data "
                "whose labels count"
            )
        self.reports.publish(record)

    def _save(self, *, last: bool = False) -> None:
        if self.checkpointer is None or self.step in (0, self._saved) or not self._peers.writes(last=last):
            return
        self._read()
        self._report()
        self._read()
        self._saved = self.step
        more: dict[str, Any] = {"averages": self.averages} if self.averages else {}
        with self.reports.meter.paused(), use_evaluation_values(self.optimizer):
            self.checkpointer.save(self.step, self.par, self.optimizer, self.state_dict(), **more)
        self.reports.note(f"checkpoint of step {self.step} saved")

    def _amend(self, *, makes_up: bool = False) -> None:
        """Add to the checkpoint of this step what came after its save."""
        if self.checkpointer is not None and self._saved == self.step and self._peers.writes(last=self.complete):
            self.checkpointer.amend(self.step, {**self.state_dict(), "makes_up": makes_up})


def _enter_values(trainer: Trainer, average: Averaged | None) -> AbstractContextManager[object]:
    """Return what gives the module the values of an average, or the optimizer's for an evaluation."""
    if average is None:
        return use_evaluation_values(trainer.optimizer)
    trainer._wait_for_saves(copied=True)
    return average.swapped()


def _is_due(every: Every, step: int, epoch_ended: bool) -> bool:
    return epoch_ended if every == "epoch" else every is not None and step % every == 0


def _check_parts(par: Parallelized, objective: Objective, optimizer: torch.optim.Optimizer) -> None:
    """Check that the optimizer has the module's parameters, and that the loss is a sum over this rank's positions."""
    parameters = {id(parameter) for parameter in par.module.parameters()}
    if any(id(parameter) not in parameters for group in optimizer.param_groups for parameter in group["params"]):
        raise MeshparError(
            "the optimizer holds parameters that the module no longer has; build it after plan.apply and materialize"
        )
    kind = getattr(objective, "examples", "tokens")
    if par.loss_size > par.data_size and kind != "tokens":
        raise MeshparError(
            f"{type(objective).__name__} trains on {kind}, and its loss is not a sum over positions, but the plan "
            "splits positions; use CausalLM(), or a mesh without that axis"
        )


def _check_ranks(par: Parallelized, data: Batches, validation: Batches | None, *settings: object) -> None:
    """Check that all ranks train the same parameters on the same data with the same settings. Collective."""
    par.check_replicas()
    validated = (None, None) if validation is None else (validation.samples.fingerprint, validation.global_batch)
    parts = {"training data": data.state_dict(), "validation data": validated[0], "settings": settings}
    parts["batch sizes"] = (data.global_batch, validated[1])
    digests = {name: torch.tensor(list(hashlib.sha256(repr(part).encode()).digest())) for name, part in parts.items()}
    check_equal(digests, dict.fromkeys(digests, [0] * dist.get_world_size()), "what the ranks were given")
