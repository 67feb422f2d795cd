"""Parameters that data-parallel ranks keep whole beside those that are sharded: scalars, and what a plan names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from meshpar.passes.installed import installed
from meshpar.passes.local import see_plain, strides
from meshpar.patterns import matches
from meshpar.placements import local_tensor


def kept_whole(module: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Parameter]:
    """Return the parameters, by their first name, that FSDP2 does not manage: scalars, which it cannot split, and those of ``patterns``."""
    named = module.named_parameters(remove_duplicate=False)
    chosen = {id(each) for name, each in named if not each.ndim or any(matches(pattern, name) for pattern in patterns)}
    return {name: each for name, each in module.named_parameters() if id(each) in chosen}


@final
class WholeParameters:
    """Parameters of a module that every data rank holds whole: DTensors like the others, plain tensors in forward.

    FSDP2 does not reduce the gradients of what it does not manage, so they are averaged here when a backward has ended.

    Args:
        module: the outermost module, whose parameters are replaced.
        names: of the parameters, tied ones once.
        mesh: the whole mesh.
        axes: the data axes.
    """

    def __init__(self, module: nn.Module, names: Sequence[str], mesh: DeviceMesh, axes: tuple[str, ...]) -> None:
        self._module, self._names, self._mesh, self._axes = module, tuple(names), mesh, axes
        placed: dict[int, nn.Parameter] = {id(module.get_parameter(name)): self._placed(module.get_parameter(name)) for name in names}
        for child in module.modules():
            held = [name for name, value in child._parameters.items() if id(value) in placed]
            for name in held:
                child._parameters[name] = placed[id(child._parameters[name])]
            known = installed(child)
            if held and not (known is not None and known.reads_parameters):
                see_plain(child, [child])

    def _placed(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter as a DTensor that the data axes replicate, and that is split over tensor axes as it was."""
        names, placements = self._axes, [Replicate()] * len(self._axes)
        if isinstance(parameter, DTensor):
            names, placements = (*names, *(parameter.device_mesh.mesh_dim_names or ())), [*placements, *parameter.placements]  # type: ignore[list-item]
        held = local_tensor(parameter)
        held = held if held.is_meta else held.to(self._mesh.device_type)
        whole = DTensor.from_local(
            held, self._mesh[names], placements, run_check=False, shape=parameter.shape, stride=strides(parameter.shape)
        )
        fresh = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        vars(fresh).update(vars(parameter), _meshpar_whole=True)
        return fresh

    @torch.no_grad()
    def reduce(self) -> list[nn.Parameter]:
        """Average the gradients over the data axes, in float32 or wider; return the parameters that had none here, which count as zero.

        Collective over the axes.
        """
        trained: list[Any] = [each for name in self._names if (each := self._module.get_parameter(name)).requires_grad]
        if not trained:
            return []
        missing = [each for each in trained if each.grad is None]
        for each in missing:
            each.grad = torch.zeros_like(each)
        grads = [local_tensor(each.grad) for each in trained]
        flat = torch.cat([grad.reshape(-1).to(torch.promote_types(grad.dtype, torch.float32)) for grad in grads])
        count = 1
        for axis in self._axes:
            dist.all_reduce(flat, group=self._mesh.get_group(axis))
            count *= self._mesh[axis].size()
        flat /= count
        for grad, part in zip(grads, flat.split([each.numel() for each in grads])):
            grad.copy_(part.view_as(grad))
        return missing
