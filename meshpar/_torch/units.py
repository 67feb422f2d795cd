"""The units that FSDP2 shards or replicates as one, their gathered weights, and how they come back from an error.

FSDP2 keeps to itself which weights are gathered, under which parameters, and whether gradients are reduced.
``Units.drop_unreduced_gradients`` and ``Units.unwind``: torch 2.13 has ``reset_iter_state`` for them, 2.11 nothing; in
2.15 that also drops the gradients that earlier micro-batches have reduced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from meshpar._torch.fsdp import ACCUMULATES_APART, is_shard, param_groups
from meshpar._torch.modules import held_part, memory_of
from meshpar._torch.unit_backwards import UnitBackwards, WeightWrites, registered_tensor, trained_digits


@final
class Units:
    """The modules that FSDP2 shards or replicates as one, inside one outermost module."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = [child for child in module.modules() if isinstance(child, FSDPModule)]
        self._groups = [group for child in self.modules for group in param_groups(child)]
        self.writes = WeightWrites(self._groups)
        self.backwards = UnitBackwards(self.modules, self._groups, self.writes)

    def in_backward(self) -> bool:
        """Return whether a backward has come into a unit and has not ended, as far as FSDP2 knows."""
        open_states = (TrainingState.PRE_BACKWARD, TrainingState.POST_BACKWARD)
        return any(group._training_state in open_states for group in self._groups)

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
            group.wait_for_unshard()
            if not group.is_sharded:
                group.reshard()
            for parameter in group.fsdp_params:
                part = parameter._sharded_param_data
                # ``.data`` was assigned
                if type(part) is Tensor and memory_of(part) != memory_of(held_part(parameter.sharded_param)):
                    parameter.reset_sharded_param()

    @torch.no_grad()
    def gather(self, unit: nn.Module) -> None:
        """Gather a unit and let go of it as a forward of the unit would, which the ranks that call it wait for."""
        for group in param_groups(unit):
            was_sharded = group.is_sharded
            group.unshard()
            group.wait_for_unshard()
            if was_sharded and group._reshard_after_forward:
                group.reshard()

    def release(self, output: Iterable[Tensor]) -> None:
        """Let go of gathered weights after a call without gradients, unless its ``output`` has one of them."""
        gathered = (group.fsdp_params for group in self._groups if group.is_unsharded)
        weights = {memory_of(held_part(weight._unsharded_param)) for parameters in gathered for weight in parameters}
        if weights.isdisjoint(memory_of(held_part(weight)) for weight in output if weight.layout == torch.strided):
            self.reshard()

    def hide(self, unit: nn.Module | None = None) -> None:
        """Register the shards on the modules of one unit, or of all, again; what is gathered stays for backward."""
        for group in self._groups if unit is None else param_groups(unit):
            if not group.is_sharded:
                for parameter in group.fsdp_params:
                    registered = registered_tensor(parameter)  # what somebody put there stays, to be found
                    if registered is not None and (
                        registered is parameter._unsharded_param
                        or registered is getattr(parameter, "_sharded_post_forward_param", None)
                    ):
                        parameter._setattr_on_modules(parameter.sharded_param)

    def show(self, unit: nn.Module | None = None) -> None:
        """Register what is gathered, for code that runs in a unit, or that backward runs once more in any."""
        for group in self._groups if unit is None else param_groups(unit):
            if group.is_unsharded:
                for parameter in group.fsdp_params:
                    parameter._setattr_on_modules(parameter._unsharded_param)

    def mark(self) -> list[Any]:
        """Mark the sharded parameters, by which :func:`is_shard` knows them, and return those that had no mark."""
        new = [parameter for parameter in self.shards() if not is_shard(parameter)]
        for parameter in new:
            parameter._meshpar_shard = True
        return new

    def trained(self, unit: nn.Module) -> str:
        """Return which of a unit's parameters want gradients, a digit each."""
        return "".join(map(trained_digits, param_groups(unit)))

    def reduces(self) -> bool:
        """Return whether the backward that runs reduces gradients."""
        return all(group.reduce_grads for group in self._groups)

    def hooked(self) -> list[Any]:
        """Return the sharded parameters with a hook for their gradient before it is accumulated."""
        return [parameter for parameter in self.shards() if parameter._backward_hooks]

    def hooked_after(self) -> list[Any]:
        """Return those with a hook for after it is accumulated, which FSDP2 calls after a backward that reduces."""
        return [parameter for parameter in self.shards() if parameter._post_accumulate_grad_hooks]

    def shards(self) -> Iterator[Any]:
        """Return the sharded parameters of all units, whether the units are gathered or not."""
        return (parameter.sharded_param for group in self._groups for parameter in group.fsdp_params)
