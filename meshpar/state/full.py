"""A parallel module's state as whole plain tensors, one at a time, and refusals of what takes a rank's part for it."""

from __future__ import annotations

import copy
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshpar._torch.autograd import check_norms_of
from meshpar._torch.calls import check_functional_calls, while_lives
from meshpar._torch.dtensor import refuse_parts_as_numbers
from meshpar.core import runtime
from meshpar.core.errors import MeshparError
from meshpar.passes.pipeline.portion import tensors_elsewhere
from meshpar.passes.pipeline.running import Layers
from meshpar.process.waiting import reads_of
from meshpar.same_bits.limits import refuse_norms_of_shards
from meshpar.step.forward import fact_of, run_of
from meshpar.step.moment import Moment
from meshpar.tensors.placements import held_by_this_rank, local_tensor, part_like, placed_like, whole_tensor

BLOCKS = "_blocks"
"""The end of the name of an optimizer's tensor with a number for each block of a row; no rank divides its last dim."""


@final
class ShardedState(OrderedDict[str, Any]):
    """``state_dict()`` of a parallel module or its optimizer, of which ``torch.save`` would write this rank's part."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise MeshparError(
            "state_dict() of a parallel module or its optimizer holds this rank's shards, and pickling it "
            "(torch.save) would lose the others'; use meshpar.checkpoints.CheckpointManager, or save "
            "par.state_dict(full=True) of the module from rank 0"
        )

    def __copy__(self) -> ShardedState:
        return ShardedState(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedState:
        return ShardedState((key, copy.deepcopy(value, memo)) for key, value in self.items())


@final
class OptimizerStates(Moment):
    """Let optimizers' ``state_dict()`` refuse to be pickled, and place the state that they have loaded or will load."""

    def __init__(self, *, of_some_layers: bool) -> None:
        self._of_some_layers = of_some_layers
        self._met: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def before_step(self, optimizer: torch.optim.Optimizer, *, trains: bool) -> None:
        if trains and optimizer not in self._met:
            self._met.add(optimizer)
            optimizer.register_state_dict_post_hook(self._sharded)
            optimizer.register_load_state_dict_post_hook(place_optimizer_state)
            place_optimizer_state(optimizer)

    def _sharded(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        values = (value for states in state["state"].values() if isinstance(states, dict) for value in states.values())
        sharded = self._of_some_layers or any(isinstance(value, DTensor) for value in values)
        return ShardedState(state) if sharded else None


def place_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Divide whole plain state as its parameters; raises MeshparError for another shape in an optimizer of torch."""
    if isinstance(optimizer, torch.optim.Adafactor):
        return  # its factors have other shapes, and its step places them
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, DTensor) or not isinstance(state, dict):
            continue
        for key, value in state.items():
            if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.ndim == 0:
                continue
            if value.shape == parameter.shape:
                state[key] = placed_like(value, parameter, ())
            elif type(optimizer).__module__.startswith("torch.optim."):
                raise MeshparError(
                    f"{type(optimizer).__name__}'s {key} has the shape {tuple(value.shape)}; expected "
                    f"{tuple(parameter.shape)}, which is the parameter's; load whole tensors, as one process's "
                    "optimizer.state_dict() has them, or restore the optimizer by "
                    "meshpar.checkpoints.CheckpointManager"
                )


def guard_state(module: Any) -> None:  # noqa: ANN401 - its methods are replaced
    """Let ``state_dict()`` refuse to be pickled by mistake, and ``load_state_dict`` take whole plain tensors, too."""
    inner = module.state_dict

    def state_dict(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the module's
        state = inner(*args, **kwargs)
        if args or kwargs.get("destination") is not None:
            return state
        if not tensors_elsewhere(run_of(module)) and not any(isinstance(value, DTensor) for value in state.values()):
            return state
        sharded = ShardedState(state)
        sharded._metadata = getattr(state, "_metadata", None)  # type: ignore[attr-defined]
        return sharded

    def place(
        module: nn.Module, state: dict[str, Any], prefix: str, _: object, strict: bool, missing: list[str], *others: Any
    ) -> None:
        reads_of(module).wait("load_state_dict()")
        lacking = _drop_other_layers(module, state, prefix, others[-1])
        missing += lacking if strict else ()
        for name, target in _tensors(module).items():
            value = state.get(prefix + name)
            plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
            if isinstance(target, DTensor) and value is not None and plain and value.shape == target.shape:
                part = value.detach()[held_by_this_rank(target)].to(target.device).contiguous()
                state[prefix + name] = part_like(part, target)

    module.state_dict = state_dict
    module.register_load_state_dict_pre_hook(place)


def _drop_other_layers(module: nn.Module, state: dict[str, Any], prefix: str, problems: list[str]) -> list[str]:
    """Drop tensors of other ranks' layers; return those that lack, and note other shapes in ``problems``."""
    elsewhere = {prefix + name: tensor for name, tensor in tensors_elsewhere(run_of(module)).items()}
    dropped = {name: state.pop(name) for name in elsewhere if name in state}
    for name, value in dropped.items():
        if isinstance(value, Tensor) and value.shape != (shape := elsewhere[name].shape):
            sizes = f"{tuple(value.shape)} in the state, {tuple(shape)} in the model"
            problems.append(f"size mismatch for {name}: {sizes}")
    return sorted(elsewhere.keys() - dropped.keys()) if dropped else []  # without any it is this rank's own


def gather_state(module: nn.Module, *, everywhere: bool) -> dict[str, Any]:
    """Return the state as whole host tensors on rank 0, or ``everywhere``; one at a time is on a device. Collective."""
    keep = everywhere or dist.get_rank() == 0
    if (layers := fact_of(module, Layers)) is not None:
        return _gather_stages(module, layers.rank, layers.ranks, keep=keep)
    state, copies = dict[str, Any](), dict[int, Tensor]()
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in copies:
            whole = whole_tensor(value)
            copies[id(value)] = whole.cpu().clone() if keep else torch.empty(0)
            del whole
        state[name] = copies[id(value)] if isinstance(value, Tensor) else value
    return state if keep else {}


def _gather_stages(module: nn.Module, stage: int, stages: int, *, keep: bool) -> dict[str, Any]:
    """Return the whole state where ranks have different layers: the ranks of one after another send theirs."""
    values = module.state_dict(keep_vars=True)
    device = next((value.device for value in values.values() if isinstance(value, Tensor)), torch.device("cpu"))
    state, every = dict[str, Any](), [0] * dist.get_world_size()
    dist.all_gather_object(every, stage, group=runtime.hosts())
    for sender in range(stages):
        source, described = every.index(sender), list[Any]()
        for name, value in values.items():
            described.append((name, value.shape, value.dtype) if isinstance(value, Tensor) else (name, value, None))
        described = [described]
        dist.broadcast_object_list(described, src=source, group=runtime.hosts())
        for name, what, dtype in described[0]:
            if name in state:  # both ends have what is tied
                continue
            if dtype is None:
                state[name] = what
                continue
            whole = whole_tensor(values[name]) if stage == sender else torch.empty(what, dtype=dtype, device=device)
            whole = whole.detach().contiguous()
            dist.broadcast(whole, src=source)
            state[name] = whole.cpu().clone() if keep else None
    return state if keep else {}


@torch.no_grad()
def scatter_state(
    module: nn.Module, state: Mapping[str, Any], device: torch.device, *, from_rank_0: bool, strict: bool
) -> None:
    """Copy each rank's part of whole tensors, rank 0's if ``from_rank_0``; MeshparError first where they do not fit."""
    elsewhere = tensors_elsewhere(run_of(module))
    targets = {**_tensors(module), **elsewhere}
    problems = misfits(targets, state, strict=strict) if not from_rank_0 or dist.get_rank() == 0 else []
    offered = sorted(set(targets).intersection(state))
    if from_rank_0:
        said: list[Any] = [problems, offered]
        dist.broadcast_object_list(said, src=0, group=runtime.hosts())
        problems, offered = said
    if problems:
        raise MeshparError("\n  ".join(["this state does not fit the module:", *problems]))
    for name in offered:
        target = targets[name]
        whole = torch.empty(target.shape, dtype=target.dtype, device=device) if from_rank_0 else state[name]
        if from_rank_0:
            if dist.get_rank() == 0:
                whole.copy_(state[name])
            dist.broadcast(whole, src=0)
        if name not in elsewhere:
            local_tensor(target).copy_(whole_tensor(whole)[held_by_this_rank(target)])


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    state = nn.Module.state_dict(module, keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def misfits(own: Mapping[str, Tensor], state: Mapping[str, Any], *, strict: bool = True) -> list[str]:
    """Return the names of ``state`` that are missing or unexpected (``strict``), and the shapes that differ."""
    problems = []
    if strict:
        problems += [f"missing: {name} {tuple(tensor.shape)}" for name, tensor in own.items() if name not in state]
        problems += [f"unexpected: {name}" for name in state if name not in own]
    for name, tensor in own.items():
        if name in state and tuple(state[name].shape) != tuple(tensor.shape):
            problems.append(f"shape of {name}: expected {tuple(tensor.shape)}, got {tuple(state[name].shape)}")
    return problems


def refuse_copies(module: Any, *, patch: bool = True) -> None:  # noqa: ANN401 - a module that gets attributes
    """Refuse what would copy or write this rank's part as the model; ``patch``: functions of torch, too."""
    for name, message in _REFUSED.items():
        if name != "resize_token_embeddings" or hasattr(module, name):
            setattr(module, name, functools.partial(_refuse, message))
    if hasattr(module, "save_pretrained"):
        module.save_pretrained = functools.partial(_save_whole, module.save_pretrained)
    module._ddp_params_and_buffers_to_ignore = _NotForDDP()  # which DistributedDataParallel reads first
    guard_state(module)
    if not patch:
        return
    while_lives(module, "norms", functools.partial(check_norms_of, _refuse_several_meshes))
    while_lives(module, "functional calls", functools.partial(check_functional_calls, _refuse_other_layers))
    refuse_number = functools.partial(_refuse, _READ_AS_A_NUMBER)
    while_lives(module, "numbers", functools.partial(refuse_parts_as_numbers, refuse_number))


def _save_whole(save: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """Save a whole state that is handed in; other ranks than 0 have an empty one, and write nothing."""
    state = kwargs.get("state_dict")
    if state is None or any(isinstance(value, DTensor) for value in state.values()):
        _refuse(
            "save_pretrained does not support shards; hand in whole tensors, save_pretrained(folder, "
            "state_dict=par.state_dict(full=True)) on every rank, or use meshpar.checkpoints: "
            "CheckpointManager(...).save, then export_safetensors"
        )
    if state:
        save(*args, **kwargs)


_REFUSED = {
    "__deepcopy__": "a parallel module cannot be copied, because the copy would run the original's weights; for "
    "averaged weights use par.averaged(decay), for a second model build another one and apply a plan to it",
    "no_sync": "no_sync() is DistributedDataParallel's; iterate over par.accumulate(micro_batches), and run a backward "
    "for each, of which the last one reduces gradients",
    "resize_token_embeddings": "resize_token_embeddings replaces parameters that the plan has placed; call it before "
    "plan.apply",
}
_READ_AS_A_NUMBER = (
    "a DTensor whose ranks hold parts of it was read as a number (.item(), float()), which would give only this "
    "rank's part; use par.whole(tensor).item() on every rank, or par.clip_grad_norm_(float('inf')) for the norm of "
    "all gradients"
)


class _NotForDDP:
    """Refuses to be read."""

    def __iter__(self) -> NoReturn:
        _refuse("DistributedDataParallel would average what the plan has averaged; call par.module without it")


def _refuse_several_meshes(gradients: Iterable[Tensor]) -> None:
    gradients = list(gradients)
    refuse_norms_of_shards(gradients)
    meshes = dict.fromkeys(gradient.device_mesh for gradient in gradients if isinstance(gradient, DTensor))
    if len(meshes) > 1:
        axes = " and ".join(f"({', '.join(mesh.mesh_dim_names or ())})" for mesh in meshes)
        _refuse(
            f"torch.nn.utils.clip_grad_norm_ got gradients on several meshes ({axes}), whose norms torch cannot add; "
            "call par.clip_grad_norm_(max_norm), which clips by one norm over all of them"
        )


def _refuse_other_layers(module: nn.Module) -> None:
    if tensors_elsewhere(run_of(module)):
        _refuse(
            "torch.func.functional_call puts weights into layers of which this stage of pp has some alone; load them "
            "by par.load_state_dict(weights), or evaluate averages by par.averaged(decay)"
        )


def _refuse(message: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise MeshparError(message)
