"""Hooks of a user's own on sharded parameters, to which autograd hands no gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import final

from torch import Tensor

from meshpar._torch.units import Units
from meshpar.step.moment import Moment


@final
class GradientHooks(Moment):
    """Call the hooks of one module's sharded parameters with reduced gradients."""

    def __init__(self, units: Units) -> None:
        self._units = units

    def after_backward(self) -> None:
        for parameter in [hooked for hooked in self._units.hooked() if hooked.grad is not None]:
            hooks: Mapping[int, Callable[[Tensor], Tensor | None]] = parameter._backward_hooks or {}
            for hook in list(hooks.values()):
                assert parameter.grad is not None, "only parameters with a gradient are handed in"
                changed = hook(parameter.grad)
                if changed is not None:
                    parameter.grad = changed
