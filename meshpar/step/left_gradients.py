"""The gradients that a step or a backward left behind, which no optimizer may use."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from meshpar._torch.units import Units
from meshpar.core.errors import MeshparError
from meshpar.step.placements import local_tensor


@final
class LeftGradients:
    """Remember gradients of a step that was left, or of a backward that an error ended, until somebody clears them.

    Args:
        module: the outermost module.
        units: of the module, whose gradients that are not reduced yet go with them.
        refuses: refuse to go on with them; False: forget what was cleared, and no more.
    """

    def __init__(self, module: nn.Module, units: Units, *, refuses: bool) -> None:
        self._module, self._units, self._refuses = module, units, refuses
        self._left: list[tuple[Tensor, Tensor, int]] = []
        self._cut_short = False

    def leave(self, *, by_error: bool = False) -> None:
        """Remember the gradients that there are now; ``by_error`` where an error ended a backward."""
        for parameter in self._module.parameters():
            if parameter.requires_grad:
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = grad
                self._left.append((parameter, grad, grad._version))
        self._cut_short = self._cut_short or by_error

    def refuse(self) -> None:
        """Refuse to go on with gradients that are left; forget those that somebody cleared."""
        self.forget_cleared()
        if not self._refuses:
            return
        if self._cut_short:
            raise MeshparError(
                "an error ended a backward, so the gradients are incomplete; call optimizer.zero_grad() after such an "
                "error"
            )
        if self._left:
            raise MeshparError(
                "par.accumulate was left before its last micro-batch, so that the gradients of this step were never "
                "reduced; call optimizer.zero_grad() after leaving it, or run all micro-batches"
            )

    def forget_cleared(self) -> None:
        """Forget the gradients that somebody has cleared."""
        if self._left and not any(
            parameter.grad is grad and grad._version == version for parameter, grad, version in self._left
        ):
            self._units.drop_unreduced_gradients()
            self._left.clear()
        if self._cut_short:
            grads = (
                local_tensor(parameter.grad) for parameter in self._module.parameters() if parameter.grad is not None
            )
            self._cut_short = bool(self._left) or any(bool(grad.count_nonzero()) for grad in grads)
