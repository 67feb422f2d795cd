"""Create the :class:`Cycle` of a module with its guards in their order: hooks for gathering, reduction and checks."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from meshpar._torch.modules import BatchNorm
from meshpar._torch.units import Units
from meshpar.core import runtime
from meshpar.core.guards import Guard, Guarded, Guards, guards_of
from meshpar.core.mesh import MeshSpec
from meshpar.core.passes import Role, find_blocks
from meshpar.core.resolved import Resolved
from meshpar.guards import own_guards
from meshpar.guards.agreement import Agreement
from meshpar.guards.losses import Losses
from meshpar.passes.applied import applied
from meshpar.passes.pipeline.stand_ins import is_idle
from meshpar.passes.tensor.random import draws_random
from meshpar.step.comparisons import Comparisons, NoComparisons
from meshpar.step.cycle import Cycle
from meshpar.step.explain import Explanation
from meshpar.step.meeting import Meeting
from meshpar.trials.experts import watch_experts
from meshpar.trials.positions import mixing_test
from meshpar.trials.split import split_test


def attach(
    module: nn.Module,
    resolved: Resolved,
    meshes: Mapping[MeshSpec, DeviceMesh],
    device: torch.device,
    replaced: Sequence[Tensor],
    *,
    title: str,
    verify: bool,
    guards: Guards,
) -> Cycle:
    """Attach the checks to a module on which the passes ran.

    Args:
        module: the outermost module.
        resolved: its plan.
        meshes: of ``resolved.meshes``.
        device: of this rank.
        replaced: parameters that the passes replaced and somebody still holds.
        title: of the plan, as messages call it.
        verify: try what the passes divide in the first forward.
        guards: when the checks compare.
    """
    unit_pass = resolved.data_pass
    off = guards == "off"
    explanation = Explanation(
        module,
        title,
        splits_features=bool(resolved.divided(Role.FEATURES)),
        unit_pass=None if unit_pass is None else unit_pass.name,
    )
    guarded = Guarded(
        module=module,
        resolved=resolved,
        meshes=meshes,
        device=device,
        replaced=tuple(map(weakref.ref, replaced)),
        lengths=set(),
        guards=guards,
    )
    units = Units(module)
    agreement, comparing = _comparisons(guarded, units)
    cycle = Cycle(
        module,
        units,
        None if off else explanation,
        resolved.same,
        watching=() if off else (*own_guards(guarded, units), *guards_of(guarded), *comparing),
        parts=guarded.lengths,
        agreement=agreement,
        guards=guards,
    )
    if (features := applied(module).split) is not None and features.arrivals is not None:
        features.arrivals.guards = guards
    if not off:
        _check_first_runs(cycle, resolved, device, verify=verify)
    return cycle


def _comparisons(guarded: Guarded, units: Units) -> tuple[Comparisons, Sequence[Guard]]:
    """Return what ranks exchange, and the guards that compare their loops and losses."""
    module, resolved, device = guarded.module, guarded.resolved, guarded.device
    held_on, layers = guarded.meshes[resolved.held], resolved.divided(Role.LAYERS)
    always, mesh = guarded.guards == "always", guarded.meshes[resolved.spec]
    stages = _stages(resolved.spec, layers[0]) if layers else ()
    if guarded.guards == "off":
        compares = resolved.reduced and dist.get_world_size() > 1
        return NoComparisons(module, Meeting.of(module, stages).exchange if compares else None), ()
    agreement = Agreement(
        module,
        units,
        held_on,
        resolved.reduced,
        resolved.same,
        {axis: mesh.get_group(axis) for axis in resolved.divided(Role.POSITIONS)},
        device,
        always=always,
        predicts=_predictable(module, resolved),
        stages=stages,
    )
    compared = () if resolved.splits_sequence else resolved.same
    losses = Losses({axis: held_on.get_group(axis) for axis in compared}, device, always=always)
    return agreement, (agreement, losses)


def _stages(spec: MeshSpec, axis: str) -> list[list[int]]:
    """Return the ranks that have each stage's layers."""
    stages: list[list[int]] = [[] for _ in range(spec.axes[axis])]
    for rank in range(spec.size):
        stages[spec.coordinates(rank)[axis]].append(rank)
    return stages


def _check_first_runs(cycle: Cycle, resolved: Resolved, device: torch.device, *, verify: bool) -> None:
    """Check the calls of the inner modules, and the first forward and backward."""
    module = cycle.module
    parts = dict([*_parts(module), *find_blocks(module, resolved.layout)])
    enter = "call the module, or a method by par.register_method(name)"
    if resolved.splits_sequence:
        why = (
            f"it would treat this rank's positions as the whole sequence; {enter}, or use "
            "TensorParallel(sequence_parallel=False)"
        )
        cycle.calls.only_inside(parts, why)
    elif resolved.divided(Role.LAYERS):
        stand_ins = {name: part for name, part in module.named_modules() if getattr(part, "stands_in", False)}
        called = {name: part for name, part in {**parts, **stand_ins}.items() if not any(map(is_idle, part.modules()))}
        cycle.calls.only_inside(called, f"this rank has some of the layers; {enter}")
    elif resolved.data_pass is not None:
        why = f"its weights are gathered with those of a larger unit; {enter}, or name it in the pass's blocks"
        cycle.calls.only_inside({name: part for name, part in parts.items() if not isinstance(part, FSDPModule)}, why)
    cycle.calls.explain_parts(part for part in parts.values() if any(True for _ in part.children()))
    if verify and not runtime.is_simulated():
        watch_experts(module, resolved.layout, applied(module))
        cycle.first_runs.split = split_test(module, resolved.blocks, device)
        if not resolved.divided(Role.LAYERS):  # it runs the model on other batches, which a stage cannot do alone
            cycle.first_runs.mixing = mixing_test(module, resolved.blocks)
    if cycle.agreement is not None:
        cycle.agreement.begin(draws=(resolved.layout.dropout or draws_random(module)) and not resolved.splits_sequence)


def _predictable(module: nn.Module, resolved: Resolved) -> bool:
    """Return whether ranks that exchange more than weights inside of a forward compute the same values there, so that
    they call the same units: those of ``tp``, where none has a part of the sequence.
    """
    divided = applied(module).divided or resolved.divided(Role.POSITIONS) or resolved.divided(Role.LAYERS)
    alike = not divided and not resolved.splits_sequence
    return alike and not any(isinstance(child, BatchNorm) for child in module.modules())


def _parts(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that the outermost one calls, also those in its lists."""
    for inner, child in module.named_children():
        full = f"{name}.{inner}" if name else inner
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _parts(child, full)
        elif any(True for _ in child.parameters()):
            yield full, child
