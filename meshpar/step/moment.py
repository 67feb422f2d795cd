"""The moments of a step: what happens around the calls, backwards and optimizer steps of one parallel module.

A mechanism of a pass is a moment, and so is a guard, which only refuses. ``guards/__init__.py`` makes the ordered list,
and ``step/forward.py`` runs it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from meshpar._torch.units import Units
from meshpar.core import runtime
from meshpar.core.mesh import MeshSpec
from meshpar.core.passes import Facts, Guards
from meshpar.core.resolved import Resolved
from meshpar.exchange.ranks import GradientMarks, Looks, Ranks
from meshpar.tensors.placements import local_tensor


@final
class Forward:
    """A call of the module whose gradients are wanted; each is one object."""

    __slots__ = ("__weakref__",)


class HandsOn:
    """A fact of a pass whose ranks hand values on to others: there a call's backward begins, not at its output."""

    def handed_on(self, output: object) -> object:
        """Return what the call that returned ``output`` has handed on; ``output`` itself where it is the last."""
        return output


class Moment:
    """Act around a step of one parallel module: inherit this class and override the moments that matter.

    Moments come in the order of the plan's passes, then of the guards; after a forward in the opposite one.
    """

    __slots__ = ()

    def before_split(self, batch: object) -> None:
        """Before ``par.split`` takes this rank's positions of a batch."""

    def before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Before a call of the module, with its arguments."""

    def after_forward(self, output: object) -> None:
        """After a call of the module, with its output; moments come in the opposite order here."""

    def after_error(self) -> None:
        """After a call of the module that raised an error, which is raised again whatever happens here."""

    def before_unit(self, name: str, unit: nn.Module) -> None:
        """Before a forward of a unit of data parallelism, not gathered yet; also where a backward computes it again."""

    def unit_gathered(self, name: str, unit: nn.Module) -> None:
        """When a unit's weights are gathered, before its own forward."""

    def after_unit(self, name: str, unit: nn.Module) -> None:
        """After a unit's own forward, before its weights are let go of."""

    def wants_gradients(self, forward: Forward) -> None:
        """After a call of the module whose gradients are wanted, when all looked at its output."""

    def before_backward(self, roots: Iterable[object], *, reaches: Callable[[], bool]) -> None:
        """Before any model's backward from ``roots``, tensors or nodes; ``reaches()``: a forward of the module."""

    def begin_backward(self, forward: Forward | None) -> None:
        """Where a backward comes to an output of ``forward``; None: into a unit by another way."""

    def close_backward(self) -> None:
        """When a backward that reached the module has ended, also by an error."""

    def after_failed_backward(self) -> None:
        """When it is known that an error ended a backward."""

    def end_backward(self, *, reduces: bool) -> None:
        """When a backward has ended, before whole parameters are reduced; not ``reduces``: between micro-batches."""

    def reduce(self) -> list[nn.Parameter]:
        """Reduce gradients that a backward has left; return the parameters that had none here, which count as zero."""
        return []

    def gradients(self, unused: list[nn.Parameter]) -> None:
        """When gradients are reduced; ``unused`` have zeros here, because this rank did not use them."""

    def after_backward(self) -> None:
        """After a backward, when gradients are reduced."""

    def before_micro_batch(self, left: int) -> None:
        """Before a micro-batch of ``par.accumulate``; ``left``: 2 before others, 1 before the last, 0: none is here."""

    def before_step(self, optimizer: Optimizer, *, trains: bool) -> None:
        """Before an optimizer's step; not ``trains``: it holds no parameter of the module."""

    def leave_step(self, *, by_error: bool) -> None:
        """When a step was left before its gradients were reduced; ``by_error``: ranks may have different parts."""

    def before_move(self) -> None:
        """Before parameters are allocated, freed or moved."""

    def after_move(self) -> None:
        """After parameters were allocated or moved."""

    def agree(self, place: str, numbers: Sequence[int] = ()) -> list[bool]:
        """Before ranks exchange something at ``place``; return of each number whether all ranks have the same."""
        return [True] * len(numbers)

    def simulated(self) -> Moment | None:
        """Return what stands in for this moment where ranks are simulated; None: nothing."""
        return self


@final
class Listeners:
    """The moments of one module in their order; ``at``: of each event, a method of :class:`Moment`, those that act."""

    def __init__(self, moments: Sequence[Moment]) -> None:
        self.moments: Sequence[Moment] = ()
        self.at: dict[Callable[..., Any], list[Callable[..., Any]]] = {
            event: [] for name, event in vars(Moment).items() if callable(event) and not name.startswith("_")
        }
        self.replace(moments)

    def replace(self, moments: Sequence[Moment]) -> None:
        """Take other moments; the lists of ``at`` stay the same objects."""
        self.moments = tuple(moments)
        for event, methods in self.at.items():
            bound = [getattr(moment, event.__name__) for moment in moments]
            methods[:] = [method for method in bound if getattr(method, "__func__", None) is not event]


class Guard(Moment):
    """Watch one parallel module: inherit this class and override the moments that matter.

    A guard compares and refuses, by raising a :class:`meshpar.MeshparError`; it changes nothing, and results without it
    are the same. Where it exchanges something, every rank must come there alike.

    >>> class NoEmptyBatch(Guard):
    ...     def before_forward(self, args, kwargs):
    ...         if any(isinstance(value, Tensor) and not value.numel() for value in (*args, *kwargs.values())):
    ...             raise MeshparError("the batch is empty")

    A package adds its guards to every plan by the entry point ``meshpar.guards``, a function of :class:`Guarded` that
    returns them. ``Plan(..., guards="off")`` leaves them out, too.
    """

    __slots__ = ()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """A parallel module as its guards see it.

    Attributes:
        module: the outermost module, on which the passes ran.
        resolved: its plan.
        meshes: of ``resolved.meshes``.
        device: of this rank.
        replaced: parameters that the passes replaced and somebody still holds, such as an optimizer.
        lengths: numbers of positions that ``par.split`` has given this rank so far.
        guards: when guards compare.
        facts: of the plan's passes.
        units: the units of data parallelism.
    """

    module: nn.Module
    resolved: Resolved
    meshes: Mapping[MeshSpec, DeviceMesh]
    device: torch.device
    replaced: Sequence[weakref.ref[Tensor]]
    lengths: set[int]
    guards: Guards
    facts: Facts
    units: Units


MakesGuards: TypeAlias = Callable[[Guarded], Iterable[Guard]]
"""An entry point of the group ``meshpar.guards``: returns the guards of one module."""


@final
class LeftGradients(Moment):
    """Remember gradients of a step that was left (``pending``) or a failed backward (``cut_short``), until cleared."""

    def __init__(self, module: nn.Module, units: Units) -> None:
        self._module, self._units = module, units
        self.pending: list[tuple[Tensor, Tensor, int]] = []
        self.cut_short = False

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
                self.pending.append((parameter, grad, grad._version))
        self.cut_short = self.cut_short or by_error

    def before_backward(self, roots: object, *, reaches: object) -> None:
        self.forget_cleared()

    def forget_cleared(self) -> None:
        """Forget the gradients that somebody has cleared."""
        if self.pending and not any(
            parameter.grad is grad and grad._version == version for parameter, grad, version in self.pending
        ):
            self._units.drop_unreduced_gradients()
            self.pending.clear()
        if self.cut_short:
            grads = (
                local_tensor(parameter.grad) for parameter in self._module.parameters() if parameter.grad is not None
            )
            self.cut_short = bool(self.pending) or any(bool(grad.count_nonzero()) for grad in grads)


@final
class UnusedGradients(Moment):
    """Drop the gradients of the parameters that no rank used, among those whose gradient counts as zero on this one.

    Where guards compare, the same exchange refuses ranks that have gradients for other parameters, which FSDP2 would
    join without an error.
    """

    def __init__(self, module: nn.Module, ranks: Ranks | None, device: torch.device, guards: Guards) -> None:
        self._module, self._ranks, self._device, self._guards = module, ranks, device, guards
        self._looks = Looks()
        self._sent: GradientMarks | None = None

    def gradients(self, unused: list[nn.Parameter]) -> None:
        """Drop the gradients of ``unused`` that no rank used. Collective where gradients are averaged."""
        if self._sent is not None:
            earlier, self._sent = self._sent, None
            earlier.check()
        if self._ranks is None:
            for parameter in unused:
                parameter.grad = None
            return
        first = self._guards != "off" and self._looks.first("a backward")
        compares = first or self._guards == "always"
        waits = first or (compares and runtime.over_hosts(self._device))
        zeros, trained = {id(parameter) for parameter in unused}, list(self._module.named_parameters())
        marks = [0 if parameter.grad is None else 1 if id(parameter) in zeros else 2 for _, parameter in trained]
        send = partial(GradientMarks, self._ranks, trained, marks, compares=compares)
        self._sent = send() if waits or not compares else runtime.among_real_ranks(send)
        if waits or unused:
            sent, self._sent = self._sent, None
            for (_, parameter), mark in zip(trained, marks if sent is None else sent.check()):
                if mark == 1:
                    parameter.grad = None


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
