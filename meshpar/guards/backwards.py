"""Refuse backwards of other or freed weights or in a backward, and left or hooked gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshpar._torch.autograd import in_backward
from meshpar._torch.simulated_device import without_functions
from meshpar._torch.units import Units
from meshpar.core.errors import MeshparError
from meshpar.guards.placed_parameters import PlacedParameters
from meshpar.passes.recompute import Recomputed
from meshpar.step.backward import STALE
from meshpar.step.moment import Forward, Guard, Guarded, LeftGradients

Versions = tuple[Sequence[Tensor], list[int]]
"""Parameters, and numbers that change when somebody writes them, other than by ``.data``."""
_VERSION, _HOOKS = attrgetter("_version"), attrgetter("_post_accumulate_grad_hooks")


@final
class _SeenForward:
    """A forward: how many steps and failed backwards came before it, and whether a backward has been through it."""

    def __init__(self, steps: int, errors: int, versions: Versions) -> None:
        self.steps, self.errors, self.versions, self.done = steps, errors, versions, False


@final
class Backwards(Guard):
    """The forwards of one module through which a backward may run."""

    def __init__(self, guarded: Guarded, placed: PlacedParameters) -> None:
        self._module, self._units, self._placed = guarded.module, guarded.units, placed
        recomputed = guarded.facts.find(Recomputed)
        self._selective = recomputed is not None and recomputed.selective
        self._steps = self._errors = 0
        self._records: weakref.WeakKeyDictionary[Forward, _SeenForward] = weakref.WeakKeyDictionary()
        self._begun: set[_SeenForward] = set()
        # of parameters, since the last forward or the beginning of the backward that runs
        self._versions: Versions = (), []

    def wants_gradients(self, forward: Forward) -> None:
        parameters = self._units.shards() if self._units.modules else self._placed.parameters
        with without_functions():
            self._versions = parameters, list(map(_VERSION, parameters))
        self._records[forward] = _SeenForward(self._steps, self._errors, self._versions)

    def before_backward(self, roots: Iterable[object], *, reaches: Callable[[], bool]) -> None:
        """Refuse parameters that somebody changed between a forward and its backward, which gathers them once more."""
        if not self._units.modules:
            return
        turned = self._units.backwards.turned()
        if (turned is None and _written_since(self._versions) is None) or not reaches():
            return
        if turned is not None:
            raise MeshparError(
                f"requires_grad of {turned} changed between a forward and its backward, so that its gradient would be "
                "lost; freeze and unfreeze parameters before the forward, or after the backward"
            )
        self._refuse_written(self._versions)

    def begin_backward(self, forward: Forward | None) -> None:
        if self._units.modules and torch.is_grad_enabled():
            raise MeshparError(
                "a gradient of a gradient (create_graph=True) needs weights that data parallelism has freed by then; "
                "use a mesh of tensor parallelism alone, or compute the penalty from finite differences"
            )
        if forward is not None:
            self._refuse_wrong(self._records[forward])
            self._begun.add(self._records[forward])

    def close_backward(self) -> None:
        for record in self._begun:
            record.done = True
        self._begun.clear()

    def after_failed_backward(self) -> None:
        self._errors += 1

    def before_step(self, optimizer: Optimizer, *, trains: bool) -> None:
        self._steps += trains

    def end_backward(self, *, reduces: bool) -> None:
        """Refuse parameters and gathered weights that were written meanwhile."""
        if (name := self._units.writes.take_lost()) is not None:
            raise MeshparError(
                f"{name} was written in a backward, by a hook; write after it, outside of the module's calls"
            )
        versions, self._versions = self._versions, ((), [])
        if not any(map(_HOOKS, versions[0])):
            self._refuse_written(versions)

    def _refuse_written(self, versions: Versions) -> None:
        if (written := _written_since(versions)) is not None:
            names = (name for name, parameter in self._module.named_parameters() if parameter is written)
            name = next(names, "a parameter")
            raise MeshparError(
                f"{name} was written between a forward and the end of its backward, which may use the new values; "
                "write after the backward. par.averaged(decay) may evaluate other weights in between"
            )

    def _refuse_wrong(self, forward: _SeenForward) -> None:
        if self._units.modules:
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
        elif forward.done and self._selective:
            raise MeshparError(
                "a second backward runs through one forward (retain_graph=True), whose saved results selective "
                "recomputation has freed; add the losses and run one backward, or use "
                "ActivationCheckpoint(mode='full')"
            )
        self._refuse_written(forward.versions)


def _written_since(versions: Versions) -> Tensor | None:
    parameters, before = versions
    now = list(map(_VERSION, parameters))
    return None if now == before else next(p for p, new, old in zip(parameters, now, before) if new != old)


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


@final
class UnfinishedSteps(Guard):
    """Look for gradients that are left, before a forward of training and before a step."""

    def __init__(self, left: LeftGradients) -> None:
        self._left = left

    def before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if torch.is_grad_enabled() and (self._left.pending or self._left.cut_short):
            self._refuse()

    def before_step(self, optimizer: Optimizer, *, trains: bool) -> None:
        if trains and (self._left.pending or self._left.cut_short):
            self._refuse()

    def _refuse(self) -> None:
        self._left.forget_cleared()
        if self._left.cut_short:
            raise MeshparError(
                "an error ended a backward, so the gradients are incomplete; call optimizer.zero_grad() after such an "
                "error"
            )
        if self._left.pending:
            raise MeshparError(
                "par.accumulate was left before its last micro-batch, so that the gradients of this step were never "
                "reduced; call optimizer.zero_grad() after leaving it, or run all micro-batches"
            )


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
