"""The units that FSDP2 shards or replicates as one: their gathered weights, backwards, and way back from an error.

FSDP2 keeps to itself which weights are gathered, under which parameters, and whether gradients are reduced. It reduces
what has a gradient on this rank, which may be something else on another rank; torch 2.13 has
``set_reduce_scatter_unused_params``, which gives zeros to what no rank used, too.
``Units.drop_unreduced_gradients`` and ``Units.unwind``: torch 2.13 has ``reset_iter_state`` for them, 2.11 nothing; in
2.15 that also drops the gradients that earlier micro-batches have reduced.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

from meshpar._torch.autograd import accumulates, unseen
from meshpar._torch.calls import eager
from meshpar._torch.fsdp import ACCUMULATES_APART, WeightWrites, is_shard, param_groups, registered_tensor
from meshpar._torch.tensors import held_part, memory_of, tensor_leaves, tree_map


@final
@dataclass(eq=False, slots=True)
class UnitRun:
    """A forward of a unit. Nodes from ``first`` to before ``last`` are its own and those of runs inside it."""

    unit: nn.Module
    around: UnitRun | None
    first: int
    last: int = -1
    inside: list[UnitRun] = field(default_factory=list)
    # the backward that runs, or is about to, reaches it
    reached: bool = False
    # it is reduced in that backward, or needs no gradients
    done: bool = False

    def in_backward(self) -> Iterator[UnitRun]:
        """Yield this run and those inside it in the order in which a backward comes to them."""
        yield self
        for run in reversed(self.inside):
            yield from run.in_backward()


@final
class UnitBackwards:
    """Let ranks reduce the gradients of units alike: what other ranks may have used counts as zero."""

    def __init__(self, units: Sequence[FSDPModule], groups: Sequence[Any], writes: WeightWrites) -> None:
        self._units, self._groups, self._writes = units, groups, writes
        self._zeroed: list[nn.Parameter] = []
        self._used: set[int] = set()
        self._trained_when_run: dict[int, str] = {}
        self._passed: set[int] = set()
        self._outermost: list[UnitRun] = []
        self._skips = False

    def watch(self, run: Callable[[], None]) -> None:
        """Call ``run`` in every backward that reaches a unit."""
        unit: Any
        for unit in self._units:
            unit.register_forward_hook(_return, prepend=True, with_kwargs=True)  # FSDP2's own hook comes next
            state = unit._get_fsdp_state()
            state._root_post_backward_final_callback = partial(self._end, state._root_post_backward_final_callback)
            for group in param_groups(unit):
                group.pre_backward = partial(self._before_unit, unit, group.pre_backward)
                group.post_backward = partial(self._after_unit, unit, group, group.post_backward, run)
                # selective recomputation requires the same operators each time, and does not see these
                group.unshard, group.wait_for_unshard = unseen(group.unshard), unseen(group.wait_for_unshard)

    def expect(self, outermost: list[UnitRun]) -> None:
        """Expect a backward that reaches some of these runs, latest last; others may be reached by other ranks."""
        # ranks gather and reduce in one order: what this rank does not reach has its place, too, with zeros
        self._outermost = outermost
        self._skips = any(not run.reached and not run.done for run in self._in_backward())

    def _in_backward(self) -> Iterator[UnitRun]:
        return (run for outer in reversed(self._outermost) for run in outer.in_backward())

    def _before_unit(self, unit: nn.Module, inner: Callable[..., None], *args: Any) -> None:
        if self._skips:
            self._pass_by(unit, ends=False)
        inner(*args)

    def _pass_by(self, unit: nn.Module, *, ends: bool) -> None:
        """Gather and reduce what the backward does not reach before it comes to ``unit``, or ``ends`` it."""
        here = next((run for run in self._in_backward() if run.unit is unit and run.reached and not run.done), None)
        if here is None:
            return
        before = itertools.takewhile(lambda run: run is not here, self._in_backward())
        for run in [*before, *(here.in_backward() if ends else ())]:
            if not run.reached and not run.done:
                self._pass(run)
        here.done = ends

    def _pass(self, run: UnitRun) -> None:
        """Gather and reduce a run that the backward does not reach."""
        run.done = True
        groups = param_groups(run.unit)
        self._passed.update(map(id, groups))
        self.enter(run.unit)
        for inner in reversed(run.inside):
            self._pass(inner)
        for group in reversed(groups):
            group.post_backward()

    def _end(self, inner: Callable[[], None]) -> None:
        """End a backward: what it has not reduced yet is reduced in the order of backward, which all ranks have."""
        for run in reversed(self._outermost):
            self._finish(run)
        inner()

    def _finish(self, run: UnitRun) -> None:
        if run.done:
            return
        if not run.reached:
            self._pass(run)
            return
        for inner in reversed(run.inside):
            self._finish(inner)
        for group in reversed(param_groups(run.unit)):
            if group._training_state != TrainingState.POST_BACKWARD:
                group.post_backward()

    def _after_unit(
        self, unit: nn.Module, group: Any, inner: Callable[..., None], run: Callable[[], None], *args: Any
    ) -> None:
        if self._skips:
            self._pass_by(unit, ends=True)
        run()
        self._writes.look(group)
        for parameter in group.fsdp_params:
            grad = parameter.sharded_param.grad  # of operators on the parameter itself
            if isinstance(grad, DTensor) and grad.placements != parameter.sharded_param.placements:
                parameter.sharded_param.grad = grad.redistribute(placements=parameter.sharded_param.placements)
        if group.reduce_grads:
            self._fill(group)
        inner(*args)

    def _fill(self, group: Any) -> None:
        """Give zeros to the parameters of a unit that this backward did not use, where it or another rank may."""
        wanted = [parameter for parameter in group.fsdp_params if parameter.sharded_param.requires_grad]
        trained = [parameter for parameter in wanted if hasattr(parameter, "_unsharded_param")]
        without_earlier = [parameter for parameter in trained if parameter.unsharded_accumulated_grad is None]
        unused = [parameter for parameter in without_earlier if parameter._unsharded_param.grad is None]
        used = len(unused) < len(trained) or id(group) in self._passed
        if used or (id(group) in self._trained_when_run and trained and accumulates(trained[0]._unsharded_param)):
            without = set(map(id, unused))
            self._used.update(id(parameter.sharded_param) for parameter in trained if id(parameter) not in without)
            for parameter in unused:
                gathered = parameter._unsharded_param
                gathered.grad = torch.zeros_like(gathered, dtype=gathered.grad_dtype)
                if parameter.sharded_param.grad is None:
                    self._zeroed.append(parameter.sharded_param)
        # one dtype a unit: an earlier micro-batch has left gradients in the dtype of the reduction
        if len(without_earlier) < len(trained) and ACCUMULATES_APART:
            for parameter in without_earlier:
                parameter.to_accumulated_grad_if_needed()

    def use(self, parameter: nn.Parameter) -> None:
        """Record that the backward that runs reaches a sharded parameter by another way than its unit."""
        self._used.add(id(parameter))

    def take_unused(self) -> list[nn.Parameter]:
        """Return the sharded parameters that this rank did not use in the last backward, and forget the backward."""
        unused = [parameter for parameter in self._zeroed if id(parameter) not in self._used]
        for seen in (self._zeroed, self._used, self._trained_when_run, self._passed):
            seen.clear()
        self._outermost, self._skips = [], False
        return unused

    def run(self, unit: nn.Module) -> None:
        """Remember that a unit runs a forward whose gradients are wanted."""
        self._trained_when_run.update((id(group), trained_digits(group)) for group in param_groups(unit))

    def turned(self) -> str | None:
        """Return the name of a parameter that was frozen, or unfrozen, since its unit ran."""
        for group in self._groups:
            before = self._trained_when_run.get(id(group))
            if before is not None and before != (now := trained_digits(group)):
                states = zip(group.fsdp_params, before, now)
                return next(parameter._param_fqn for parameter, was, is_now in states if was != is_now)
        return None

    @staticmethod
    def enter(unit: nn.Module) -> None:
        """Gather a unit for the backward that runs, as FSDP2 does where a gradient reaches one of its outputs."""
        state: Any = unit._get_fsdp_state()  # type: ignore[operator]
        groups = param_groups(unit)
        if not groups or any(group._training_state != TrainingState.PRE_BACKWARD for group in groups):
            state._pre_backward(None)


def trained_digits(group: Any) -> str:
    """Return which of a unit's parameters want gradients, a digit each."""
    return "".join("01"[parameter.sharded_param.requires_grad] for parameter in group.fsdp_params)


class _NoView(torch.autograd.Function):
    """The same values in the same memory, as a tensor that is no view to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


@eager  # FSDP2's hooks stand beside the compiled block, where this one would be a graph of its own
def _return(module: nn.Module, args: object, kwargs: object, output: Any) -> Any:
    """Return a unit's output without views of what it computed: a change of one in place drops FSDP2's hook."""
    if not torch.is_grad_enabled():
        return output
    # a view of its input stays one: whoever holds the input sees a change of it
    inputs = {id(base) for leaf in tensor_leaves((args, kwargs)) for base in (leaf, leaf._base)}

    def separate(value: Any) -> Any:
        view = isinstance(value, Tensor) and value._is_view() and value.requires_grad and id(value._base) not in inputs
        return _NoView.apply(value) if view else value

    return tree_map(separate, output)


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
