"""Resolved: all that follows from a plan, a model and a number of ranks, computed once; and the run of its passes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshpar._torch.fsdp import parts_only
from meshpar.core.errors import MeshparError
from meshpar.core.layout import ModelLayout
from meshpar.core.mesh import MeshSpec
from meshpar.core.passes import Facts, Installed, Pass, Role, Stage, axes_of, find_blocks, held_mesh, seen_mesh
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


def run_passes(
    module: nn.Module,
    resolved: Resolved,
    meshes: Mapping[MeshSpec, DeviceMesh],
    device: torch.device,
    facts: Facts,
    prepare: Callable[[], None] | None = None,
) -> tuple[list[Installed], list[Tensor]]:
    """Run the passes; return what each installed, and replaced parameters that somebody still holds. Collective."""
    built_on_meta = any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    if prepare is not None:
        prepare()
    before = [weakref.ref(parameter) for parameter in module.parameters()]
    names, ties = _names(module)
    every = list[Installed]()
    for pass_, seen in zip(resolved.passes, resolved.seen, strict=True):
        with parts_only():
            installed = pass_.install(module, resolved.layout, meshes[seen], facts) or Installed()
        every.append(installed)
        facts.add(installed.facts)
        names_now, ties_now = _names(module)
        if Role.LAYERS in pass_.roles.values():  # other ranks have the others
            here = set(names_now)
            names, ties = [name for name in names if name in here], ties_now
        if names_now != names:
            changed = sorted(set(names_now) ^ set(names))[:6]
            raise MeshparError(f"{pass_.name} changed the names of parameters, which a pass must keep: {changed}")
        if ties_now != ties:
            raise MeshparError(f"{pass_.name} untied tied parameters: expected {ties}, got {ties_now}")
    elsewhere = any(tensor.device != device for tensor in (*module.parameters(), *module.buffers()))
    if elsewhere and not built_on_meta and resolved.data_pass is None:
        module.to(device)
    remaining_ids = {id(parameter) for parameter in module.parameters()}
    return every, [old for reference in before if (old := reference()) is not None and id(old) not in remaining_ids]


def _names(module: nn.Module) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return the names of a module's parameters, and groups of those that are one tensor."""
    return [name for name, _ in module.named_parameters()], tied_names(module)
