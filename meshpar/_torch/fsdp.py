"""FSDP2's state of one unit, and how units are made.

- ``replicate`` on FSDP2's machinery: goes when ``torch.distributed.fsdp`` exports it (pytorch/pytorch#166433).
- ``ACCUMULATES_APART``: where FSDP2 keeps gradients that it has not reduced yet. It goes with torch 2.14.
- ``parts_only``: FSDP2 holds the parameters of a unit in a list while it makes their shards, with no public form.
- ``reduce_replicas_by``: FSDP2's own all-reduce over replicas has no custom form, as its reduce-scatter has.
- ``output_dtype``: FSDP2 keeps a module's policy to itself; ``gathered_inputs`` is what it sends when it gathers.
"""

from __future__ import annotations

import importlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from meshpar._torch.calls import eager

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


def uncompiled_method(owner: object, name: str) -> Callable[..., Any]:
    """Return a method of FSDP2 that keeps the compiler out without torch's wrapper, which is made anew in each call."""
    method = getattr(owner, name)
    plain = getattr(method, "__wrapped__", None)
    return method if plain is None else MethodType(eager(plain), owner)


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


def reduce_replicas_by(unit: FSDPModule, ranks: Any, reduce: Callable[[torch.Tensor], object]) -> None:
    """Let ``reduce`` sum a unit's gradients over replicas, in place; FSDP2's own all-reduce is over ``ranks`` alone."""
    for group in param_groups(unit):
        group.mesh_info.replicate_process_group = ranks
    unit.set_all_reduce_hook(reduce)  # type: ignore[arg-type]


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


def output_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype to which FSDP2 casts the module's output, None where it does not."""
    state: Any = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
    return None if state is None else state._mp_policy.output_dtype
