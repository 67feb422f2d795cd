"""The parts of a training step: losses of micro-batches on the device, their gradients, and which steps are skipped."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, final

import torch
from torch import nn

from meshpar.core import runtime
from meshpar.core.errors import MeshparError
from meshpar.core.passes import Role
from meshpar.losses.token_loss import IGNORE_INDEX, token_losses
from meshpar.parallelized import Parallelized
from meshpar.state.averaging import Averaged
from meshpar.training.adamw_and_schedules import LossScaler
from meshpar.training.data import SampleSet, TensorBatch
from meshpar.training.experts import ExpertLoad
from meshpar.training.objectives import Objective
from meshpar.training.settings import TrainSettings
from meshpar.training.stop import StopRequest

log = logging.getLogger(__name__)

Sums = dict[str, torch.Tensor]
"""Sums over this rank's tokens by name: ``loss``, and what else an objective reports."""

_MOST_SKIPS = 50  # in a row: float16's scale falls from 2**16 to nothing in fewer
_NORMS, _LEAST_NORMS = 100, 20  # of the median, from which a spike is told


@final
class BatchLosses:
    """Compute summed losses of batches, which a GPU copies on a stream of its own during the step before."""

    def __init__(self, objective: Objective, device: torch.device) -> None:
        self.objective, self._device = objective, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, module: nn.Module, batch: TensorBatch, samples: SampleSet) -> tuple[torch.Tensor, Sums]:
        """Return the summed loss of this rank's batch, and what else is reported: of a mix each source's loss."""
        batch = self._on_device(batch)
        source = batch.pop("source", None)
        if source is None:
            loss_sum, _, more = self.objective.loss(module, batch)
            return loss_sum, dict(more)
        with token_losses() as losses:
            loss_sum, _, more = self.objective.loss(module, batch)
        names: Any = samples
        return loss_sum, {**more, **_by_source(list(names.sources), losses, batch["labels"], source)}

    def _on_device(self, batch: TensorBatch) -> TensorBatch:
        """Return the batch for the device's current stream."""
        if self._stream is None:
            return {name: tensor.to(self._device, non_blocking=True) for name, tensor in batch.items()}
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            moved = {name: tensor.to(self._device, non_blocking=True) for name, tensor in batch.items()}
        current.wait_stream(self._stream)
        for tensor in moved.values():
            tensor.record_stream(current)  # or its memory could be given away while the step reads it
        return moved


def _by_source(
    names: Sequence[str], losses: Sequence[torch.Tensor], labels_BL: torch.Tensor, source_B: torch.Tensor
) -> Sums:
    """Return each source's summed loss and tokens, (2,) float32; empty where ``losses`` are not those of all labels."""
    if sum(loss.numel() for loss in losses) != labels_BL.numel():
        return {}
    rows_BL = torch.cat([loss.reshape(-1) for loss in losses]).view(labels_BL.shape)
    rows_B2 = torch.stack([rows_BL.sum(1), (labels_BL != IGNORE_INDEX).sum(1)], 1)
    sums = rows_B2.new_zeros(len(names), 2).index_add_(0, source_B, rows_B2)
    return {f"loss/{name}": total for name, total in zip(names, sums, strict=True)}


@final
class Skips:
    """Decide by the gradient norm, which is equal on every rank, whether a step changes the weights."""

    def __init__(self, settings: TrainSettings, scaler: LossScaler | None, device: torch.device) -> None:
        self._settings, self._scaler = settings, scaler
        self.count, self.norms, self._in_a_row = 0, deque[float](maxlen=_NORMS), 0
        self.first_bad = torch.full((), -1, dtype=torch.int64, device=device)

    def allows(self, step: int, norm: torch.Tensor) -> bool:
        """Return whether the gradients of ``step`` are finite and no spike."""
        spikes, skips = self._settings.skip_spikes, self._settings.nonfinite == "skip"
        if self._scaler is None and not skips and spikes is None:
            if runtime.queues(norm.device):
                self.mark(step, norm)
            else:
                self.check(-1 if math.isfinite(norm) else step)
            return True
        value = float(norm)
        good = math.isfinite(value) if self._scaler is None else self._scaler.update(value)
        if not good and self._scaler is None and not skips:
            self.check(step)
        why = ""
        if good and spikes is not None:
            usual = median(self.norms) if len(self.norms) >= _LEAST_NORMS else math.inf
            good = value <= spikes * usual
            why = f", above {spikes:g} x {usual:.3g}, the median of {len(self.norms)} steps"
            self.norms.extend([value] if good else [])
        self._in_a_row = 0 if good else self._in_a_row + 1
        if not good:
            self.count += 1
            log.warning("step %d skipped: the gradient norm is %s%s", step + 1, value, why)
        if self._in_a_row > _MOST_SKIPS:
            raise MeshparError(
                f"{self._in_a_row} steps in a row, up to step {step + 1}, had a gradient that is not finite, or a "
                "spike; lower the learning rate, or raise training.skip_spikes"
            )
        return good

    def mark(self, step: int, norm: torch.Tensor) -> None:
        """Note on the device whether the norm is finite, without reading it."""
        self.first_bad = torch.where(~norm.isfinite() & (self.first_bad < 0), step, self.first_bad)

    def check(self, first_bad: int) -> None:
        """Raise MeshparError if the norm of a step was not finite; -1: all were."""
        if first_bad >= 0:
            raise MeshparError(
                f"the gradient norm of step {first_bad + 1} is not finite, and the weights after it are worthless; "
                "resume from the last checkpoint with a lower learning rate or a longer warm-up, or set "
                "training.nonfinite=skip to skip such steps"
            )


@final
class TrainStep:
    """Compute the gradients of a step's micro-batches, and step the optimizer."""

    def __init__(
        self,
        par: Parallelized,
        losses: BatchLosses,
        optimizer: torch.optim.Optimizer,
        averages: Mapping[str, Averaged],
        settings: TrainSettings,
        scaler: LossScaler | None,
    ) -> None:
        self._par, self.losses, self._optimizer, self._averages = par, losses, optimizer, averages
        self._settings, self.scaler = settings, scaler
        self.skips = Skips(settings, scaler, par.device)
        self.load = ExpertLoad(par, balance_rate=settings.balance_rate, balance_loss=settings.balance_loss)
        self.norms: dict[str, torch.Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        scaler = None if self.scaler is None else self.scaler.state_dict()
        return {"skipped": self.skips.count, "norms": list(self.skips.norms), "scaler": scaler}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.skips.count, self.skips.norms = state["skipped"], deque(state.get("norms", ()), maxlen=_NORMS)
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])

    def backward(
        self, micro_batches: Sequence[TensorBatch], samples: SampleSet, stop: StopRequest | None
    ) -> tuple[int, Sums] | None:
        """Compute gradients; return this rank's tokens and sums, or None where the ranks agreed to ``stop``."""
        par, count_of, balances = self._par, self.losses.objective.tokens, bool(self._settings.balance_loss)
        micro_batches = [par.split(batch) for batch in micro_batches]
        tokens = sum(map(count_of, micro_batches))
        # full: a tensor made of a Python number on a GPU would wait for it
        token_scale = par.begin_token_scale(torch.full((), tokens, dtype=torch.float32, device=par.device))
        scale: torch.Tensor | None = None
        stopped = False
        # Stages take all micro-batches at once: an exchange of all hosts for each would stand before the first forward.
        stop = None if par.resolved.divided(Role.LAYERS) else stop

        def until_stopped() -> Iterator[TensorBatch]:
            nonlocal stopped
            for number, batch in enumerate(micro_batches):
                stopped = bool(number) and stop is not None and stop.agreed()
                if stopped:
                    return
                yield batch

        def loss(module: nn.Module, batch: TensorBatch) -> tuple[torch.Tensor, Sums]:
            nonlocal scale
            loss_sum, more = self.losses(module, batch, samples)
            if scale is None:  # not before the first forward, beside which the ranks exchange their counts
                scale = token_scale() * (1.0 if self.scaler is None else self.scaler.scale)
            factor: Any = scale
            balance = {"balance_loss": self.load.loss(count_of(batch))} if balances else {}
            return sum(balance.values(), loss_sum) * factor, {"loss": loss_sum, **more, **balance}

        _, sums = par.backward(until_stopped(), loss, reduce_each=self._settings.reduce_each)
        if scale is None:  # this rank has no loss
            token_scale()
        if not stopped:
            return tokens, sums
        par.reshard()
        self._optimizer.zero_grad(set_to_none=True)
        return None

    def update(self, step: int) -> bool:
        """Step the optimizer and the averages; return whether the step changed the weights."""
        if self.scaler is not None:
            self.scaler.unscale_(self._par.module)
        norms = self._par.clip_grad_norms_(self._settings.clip or math.inf, self._settings.norms)
        self.norms = {f"grad_norm/{name}" if name else "grad_norm": norm for name, norm in norms.items()}
        moved = self.skips.allows(step, norms[""])
        if moved:
            self._optimizer.step()
            for average in self._averages.values():
                average.update()
        self.load.step(moved=moved)
        self._optimizer.zero_grad(set_to_none=True)
        return moved
