"""The units that FSDP2 shards or replicates as one, and the end of a unit's backward, where it reduces gradients.

FSDP2 keeps to itself which weights are gathered, under which parameters, and whether gradients are reduced. It reduces
what has a gradient on this rank, which may be something else on another rank; torch 2.13 has
``set_reduce_scatter_unused_params``, which gives zeros to what no rank used, too.
``Units.drop_unreduced_gradients`` and ``Units.unwind``: torch 2.13 has ``reset_iter_state`` for them, 2.11 nothing; in
2.15 that also drops the gradients that earlier micro-batches have reduced.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

from meshpar._torch.autograd import accumulates
from meshpar._torch.calls import eager
from meshpar._torch.fake import has_values
from meshpar._torch.fsdp import ACCUMULATES_APART, is_shard, param_groups
from meshpar._torch.pytree import tree_leaves, tree_map
from meshpar._torch.recompute import unseen


@final
@dataclass(eq=False, slots=True)
class UnitRun:
    """A forward of a unit. The nodes from ``first`` on, to before ``last``, are its own and those of runs inside it.

    Attributes:
        around: the run in which it is.
        inside: the runs in it.
        reached: whether the backward that runs, or is about to, reaches it.
        done: whether it is reduced in that backward, or needs no gradients.
    """

    unit: nn.Module
    around: UnitRun | None
    first: int
    last: int = -1
    inside: list[UnitRun] = field(default_factory=list)
    reached: bool = False
    done: bool = False

    def in_backward(self) -> Iterator[UnitRun]:
        """Yield this run and those inside it in the order in which a backward comes to them."""
        yield self
        for run in reversed(self.inside):
            yield from run.in_backward()


@final
class Units:
    """The modules that FSDP2 shards or replicates as one, inside one outermost module."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = [child for child in module.modules() if isinstance(child, FSDPModule)]
        self._groups = [group for child in self.modules for group in param_groups(child)]
        self._filled: list[nn.Parameter] = []
        self._versions: dict[int, tuple[int, int, int]] = {}
        self._used: set[int] = set()
        self._ran: dict[int, str] = {}
        self._lost: str | None = None
        self._kept: list[tuple[Any, Any, tuple[int, int, int]]] = []
        self._outermost: list[UnitRun] = []
        self._idle = False
        self._passed: set[int] = set()

    def watch(self, run: Callable[[], None]) -> None:
        """Call ``run`` in every backward that reaches a unit, and let ranks reduce alike: what other ranks may have
        used counts as zero.

        Selective recomputation, which requires the same operators each time, does not see that weights are gathered. A
        unit's output may be changed in place behind the unit; its weights are gathered in backward all the same.
        """
        for child in self.modules:
            child.register_forward_hook(_returned, prepend=True, with_kwargs=True)  # FSDP2's own hook comes next
            state: Any = child._get_fsdp_state()
            end = state._root_post_backward_final_callback
            state._root_post_backward_final_callback = functools.partial(self._at_end, end)
            for group in param_groups(child):
                group.pre_backward = functools.partial(self._before_backward, child, group.pre_backward)
                group.post_backward = functools.partial(self._after_backward, child, group, group.post_backward, run)
                group.unshard, group.wait_for_unshard = unseen(group.unshard), unseen(group.wait_for_unshard)

    def expect(self, outermost: list[UnitRun]) -> None:
        """Expect a backward that reaches these runs, latest last.

        Ranks gather and reduce in one order. Where a backward does not reach a run, because its output was dropped,
        other ranks may reach it: its unit is gathered and reduced in its place here, too, with zeros.
        """
        self._outermost = outermost
        self._idle = any(not run.reached and not run.done for run in self._in_backward())

    def _in_backward(self) -> Iterator[UnitRun]:
        return (run for outer in reversed(self._outermost) for run in outer.in_backward())

    def _before_backward(self, unit: nn.Module, inner: Callable[..., None], *args: Any) -> None:
        if self._idle:
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
        run.done = True
        groups = param_groups(run.unit)
        self._passed.update(map(id, groups))
        self.enters_backward(run.unit)
        for inner in reversed(run.inside):
            self._pass(inner)
        for group in reversed(groups):
            group.post_backward()

    def _at_end(self, inner: Callable[[], None]) -> None:
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

    def _after_backward(
        self, unit: nn.Module, group: Any, inner: Callable[..., None], run: Callable[[], None], *args: Any
    ) -> None:
        if self._idle:
            self._pass_by(unit, ends=True)
        run()
        for parameter in group.fsdp_params:
            grad = parameter.sharded_param.grad  # of operators on the parameter itself
            if isinstance(grad, DTensor) and grad.placements != parameter.sharded_param.placements:
                parameter.sharded_param.grad = grad.redistribute(placements=parameter.sharded_param.placements)
            if group.is_unsharded and self._versions.get(id(parameter)) not in (
                None,
                _version(parameter._unsharded_param),
            ):
                self._lost = parameter._param_fqn or parameter._module_info.param_name
        if group.reduce_grads:
            self._fill(group)
        inner(*args)

    def _fill(self, group: Any) -> None:
        trained = [
            parameter
            for parameter in group.fsdp_params
            if parameter.sharded_param.requires_grad and hasattr(parameter, "_unsharded_param")
        ]
        early = any(parameter.unsharded_accumulated_grad is not None for parameter in trained)
        unused = [
            parameter
            for parameter in trained
            if parameter.unsharded_accumulated_grad is None and parameter._unsharded_param.grad is None
        ]
        if (
            len(unused) < len(trained)
            or id(group) in self._passed
            or (id(group) in self._ran and trained and accumulates(trained[0]._unsharded_param))
        ):
            known = set(map(id, unused))
            self._used.update(id(parameter.sharded_param) for parameter in trained if id(parameter) not in known)
            for parameter in unused:
                parameter._unsharded_param.grad = torch.zeros_like(
                    parameter._unsharded_param, dtype=parameter._unsharded_param.grad_dtype
                )
                if parameter.sharded_param.grad is None:
                    self._filled.append(parameter.sharded_param)
        # one dtype a unit: an earlier micro-batch has left gradients in the dtype of the reduction
        if early and ACCUMULATES_APART:
            for parameter in trained:
                if parameter.unsharded_accumulated_grad is None:
                    parameter.to_accumulated_grad_if_needed()

    def take_filled(self) -> list[nn.Parameter]:
        """Return the parameters whose gradient is other ranks' alone, if it is anybody's; the backward has ended."""
        filled = [parameter for parameter in self._filled if id(parameter) not in self._used]
        self._filled.clear()
        self._used.clear()
        self._ran.clear()
        self._passed.clear()
        self._outermost, self._idle = [], False
        return filled

    def take_lost(self) -> str | None:
        """Return the name of a gathered weight that somebody wrote in the backward that ends."""
        lost, self._lost = self._lost, None
        return lost

    def in_backward(self) -> bool:
        """Return whether a backward has come into a unit and has not ended, as far as FSDP2 knows."""
        open_states = (TrainingState.PRE_BACKWARD, TrainingState.POST_BACKWARD)
        return any(group._training_state in open_states for group in self._groups)

    def unwind(self) -> None:
        """Bring units back from a backward that an error ended; without it FSDP2 never sees the end of a later one,
        nor reduces in it.
        """
        self.take_filled()
        self.take_lost()
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

    def runs(self, unit: nn.Module) -> None:
        """Remember that a unit runs a forward whose gradients are wanted."""
        self._ran.update((id(group), _trained(group)) for group in param_groups(unit))

    def turned(self) -> str | None:
        """Return the name of a parameter that was frozen, or not, when its unit ran, and is not, or is, now."""
        for group in self._groups:
            if (before := self._ran.get(id(group))) is not None and before != (now := _trained(group)):
                return next(
                    parameter._param_fqn
                    for parameter, was, is_now in zip(group.fsdp_params, before, now)
                    if was != is_now
                )
        return None

    def enters_backward(self, unit: nn.Module) -> None:
        """Gather a unit for the backward that runs, as FSDP2 does where a gradient reaches one of its outputs."""
        state: Any = unit._get_fsdp_state()  # type: ignore[operator]
        groups = param_groups(unit)
        if not groups or any(group._training_state != TrainingState.PRE_BACKWARD for group in groups):
            state._pre_backward(None)

    def reshard(self) -> None:
        """Let go of gathered weights, also of those that were asked for ahead and never used."""
        for group in self._groups:
            group.wait_for_unshard()
            if not group.is_sharded:
                group.reshard()
            for parameter in group.fsdp_params:
                held = parameter._sharded_param_data
                if type(held) is Tensor and _memory(held) != _memory(parameter.sharded_param):  # ``.data`` was assigned
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
        """Let go of gathered weights after a call without gradients, which no backward needs; a call may have
        returned them.
        """
        gathered = [
            parameter._unsharded_param
            for group in self._groups
            if group.is_unsharded
            for parameter in group.fsdp_params
        ]
        if {_memory(tensor) for tensor in output if tensor.layout == torch.strided}.isdisjoint(map(_memory, gathered)):
            self.reshard()

    def keep(self) -> None:
        """Remember the shards that are gathered now, for :meth:`unwritten` and :meth:`written_since_kept`."""
        gathered = [parameter for group in self._groups if group.is_unsharded for parameter in group.fsdp_params]
        self._kept = [(parameter, parameter.sharded_param, _version(parameter.sharded_param)) for parameter in gathered]

    def unwritten(self) -> Tensor | None:
        """Return whether the shards of :meth:`keep` are bit by bit what is gathered; None where one was written,
        replaced or let go of.
        """
        gathered = {id(parameter) for group in self._groups if group.is_unsharded for parameter in group.fsdp_params}
        if any(
            id(parameter) not in gathered or parameter.sharded_param is not was or _version(was) != then
            for parameter, was, then in self._kept
        ):
            return None
        return torch.stack([_agrees(parameter) for parameter, _, _ in self._kept]).all() if self._kept else None

    def written_since_kept(self) -> str | None:
        """Return the name of a shard of :meth:`keep` that was written or replaced."""
        return next(
            (
                parameter._param_fqn or parameter._module_info.param_name
                for parameter, was, then in self._kept
                if parameter.sharded_param is not was or _version(was) != then
            ),
            None,
        )

    def hide(self, unit: nn.Module | None = None) -> None:
        """Register the shards on the modules of one unit, or of all, again, and keep what is gathered, which
        backward needs.
        """
        for group in self._groups if unit is None else param_groups(unit):
            if not group.is_sharded:
                for parameter in group.fsdp_params:
                    held = _registered(parameter)  # what somebody put there stays, to be found
                    gathered = (parameter._unsharded_param, getattr(parameter, "_sharded_post_forward_param", None))
                    if held is not None and any(held is known for known in gathered):
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

    def use(self, parameter: nn.Parameter) -> None:
        """Record that the backward that runs reaches a sharded parameter by another way than its unit."""
        self._used.add(id(parameter))

    def remember(self, unit: nn.Module) -> None:
        """Remember the state of a unit's weights, which are gathered now, for :meth:`written`."""
        for group in param_groups(unit):
            for parameter in group.fsdp_params:
                self._versions[id(parameter)] = _version(parameter._unsharded_param)

    def written(self, unit: nn.Module, *, look: bool) -> str | None:
        """Return the name of a gathered weight that somebody wrote or replaced since :meth:`remember`.

        Args:
            unit: is gathered.
            look: also compare values with this rank's shard, bit by bit, which finds a write through ``.data`` or
                NumPy.
        """
        for group in param_groups(unit):
            for parameter in group.fsdp_params:
                gathered = parameter._unsharded_param
                held = _registered(parameter)
                # A tensor that is no parameter stands there for a while: what adapters compute from it.
                replaced = (
                    isinstance(held, nn.Parameter) and held is not gathered and held is not parameter.sharded_param
                )
                wrote = self._versions.get(id(parameter)) not in (None, _version(gathered))
                if (
                    replaced
                    or wrote
                    or (look and group.is_unsharded and has_values(_local(gathered)) and not _agrees(parameter))
                ):
                    return parameter._param_fqn or parameter._module_info.param_name
        return None

    def trained(self, unit: nn.Module) -> str:
        """Return which of a unit's parameters want gradients, a digit each."""
        return "".join(map(_trained, param_groups(unit)))

    def reduces(self) -> bool:
        """Return whether the backward that runs reduces gradients."""
        return all(group.reduce_grads for group in self._groups)

    def hooked(self) -> list[Any]:
        """Return the sharded parameters on which somebody registered a hook for their gradient before it is
        accumulated.
        """
        return [parameter for parameter in self.shards() if parameter._backward_hooks]

    def hooked_after(self) -> list[Any]:
        """Return those with a hook for after it is accumulated, which FSDP2 calls after a backward that reduces."""
        return [parameter for parameter in self.shards() if parameter._post_accumulate_grad_hooks]

    def shards(self) -> Iterator[Any]:
        """Return the sharded parameters of all units, whether the units are gathered or not."""
        return (parameter.sharded_param for group in self._groups for parameter in group.fsdp_params)


def _trained(group: Any) -> str:
    return "".join("01"[parameter.sharded_param.requires_grad] for parameter in group.fsdp_params)


def _registered(parameter: Any) -> Tensor | None:
    info = parameter._module_info
    held: Tensor | None = info.module._parameters.get(info.param_name)
    return held


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _memory(tensor: Tensor) -> int:
    """Return the number of the memory that a tensor's part here is in."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()._cdata


def _version(gathered: Any) -> tuple[int, int, int]:
    """Return numbers that change when somebody writes a gathered weight or gives it other memory."""
    local = gathered._local_tensor if isinstance(gathered, DTensor) else gathered
    return gathered._version, local._version, _memory(gathered)


@torch.no_grad()
def _agrees(parameter: Any) -> Tensor:
    """Return whether this rank's part of a gathered weight is the shard that was gathered, a bool of no dimensions."""
    gathered: Any = parameter._unsharded_param
    whole = gathered._local_tensor if isinstance(gathered, DTensor) else gathered
    if hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather"):  # gathered in another form, such as float8
        return torch.ones((), dtype=torch.bool, device=whole.device)
    shard, dim = parameter._sharded_local_tensor, parameter.fsdp_placement.dim
    ranks, rank = getattr(parameter.mesh_info, "shard_mesh_size", 1), getattr(parameter.mesh_info, "shard_mesh_rank", 0)
    begin = rank * -(-whole.shape[dim] // ranks)
    mine = whole.narrow(dim, min(begin, whole.shape[dim]), shard.shape[dim]).contiguous()
    shard = shard.to(mine.device, mine.dtype).contiguous()
    return (mine.view(torch.uint8) == shard.view(torch.uint8)).all()


class _Apart(torch.autograd.Function):
    """The same values in the same memory, as a tensor that is no view to autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


@eager  # FSDP2's hooks stand beside the compiled block, where this one would be a graph of its own
def _returned(module: nn.Module, args: object, kwargs: object, output: Any) -> Any:
    """Return a unit's output without views of what it computed: a change in place of a view drops the hook that FSDP2
    puts on it.

    A view of its input stays one: whoever holds the input sees a change of it.
    """
    if not torch.is_grad_enabled():
        return output
    given = {
        id(base) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) for base in (leaf, leaf._base)
    }

    def apart(value: Any) -> Any:
        view = isinstance(value, Tensor) and value._is_view() and value.requires_grad and id(value._base) not in given
        return _Apart.apply(value) if view else value

    return tree_map(apart, output)
