"""Loss scaling for float16 training, on sharded gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshpar.errors import RecipeError


@final
class LossScaler:
    """Scale the loss so that small gradients do not underflow in float16, and skip steps that overflow (Micikevicius et al., 2018).

    ``torch.amp.GradScaler`` detects overflow in each rank's own shards. Here the gradient norm, which is equal on every rank of every axis,
    decides, so that all ranks skip together.

    >>> from meshpar.training import LossScaler
    >>> scaler = LossScaler(scale=1024.0)
    >>> scaler.update(norm=float("inf")), scaler.scale
    (False, 512.0)

    Attributes:
        scale: factor of the loss.
        skipped: number of steps skipped so far.
    """

    def __init__(self, *, scale: float = 2.0**16, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000) -> None:
        """Set the initial state.

        Args:
            scale: initial scale.
            growth: factor of the scale after ``interval`` steps in a row without overflow.
            backoff: factor of the scale after an overflow.
            interval: number of steps without overflow before the scale grows.
        """
        if not (scale > 0 and growth >= 1 and 0 < backoff < 1 and interval >= 1):
            raise RecipeError(
                f"expected scale > 0, growth >= 1, backoff in 0 to 1, interval >= 1; got {scale}, {growth}, {backoff}, {interval}"
            )
        self.scale, self.skipped = scale, 0
        self._growth, self._backoff, self._interval, self._good = growth, backoff, interval, 0

    @torch.no_grad()
    def unscale_(self, module: nn.Module) -> None:
        """Divide every gradient of this rank by the scale; call it before clipping."""
        grads: dict[torch.device, list[torch.Tensor]] = {}
        for parameter in module.parameters():
            if parameter.grad is not None:
                local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                grads.setdefault(local.device, []).append(local)
        for together in grads.values():
            torch._foreach_mul_(together, 1.0 / self.scale)

    def update(self, norm: float) -> bool:
        """Adapt the scale, and return whether the optimizer may step.

        Args:
            norm: norm of the unscaled gradients, equal on every rank, from ``par.clip_grad_norm_``.
        """
        if math.isfinite(norm):
            self._good += 1
            if self._good == self._interval:
                self.scale, self._good = self.scale * self._growth, 0
            return True
        self.scale, self._good, self.skipped = self.scale * self._backoff, 0, self.skipped + 1
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {"scale": self.scale, "good": self._good, "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self.scale, self._good, self.skipped = state["scale"], state["good"], state["skipped"]
