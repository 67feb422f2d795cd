"""Refuse hooks on parameters that would get another gradient than in one process (``step/gradient_hooks.py``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NoReturn, final

from torch import nn

from meshpar._torch.units import Units
from meshpar.core.errors import MeshparError
from meshpar.step.moment import Guard


@final
class HookedGradients(Guard):
    """Look at the hooks of one module's sharded parameters."""

    def __init__(self, units: Units) -> None:
        self._units = units
        self._had_gradient: set[int] = set()

    def before_backward(self, roots: Iterable[object], *, reaches: Callable[[], bool]) -> None:
        self._had_gradient = {id(parameter) for parameter in self._units.hooked() if parameter.grad is not None}

    def end_backward(self, *, reduces: bool) -> None:
        if not reduces and (self._units.hooked() or self._units.hooked_after()):
            _refuse()

    def gradients(self, unused: list[nn.Parameter]) -> None:
        """Refuse hooks that ran for parameters that no rank used, and those on gradients of several backwards."""
        if any(parameter.grad is None and parameter._post_accumulate_grad_hooks for parameter in unused):
            raise MeshparError(
                "a post-accumulate-grad hook ran for a parameter that no rank used in this backward; use every "
                "parameter in each step, or change gradients between backward and step instead"
            )
        hooked = (parameter for parameter in self._units.hooked() if parameter.grad is not None)
        if any(id(parameter) in self._had_gradient for parameter in hooked):
            _refuse()


def _refuse() -> NoReturn:
    raise MeshparError(
        "a hook on a parameter gets the gradient of one backward, but here several are added up before it can "
        "run; change gradients between the last backward and the step instead, or run one backward a step"
    )
