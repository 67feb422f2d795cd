"""Refuse blocks that a model recomputes by a backward inside of a backward."""

from __future__ import annotations

import weakref
from typing import final

import torch
from torch import nn

from meshpar._torch.autograd import in_backward
from meshpar.core.errors import MeshparError
from meshpar.step.moment import Guard


@final
class Reentrant(Guard):
    """Look for units that ran without gradients in a forward and with gradients in its backward."""

    def __init__(self) -> None:
        self._without_grad: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def before_unit(self, name: str, unit: nn.Module) -> None:
        if not torch.is_grad_enabled():
            self._without_grad.add(unit)
        elif not in_backward():
            self._without_grad.discard(unit)
        elif unit in self._without_grad:
            raise MeshparError(
                "the model recomputes a block by torch.utils.checkpoint(use_reentrant=True), whose backward inside a "
                "backward sharding may reduce more than once; use checkpoint(..., use_reentrant=False), or "
                "ActivationCheckpoint() in the plan"
            )
