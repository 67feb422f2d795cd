"""Refuse backwards that would use other weights than their forward, or weights that are gone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import final

import torch
from torch import Tensor, nn

from meshpar._torch.units import Units
from meshpar.core.errors import MeshparError
from meshpar.passes.applied import applied
from meshpar.step.backward_entrances import STALE

Versions = Sequence[tuple[Tensor, int]]
"""Parameters, and numbers that change when somebody writes them."""


@final
class Forward:
    """One forward: how many optimizer steps and errors in backwards came before it, and whether a backward has been
    through it.
    """

    def __init__(self, steps: int, errors: int, versions: Versions) -> None:
        self.steps, self.errors, self.versions, self.done = steps, errors, versions, False


@final
class Backwards:
    """The forwards of one module through which a backward may run.

    Args:
        module: the outermost module.
        units: of the module.
        parameters: returns the module's, once each.
        refuses: refuse backwards; False: remember which forwards they went through, and no more.
    """

    def __init__(
        self, module: nn.Module, units: Units, parameters: Callable[[], Iterable[Tensor]], *, refuses: bool
    ) -> None:
        self._module, self._units, self._parameters, self._refuses = module, units, parameters, refuses
        self._steps = self._errors = 0
        self._begun: set[Forward] = set()
        # of parameters, since the last forward or the beginning of the backward that runs
        self._versions: Versions = ()

    def after_forward(self) -> Forward:
        """Return the record of a forward that has ended, whose gradients are wanted."""
        self._versions = self._versions_now() if self._refuses else ()
        return Forward(self._steps, self._errors, self._versions)

    def step(self) -> None:
        """Record that parameters change: an optimizer steps."""
        self._steps += 1

    def fail(self) -> None:
        """Record that an error ended a backward."""
        self._errors += 1

    @property
    def turned(self) -> str | None:
        """The name of a parameter that was frozen, or not, in the last forward, and is not, or is, now."""
        return self._units.turned()

    @property
    def written(self) -> bool:
        """A parameter was written since the last forward."""
        return _written_since(self._versions) is not None

    def refuse_changed(self) -> None:
        """Refuse parameters that somebody changed between a forward and its backward, which gathers them once more."""
        if (name := self.turned) is not None:
            raise MeshparError(
                f"requires_grad of {name} changed between a forward and its backward, so that its gradient would be "
                "lost; freeze and unfreeze parameters before the forward, or after the backward"
            )
        self._refuse_written(self._versions)

    def begin(self, forward: Forward) -> bool:
        """Begin a backward through ``forward``; tell whether it is the first forward that this backward reaches."""
        if self._refuses:
            self._refuse_wrong(forward)
        first = not self._begun
        self._begun.add(forward)
        return first

    def close(self) -> None:
        """Record that the backward that ran has ended, also by an error."""
        for forward in self._begun:
            forward.done = True
        self._begun.clear()

    def end(self) -> None:
        """Refuse parameters that were written meanwhile, at the end of a backward."""
        versions, self._versions = self._versions, ()
        if not any(parameter._post_accumulate_grad_hooks for parameter, _ in versions):
            self._refuse_written(versions)

    def _versions_now(self) -> Versions:
        """Return numbers that change when somebody writes parameters, other than by ``.data``."""
        held = self._units.shards() if self._units.modules else self._parameters()
        return [(tensor, tensor._version) for tensor in held]

    def _refuse_written(self, versions: Versions) -> None:
        written = _written_since(versions)
        if written is not None:
            name = next(
                (name for name, parameter in self._module.named_parameters() if parameter is written), "a parameter"
            )
            raise MeshparError(
                f"{name} was written between a forward and the end of its backward, which may use the new values; "
                "write after the backward. par.averaged(decay) may evaluate other weights in between"
            )

    def _refuse_wrong(self, forward: Forward) -> None:
        if self._units.modules:
            refuse_second_order()
            if forward.done:
                raise MeshparError(
                    "a second backward runs through one forward (retain_graph=True), whose weights data parallelism "
                    "has freed; add the losses and run one backward, or run the forward again"
                )
            if forward.errors != self._errors:
                raise MeshparError(
                    "an error ended an earlier backward, and the forward of this one came before it; clear the "
                    "gradients by optimizer.zero_grad() and run the forward again"
                )
            if forward.steps != self._steps:
                raise MeshparError(STALE)
        elif forward.done and applied(self._module).selective:
            raise MeshparError(
                "a second backward runs through one forward (retain_graph=True), whose saved results selective "
                "recomputation has freed; add the losses and run one backward, or use "
                "ActivationCheckpoint(mode='full')"
            )
        self._refuse_written(forward.versions)


def refuse_second_order() -> None:
    """Refuse a backward that records a graph of its own."""
    if torch.is_grad_enabled():
        raise MeshparError(
            "a gradient of a gradient (create_graph=True) needs weights that data parallelism has freed by then; use "
            "a mesh of tensor parallelism alone, or compute the penalty from finite differences"
        )


def _written_since(versions: Versions) -> Tensor | None:
    return next((tensor for tensor, version in versions if tensor._version != version), None)
