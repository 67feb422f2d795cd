"""Functions that torch has and has not made public: the one place where its private modules are named.

- ``replicate`` on FSDP2's machinery: private while torch settles whether it replaces DistributedDataParallel's
  composable form (pytorch/pytorch#166433). It goes when ``torch.distributed.fsdp`` exports it.
- ``collective_ops``: the collectives as operators that autograd functions and ``torch.compile`` can hold. Their Python
  wrappers are renamed between releases (torch 2.13 deprecates ``all_gather_tensor``, which 2.11 has alone); the
  operators keep their names. They go when the wrappers are public. ``all_gather`` and ``reduce_scatter`` of one tensor
  have other names since torch 2.13.
- ``as_one_operator``: an option of the compiler, which older releases lack; torch has no public list of its options.
- ``ignore_profiler_marks``: torch's own list of operators to ignore lacks them; it goes when the list has them.
- ``Units``: what FSDP2 keeps of its units: which weights are gathered, under which parameters, and whether gradients
  are reduced. It reduces what has a gradient on this rank, which may be something else on another rank; torch 2.13 has
  ``set_reduce_scatter_unused_params``, which gives zeros to what no rank used, too.
- ``ACCUMULATES_APART``: where FSDP2 keeps gradients that it has not reduced yet. It goes with torch 2.14.
- ``enter_by``: a call of a module, with its hooks inside; ``nn.Module`` has no public place around both.
- ``refuse_parts_as_numbers``, ``change_operators``: what DTensor does with single operators is its own table, with no
  public form.
- ``change_attributes``: torch writes ``tensor.data = value`` into the outside of a DTensor alone, and has no hook for
  it.
- ``in_checkpoint``: whose hooks on saved tensors are in force.
- ``check_backwards``, ``check_norms_of``: ``torch.autograd.grad``, ``backward`` and ``torch.nn.utils.clip_grad_norm_``
  have no hook for what they are asked.
- ``next_node``: autograd's number of the node that it makes next, by which units know their own; private without a
  public form.
- ``in_backward``, ``at_end_of_backward``: where autograd is; FSDP2 and DDP read the same, with no public form.
- ``without_modes``: a try inside of a forward must not be recorded by selective recomputation; private without a public
  form.
- ``Units.drop_unreduced_gradients``, ``Units.unwind``: torch 2.13 has ``reset_iter_state`` for them, 2.11 nothing; in
  2.15 that also drops the gradients that earlier micro-batches have reduced.
- ``output_dtype``: FSDP2 keeps a module's policy to itself.
- ``parts_only``: FSDP2 holds the parameters of a unit in a list while it makes their shards, with no public form.
- ``assert_async``: a check that does not wait for the device; private without a public form.
- ``forget_meshes``: DTensor keeps what it planned for a mesh, whose groups may be closed, in caches by equal meshes.
- ``flattened``: FSDP2 takes one axis to shard over; flattening several is private (``gathered_inputs`` is what it sends
  over it).
- ``StridedShard``: how FSDP2 names its split of a dim that the tensor axis split before (pytorch/pytorch#126697).
- ``checkpoint`` (composable recomputation): private, with no public form that keeps parameter names
  (pytorch/pytorch#87664). The context of its recomputation, ``_no_hook``, can be entered once, and a second backward
  through one forward enters it once more: ours takes its place.
- ``open_groups``, ``collective_counts``, ``last_collectives``: which process groups there are, their numbers of
  collectives, and the flight recorder (gloo's in memory since torch 2.13); private without a public form.
- ``gloo_threads``: a trace names the thread that ran a collective, gloo does not say whose thread it is; private
  without a public form.
- ``quiet_gathers``: torch advises about a gather over two axes of one dim by a logger of a private module, and has no
  switch for it.
- ``share_timeout``, ``shared_timeout``: a mesh's groups do not take the time-out of the group that they are made in;
  private without a public form.
- ``bound``: as ``share_timeout``, of a backend; ``set_timeout`` is public since torch 2.14.
- ``eager``: ``torch.compiler.disable`` loads the compiler where it decorates, torch's own form at the first call.
- ``before_steps``: torch forgets a hook of all optimizers in a step only with an error; where its own code runs, frames
  tell.
- ``adafactor_on``: Adafactor's ``_init_group`` lists the tensors on which its step works; there is no public place
  between its state and its arithmetic.
- ``stored_at``: the class in which a distributed checkpoint's ``.metadata`` names each part's place, and stock
  ``dcp.load`` looks for it; private without a public form.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import json
import logging
import sys
import traceback
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from types import MethodType
from typing import Any, NoReturn, ParamSpec, TypeVar, cast, final

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch import _assert_async as assert_async
from torch._compile import _disable_dynamo
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed._composable import checkpoint_activation
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from meshpar.patches import Undo

__all__ = [
    "Node",
    "StridedShard",
    "assert_async",
    "checkpoint",
    "collective_ops",
    "ignore_profiler_marks",
    "replicate",
    "without_modes",
]

P = ParamSpec("P")
R = TypeVar("R")

BEFORE_2_13 = tuple(int(digits) for digits in torch.__version__.split(".")[:2]) < (2, 13)


class _Part(torch.autograd.Function):
    """Return the part of a DTensor here; its gradient has a gradient, which torch before 2.13 cuts off without an
    error.
    """

    @staticmethod
    def forward(ctx: Any, whole: DTensor) -> torch.Tensor:
        ctx.whole = whole.device_mesh, whole.placements, whole.shape, whole.stride()
        return whole._local_tensor.view_as(whole._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> DTensor:
        mesh, placements, shape, stride = ctx.whole
        return DTensor.from_local(grad.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride)


def part_here(whole: DTensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, as autograd knows it."""
    part: torch.Tensor = _Part.apply(whole) if BEFORE_2_13 else whole.to_local()
    return part


def flattens(tensor: torch.Tensor) -> bool:
    """Tell whether torch can make a vector of a tensor without other ranks: before 2.13 only if it is not split
    along a later dimension.
    """
    return not (
        BEFORE_2_13
        and isinstance(tensor, DTensor)
        and any(isinstance(placement, Shard) and placement.dim > 0 for placement in tensor.placements)
    )


keep_version: Any = torch.autograd._unsafe_preserve_version_counter
"""Let tensors keep the number by which autograd knows of writes: what was written is put back before anybody reads
it.
"""

ACCUMULATES_APART = hasattr(FSDPParam, "to_accumulated_grad_if_needed")
"""Torch up to 2.14 accumulates gradients without reducing them beside ``.grad``, in the dtype of the reduction; 2.15
in ``.grad``.
"""


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Keep ``torch.compile`` out of ``function``: ``torch.compiler.disable`` that loads the compiler, half a second,
    at the first call.
    """
    return cast("Callable[P, R]", _disable_dynamo(function))


def as_one_operator(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function into what selective recomputation sees as one operator, where torch can: its kernels alone
    it does not see.
    """
    options: dict[str, Any] = {"wrap_inductor_compiled_regions": True}
    can = options.keys() <= set(torch._inductor.list_options())
    return cast("Callable[P, R]", torch.compile(function, options=options if can else None))


def ignore_profiler_marks() -> Undo:
    """Let selective recomputation pass over profiler marks, which FSDP2 makes in a recomputation and not in the
    forward it repeats.
    """
    enter, leave = (
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    )
    return _set(torch.utils.checkpoint, "SAC_IGNORED_OPS", torch.utils.checkpoint.SAC_IGNORED_OPS | {enter, leave})


@final
class _WithoutHook:
    """A module's recomputation, whose own hooks would recompute inside of it."""

    def __init__(self, module: nn.Module, inner: AbstractContextManager[Any] | None = None) -> None:
        self._state: Any = checkpoint.state(module)
        self._inner = nullcontext() if inner is None else inner

    def __enter__(self) -> None:
        self._state.enable_hook = False
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._state.enable_hook = True
        self._inner.__exit__(*error)


def recompute_again() -> Undo:
    """Let a module to which :func:`checkpoint` was applied be recomputed in each of several backwards through one
    forward.
    """
    return _set(checkpoint_activation, "_no_hook", _WithoutHook)


def _set(owner: Any, name: str, value: object) -> Undo:
    """Set an attribute; undoing it leaves what others set since alone."""
    before = getattr(owner, name)
    setattr(owner, name, value)

    def undo() -> bool:
        if getattr(owner, name) is value:
            setattr(owner, name, before)
        return True

    return undo


@final
class Units:
    """The modules that FSDP2 shards or replicates as one, inside one outermost module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()
        self.look()
        self._filled: list[nn.Parameter] = []
        self._versions: dict[int, tuple[int, int, int]] = {}
        self._used: set[int] = set()
        self._ran: dict[int, str] = {}
        self._lost: str | None = None
        self._kept: list[tuple[Any, Any, tuple[int, int, int]]] = []

    def look(self) -> None:
        """Find the units again: modules came or left."""
        self.modules = [child for child in self._module.modules() if isinstance(child, FSDPModule)]
        self._groups = [group for child in self.modules for group in _groups(child)]

    def watch(self, run: Callable[[], None]) -> None:
        """Call ``run`` in every backward that reaches a unit, and let ranks reduce alike: what other ranks may have
        used counts as zero.

        Selective recomputation, which requires the same operators each time, does not see that weights are gathered. A
        unit's output may be changed in place behind the unit; its weights are gathered in backward all the same.
        """
        for child in self.modules:
            if child not in self._watched:
                child.register_forward_hook(_returned, prepend=True, with_kwargs=True)  # FSDP2's own hook comes next
        for group in self._groups:
            if group in self._watched:
                continue
            group.post_backward = functools.partial(self._after_backward, group, group.post_backward, run)
            group.unshard, group.wait_for_unshard = unseen(group.unshard), unseen(group.wait_for_unshard)
        self._watched.update([*self.modules, *self._groups])

    def _after_backward(self, group: Any, inner: Callable[..., None], run: Callable[[], None], *args: Any) -> None:
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
        if len(unused) < len(trained) or (
            id(group) in self._ran and trained and _accumulates(trained[0]._unsharded_param)
        ):
            known = set(map(id, unused))
            self._used.update(id(parameter.sharded_param) for parameter in trained if id(parameter) not in known)
            for parameter in unused:
                parameter._unsharded_param.grad = torch.zeros_like(
                    parameter._unsharded_param, dtype=parameter._unsharded_param.grad_dtype
                )
                if parameter.sharded_param.grad is None:
                    self._filled.append(parameter.sharded_param)
        if (
            early and ACCUMULATES_APART
        ):  # one dtype a unit: an earlier micro-batch has left gradients in the dtype of the reduction
            for parameter in trained:
                if parameter.unsharded_accumulated_grad is None:
                    parameter.to_accumulated_grad_if_needed()

    def take_filled(self) -> list[nn.Parameter]:
        """Return the parameters whose gradient is other ranks' alone, if it is anybody's; the backward has ended."""
        filled = [parameter for parameter in self._filled if id(parameter) not in self._used]
        self._filled.clear()
        self._used.clear()
        self._ran.clear()
        return filled

    def take_lost(self) -> str | None:
        """Return the name of a gathered weight that somebody wrote in the backward that ends."""
        lost, self._lost = self._lost, None
        return lost

    def in_backward(self) -> bool:
        """Tell whether a backward has come into a unit and has not ended, as far as FSDP2 knows."""
        open_states = (TrainingState.PRE_BACKWARD, TrainingState.POST_BACKWARD)
        return any(group._training_state in open_states for group in self._groups)

    def unwind(self) -> None:
        """Bring units back from a backward that an error ended; without it FSDP2 never sees the end of a later one,
        nor reduces in it.
        """
        self.take_filled()
        self.take_lost()
        for unit in self.modules:
            state: Any = unit._get_fsdp_state()
            state._training_state = TrainingState.IDLE
            state._state_ctx.iter_forward_root = None
            state._state_ctx.post_backward_final_callback_queued = False
            getattr(state, "_modules_to_run_forward", set[nn.Module]()).clear()
        for group in self._groups:
            group._training_state = TrainingState.IDLE
            group.finalize_backward()
            group.comm_ctx.post_forward_order.clear()
        self.drop_unreduced_gradients()
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
        self._ran.update((id(group), _trained(group)) for group in _groups(unit))

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
        groups = _groups(unit)
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
        """Remember the shards that are gathered now, for :meth:`unwritten`."""
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

    def hide(self, unit: nn.Module | None = None) -> None:
        """Register the shards on the modules of one unit, or of all, again, and keep what is gathered, which
        backward needs.
        """
        for group in self._groups if unit is None else _groups(unit):
            if not group.is_sharded:
                for parameter in group.fsdp_params:
                    held = _registered(parameter)  # what somebody put there stays, to be found
                    gathered = (parameter._unsharded_param, getattr(parameter, "_sharded_post_forward_param", None))
                    if held is not None and any(held is known for known in gathered):
                        parameter._setattr_on_modules(parameter.sharded_param)

    def show(self, unit: nn.Module | None = None) -> None:
        """Register what is gathered, for code that runs in a unit, or that backward runs once more in any."""
        for group in self._groups if unit is None else _groups(unit):
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
        """Know that the backward that runs reaches a sharded parameter by another way than its unit."""
        self._used.add(id(parameter))

    def remember(self, unit: nn.Module) -> None:
        """Remember the state of a unit's weights, which are gathered now, for :meth:`written`."""
        for group in _groups(unit):
            for parameter in group.fsdp_params:
                self._versions[id(parameter)] = _version(parameter._unsharded_param)

    def written(self, unit: nn.Module, *, look: bool) -> str | None:
        """Return the name of a gathered weight that somebody wrote or replaced since :meth:`remember`.

        Args:
            unit: is gathered.
            look: also compare values with this rank's shard, bit by bit, which finds a write through ``.data`` or
                NumPy.
        """
        for group in _groups(unit):
            for parameter in group.fsdp_params:
                gathered = parameter._unsharded_param
                held = _registered(parameter)
                # A tensor that is no parameter stands there for a while: what adapters compute from it.
                replaced = (
                    isinstance(held, nn.Parameter) and held is not gathered and held is not parameter.sharded_param
                )
                wrote = self._versions.get(id(parameter)) not in (None, _version(gathered))
                if replaced or wrote or (look and group.is_unsharded and not _agrees(parameter)):
                    return parameter._param_fqn or parameter._module_info.param_name
        return None

    def trained(self, unit: nn.Module) -> str:
        """Return which of a unit's parameters want gradients, a digit each."""
        return "".join(map(_trained, _groups(unit)))

    def reduces(self) -> bool:
        """Tell whether the backward that runs reduces gradients."""
        return all(group.reduce_grads for group in self._groups)

    def moved(self) -> list[str]:
        """Return the names of parameters that stand in another unit than the one that shards them."""
        homes = {
            id(parameter.sharded_param): unit
            for unit in self.modules
            for group in _groups(unit)
            for parameter in group.fsdp_params
        }
        names = {child: name for name, child in self._module.named_modules()}
        now = [child for child in self._module.modules() if isinstance(child, FSDPModule)]
        owners = [(unit, child) for unit in now for child in _own_modules(unit)]
        held = [(unit, child, leaf, value) for unit, child in owners for leaf, value in child._parameters.items()]
        return [f"{names[child]}.{leaf}" for unit, child, leaf, value in held if homes.get(id(value), unit) is not unit]

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


def _memory(tensor: Tensor) -> int:
    """Return the number of the memory that a tensor's part here is in."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()._cdata


def _version(gathered: Any) -> tuple[int, int, int]:
    """Return numbers that change when somebody writes a gathered weight or gives it other memory; gathering changes
    none.
    """
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


@contextmanager
def parts_only() -> Iterator[None]:
    """Let FSDP2 free each parameter when its part is made; it keeps all of a unit's until the unit is made, and
    compares names then.
    """
    contract: Any = importlib.import_module("torch.distributed._composable.contract")
    inner, make, ordered = FSDPParamGroup.__init__, FSDPParam, contract.OrderedDict

    def init(self: Any, params: list[nn.Parameter], *args: Any, **kwargs: Any) -> None:
        importlib.import_module(
            "torch._dynamo"
        )  # whose first import keeps the frames around it until the collector runs
        places = itertools.count()

        def part(*args: Any, **kwargs: Any) -> FSDPParam:
            made = make(*args, **kwargs)
            params[next(places)] = made.sharded_param
            return made

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
    """Let ``module`` be the outermost one also where a part of it is called first."""
    state: Any = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
    if state is not None and state._is_root is None:
        state._lazy_init()


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


def unseen(inner: Callable[P, R]) -> Callable[P, R]:
    """Let selective recomputation, which requires the same operators each time, not see what a function computes."""

    @functools.wraps(inner)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if isinstance(_get_current_dispatch_mode(), _CachingTorchDispatchMode | _CachedTorchDispatchMode):
            with _pop_mode_temporarily():
                return inner(*args, **kwargs)
        return inner(*args, **kwargs)

    return run


def _groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    # torch 2.13 allows a state several groups, where 2.11 has one.
    return [
        group for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group] if group is not None
    ]


@final
class _Came(nn.Module):
    """Modules of a unit that came after the unit was made, for FSDP2 to shard their parameters."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.inside = nn.ModuleList(modules)

    def forward(self) -> None:
        """Is never called; FSDP2 requires one."""


def make_unit(unit: nn.Module, make: Callable[..., FSDPModule], ignored: Collection[nn.Parameter]) -> FSDPModule:
    """Make a unit; one that was made lets go of the parameters that left its modules since, and takes in those that
    came.

    Args:
        unit: a module. The units in it come first.
        make: makes a unit of a module, with the parameters to ignore.
        ignored: parameters that belong to no unit.
    """
    if not isinstance(unit, FSDPModule):
        return make(unit, ignored_params=set(ignored))
    groups, known = _groups(unit), {*map(id, ignored)}
    held = [parameter.sharded_param for group in groups for parameter in group.fsdp_params]
    known.update(map(id, held))
    inside = list(_own_modules(unit))
    came = [child for child in inside if any(id(value) not in known for value in child.parameters(recurse=False))]
    if came:
        (made,) = _groups(make(_Came(came), ignored_params={*ignored, *held}))
        if groups:
            groups[0].fsdp_params += made.fsdp_params
        else:
            made.modules, groups = (unit,), [made]
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for child in inside:
        for name, value in child._parameters.items():
            places.setdefault(id(value), []).append((child, name))
    for group in groups:
        group.fsdp_params = [parameter for parameter in group.fsdp_params if id(parameter.sharded_param) in places]
        for parameter in group.fsdp_params:
            (owner, name), *others = places[id(parameter.sharded_param)]
            parameter._module_info = type(parameter._module_info)(
                owner, name, [one for one, _ in others], [name for _, name in others]
            )
    state: Any = unit._get_fsdp_state()
    groups = [group for group in groups if group.fsdp_params]
    if hasattr(state, "_fsdp_param_groups"):
        state._fsdp_param_groups = groups
    else:
        state._fsdp_param_group = groups[0] if groups else None
    return unit


def _own_modules(unit: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a unit, without those of the units in it."""
    yield unit
    for child in unit.children():
        if not isinstance(child, FSDPModule):
            yield from _own_modules(child)


def begin_anew(module: nn.Module) -> None:
    """Let FSDP2 look at the units of a module, and their parameters, before the next forward as it does before the
    first.
    """
    for unit in module.modules():
        if not isinstance(unit, FSDPModule):
            continue
        state: Any = unit._get_fsdp_state()
        state._is_root = None
        state._state_ctx.all_states.clear()
        for group in _groups(unit):
            group._module_fqn, group._reset_sharded_params = None, False
            for handles in (
                group._module_to_pre_save_state_dict_hook_handle,
                group._module_to_pre_load_state_dict_hook_handle,
            ):
                for handle in handles.values():
                    handle.remove()
                handles.clear()


def units_with_parameters(module: nn.Module) -> list[FSDPModule]:
    """Return the units of a module that hold parameters, outermost first."""
    return [child for child in module.modules() if isinstance(child, FSDPModule) and _groups(child)]


@torch.no_grad()
def gathered_inputs(unit: FSDPModule) -> list[torch.Tensor]:
    """Return what this rank sends when a sharded unit is gathered, as FSDP2 sends it."""
    parts = [part for group in _groups(unit) for parameter in group.fsdp_params for part in parameter.all_gather_inputs]
    return [part.view(torch.uint8) for part in parts] if len({part.dtype for part in parts}) > 1 else parts


def is_gathered(unit: FSDPModule) -> bool:
    """Return whether a unit's parameters are whole now."""
    return any(group.is_unsharded for group in _groups(unit))


def gathered_bytes(unit: FSDPModule) -> int:
    """Return the bytes of :func:`gathered_inputs`, also on the meta device."""
    held = (
        (parameter, parameter.mp_policy.param_dtype or parameter.sharded_param.dtype)
        for group in _groups(unit)
        for parameter in group.fsdp_params
    )
    return sum(parameter.padded_sharded_param_size.numel() * dtype.itemsize for parameter, dtype in held)


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """Return the one axis over all ranks of a mesh, named after its axes: ``"dp_replicate+dp_shard"``."""
    own = mesh._get_root_mesh().__dict__.get("_meshpar_own", False)
    flat = mesh._flatten("+".join(mesh.mesh_dim_names or ()), dist.get_backend() if own else None)
    share_timeout([flat.get_group()])
    return flat


def own_groups(names: Iterable[str], own: bool) -> dict[str, Any]:
    """Return the arguments of ``init_device_mesh`` by which an axis of all ranks gets a group of its own."""
    return {"backend_override": dict.fromkeys(names, dist.get_backend())} if own else {}


def gather_before_backward(unit: nn.Module, output: object, tensors: Iterable[Any]) -> None:
    """Let FSDP2 know of outputs that it does not find itself, in objects of classes of their own."""
    if isinstance(output, torch.Tensor):
        return
    state: Any = unit._get_fsdp_state() if isinstance(unit, FSDPModule) else None
    known = {id(leaf) for leaf in tree_leaves(output)}
    for tensor in tensors:
        if id(tensor) not in known:
            tensor.register_hook(state._pre_backward)


def enter_by(module: Any, call: Callable[..., Any]) -> None:
    """Let every call of ``module``, with its hooks, go through ``call``, which is not compiled where somebody
    compiles the module.
    """

    @torch.compiler.disable(recursive=False)
    def entered(self: object, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    module._call_impl = MethodType(entered, module)


def refuse_parts_as_numbers(refuse: Callable[[], NoReturn]) -> Undo:
    """Let ``refuse`` answer where a DTensor is read as a number (``.item()``) while its ranks hold parts of it.

    torch returns this rank's part. Reading the whole would wait for the other ranks, who may not read.
    """

    def read(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (value,) = args
        if not all(placement.is_replicate() for placement in value.placements):
            refuse()
        return op(value.to_local())

    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    number = torch.ops.aten._local_scalar_dense.default
    handlers.setdefault(number, read)

    def undo() -> bool:
        if handlers.get(number) is read:
            del handlers[number]
        return True

    return undo


def change_attributes(assign: Callable[[DTensor, object], bool], refuse_numpy: Callable[[DTensor], NoReturn]) -> Undo:
    """Change what two attributes of DTensors do.

    Args:
        assign: answers ``tensor.data = value``, which torch ignores without an error; torch goes on where it returns
            False.
        refuse_numpy: is called in the place of ``tensor.numpy()``.
    """
    plain: Any = torch.Tensor.data

    def write(tensor: DTensor, value: Any) -> None:
        if not assign(tensor, value):
            plain.__set__(tensor, value)

    mine = property(plain.__get__, write)
    changed: dict[str, Any] = {"data": mine, "numpy": lambda tensor, **_: refuse_numpy(tensor)}
    for name, value in changed.items():
        setattr(DTensor, name, value)

    def undo() -> bool:
        for name, value in changed.items():
            if vars(DTensor).get(name) is value:
                delattr(DTensor, name)
        return True

    return undo


_RANDOM = (
    *(
        "normal_",
        "uniform_",
        "bernoulli_",
        "bernoulli",
        "rand_like",
        "randn_like",
        "randint_like",
        "native_dropout",
        "exponential_",
    ),
    *("geometric_", "log_normal_", "cauchy_", "random_", "poisson", "multinomial"),
)


def change_operators(
    draw: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
    refuse_unknown: Callable[[Any, Exception], None],
    refuse_lost: Callable[[], NoReturn],
) -> Undo:
    """Change what DTensors do with operators of three kinds.

    Args:
        draw: runs an operator that draws random numbers, which torch draws on a CPU for each part as if it were the
            whole.
        refuse_unknown: is called with an operator that torch cannot run on shards, and its error, which is raised
            afterwards.
        refuse_lost: is called where somebody writes into a view that is a copy, gathered from shards, so that the write
            would be lost.
    """
    dispatcher: Any = DTensor._op_dispatcher
    handlers: dict[Any, Any] = dispatcher._custom_op_handlers
    infer, compute = (
        dispatcher._propagate_op_sharding_dispatch_slow_path,
        dispatcher._dispatch_get_local_results_slow_path,
    )
    packets = [getattr(torch.ops.aten, name) for name in _RANDOM]
    random = {
        getattr(packet, overload): draw
        for packet in packets
        for overload in packet.overloads()
        if "out" not in overload
    }
    handlers.update({op: handler for op, handler in random.items() if op not in handlers})
    guards: dict[Any, Any] = {}

    def inferred(op: Any, *args: Any) -> Any:
        try:
            return infer(op, *args)
        except RuntimeError as error:
            refuse_unknown(op, error)
            raise

    def computed(op: Any, args: tuple[Any, ...], info: Any) -> Any:
        results = compute(op, args, info)
        base = args[0] if args else None
        if (
            info.output_sharding.needs_redistribute
            and _is_view(op)
            and isinstance(base, DTensor)
            and base.is_leaf
            and not in_backward()
        ):
            for result in results if isinstance(results, list | tuple) else [results]:
                result.untyped_storage().meshpar_copy = True
            if not guards:
                guards.update({written: guard for written in _writes() if written not in handlers})
                handlers.update(guards)
        return results

    def guard(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = args[0]
        if isinstance(written, DTensor) and hasattr(written._local_tensor.untyped_storage(), "meshpar_copy"):
            refuse_lost()
        handlers.pop(op, None)
        try:
            return op(*args, **kwargs)
        finally:
            handlers[op] = guard

    dispatcher._propagate_op_sharding_dispatch_slow_path, dispatcher._dispatch_get_local_results_slow_path = (
        inferred,
        computed,
    )

    def undo() -> bool:
        for op, handler in (random | guards).items():
            if handlers.get(op) is handler:
                del handlers[op]
        for name, changed in (
            ("_propagate_op_sharding_dispatch_slow_path", inferred),
            ("_dispatch_get_local_results_slow_path", computed),
        ):
            if vars(dispatcher).get(name) is changed:
                delattr(dispatcher, name)
        return True

    return undo


def _is_view(op: Any) -> bool:
    returned = op._schema.returns[0].alias_info if op._schema.returns else None
    return returned is not None and not returned.is_write


def _writes() -> Iterator[Any]:
    """Yield the operators that write their first tensor."""
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if name.startswith("aten::") and packet.endswith("_") and not packet.startswith("_"):
            yield getattr(getattr(torch.ops.aten, packet), overload or "default")


def _accumulates(parameter: torch.Tensor) -> bool:
    """Tell whether the backward that runs now would leave a gradient in ``parameter``; ``torch.autograd.grad`` does
    not.
    """
    return in_backward() and torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)


def is_shard(parameter: torch.Tensor) -> bool:
    """Tell whether a parameter is a unit's, which computes with another tensor that it gathers. Compiled code asks."""
    return getattr(parameter, "_meshpar_shard", False)


def set_recomputed(module: nn.Module, recomputed: bool) -> None:
    """Let a module to which :func:`checkpoint` was applied be recomputed, or not for a while; others stay as they
    are.
    """
    with suppress(AssertionError, AttributeError):
        state: Any = checkpoint.state(module)
        state.enable_hook = recomputed


def in_checkpoint() -> bool:
    """Tell whether the code that runs is inside of ``torch.utils.checkpoint(use_reentrant=False)``, and not yet
    recomputed.
    """
    # torch has no types for it
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore[reportAttributeAccessIssue]
    return hooks is not None and hooks[0].__qualname__.startswith("_checkpoint_hook.")


def check_backwards(
    wanted: Callable[[list[Any]], None], roots: Callable[[list[Any]], None], failed: Callable[[], None]
) -> Undo:
    """Let functions look at each backward before it runs, by ``backward`` or ``torch.autograd.grad``.

    Args:
        wanted: looks at what the gradients are asked of, by ``torch.autograd.grad`` or ``backward(inputs=...)``.
            Autograd knows nothing of FSDP2's shards: it calls them unused, or with ``allow_unused`` answers None.
        roots: looks at the tensors and nodes from which the backward starts.
        failed: is called where the backward ended with an error.
    """
    undone = [
        _check_tensors(torch.autograd, name, {"inputs": wanted, starts: roots}, failed)
        for name, starts in (("grad", "outputs"), ("backward", "tensors"))
    ]
    return lambda: all(undo() for undo in undone)


def check_norms_of(check: Callable[[list[Any]], None]) -> Undo:
    """Let ``check`` look at the gradients of which ``torch.nn.utils.clip_grad_norm_`` computes a norm."""
    return _check_tensors(torch.nn.utils.clip_grad, "_get_total_norm", {"tensors": check})


def before_steps(run: Callable[..., Any]) -> Undo:
    """Call ``run`` before every optimizer's step. Undoing waits while a thread is in a step, which iterates over the
    hooks.
    """
    hook, torchs = register_optimizer_step_pre_hook(run), vars(sys.modules[Optimizer.__module__])

    def undo() -> bool:
        frames = (frame for top in sys._current_frames().values() for frame, _ in traceback.walk_stack(top))
        if any(frame.f_globals is torchs for frame in frames):
            return False
        hook.remove()
        return True

    return undo


def next_node() -> int:
    """Return the number of the node that autograd makes next in this thread; a graph's nodes are numbered in the
    order of their making.
    """
    return torch.autograd._get_sequence_nr()


def _check_tensors(
    owner: Any, name: str, checks: Mapping[str, Callable[[list[Any]], None]], failed: Callable[[], None] = lambda: None
) -> Undo:
    """Let ``checks``, by the name of an argument, look at the tensors and nodes that a function of ``owner`` is
    called with.
    """
    inner = getattr(owner, name)
    if hasattr(inner, "_meshpar_checked"):  # somebody wrapped it, so that undoing left it
        return lambda: True
    places = list(inspect.signature(inner).parameters)

    def checked(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(places, args)) | kwargs
        for argument, check in checks.items():
            check([leaf for leaf in tree_leaves(given.get(argument)) if isinstance(leaf, torch.Tensor | Node)])
        try:
            return inner(*args, **kwargs)
        except BaseException:
            failed()
            raise

    checked._meshpar_checked = True  # type: ignore[attr-defined]
    return _set(owner, name, functools.wraps(inner)(checked))


def in_backward() -> bool:
    """Tell whether autograd runs a backward in this thread; a forward that runs there is a recomputation."""
    return backward() != -1


def backward() -> int:
    """Return the number of the backward that runs in this thread, -1 where none does."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(run: Callable[[], None]) -> None:
    """Run something when the backward that runs now is through; after what was asked for earlier."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(run)


def output_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype to which FSDP2 casts the module's output, None where it does not."""
    state: Any = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
    return None if state is None else state._mp_policy.output_dtype


collective_ops = torch.ops._c10d_functional
all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


def collective_counts() -> dict[str, int]:
    """Return how many collectives the process groups of this rank have begun, by their axis and ranks; groups of
    several models may share them.
    """
    if not dist.is_initialized():
        return {}
    found = dict[str, int]()
    group: Any
    for group in open_groups():
        with suppress(RuntimeError):  # a backend without numbers (fake, mpi)
            title = group_title(group)
            found[title] = found.get(title, 0) + group._get_sequence_number_for_group()
    return found


def gloo_threads() -> dict[int, str]:
    """Return the threads of this process that run gloo's collectives, by number, and the title of each one's group;
    empty where not known.

    Each of a process's groups starts threads of its own, as many as every other and before the next group's. Linux
    tells their names.
    """
    threads = []
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # a thread that has just ended
            if (task / "comm").read_text().strip() == "pt_gloo_runloop":
                threads.append(
                    (int((task / "stat").read_text().rsplit(")", 1)[1].split()[19]), int(task.name))
                )  # when it was started
    groups = [group for group, (backend, _) in dist.distributed_c10d._world.pg_map.items() if "gloo" in str(backend)]
    per_group, rest = divmod(len(threads), len(groups)) if groups else (0, 1)
    if rest or not per_group:
        return {}
    return {number: group_title(groups[place // per_group]) for place, (_, number) in enumerate(sorted(threads))}


class AdafactorOn:
    """Let an Adafactor's step work on other objects than its tensors, one at a time; the bases after this one are its
    class.

    Attributes:
        replace: is called with a parameter, its gradient and its state, and returns what takes the place of the
            parameter, of the gradient and, by key, of the tensors of the state.
    """

    replace: Callable[[Tensor, Tensor, dict[str, Any]], tuple[Any, Any, dict[str, Any]]]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [{**group, "foreach": False} for group in vars(self)["param_groups"]]

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> bool:
        parent: Any = super()
        has_complex: bool = parent._init_group(group, *lists)
        parameters, grads, rows, columns, variances, _ = lists
        for place, (parameter, grad) in enumerate(zip(parameters, grads, strict=True)):
            replaced = self.replace(parameter, grad, self.state[parameter])  # type: ignore[attr-defined]
            parameters[place], grads[place], state = replaced
            rows[place], columns[place], variances[place] = (
                state.get(key) for key in ("row_var", "col_var", "variance")
            )
        return has_complex


@functools.cache
def _adafactor_on(kind: type, replace: Callable[..., Any]) -> type:
    return type(kind.__name__, (AdafactorOn, kind), {"replace": staticmethod(replace)})


def adafactor_on(optimizer: torch.optim.Adafactor, replace: Callable[..., Any]) -> Any:
    """Return an optimizer that shares everything with ``optimizer`` and steps on what ``replace`` returns (see
    :class:`AdafactorOn`).
    """
    kind: Any = type(optimizer)
    stands_in: Any = object.__new__(_adafactor_on(kind, replace))
    stands_in.__dict__ = optimizer.__dict__
    return stands_in


def forget_meshes() -> None:
    """Let DTensor plan anew: what it remembers by a mesh also serves an equal one, and may name groups that were
    closed since.
    """
    dispatcher: Any = DTensor._op_dispatcher
    dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    forget = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if forget is not None:
        forget()


@contextmanager
def quiet_gathers() -> Iterator[None]:
    """Keep DTensor's advice on slow gathers out of the log: what FSDP2 shards over tensor parallelism cannot be
    gathered in another way.
    """
    log = logging.getLogger("torch.distributed.tensor._redistribute")
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


def shared_timeout() -> timedelta | None:
    """Return the default group's bound on collectives; None where it has none, as a simulated one."""
    world: Any = dist.group.WORLD
    with suppress(IndexError, RuntimeError):  # a group of no device; a backend without options
        return getattr(getattr(world._get_backend(world._device_types[0]), "options", None), "_timeout", None)
    return None


def share_timeout(groups: Iterable[Any]) -> None:
    """Give groups the default group's bound on collectives; torch gives a mesh's groups 30 minutes with gloo and 10
    with NCCL.
    """
    timeout = shared_timeout()
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # public since torch 2.14
    if timeout is not None:
        for group in groups:
            set_timeout(timeout, group)


def open_groups() -> list[Any]:
    """Return the process groups of this rank that are open."""
    return list(dist.distributed_c10d._world.pg_map)


def bound(group: Any, seconds: float) -> None:
    """Bound every collective of a backend that was made without a process group; public (``set_timeout``) in newer
    torch alone.
    """
    group._set_default_timeout(timedelta(seconds=seconds))


def stored_at(file: str, position: int, length: int) -> Any:
    """Return a part's place in a distributed checkpoint, in bytes, as ``.metadata`` has it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # loads all of torch's checkpoints, which few need

    return _StorageInfo(file, position, length)


def last_collectives() -> dict[str, tuple[int, str]]:
    """Return the number and the name (with the line that called it, where it is known) of each group's last
    collective.
    """
    counts = collective_counts()
    names = {group.group_name: group_title(group) for group in open_groups()} if counts else {}
    last = {name: (number, "a collective") for name, number in counts.items()}
    for backend in ("fr", "nccl"):  # gloo's record, and NCCL's, which only a torch with NCCL has
        home = torch._C._distributed_c10d  # pyright: ignore[reportAttributeAccessIssue]
        dump = getattr(home, f"_dump_{backend}_trace_json", None)
        for entry in json.loads(dump()).get("entries", []) if dump is not None else []:
            name = names.get(entry["process_group"][0])
            if name is not None and not entry.get("is_p2p") and entry["collective_seq_id"] == counts[name]:
                last[name] = (counts[name], entry["profiling_name"])
    return last


def group_title(group: Any) -> str:
    """Return what a process group is called: its axis and its ranks."""
    ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
    said = (
        group.group_desc.removeprefix("mesh_")
        if group.group_desc not in ("", "undefined")
        else f"group {group.group_name}"
    )
    return f"{said} (ranks {ranks})"
