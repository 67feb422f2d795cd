"""Modules that come into a model after a plan was applied to it: agreed on by all ranks, then placed by every pass."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from meshpar.core.applying import run_passes
from meshpar.core.errors import MeshparError, PlanError
from meshpar.core.layout import ModelLayout
from meshpar.core.mesh import MeshSpec
from meshpar.core.passes import Pass
from meshpar.core.resolved import Resolved
from meshpar.exact.attach import renew
from meshpar.exact.cycle import Cycle
from meshpar.passes.installed import before_plan
from meshpar.passes.prepare import prepare
from meshpar.state import initialize


class Planned(Protocol):
    """The part of :class:`meshpar.Plan` that a parallel module uses."""

    @property
    def passes(self) -> tuple[Pass, ...]: ...

    @property
    def verify(self) -> bool: ...

    def checked(self, module: nn.Module, layout: ModelLayout | None, world_size: int | None) -> Resolved:
        """Raise an error for what the plan cannot place."""
        ...


@final
@dataclass(frozen=True, slots=True)
class Adopted:
    """The parameters that came into a module, and those that left it.

    Attributes:
        resolved: the plan for the module as it is now.
        names: of the parameters that came.
        parameters: the same, as the passes placed them; tied ones once.
        gone: the parameters that left.
        renamed: name of a parameter that moved into a new module -> its name before.
    """

    resolved: Resolved
    names: list[str]
    parameters: list[nn.Parameter]
    gone: list[nn.Parameter]
    renamed: dict[str, str]


def adopt(
    module: nn.Module,
    plan: Planned,
    resolved: Resolved,
    meshes: Mapping[MeshSpec, DeviceMesh],
    device: torch.device,
    cycle: Cycle,
    names: Sequence[str],
) -> Adopted:
    """Place the modules that came; see :meth:`meshpar.Parallelized.adopt`. Collective: every rank calls it.

    Args:
        module: the outermost module.
        plan: that was applied to it.
        resolved: the plan for the module as it was.
        meshes: of ``resolved.meshes``.
        device: of this rank.
        cycle: the checks of the module.
        names: of the modules that came.
    """
    came = _agreed_on(module, cycle, names)
    placed, known = cycle.placed.modules, dict(module.named_modules())
    late = [name for name, child in known.items() if child not in placed]
    resolved = plan.checked(before_plan(module, placed), resolved.layout, resolved.spec.size)
    if problems := [
        problem
        for pass_, spec in zip(resolved.passes, resolved.seen, strict=True)
        for problem in pass_.late_problems(module, resolved.layout, spec, late)
    ]:
        raise PlanError(problems)
    fresh: dict[str, Tensor] = {name: module.get_parameter(name) for name in came}
    fresh |= {f"{name}.{leaf}": value for name in late for leaf, value in known[name].named_buffers(recurse=False)}
    initialize.check_weights(fresh, "the weights handed to par.adopt")
    del fresh
    gone, renamed = cycle.left(), cycle.placed.renamed()
    replaced = run_passes(module, resolved, meshes, device, partial(prepare, module, resolved, meshes))
    cycle.adopted([*replaced, *gone])
    renew(cycle, resolved, device, verify=plan.verify)
    return Adopted(resolved, came, list(dict.fromkeys(map(module.get_parameter, came))), gone, renamed)


def forget(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Take parameters, and their state, out of an optimizer."""
    gone = {id(parameter) for parameter in parameters}
    for group in optimizer.param_groups:
        kept = [place for place, parameter in enumerate(group["params"]) if id(parameter) not in gone]
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [group[key][place] for place in kept]
    for parameter in [parameter for parameter in optimizer.state if id(parameter) in gone]:
        del optimizer.state[parameter]


def _agreed_on(module: nn.Module, cycle: Cycle, names: Sequence[str]) -> list[str]:
    """Return the names of the parameters that came into modules ``names``, which are the same on all ranks."""
    came, error = list[str](), None
    try:
        came = cycle.came(names)
        missing = initialize.without_memory(module)
        if missing and any(name not in missing for name, _ in module.named_parameters() if name not in came):
            raise MeshparError(
                f"{min(missing)} has no values, and the model has; build new modules with weights, the same on every "
                "rank: call torch.manual_seed(0) before"
            )
    except MeshparError as refused:
        error = refused
    mine = f"{names} {came} {error}"
    agreement = cycle.agreement
    alike = agreement is None or all(agreement.meet("par.adopt", [zlib.crc32(mine.encode())]))
    if error is not None:
        raise error
    if not alike:
        raise MeshparError(
            f"ranks adopt different modules, this rank {', '.join(came) or 'none'}; build the same modules on every "
            "rank"
        )
    return came
