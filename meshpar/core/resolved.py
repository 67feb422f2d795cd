"""Resolved: all that follows from a plan, a model and a number of ranks, computed once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import nn

from meshpar.core.layout import ModelLayout
from meshpar.core.mesh import MeshSpec
from meshpar.core.passes import Pass, Role, Stage, axes_of, find_blocks, held_mesh, seen_mesh
from meshpar.core.patterns import tied_names


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A plan for one model and one number of ranks.

    Attributes:
        passes: in the order in which they apply.
        spec: the mesh with all sizes.
        held: the mesh over which parameters are held (:func:`meshpar.core.passes.held_mesh`).
        seen: the mesh that each pass sees, in the order of the passes.
        layout: description of the model.
        blocks: names of the model's blocks, innermost first.
        tied: groups of names of parameters that are one tensor.
        roles: the axes of ``spec`` by role, outermost first.
        averaged: the axes of ``held`` over which gradients are averaged.
    """

    passes: tuple[Pass, ...]
    spec: MeshSpec
    held: MeshSpec
    seen: tuple[MeshSpec, ...]
    layout: ModelLayout
    blocks: tuple[str, ...]
    tied: tuple[tuple[str, ...], ...]
    roles: Mapping[Role, tuple[str, ...]]
    averaged: tuple[str, ...]

    @property
    def meshes(self) -> tuple[MeshSpec, ...]:
        """The meshes to build, each once."""
        return tuple(dict.fromkeys((self.spec, self.held, *self.seen)))

    def divided(self, role: Role) -> tuple[str, ...]:
        """Return the axes of a role that have more than one rank."""
        return tuple(axis for axis in self.roles[role] if self.spec.axes[axis] > 1)

    @property
    def reduced(self) -> tuple[str, ...]:
        """The axes of ``held`` with more than one rank over which gradients are averaged."""
        return tuple(axis for axis in self.averaged if self.held.axes[axis] > 1)

    @property
    def same(self) -> tuple[str, ...]:
        """The axes of ``held`` with more than one rank whose ranks compute the same samples together."""
        excluded = (*self.averaged, *self.roles[Role.LAYERS])
        return tuple(axis for axis, size in self.held.axes.items() if size > 1 and axis not in excluded)

    @property
    def splits_sequence(self) -> bool:
        """Some ranks compute different positions between the layers that split features."""
        return any(
            pass_.splits_sequence and any(self.spec.axes[axis] > 1 for axis in pass_.axes) for pass_ in self.passes
        )

    @property
    def hybrid(self) -> bool:
        """Parameters are held over several axes of samples: gradients may be reduced over the inner ones first."""
        data = self.data_pass
        return data is not None and len(axes_of([data], self.spec, Role.SAMPLES)) > 1

    @property
    def data_pass(self) -> Pass | None:
        """The pass that holds parameters over data axes; None where no pass does."""
        return next((pass_ for pass_ in self.passes if pass_.stage == Stage.DATA), None)


def resolve(passes: Sequence[Pass], spec: MeshSpec, module: nn.Module, layout: ModelLayout) -> Resolved:
    """Compute all that follows from checked passes on a resolved mesh, for one model."""
    held = held_mesh(passes, spec)
    return Resolved(
        passes=tuple(passes),
        spec=spec,
        held=held,
        seen=tuple(seen_mesh(pass_, passes, spec) for pass_ in passes),
        layout=layout,
        blocks=tuple(name for name, _ in find_blocks(module, layout)),
        tied=tuple(tied_names(module)),
        roles={role: axes_of(passes, spec, role) for role in Role},
        averaged=axes_of(passes, held, Role.SAMPLES),
    )
