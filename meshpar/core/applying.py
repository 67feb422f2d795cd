"""Run the passes of a plan on a module, and see that they keep what a pass must keep."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshpar._torch.fsdp import parts_only
from meshpar.core.errors import MeshparError
from meshpar.core.mesh import MeshSpec
from meshpar.core.passes import Facts, Installed, Role
from meshpar.core.patterns import tied_names
from meshpar.core.resolved import Resolved


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
    names, ties = [name for name, _ in module.named_parameters()], tied_names(module)
    every = list[Installed]()
    for applied_pass, seen in zip(resolved.passes, resolved.seen, strict=True):
        with parts_only():
            installed = applied_pass.install(module, resolved.layout, meshes[seen], facts) or Installed()
        every.append(installed)
        facts.add(installed.facts)
        if Role.LAYERS in applied_pass.roles.values():  # other ranks have the others
            names_here = {name for name, _ in module.named_parameters()}
            names, ties = [name for name in names if name in names_here], tied_names(module)
        _check_kept(applied_pass.name, module, names, ties)
    elsewhere = any(tensor.device != device for tensor in (*module.parameters(), *module.buffers()))
    if elsewhere and not built_on_meta and resolved.data_pass is None:
        module.to(device)
    remaining_ids = {id(parameter) for parameter in module.parameters()}
    return every, [old for reference in before if (old := reference()) is not None and id(old) not in remaining_ids]


def _check_kept(title: str, module: nn.Module, names: list[str], ties: list[tuple[str, ...]]) -> None:
    """Raise an error if a pass changed the names of parameters, or untied them."""
    if (now := [name for name, _ in module.named_parameters()]) != names:
        changed = sorted(set(now) ^ set(names))[:6]
        raise MeshparError(f"{title} changed the names of parameters, which a pass must keep: {changed}")
    if tied_names(module) != ties:
        raise MeshparError(f"{title} untied tied parameters: expected {ties}, got {tied_names(module)}")
