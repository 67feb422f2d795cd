"""Refuse to go on with gradients of a step that was left, or of a backward that an error ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch.optim import Optimizer

from meshpar.core.errors import MeshparError
from meshpar.step.left_gradients import LeftGradients
from meshpar.step.moment import Guard


@final
class UnfinishedSteps(Guard):
    """Look for gradients that are left, before a forward of training and before a step."""

    def __init__(self, left: LeftGradients) -> None:
        self._left = left

    def before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if torch.is_grad_enabled():
            self._refuse()

    def before_step(self, optimizer: Optimizer, *, trains: bool) -> None:
        if trains:
            self._refuse()

    def _refuse(self) -> None:
        self._left.forget_cleared()
        if self._left.cut_short:
            raise MeshparError(
                "an error ended a backward, so the gradients are incomplete; call optimizer.zero_grad() after such an "
                "error"
            )
        if self._left.any:
            raise MeshparError(
                "par.accumulate was left before its last micro-batch, so that the gradients of this step were never "
                "reduced; call optimizer.zero_grad() after leaving it, or run all micro-batches"
            )
