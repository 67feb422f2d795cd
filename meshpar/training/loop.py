"""The training loop: steps, reports, validation, checkpoints."""

from __future__ import annotations

import hashlib
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain, islice
from statistics import median
from typing import Any, Protocol, final

import torch
import torch.distributed as dist
from torch import nn

from meshpar.core import runtime
from meshpar.core.errors import MeshparError, brief
from meshpar.core.passes import Role
from meshpar.losses.token_loss import token_losses
from meshpar.parallelized import Parallelized
from meshpar.passes.pipeline.running import Layers
from meshpar.passes.tensor.random import mix
from meshpar.state.averaging import Averaged
from meshpar.step.forwards import evaluating
from meshpar.step.rank_digests import check_equal
from meshpar.training.beside import Beside
from meshpar.training.data import Batches, TensorBatch
from meshpar.training.documents import check_documents
from meshpar.training.elastic import Replicas
from meshpar.training.elementwise import HasModes, evaluated
from meshpar.training.evaluation import Evaluation, values_of
from meshpar.training.experts import ExpertLoad
from meshpar.training.metrics import Ended, Meter, Reading, Reporter, losses_of, means
from meshpar.training.objectives import Objective
from meshpar.training.optimizer import LossScaler, Schedule
from meshpar.training.settings import Every, Outcome, TrainSettings
from meshpar.training.stop import StopAskedError, StopRequest
from meshpar.weights import average_called

log = logging.getLogger(__name__)

_MOST_SKIPS = 50  # in a row: float16's scale falls from 2**16 to nothing in fewer
_VALIDATION = "val/"
_NORMS, _LEAST_NORMS = 100, 20  # of the median, from which a spike is told


@final
class Transfer:
    """Copy batches to a device.

    A GPU copies on a separate stream. The host runs ahead of the device, so the copy of a step's batch overlaps with
    the step before (from page-locked memory; from other memory the host waits for the copy).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: TensorBatch) -> TensorBatch:
        """Return the batch on the device, for the device's current stream."""
        if self._stream is None:
            return {name: tensor.to(self._device, non_blocking=True) for name, tensor in batch.items()}
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            moved = {name: tensor.to(self._device, non_blocking=True) for name, tensor in batch.items()}
        current.wait_stream(self._stream)
        for tensor in moved.values():
            tensor.record_stream(current)  # or its memory could be given away while the step reads it
        return moved


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
        """Save model, optimizer, averages and ``extra`` (plain data) after ``step`` steps.

        Collective: every rank calls it.
        """

    def amend(self, step: int, extra: dict[str, Any]) -> None:
        """Replace ``extra`` of a saved step: a validation, which comes after the save, has added metrics."""

    def wait(self, *, copied: bool = False) -> None:
        """Wait for saves in the background: until they are committed, or until they have copied the parameters."""


@final
class Trainer:
    """Train a parallelized module: construct it and call :meth:`run`.

    >>> Trainer(par, CausalLM(), batches, optimizer, schedule, settings).run()  # doctest: +SKIP

    The loss is the mean over all tokens of all ranks and micro-batches. The gradient norm is that of the whole model.
    The loop waits for the device only to report a number.
    """

    def __init__(
        self,
        par: Parallelized,
        objective: Objective,
        data: Batches,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        settings: TrainSettings,
        *,
        validation: Batches | None = None,
        checkpointer: Checkpointer | None = None,
        reporters: Sequence[Reporter] = (),
        scaler: LossScaler | None = None,
        flops_per_token: float | None = None,
        averages: Mapping[str, Averaged] | None = None,
        validated: str = "trained",
        evaluations: Mapping[str, Evaluation] | None = None,
    ) -> None:
        """Store the parts of the training; nothing runs yet.

        Args:
            par: the parallel module, materialized.
            objective: computes the loss.
            data: training batches of this data rank.
            optimizer: the optimizer of ``par.module``'s parameters.
            schedule: sets the learning rate of every step. Its steps are those of the batch with which the run began: a
                run of ``epochs`` that resumes with another batch has the same rate at the same sample.
            settings: number of steps or epochs, and the intervals of reports, validations and checkpoints.
            validation: validation batches of this data rank, in order (``seed=None``); None: no validation.
            checkpointer: saves checkpoints; None: nothing is saved.
            reporters: receive the records. Pass them on one rank, and none on the others.
            scaler: loss scaler for float16; None: no scaling.
            flops_per_token: training FLOPs of a token, for MFU; None: no MFU.
            averages: averages of the weights by name (:meth:`Parallelized.averaged`), updated after each step of the
                optimizer and saved with it.
            validated: which weights are validated: ``"trained"``, ``"averaged"`` for the only average, or a name.
            evaluations: made of the same weights after each validation, or in its place; their numbers are
                ``eval/NAME/...``.
        """
        own = {id(parameter) for parameter in par.module.parameters()}
        if any(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"]):
            raise MeshparError(
                "the optimizer holds parameters that the module no longer has; build it after plan.apply and "
                "materialize"
            )
        kind = getattr(objective, "examples", "tokens")
        if par.loss_size > par.data_size and kind != "tokens":
            raise MeshparError(
                f"{type(objective).__name__} trains on {kind}, and its loss is not a sum over positions, but the plan "
                "splits positions; use CausalLM(), or a mesh without that axis"
            )
        self.par, self.objective, self.data, self.optimizer = par, objective, data, optimizer
        self.schedule, self.settings, self.validation = schedule, settings, validation
        self.checkpointer, self.reporters, self.scaler = checkpointer, tuple(reporters), scaler
        self.averages, self.evaluations = dict(averages or {}), dict(evaluations or {})
        named = average_called(validated, self.averages)
        self._validated = None if named is None else self.averages[named]
        self.step, self.tokens, self.skipped = 0, 0, 0
        self.batch = data.global_batch  # samples of a step when the run began
        self.moves = 0  # batches of all validations, and signs of evaluations, so that a watchdog sees one move
        self._meter = Meter(par, flops_per_token=flops_per_token, world_size=dist.get_world_size())
        self._load = ExpertLoad(par, balance_rate=settings.balance_rate, balance_loss=settings.balance_loss)
        self._values: dict[str, float] = {}
        self._skips = 0
        self._norms: deque[float] = deque(maxlen=_NORMS)  # of the last steps that were made, with skip_spikes
        self._saved = -1
        self.replicas: Replicas | None = None  # made with this trainer, whose state it sends to others
        self._first_bad = torch.full((), -1, dtype=torch.int64, device=par.device)
        self._on_device = Transfer(par.device)
        self._reading: tuple[Reading, dict[str, float], list[str]] | None = None
        self._stop: StopRequest | None = None  # of a run
        self._beside: Beside | None = None
        self.ended: Ended = "failed"
        self.owes: list[str] = []  # validation and evaluations after the last step that are not made yet
        self._makes_up = False
        self._refused: set[int] = set()  # reporters that raised an error
        self._begun = data.state_dict()  # before the last step
        self._at, self._rate = 0.0, 0.0  # of the last step, in the schedule
        self._plan_schedule()

    def _plan_schedule(self) -> None:
        """Fit the schedule to the length that the run has, in steps of the batch with which it began."""
        settings, epoch = self.settings, math.ceil(len(self.data.samples) / self.batch)
        self.planned = self.schedule.over(settings.total_steps(epoch))
        self.follows_samples = settings.epochs is not None and (
            settings.steps is None or settings.epochs * epoch < settings.steps
        )

    @property
    def total_steps(self) -> int:
        """Number of steps of the run: those that it has made, and those that are left with the present batch."""
        steps, epochs = self.settings.steps, self.settings.epochs
        bounds = [steps, None if epochs is None else self.step + self.data.steps_until(epochs)]
        return min(bound for bound in bounds if bound is not None)

    @property
    def complete(self) -> bool:
        """True when all steps or epochs are done."""
        steps, epochs = self.settings.steps, self.settings.epochs
        return (steps is not None and self.step >= steps) or (epochs is not None and self.data.epoch >= epochs)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resume needs besides model and optimizer: plain data, the same on every rank."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "skipped": self.skipped,
            "norms": list(self._norms),
            "seed": self.settings.seed,
            "data": self.data.state_dict(),
            "batch": self.batch,
            "owes": list(self.owes),
            "makes_up": self._makes_up,
            "schedule": asdict(self.planned),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "metrics": {
                name: value for name, value in self._values.items() if name.startswith(("train/", "val/", "eval/"))
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state, after the caller has restored model and optimizer.

        Raises:
            RecipeError: the state belongs to other data.
        """
        self.data.load_state_dict(state["data"])
        self.step, self.tokens, self.skipped = state["step"], state["tokens"], state["skipped"]
        self._norms = deque(state.get("norms", ()), maxlen=_NORMS)
        self.batch = state.get("batch", self.data.global_batch)
        self._plan_schedule()
        owed = state.get("owes", [_VALIDATION] if state.get("owes_validation") else [])
        # what ended this start and the one before it is not made a third time
        self.owes = [name for name in owed if name in self._all_owed() and not state.get("makes_up")]
        self._values = dict(state["metrics"])
        self._saved, self._reading = self.step, None
        self._meter.forget()
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])

    def run(self, stop: StopRequest | None = None) -> Outcome:
        """Train to the end or until a stop request, and save.

        Collective: every rank calls it.

        Args:
            stop: source of stop requests, which this method enters and exits; None: the signals of
                :class:`StopRequest`.

        Raises:
            MeshparError: a loss or gradient is not finite (the message names the step), ranks have different data or
                parameters, or the model lets the documents of a packed row see each other.
        """
        self._plan_schedule()
        self._check_ranks()
        self._check_documents()
        self.par.module.train()
        if isinstance(self.optimizer, HasModes):
            self.optimizer.train()
        stopped = None
        with stop or StopRequest() as self._stop:
            self._beside = Beside(
                self._stop,
                self.par.module,
                in_step=not self.par.resolved.divided(Role.LAYERS),
                moved=self._moved,
                before_exit=self._wait_for_saves,
                silent_s=self.settings.silent_s,
                grace_s=self.settings.grace_s,
            )
            batches = iter(self.data)
            try:
                if self.owes:
                    stopped = self._make_up()
                while not self.complete and stopped is None:
                    if not self._train_step(self._begin_step(batches)):
                        stopped = self._stopped() if self.replicas is None else None
                        continue
                    self.step += 1
                    self._after_step(epoch_ended=self.data.position()["samples"] == 0)
                    stopped = self._stopped()
            except StopAskedError as asked:  # while this replica waited for others
                stopped = str(asked)
                self._note(f"asked to stop ({stopped}) after step {self.step}, while waiting for other replicas")
                self._save()
            self._read()
        self._stop = self._beside = None
        self.ended = "complete" if stopped is None else "stopped"
        return Outcome(steps=self.step, stopped=stopped, values=dict(self._values))

    def _wait_for_saves(self) -> None:
        if self.checkpointer is not None:
            self.checkpointer.wait()

    def _stopped(self) -> str | None:
        """Save if the ranks have agreed to stop before the run is complete, and return the reason."""
        assert self._stop is not None
        asked = self._stop.agreed()
        if not asked or (self.complete and not self.owes):
            return None
        during = ", during its validation" if self.owes else ""
        self._note(f"asked to stop ({self._stop.reason}) after step {self.step}{during}")
        self._save(last=True)
        return self._stop.reason

    def _make_up(self) -> str | None:
        """Validate after a resume where a validation did not end, and return the reason of another stop."""
        if self.replicas is not None:
            self.replicas.begin(lambda: self._stop and self._stop.reason)  # or none of them would report
        if self.owes:
            self._makes_up = True
            self._amend()
            self._makes_up = False
            self._pay(again=True)
        return self._stopped()

    def validate(self) -> dict[str, float]:
        """Return the means over the validation data: ``loss`` and the other values that the objective reports.

        Collective: every rank calls it. Empty if the ranks of a run agreed to stop before its end.
        """
        assert self.validation is not None
        tokens, validation = 0, self.validation
        totals: dict[str, torch.Tensor] = {}
        validation.restart()
        batches = chain.from_iterable(islice(validation.one_epoch(), self.settings.validate_steps))
        stopped = False

        def until_stopped() -> Iterator[TensorBatch]:
            nonlocal tokens, stopped
            for batch in batches:
                if self._beside is None:
                    self._moved()
                elif stopped := not self._beside.goes_on():
                    return
                batch = self.par.split(batch)
                tokens += self.objective.tokens(batch)
                yield batch

        def losses(module: nn.Module, batch: TensorBatch) -> dict[str, torch.Tensor]:
            loss_sum, more = self._loss(module, batch, validation)
            return {name: value.float() for name, value in {"loss": loss_sum, **more}.items()}

        with evaluating(self.par.module), torch.no_grad(), self._meter.paused():
            for found in self.par.forward(until_stopped(), losses):
                for name, value in found.items():
                    totals[name] = totals.get(name, 0) + value
            if stopped:
                return {}
            count = torch.tensor(float(tokens), device=self.par.device)
            *sums, counted = self.par.data_sum(
                torch.cat([*(total.reshape(-1) for total in totals.values()), count[None]])
            ).tolist()
        return {"loss": math.nan} | means({name: total.numel() for name, total in totals.items()}, sums, counted)

    def _moved(self) -> None:
        self.moves += 1
        if self.replicas is not None:
            self.replicas.alive()

    def _loss(
        self, module: nn.Module, batch: TensorBatch, data: Batches
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return the summed loss of this rank's batch, and what else is reported: of a mix each source's loss."""
        batch = self._on_device(batch)
        source = batch.pop("source", None)
        if source is None:
            loss_sum, _, more = self.objective.loss(module, batch)
            return loss_sum, more
        with token_losses() as losses:
            loss_sum, _, more = self.objective.loss(module, batch)
        samples: Any = data.samples
        return loss_sum, {**more, **losses_of(list(samples.sources), losses, batch["labels"], source)}

    def _begin_step(self, batches: Iterator[list[TensorBatch]]) -> list[TensorBatch]:
        """Return a step's micro-batches, and note its place in the schedule before the position moves."""
        begun = None
        if self.replicas is not None:  # this one may take over the others' position
            begun = self.replicas.begin(lambda: self._stop and self._stop.reason)
        self._begun = self.data.state_dict()
        self._at = self.data.steps_at(self.batch) if self.follows_samples else float(self.step)
        return next(batches) if begun is None else begun

    def _train_step(self, micro_batches: list[TensorBatch]) -> bool:
        """Train a step; return whether it counts: a stop request or the other replicas may have ended it."""
        par, optimizer, replicas = self.par, self.optimizer, self.replicas
        par.manual_seed(mix(self.settings.seed, self.step, *([] if replicas is None else [replicas.slot])))
        micro_batches = [par.split(batch) for batch in micro_batches]
        tokens = sum(self.objective.tokens(batch) for batch in micro_batches)
        # full: a tensor made of a Python number on a GPU would wait for it
        token_scale = par.begin_token_scale(torch.full((), tokens, dtype=torch.float32, device=par.device))
        scale: torch.Tensor | None = None
        left = False
        # Stages take all micro-batches at once: an exchange of all hosts for each would stand before the first forward.
        stop = self._stop if replicas is None and par.run.find(Layers) is None else None

        def until_stopped() -> Iterator[TensorBatch]:
            nonlocal left
            for place, batch in enumerate(micro_batches):
                left = bool(place) and stop is not None and stop.agreed()
                if left:
                    return
                yield batch

        def loss(module: nn.Module, batch: TensorBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
            nonlocal scale
            loss_sum, more = self._loss(module, batch, self.data)
            if scale is None:  # not before the first forward, beside which the ranks exchange their counts
                scale = token_scale() * (1.0 if self.scaler is None else self.scaler.scale)
            assert scale is not None, "a product of tensors"
            balance = (
                {"balance_loss": self._load.loss(self.objective.tokens(batch))} if self.settings.balance_loss else {}
            )
            return sum(balance.values(), loss_sum) * scale, {"loss": loss_sum, **more, **balance}

        _, sums = par.backward(until_stopped(), loss, reduce_each=self.settings.reduce_each)
        if scale is None:  # this rank has no loss
            token_scale()
        if not left:
            return self._finish_step(tokens, sums)
        par.reshard()
        optimizer.zero_grad(set_to_none=True)
        self.data.load_state_dict(self._begun)
        return False

    def _finish_step(self, tokens: int, sums: dict[str, torch.Tensor]) -> bool:
        """Step the optimizer; return whether the step counts, which other replicas may have made alone."""
        par, optimizer, replicas = self.par, self.optimizer, self.replicas
        summed = None
        if replicas is not None:
            summed = replicas.reduce(tokens, *sums.values())
            if summed is None:
                return False
            mine = float(par.loss_rank == 0)  # the sums are all ranks' already
            tokens = int(summed[0]) * (par.loss_rank == 0)
            sums = {
                name: total.to(par.device, torch.float32) * mine for name, total in zip(sums, summed[1:], strict=True)
            }
        if self.scaler is not None:
            self.scaler.unscale_(par.module)
        norms = par.clip_grad_norms_(self.settings.clip or math.inf, self.settings.norms)
        norm = norms.pop("")
        self._rate = self.planned.apply(optimizer, self._at)
        moved = self._may_step(norm)
        if moved:
            optimizer.step()
            for average in self.averages.values():
                average.update()
            self._meter.add(sums.pop("loss"), tokens, sums)
            if summed is not None:
                self.tokens += int(summed[0])  # now, as another replica may get this state before the next report
        self._load.step(moved=moved)
        optimizer.zero_grad(set_to_none=True)
        self._norm, self._parts = norm, {f"grad_norm/{name}": value for name, value in norms.items()}
        return True

    def _may_step(self, norm: torch.Tensor) -> bool:
        """Return whether gradients are finite and no spike, by their norm, which is equal on every rank."""
        spikes = self.settings.skip_spikes
        skip = self.scaler is not None or self.settings.nonfinite == "skip" or spikes is not None
        if not skip:
            if not runtime.queues(norm.device):
                self._raise_if_bad(-1 if math.isfinite(norm) else self.step)
            else:
                self._mark_if_bad(norm)
            return True
        value = float(norm)
        good = self.scaler.update(value) if self.scaler is not None else math.isfinite(value)
        if not good and self.scaler is None and self.settings.nonfinite != "skip":
            self._raise_if_bad(self.step)
        why = ""
        if good and spikes is not None:
            usual = median(self._norms) if len(self._norms) >= _LEAST_NORMS else math.inf
            good = value <= spikes * usual
            why = f", above {spikes:g} x {usual:.3g}, the median of {len(self._norms)} steps"
            self._norms.extend([value] if good else [])
        self._skips = 0 if good else self._skips + 1
        if not good:
            self.skipped += 1
            log.warning("step %d skipped: the gradient norm is %s%s", self.step + 1, value, why)
        if self._skips > _MOST_SKIPS:
            raise MeshparError(
                f"{self._skips} steps in a row, up to step {self.step + 1}, had a gradient that is not finite, or a "
                "spike; lower the learning rate, or raise training.skip_spikes"
            )
        return good

    def _mark_if_bad(self, norm: torch.Tensor) -> None:
        """Store the first step whose norm is not finite, on the device, without reading the norm."""
        bad = ~norm.isfinite() & (self._first_bad < 0)
        self._first_bad = torch.where(bad, self.step, self._first_bad)

    def _raise_if_bad(self, step: int) -> None:
        if step >= 0:
            raise MeshparError(
                f"the gradient norm of step {step + 1} is not finite, and the weights after it are worthless; resume "
                "from the last checkpoint with a lower learning rate or a longer warm-up, or set "
                "training.nonfinite=skip to skip such steps"
            )

    def _after_step(self, *, epoch_ended: bool) -> None:
        settings, last = self.settings, self.complete
        self._read()
        self._tell_changes()
        if last or self.step % settings.log_every == 0:
            self._report()
        if settings.check_replicas_every and self.step % settings.check_replicas_every == 0:
            with self._meter.paused():
                self.par.check_replicas()
        validates = last or self._due(settings.validate_every, epoch_ended)
        self.owes = self._all_owed() if validates else []
        self._values = {name: value for name, value in self._values.items() if not name.startswith(tuple(self.owes))}
        # before the validation, which may fail: its metrics are added to the checkpoint
        if last or self._due(settings.checkpoint_every, epoch_ended):
            self._save(last=last)
        self._pay()

    def _all_owed(self) -> list[str]:
        return [*([] if self.validation is None else [_VALIDATION]), *(f"eval/{name}/" for name in self.evaluations)]

    def _pay(self, *, again: bool = False) -> None:
        """Validate and evaluate as owed, beside the training, and add the metrics to the checkpoint of this step.

        Raises:
            MeshparError: one of them failed, and ``settings.on_error`` is ``"stop"``.
        """
        if not self.owes:
            return
        assert self._stop is not None and self._beside is not None
        self._read()
        before, errors, makes = list(self.owes), list[str](), {f"eval/{name}/": name for name in self.evaluations}
        if self.checkpointer is not None and self._validated is not None:
            self.checkpointer.wait(copied=True)
        with self._meter.paused():
            for owed in list(self.owes):
                name = f"evaluation {makes[owed]}" if owed in makes else "the validation"
                weights = evaluated(self.optimizer) if self._validated is None else self._validated.swapped()
                found = self._beside.run(name, partial(self._find, makes.get(owed)), weights)
                if found is None:
                    self.par.reshard()
                    if self._stop.heard or not self._beside.failures:
                        break
                self.owes.remove(owed)
                if found is None:
                    errors.append(f"{name} failed after step {self.step}: {'; '.join(self._beside.failures)}")
                    continue
                numbers, texts = found
                if numbers:
                    self._publish({"step": self.step} | {owed + key: value for key, value in numbers.items()})
                for key, value in numbers.items():
                    if not math.isfinite(value):
                        self._note(f"step {self.step}: {owed}{key} is {value}")
                for key, text in texts.items():
                    self._note(f"step {self.step}, {makes[owed]}: {key!r} -> {text!r}")
        if again or self.owes != before:
            self._amend()
        if errors and self.settings.on_error == "stop":
            self._save(last=True)
            raise MeshparError("\n".join([*errors, "the run ends, because validation.on_error is stop"]))
        if errors and runtime.is_main():
            log.warning("%s; training continues", "; ".join(errors))

    def _find(self, evaluation: str | None) -> tuple[dict[str, float], dict[str, str]] | None:
        """Return the numbers and texts of an evaluation, of the validation without its name."""
        if evaluation is None:
            return (found, {}) if (found := self.validate()) else None
        return values_of(self.evaluations[evaluation](self.par))

    def _tell_changes(self) -> None:
        """Report which replicas were lost and joined."""
        if self.replicas is None:
            return
        for change in self.replicas.changes:
            self._note(str(change))
            self._publish({"step": self.step, "replicas": len(change.replicas), "replicas/seconds": change.seconds})
        self.replicas.changes.clear()

    def _due(self, every: Every, epoch_ended: bool) -> bool:
        return epoch_ended if every == "epoch" else every is not None and self.step % every == 0

    def _report(self) -> None:
        """Sum the ranks' values; an accelerator's are read after the next step was submitted. Collective."""
        if not self._meter.used:
            return
        known = {"lr": self._rate, "epoch": self.data.epoch, "step": self.step}
        known |= {"skipped": self.skipped} if self.skipped else {}
        load = {**self._load.take(), **self._parts}
        self._reading = self._meter.begin(self._norm, self._first_bad, *load.values()), known, list(load)
        if not runtime.queues(self.par.device):
            self._read()

    def _read(self) -> None:
        """Publish the pending record, if there is one, and raise if a norm was not finite."""
        if self._reading is None:
            return
        (reading, known, names), self._reading = self._reading, None
        record, (norm, first_bad, *load) = reading.read()
        record |= dict(zip(names, load, strict=True))
        self._raise_if_bad(int(first_bad))
        counted = int(record.pop("tokens"))
        self.tokens += counted if self.replicas is None else 0
        if not self.tokens and (self.complete or known["epoch"]):
            raise MeshparError(
                f"no label of the first {self.step} steps counted (all are -100), so nothing was learned; give data "
                "whose labels count"
            )
        self._publish(
            {
                "lr": known.pop("lr"),
                "grad_norm": norm,
                "epoch": known.pop("epoch"),
                **record,
                **known,
                "tokens": self.tokens,
            }
        )

    def _save(self, *, last: bool = False) -> None:
        if self.checkpointer is None or self.step in (0, self._saved):
            return
        if self.replicas is not None and not self.replicas.writes(last=last):
            return
        self._read()
        self._report()
        self._read()
        self._saved = self.step
        more: dict[str, Any] = {"averages": self.averages} if self.averages else {}
        with self._meter.paused(), evaluated(self.optimizer):
            self.checkpointer.save(self.step, self.par, self.optimizer, self.state_dict(), **more)
        self._note(f"checkpoint of step {self.step} saved")

    def _amend(self) -> None:
        """Add to the checkpoint of this step what came after its save."""
        if self.checkpointer is None or self._saved != self.step:
            return
        if self.replicas is None or self.replicas.writes(last=self.complete):
            self.checkpointer.amend(self.step, self.state_dict())

    def _publish(self, record: Mapping[str, float]) -> None:
        self._values |= record
        self._tell(lambda reporter: reporter.report(record))

    def _note(self, text: str) -> None:
        self._tell(lambda reporter: reporter.note(text))

    def _tell(self, act: Callable[[Reporter], object]) -> None:
        """Let each reporter act; one that raises an error ends no training."""
        for reporter in self.reporters:
            try:
                act(reporter)
            except Exception as error:  # noqa: BLE001 - the other ranks have no reporters, and train on
                if id(reporter) not in self._refused:
                    log.warning("%s raised %s; training continues", type(reporter).__name__, brief(error))
                self._refused.add(id(reporter))

    def _check_documents(self) -> None:
        """Check that the model, and a teacher beside it, keep the documents of a packed row apart. Collective."""
        both: list[Any] = [loader.samples for loader in (self.data, self.validation) if loader is not None]
        samples = next((dataset for dataset in both if getattr(dataset, "separates", False)), None)
        if samples is not None:
            teacher = getattr(self.objective, "teacher", None)
            for module in (self.par.module, *([teacher] if isinstance(teacher, nn.Module) else [])):
                check_documents(self.par, module, samples.vocab_size, samples.length)

    def _check_ranks(self) -> None:
        """Check that all ranks train the same parameters on the same data with the same settings. Collective."""
        self.par.check_replicas()
        parts = {
            "training data": self.data.state_dict(),
            "validation data": None if self.validation is None else self.validation.samples.fingerprint,
            "batch sizes": (self.data.global_batch, None if self.validation is None else self.validation.global_batch),
            "settings": (self.settings, self.planned, self.step),
        }
        digests = {
            name: torch.tensor(list(hashlib.sha256(repr(part).encode()).digest())) for name, part in parts.items()
        }
        check_equal(digests, dict.fromkeys(digests, [0] * dist.get_world_size()), "what the ranks were given")
