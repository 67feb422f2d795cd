"""The units that FSDP2 shards or replicates as one: their forwards, their gathered weights and writes into these, which
nothing would keep, and the way back from an error.

FSDP2 keeps to itself which weights are gathered, under which parameters, and by which hooks of a module.
``Units.drop_unreduced_gradients`` and ``Units.unwind``: torch 2.13 has ``reset_iter_state`` for them, 2.11 nothing; in
2.15 that also drops the gradients that earlier micro-batches have reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from meshpar._torch.calls import eager
from meshpar._torch.fsdp import ACCUMULATES_APART, UnitBackwards, param_groups, uncompiled_method
from meshpar._torch.simulated_device import has_values
from meshpar._torch.tensors import held_part, tensor_leaves, tree_leaves, tree_map

_SHARDED, _GATHERED = ShardedState.SHARDED, ShardedState.UNSHARDED
_VERSION_OF, _NUMBER_OF = attrgetter("_version"), attrgetter("_cdata")


@final
class WeightWrites:
    """The writes into the weights of units, whose parameters ``groups`` have."""

    def __init__(self, groups: Mapping[Any, Sequence[Any]]) -> None:
        self._of_units, self._groups = groups, [group for of_unit in groups.values() for group in of_unit]
        self._gathered: dict[Any, list[Any]] = {}
        self._shards: list[tuple[Any, Any, Any]] = []
        self._lost: str | None = None

    def keep_shards(self) -> None:
        """Remember the shards that are gathered now, for :meth:`shards_agree` and :meth:`written_shard`."""
        gathered = [parameter for group in self._groups if group.is_unsharded for parameter in group.fsdp_params]
        shards = [parameter.sharded_param for parameter in gathered]
        self._shards = list(zip(gathered, shards, versions(shards)))

    def shards_agree(self) -> Tensor | None:
        """Return whether the kept shards are bit by bit what is gathered; None where one was written or let go."""
        gathered = {id(parameter) for group in self._groups if group.is_unsharded for parameter in group.fsdp_params}
        if self.written_shard() is not None or any(id(parameter) not in gathered for parameter, _, _ in self._shards):
            return None
        return torch.stack([_agrees(parameter) for parameter, _, _ in self._shards]).all() if self._shards else None

    def written_shard(self) -> str | None:
        """Return the name of a kept shard that was written or replaced."""
        now = versions([was for _, was, _ in self._shards])
        for (parameter, was, then), version in zip(self._shards, now):
            if parameter.sharded_param is not was or version != then:
                return _name(parameter)
        return None

    def keep_gathered(self, unit: Any) -> None:
        """Remember the state of a unit's weights, which are gathered now, for :meth:`written_in_forward`."""
        for group in self._of_units[unit]:
            self._gathered[group] = versions([parameter._unsharded_param for parameter in group.fsdp_params])

    def written_in_forward(self, unit: Any, *, look: bool) -> str | None:
        """Return the name of a gathered weight written since :meth:`keep_gathered`; ``look``: by its bits, too."""
        for group in self._of_units[unit]:
            gathered = [parameter._unsharded_param for parameter in group.fsdp_params]
            infos = [parameter._module_info for parameter in group.fsdp_params]
            registered = [info.module._parameters.get(info.param_name) for info in infos]
            now = versions(gathered)
            before = self._gathered.get(group, now)
            if before != now or look or not all(map(is_, registered, gathered)):
                states = zip(group.fsdp_params, gathered, registered, before, now)
                if (written := _find_written(states, look=look and group.is_unsharded)) is not None:
                    return _name(written)
        return None

    def look(self, group: Any) -> None:
        """Look for a gathered weight of a unit that somebody wrote, at the end of the unit's backward."""
        if group._sharded_state is _GATHERED and group in self._gathered:
            parameters, before = group.fsdp_params, self._gathered[group]
            now = versions([parameter._unsharded_param for parameter in parameters])
            if now != before:
                written = (parameter for parameter, was, is_now in zip(parameters, before, now) if was != is_now)
                self._lost = _name(next(written))

    def take_lost(self) -> str | None:
        """Return the name of a gathered weight that somebody wrote in the backward that ends."""
        lost, self._lost = self._lost, None
        return lost


def _find_written(states: Iterable[tuple[Any, ...]], *, look: bool) -> Any | None:
    for parameter, whole, registered, then, now in states:
        # A tensor that is no parameter stands there for a while: what adapters compute from it.
        replaced = isinstance(registered, nn.Parameter) and registered is not whole
        if (
            (replaced and registered is not parameter.sharded_param)
            or now != then
            or (look and has_values(held_part(whole)) and not _agrees(parameter))
        ):
            return parameter
    return None


def versions(tensors: Sequence[Any]) -> list[Any]:
    """Return of each tensor numbers that change when somebody writes it, or gives it other memory."""
    parts = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    return list(zip(map(_VERSION_OF, tensors), map(_VERSION_OF, parts), memories(parts)))


def memories(tensors: Iterable[Tensor]) -> Iterable[int]:
    """Return the numbers by which torch knows the storages of tensors, while they live."""
    return map(_NUMBER_OF, map(Tensor.untyped_storage, tensors))


def is_shard(parameter: Tensor) -> bool:
    """Return whether a parameter is a unit's, which computes with a tensor that it gathers. Compiled code asks."""
    return getattr(parameter, "_meshpar_shard", False)


def _name(parameter: Any) -> str:
    name: str = parameter._param_fqn or parameter._module_info.param_name
    return name


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


class _NoView(torch.autograd.Function):
    """The same values in the same memory, as a tensor that is no view to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def _without_views(inputs: object, output: Any) -> Any:
    """Return a unit's output without views of what it computed: a change of one in place drops FSDP2's hook."""
    views = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf._is_view()]
    if not views:
        return output
    # a view of its input stays one: whoever holds the input sees a change of it
    of_inputs = {id(base) for leaf in tensor_leaves(inputs) for base in (leaf, leaf._base)}
    separate = {id(view) for view in views if view.requires_grad and id(view._base) not in of_inputs}
    return tree_map(lambda value: _NoView.apply(value) if id(value) in separate else value, output)


@final
class Units:
    """The modules that FSDP2 shards or replicates as one, inside one outermost module."""

    def __init__(self, module: nn.Module) -> None:
        named = module.named_modules()
        self._names: dict[Any, str] = {child: name for name, child in named if isinstance(child, FSDPModule)}
        self.modules: list[FSDPModule] = list(self._names)
        self._of_units: dict[Any, list[Any]] = {unit: param_groups(unit) for unit in self.modules}
        self._groups = [group for groups in self._of_units.values() for group in groups]
        self._parameters = [parameter for group in self._groups for parameter in group.fsdp_params]
        self.writes, self.backwards = WeightWrites(self._of_units), UnitBackwards(self._of_units)

    def around_forwards(
        self,
        *,
        before: Callable[[str, nn.Module], None],
        gathered: Sequence[Callable[[str, nn.Module], object]],
        computed: Sequence[Callable[[str, nn.Module], object]],
        after: Callable[[Any, Any, Any], None],
    ) -> None:
        """Call functions before FSDP2 gathers a unit, then, when it has computed, and at the end, also of an error."""
        for unit in self._names:
            state = unit._get_fsdp_state()
            gather, free = (uncompiled_method(state, name) for name in ("_pre_forward", "_post_forward"))

            # FSDP2's hooks stand beside a compiled block
            @eager
            def enter(unit: Any, args: Any, kwargs: Any, gather: Any = gather) -> Any:
                before(self._names[unit], unit)
                inputs = gather(unit, args, kwargs)
                for look in gathered:
                    look(self._names[unit], unit)
                return inputs

            @eager
            def leave(unit: Any, args: Any, kwargs: Any, output: Any, free: Any = free) -> Any:
                if torch.is_grad_enabled() and not (type(output) is Tensor and not output._is_view()):
                    output = _without_views((args, kwargs), output)
                for look in computed:
                    look(self._names[unit], unit)
                return free(unit, args, output)

            unit._forward_pre_hooks[state._pre_forward_hook_handle.id] = enter
            number = state._post_forward_hook_handle.id
            unit._forward_hooks[number], unit._forward_hooks_with_kwargs[number] = leave, True
            unit.register_forward_hook(after, always_call=True)

    def gather_before_backward(self, unit: Any, output: object, tensors: Iterable[Any]) -> None:
        """Let FSDP2 know of outputs that it does not find itself, in objects of classes of their own."""
        seen = set(map(id, tree_leaves(output)))
        for tensor in tensors:
            if id(tensor) not in seen:
                tensor.register_hook(unit._get_fsdp_state()._pre_backward)

    def in_backward(self) -> bool:
        """Return whether a backward has come into a unit and has not ended, as far as FSDP2 knows."""
        states = [group._training_state for group in self._groups]
        return TrainingState.PRE_BACKWARD in states or TrainingState.POST_BACKWARD in states

    def unwind(self) -> None:
        """Bring units back from a backward that an error ended, whose end FSDP2 would never see."""
        self.backwards.take_unused()
        self.writes.take_lost()
        for unit in self.modules:
            unit._get_fsdp_state()._state_ctx.post_backward_final_callback_queued = False  # type: ignore[operator]
        for group in self._groups:
            group.finalize_backward()
            group.comm_ctx.post_forward_order.clear()
        self.drop_unreduced_gradients()
        self.leave()

    def leave(self) -> None:
        """Bring units back from a call that an error ended, and let go of gathered weights."""
        for unit in self.modules:
            state: Any = unit._get_fsdp_state()
            state._training_state = TrainingState.IDLE
            state._state_ctx.iter_forward_root = None
            getattr(state, "_modules_to_run_forward", set[nn.Module]()).clear()
        for group in self._groups:
            group._training_state = TrainingState.IDLE
        self.reshard()

    def drop_unreduced_gradients(self) -> None:
        """Forget the gradients that FSDP2 has accumulated without reducing them."""
        for group in self._groups:
            group._partial_reduce_output = None  # of hybrid sharding, which reduces in two steps
            for parameter in group.fsdp_params:
                if ACCUMULATES_APART:
                    parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None

    def reshard(self) -> None:
        """Let go of gathered weights, also of those that were asked for ahead and never used."""
        for group in self._groups:
            if group._all_gather_result is not None:
                group.wait_for_unshard()
            if group._sharded_state is not _SHARDED:
                group.reshard()
        # ``.data`` was assigned
        plain = [parameter for parameter in self._parameters if type(parameter._sharded_param_data) is Tensor]
        parts = memories([parameter._sharded_param_data for parameter in plain])
        shards = memories([parameter.sharded_param._local_tensor for parameter in plain])
        for parameter, part, now in zip(plain, parts, shards):
            if part != now:
                parameter.reset_sharded_param()

    @torch.no_grad()
    def gather(self, unit: nn.Module) -> None:
        """Gather a unit and let go of it as a forward of the unit would, which the ranks that call it wait for."""
        for group in self._of_units[unit]:
            was_sharded = group.is_sharded
            group.unshard()
            group.wait_for_unshard()
            if was_sharded and group._reshard_after_forward:
                group.reshard()

    def release(self, output: Iterable[Tensor]) -> None:
        """Let go of gathered weights after a call without gradients, unless its ``output`` has one of them."""
        gathered = [parameter for group in self._groups if group.is_unsharded for parameter in group.fsdp_params]
        weights = memories([held_part(parameter._unsharded_param) for parameter in gathered])
        if set(weights).isdisjoint(memories([held_part(value) for value in output if value.layout == torch.strided])):
            self.reshard()

    def hide(self, unit: Any = None) -> None:
        """Register the shards on the modules of one unit, or of all, again; what is gathered stays for backward."""
        for group in self._groups if unit is None else self._of_units[unit]:
            if group._sharded_state is not _SHARDED:
                for parameter in group.fsdp_params:
                    info = parameter._module_info
                    registered = info.module._parameters.get(info.param_name)
                    # what somebody put there stays, to be found
                    if registered is not None and (
                        registered is parameter._unsharded_param
                        or registered is getattr(parameter, "_sharded_post_forward_param", None)
                    ):
                        parameter._setattr_on_modules(parameter.sharded_param)

    def note_trained(self, unit: Any) -> None:
        """Remember which parameters want gradients when a unit runs a forward."""
        for group in self._of_units[unit]:
            trained = [parameter.sharded_param.requires_grad for parameter in group.fsdp_params]
            self.backwards.trained_when_run[group] = trained

    def show(self, unit: Any = None) -> None:
        """Register what is gathered, for code that runs in a unit, or that backward runs once more in any."""
        for group in self._groups if unit is None else self._of_units[unit]:
            if group._sharded_state is _GATHERED:
                for parameter in group.fsdp_params:
                    parameter._setattr_on_modules(parameter._unsharded_param)

    def mark(self) -> list[Any]:
        """Mark the sharded parameters, by which :func:`is_shard` knows them, and return those that had no mark."""
        new = [parameter for parameter in self.shards() if "_meshpar_shard" not in parameter.__dict__]
        for parameter in new:
            parameter._meshpar_shard = True
        return new

    def trained(self, unit: Any) -> str:
        """Return which of a unit's parameters want gradients, a digit each."""
        parameters = [parameter for group in self._of_units[unit] for parameter in group.fsdp_params]
        return "".join(["01"[parameter.sharded_param.requires_grad] for parameter in parameters])

    def reduces(self) -> bool:
        """Return whether the backward that runs reduces gradients."""
        return False not in [group.reduce_grads for group in self._groups]

    def hooked(self) -> list[Any]:
        """Return the sharded parameters with a hook for their gradient before it is accumulated."""
        return [parameter for parameter in self.shards() if parameter._backward_hooks]

    def hooked_after(self) -> list[Any]:
        """Return those with a hook for after it is accumulated, which FSDP2 calls after a backward that reduces."""
        return [parameter for parameter in self.shards() if parameter._post_accumulate_grad_hooks]

    def shards(self) -> list[Any]:
        """Return the sharded parameters of all units, whether the units are gathered or not."""
        return [parameter.sharded_param for parameter in self._parameters]
