"""The protocol of guards: what watches a parallel module while it trains, and when guards compare."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from meshpar.core import registry
from meshpar.core.errors import PlanError
from meshpar.core.mesh import MeshSpec
from meshpar.core.resolved import Resolved

Guards = Literal["always", "first", "off"]
"""``always``: guards compare in every step, beside an accelerator in the first ones and then without waiting.
``first``: they exchange in the first steps, and then compare only what costs no exchange. ``off``: the passes run
alone.
"""
SETTINGS = ("always", "first", "off")


def check_guards(guards: object) -> None:
    """Raise PlanError for a value that is no setting of the guards."""
    if guards not in SETTINGS:
        raise PlanError(
            [f"guards={guards!r} is not known; expected one of {', '.join(map(repr, SETTINGS))}: write guards='first'"]
        )


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
        guards: when guards compare; never ``off``.
    """

    module: nn.Module
    resolved: Resolved
    meshes: Mapping[MeshSpec, DeviceMesh]
    device: torch.device
    replaced: Sequence[weakref.ref[Tensor]]
    lengths: set[int]
    guards: Guards


class Guard:
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

    def before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Check the arguments of a call of the module before it runs."""

    def after_forward(self, output: object) -> None:
        """Check the output of a call of the module; guards come in the opposite order here."""

    def after_error(self) -> None:
        """Note that a call of the module raised an error, which is raised again whatever happens here."""

    def before_unit(self, name: str, unit: nn.Module) -> None:
        """Check the forward of a unit of data parallelism before its weights are gathered; also where a backward
        computes it again.
        """

    def before_backward(self, roots: Iterable[object], *, reaches: Callable[[], bool]) -> None:
        """Check a backward, of any model, before it runs from ``roots``, tensors or nodes; ``reaches()`` tells whether
        it reaches a forward of the module.
        """

    def after_backward(self) -> None:
        """Check the module after a backward, when gradients are reduced."""

    def before_micro_batch(self, left: int) -> None:
        """Check a micro-batch of ``par.accumulate`` before it runs; ``left``: 2 before others, 1 before the last one, 0
        where this rank has none.
        """

    def before_step(self, optimizer: Optimizer, *, trains: bool) -> None:
        """Check an optimizer's step before it runs; not ``trains``: it holds no parameter of the module."""


MakesGuards: TypeAlias = Callable[[Guarded], Iterable[Guard]]
"""An entry point of the group ``meshpar.guards``: returns the guards of one module."""


def guards_of(guarded: Guarded) -> tuple[Guard, ...]:
    """Return the guards of a module from installed packages."""
    # Sorted: what guards exchange comes in this order, on hosts where packages were installed in another one, too.
    names = sorted(registry.names(registry.GUARDS))
    makers: list[MakesGuards] = [registry.plugin(registry.GUARDS, name) for name in names]
    return tuple(guard for make in makers for guard in make(guarded))
