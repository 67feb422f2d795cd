"""FSDP2's state of one unit, how units are made, and writes into their weights, which nothing would keep.

- ``replicate`` on FSDP2's machinery: goes when ``torch.distributed.fsdp`` exports it (pytorch/pytorch#166433).
- ``ACCUMULATES_APART``: where FSDP2 keeps gradients that it has not reduced yet. It goes with torch 2.14.
- ``parts_only``: FSDP2 holds the parameters of a unit in a list while it makes their shards, with no public form.
- ``output_dtype``: FSDP2 keeps a module's policy to itself; ``gathered_inputs`` is what it sends when it gathers.
"""

from __future__ import annotations

import importlib
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from meshpar._torch.simulated_device import has_values
from meshpar._torch.tensors import held_part, tree_leaves

ACCUMULATES_APART = hasattr(FSDPParam, "to_accumulated_grad_if_needed")
"""Torch up to 2.14 accumulates unreduced gradients apart, in the dtype of the reduction; 2.15 in ``.grad``."""


@contextmanager
def parts_only() -> Iterator[None]:
    """Patch FSDP2 to free each whole parameter as soon as its shard exists, not when its unit is made."""
    contract: Any = importlib.import_module("torch.distributed._composable.contract")
    inner, make, ordered = FSDPParamGroup.__init__, FSDPParam, contract.OrderedDict

    def init(self: Any, params: list[nn.Parameter], *args: Any, **kwargs: Any) -> None:
        # whose first import keeps the frames around it until the collector runs
        importlib.import_module("torch._dynamo")
        numbers = itertools.count()

        def part(*args: Any, **kwargs: Any) -> FSDPParam:
            parameter = make(*args, **kwargs)
            params[next(numbers)] = parameter.sharded_param
            return parameter

        _fsdp_param_group.FSDPParam = part  # type: ignore[assignment,misc]
        inner(self, params, *args, **kwargs)

    def names(pairs: Iterable[tuple[str, Any]] = ()) -> OrderedDict[str, Any]:
        return ordered((name, None) for name, _ in pairs)

    FSDPParamGroup.__init__, contract.OrderedDict = init, names  # type: ignore[method-assign,misc,assignment]
    try:
        yield
    finally:
        FSDPParamGroup.__init__, contract.OrderedDict = inner, ordered  # type: ignore[method-assign,misc]
        _fsdp_param_group.FSDPParam = make  # type: ignore[misc]


def make_ready(module: nn.Module) -> None:
    """Initialise ``module`` as FSDP2's root before a part of it is called."""
    state: Any = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
    if state is not None and state._is_root is None:
        state._lazy_init()


def param_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # several since torch 2.13, where 2.11 has one
    return [group for group in groups or [state._fsdp_param_group] if group is not None]


def units_with_parameters(module: nn.Module) -> list[FSDPModule]:
    """Return the units of a module that hold parameters, outermost first."""
    return [child for child in module.modules() if isinstance(child, FSDPModule) and param_groups(child)]


@torch.no_grad()
def gathered_inputs(unit: FSDPModule) -> list[torch.Tensor]:
    """Return what this rank sends when a sharded unit is gathered, as FSDP2 sends it."""
    parts = [
        part for group in param_groups(unit) for parameter in group.fsdp_params for part in parameter.all_gather_inputs
    ]
    return [part.view(torch.uint8) for part in parts] if len({part.dtype for part in parts}) > 1 else parts


def is_gathered(unit: FSDPModule) -> bool:
    """Return whether a unit's parameters are whole now."""
    return any(group.is_unsharded for group in param_groups(unit))


def gathered_bytes(unit: FSDPModule) -> int:
    """Return the bytes of :func:`gathered_inputs`, also on the meta device."""
    size = 0
    for parameter in (parameter for group in param_groups(unit) for parameter in group.fsdp_params):
        dtype = parameter.mp_policy.param_dtype or parameter.sharded_param.dtype
        size += parameter.padded_sharded_param_size.numel() * dtype.itemsize
    return size


def gather_before_backward(unit: nn.Module, output: object, tensors: Iterable[Any]) -> None:
    """Let FSDP2 know of outputs that it does not find itself, in objects of classes of their own."""
    if isinstance(output, torch.Tensor):
        return
    state: Any = unit._get_fsdp_state() if isinstance(unit, FSDPModule) else None
    seen = {id(leaf) for leaf in tree_leaves(output)}
    for tensor in tensors:
        if id(tensor) not in seen:
            tensor.register_hook(state._pre_backward)


def is_shard(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is a unit's, which computes with a tensor that it gathers. Compiled code asks."""
    return getattr(parameter, "_meshpar_shard", False)


def output_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype to which FSDP2 casts the module's output, None where it does not."""
    state: Any = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
    return None if state is None else state._mp_policy.output_dtype


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
