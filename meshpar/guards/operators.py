"""Give operators on DTensors the results of one process where torch silently gives others, or refuse them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from meshpar._torch.calls import while_lives
from meshpar._torch.dtensor import change_attributes, change_operators
from meshpar._torch.simulated_device import has_values
from meshpar._torch.tensors import tree_map
from meshpar.core.errors import MeshparError, ParallelError, first_line, notes
from meshpar.exchange.ranks import same
from meshpar.passes.tensor import random
from meshpar.tensors.placements import held_by_this_rank, local_tensor, part_like, placed_like, whole_tensor

_REMEDY = (
    "change the whole tensor on every rank, whole = par.whole(tensor), and write it back, under torch.no_grad(), by "
    "tensor.copy_(par.like(tensor, whole))"
)
_REMEDIES = {
    "in-place": "compute with the whole of it, par.whole(tensor)",
    "different mesh": "each applied plan has a mesh of its own; place one as the other, par.like(tensor, other)",
}
"""Words of torch's errors -> what helps instead."""
notes["got mixed torch.Tensor and DTensor"] = (
    "a plain tensor met a parameter, a gradient or what was computed from them, which is a DTensor on a mesh; place "
    "the plain one (a mask, noise, a value) by par.like(tensor, values), or compute with the whole of the other, "
    "par.whole(tensor), and write back by tensor.copy_(par.like(tensor, whole))"
)


def one_process(owner: object, inside: Callable[[], bool]) -> None:
    """Give operators on DTensors one process's results, or refuse them, as long as ``owner`` lives."""
    while_lives(owner, "data", functools.partial(change_attributes, _assign, _refuse_numpy))
    while_lives(
        owner,
        "operators",
        functools.partial(change_operators, _draw, functools.partial(_refuse_unknown, inside), _refuse_lost),
    )


def _assign(tensor: DTensor, value: object) -> bool:
    """Let a DTensor have the memory of another one of its shape, placed alike first; tell whether that was done."""
    fits = isinstance(value, DTensor) and value.shape == tensor.shape and value.dtype == tensor.dtype
    if not isinstance(value, DTensor) or not fits or value.device_mesh != tensor.device_mesh:
        if not isinstance(tensor, nn.Parameter):
            return False
        raise ParallelError(
            f"parameter.data was assigned a {_named(value)}, and the parameter is a {_named(tensor)}; assign a tensor "
            "made from it (parameter.data * 0.9), or par.like(parameter, values) of a whole one"
        )
    with torch.no_grad():
        part = value.redistribute(placements=tensor.placements)._local_tensor
    if part.untyped_storage()._cdata != tensor._local_tensor.untyped_storage()._cdata:
        tensor._local_tensor = part
    return True


def _refuse_numpy(tensor: DTensor) -> NoReturn:
    raise ParallelError(
        f"numpy() of a {_named(tensor)}; use par.whole(tensor).numpy() on every rank, and write an array back by "
        "tensor.copy_(par.like(tensor, array))"
    )


def _named(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    kind = f"DTensor on {value.device_mesh.mesh_dim_names}" if isinstance(value, DTensor) else "plain tensor"
    return f"{kind} {tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"


def _draw(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw random numbers for a whole tensor on every rank, and take this rank's part."""
    first = next(argument for argument in (*args, *kwargs.values()) if isinstance(argument, DTensor))
    mesh = first.device_mesh
    if not has_values(local_tensor(first)):
        parts = tree_map(lambda leaf: leaf._local_tensor if isinstance(leaf, DTensor) else leaf, (args, kwargs))
        results = op(*parts[0], **parts[1])
        return (
            first
            if op._schema.is_mutable
            else tree_map(lambda leaf: part_like(leaf, first) if isinstance(leaf, Tensor) else leaf, results)
        )
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    if groups and not all(same(random.digest(first.device, kwargs.get("generator"))[None], groups)):
        raise MeshparError(
            f"{op} draws random numbers for a tensor that ranks hold together, but their random states differ; call "
            "torch.manual_seed(seed) with one seed on every rank before it, and par.manual_seed(seed) after it"
        )
    with torch.no_grad():
        wholes = tree_map(lambda leaf: whole_tensor(leaf) if isinstance(leaf, DTensor) else leaf, (args, kwargs))
        results = op(*wholes[0], **wholes[1])
        if op._schema.is_mutable:
            local_tensor(first).copy_(results[held_by_this_rank(first)])
            return first
        return tree_map(lambda leaf: _part(leaf, first), results)


def _part(whole: object, like: DTensor) -> object:
    if not isinstance(whole, Tensor) or whole.shape == like.shape:
        return placed_like(whole, like, ()) if isinstance(whole, Tensor) else whole
    return DTensor.from_local(whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


def _refuse_unknown(inside: Callable[[], bool], op: Any, error: Exception) -> None:
    if inside():
        return
    if op.namespace == "c10d":
        raise ParallelError(
            f"{op} got a parameter or a gradient, whose collectives are the plan's: gradients are averaged over data "
            "ranks already when a backward has ended; leave the collective out, use the form for one process of an "
            "optimizer that has its own, or take par.whole(tensor) where a rank needs all of it"
        ) from error
    remedy = next((remedy for cause, remedy in _REMEDIES.items() if cause in str(error)), _REMEDY)
    raise ParallelError(
        f"torch cannot run {op} on a parameter, a gradient or what was computed from them, which are DTensors on a "
        f"mesh ({first_line(error)}); {remedy}"
    ) from error


def _refuse_lost() -> NoReturn:
    raise ParallelError(
        "a part of a DTensor (a row, a slice, a flat view) was written in place, but ranks hold other parts of it, so "
        f"that this one was gathered and the write would be lost; {_REMEDY}"
    )
