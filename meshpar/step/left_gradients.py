"""The gradients that a step or a backward left behind, which no optimizer may use (``guards/left_gradients.py``)."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from meshpar._torch.units import Units
from meshpar.step.moment import Moment
from meshpar.tensors.placements import local_tensor


@final
class LeftGradients(Moment):
    """Remember gradients of a step that was left, or of a backward that failed (``cut_short``), until cleared."""

    def __init__(self, module: nn.Module, units: Units) -> None:
        self._module, self._units = module, units
        self._left: list[tuple[Tensor, Tensor, int]] = []
        self.cut_short = False

    @property
    def any(self) -> bool:
        """Gradients are left that nobody has cleared."""
        return bool(self._left)

    def leave_step(self, *, by_error: bool) -> None:
        if self._units.modules or by_error:
            self._leave(by_error=by_error)

    def after_failed_backward(self) -> None:
        self._leave(by_error=True)

    def _leave(self, *, by_error: bool) -> None:
        for parameter in self._module.parameters():
            if parameter.requires_grad:
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = grad
                self._left.append((parameter, grad, grad._version))
        self.cut_short = self.cut_short or by_error

    def before_backward(self, roots: object, *, reaches: object) -> None:
        self.forget_cleared()

    def forget_cleared(self) -> None:
        """Forget the gradients that somebody has cleared."""
        if self._left and not any(
            parameter.grad is grad and grad._version == version for parameter, grad, version in self._left
        ):
            self._units.drop_unreduced_gradients()
            self._left.clear()
        if self.cut_short:
            grads = (
                local_tensor(parameter.grad) for parameter in self._module.parameters() if parameter.grad is not None
            )
            self.cut_short = bool(self._left) or any(bool(grad.count_nonzero()) for grad in grads)
