"""Hooks of a user's own on sharded parameters, to which autograd hands no gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import final

from torch import Tensor

from meshpar._torch.units import Units
from meshpar.core.errors import MeshparError


@final
class GradientHooks:
    """Call the hooks of one module's sharded parameters with reduced gradients.

    Args:
        units: of the module.
        refuses: refuse hooks that would get another gradient than in one process.
    """

    def __init__(self, units: Units, *, refuses: bool) -> None:
        self._units, self._refuses = units, refuses
        self._had_gradient: set[int] = set()

    def begin_backward(self) -> None:
        """Remember the parameters that have a gradient before a backward."""
        self._had_gradient = {id(parameter) for parameter in self._units.hooked() if parameter.grad is not None}

    def refuse_unreduced(self) -> None:
        """Refuse hooks at the end of a backward whose gradients are not reduced."""
        if self._refuses and (self._units.hooked() or self._units.hooked_after()):
            _refuse()

    def refuse_unused(self, unused: Sequence[Tensor]) -> None:
        """Refuse hooks that ran for parameters that no rank used, among those that this rank did not use."""
        if self._refuses and any(
            parameter.grad is None and parameter._post_accumulate_grad_hooks for parameter in unused
        ):
            raise MeshparError(
                "a post-accumulate-grad hook ran for a parameter that no rank used in this backward; use every "
                "parameter in each step, or change gradients between backward and step instead"
            )

    def run(self) -> None:
        """Call the hooks at the end of a backward whose gradients are reduced."""
        hooked = [parameter for parameter in self._units.hooked() if parameter.grad is not None]
        if self._refuses and any(id(parameter) in self._had_gradient for parameter in hooked):
            _refuse()
        for parameter in hooked:
            hooks: Mapping[int, Callable[[Tensor], Tensor | None]] = parameter._backward_hooks or {}
            for hook in list(hooks.values()):
                assert parameter.grad is not None, "only parameters with a gradient are handed in"
                changed = hook(parameter.grad)
                if changed is not None:
                    parameter.grad = changed


def _refuse() -> None:
    raise MeshparError(
        "a hook on a parameter gets the gradient of one backward, but here several are added up before it can "
        "run; change gradients between the last backward and the step instead, or run one backward a step"
    )
