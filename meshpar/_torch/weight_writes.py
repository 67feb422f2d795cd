"""Writes into the weights of FSDP2's units, gathered and sharded, that nothing would keep or all ranks would miss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from meshpar._torch.fake import has_values
from meshpar._torch.fsdp import param_groups
from meshpar._torch.modules import held_part

Version = tuple[int, int, int]
"""Numbers that change when somebody writes a tensor, or gives it other memory."""


@final
class WeightWrites:
    """The writes into the weights of units, whose parameters ``groups`` have."""

    def __init__(self, groups: Sequence[Any]) -> None:
        self._groups = groups
        self._gathered: dict[int, Version] = {}
        self._shards: list[tuple[Any, Any, Version]] = []
        self._lost: str | None = None

    def keep_shards(self) -> None:
        """Remember the shards that are gathered now, for :meth:`shards_agree` and :meth:`written_shard`."""
        gathered = (parameter for group in self._groups if group.is_unsharded for parameter in group.fsdp_params)
        shards = ((parameter, parameter.sharded_param) for parameter in gathered)
        self._shards = [(parameter, shard, _version(shard)) for parameter, shard in shards]

    def shards_agree(self) -> Tensor | None:
        """Return whether the kept shards are bit by bit what is gathered; None where one was written or let go."""
        gathered = {id(parameter) for group in self._groups if group.is_unsharded for parameter in group.fsdp_params}
        if self.written_shard() is not None or any(id(parameter) not in gathered for parameter, _, _ in self._shards):
            return None
        return torch.stack([_agrees(parameter) for parameter, _, _ in self._shards]).all() if self._shards else None

    def written_shard(self) -> str | None:
        """Return the name of a kept shard that was written or replaced."""
        for parameter, was, then in self._shards:
            if parameter.sharded_param is not was or _version(was) != then:
                return _name(parameter)
        return None

    def keep_gathered(self, unit: nn.Module) -> None:
        """Remember the state of a unit's weights, which are gathered now, for :meth:`written_in_forward`."""
        for group in param_groups(unit):
            for parameter in group.fsdp_params:
                self._gathered[id(parameter)] = _version(parameter._unsharded_param)

    def written_in_forward(self, unit: nn.Module, *, look: bool) -> str | None:
        """Return the name of a gathered weight written since :meth:`keep_gathered`; ``look``: by its bits, too."""
        for group in param_groups(unit):
            for parameter in group.fsdp_params:
                gathered, registered = parameter._unsharded_param, registered_tensor(parameter)
                # A tensor that is no parameter stands there for a while: what adapters compute from it.
                replaced = isinstance(registered, nn.Parameter) and registered is not gathered
                if (
                    (replaced and registered is not parameter.sharded_param)
                    or self._gathered.get(id(parameter)) not in (None, _version(gathered))
                    or (look and group.is_unsharded and has_values(held_part(gathered)) and not _agrees(parameter))
                ):
                    return _name(parameter)
        return None

    def look(self, group: Any) -> None:
        """Look for a gathered weight of a unit that somebody wrote, at the end of the unit's backward."""
        for parameter in group.fsdp_params if group.is_unsharded else ():
            if self._gathered.get(id(parameter)) not in (None, _version(parameter._unsharded_param)):
                self._lost = _name(parameter)

    def take_lost(self) -> str | None:
        """Return the name of a gathered weight that somebody wrote in the backward that ends."""
        lost, self._lost = self._lost, None
        return lost


def registered_tensor(parameter: Any) -> Tensor | None:
    """Return what a module has in the place of a unit's parameter."""
    info = parameter._module_info
    registered: Tensor | None = info.module._parameters.get(info.param_name)
    return registered


def _name(parameter: Any) -> str:
    name: str = parameter._param_fqn or parameter._module_info.param_name
    return name


def _version(gathered: Tensor) -> Version:
    local = held_part(gathered)
    return gathered._version, local._version, local.untyped_storage()._cdata


@torch.no_grad()
def _agrees(parameter: Any) -> Tensor:
    """Return whether this rank's part of a gathered weight is the shard that was gathered, a bool of no dimensions."""
    whole = held_part(parameter._unsharded_param)
    if hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather"):  # gathered in another form, such as float8
        return torch.ones((), dtype=torch.bool, device=whole.device)
    shard, dim = parameter._sharded_local_tensor, parameter.fsdp_placement.dim
    ranks, rank = getattr(parameter.mesh_info, "shard_mesh_size", 1), getattr(parameter.mesh_info, "shard_mesh_rank", 0)
    begin = rank * -(-whole.shape[dim] // ranks)
    own_part = whole.narrow(dim, min(begin, whole.shape[dim]), shard.shape[dim]).contiguous()
    shard = shard.to(own_part.device, own_part.dtype).contiguous()
    return (own_part.view(torch.uint8) == shard.view(torch.uint8)).all()
