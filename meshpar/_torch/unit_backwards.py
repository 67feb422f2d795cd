"""The backwards of FSDP2's units: in which order they gather and reduce, and what counts as zero; and writes into their
weights, gathered and sharded, that nothing would keep or all ranks would miss.

FSDP2 reduces what has a gradient on this rank, which may be something else on another rank; torch 2.13 has
``set_reduce_scatter_unused_params``, which gives zeros to what no rank used, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

from meshpar._torch.autograd import accumulates
from meshpar._torch.calls import eager
from meshpar._torch.fake import has_values
from meshpar._torch.fsdp import ACCUMULATES_APART, param_groups
from meshpar._torch.modules import held_part
from meshpar._torch.pytree import tensor_leaves, tree_map
from meshpar._torch.recompute import unseen


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
