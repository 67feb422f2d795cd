"""FSDP2's state of one unit, how units are made, and their backwards: what one does not reach is gathered and reduced
in its place, as on other ranks.

- ``replicate`` on FSDP2's machinery: goes when ``torch.distributed.fsdp`` exports it (pytorch/pytorch#166433).
- ``ACCUMULATES_APART``: where FSDP2 keeps gradients that it has not reduced yet. It goes with torch 2.14.
- ``parts_only``: FSDP2 holds the parameters of a unit in a list while it makes their shards, with no public form.
- ``reduce_replicas_by``: FSDP2's own all-reduce over replicas has no custom form, as its reduce-scatter has.
- ``output_dtype``: FSDP2 keeps a module's policy to itself; ``gathered_inputs`` is what it sends when it gathers.
- ``UnitBackwards``: FSDP2 keeps to itself under which parameters gradients are reduced. It reduces what has a gradient
  on this rank, which may be something else on another rank; torch 2.13 has ``set_reduce_scatter_unused_params``, which
  gives zeros to what no rank used, too.
"""

from __future__ import annotations

import importlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any, final

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from meshpar._torch.autograd import accumulates
from meshpar._torch.calls import eager, unseen

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


@final
@dataclass(eq=False, slots=True)
class UnitRun:
    """A forward of a unit. Nodes from ``first`` to before ``last`` are its own and those of runs inside it."""

    unit: Any
    around: UnitRun | None
    first: int
    last: int = -1
    inside: list[UnitRun] = field(default_factory=list)
    # the backward that runs, or is about to, reaches it
    reached: bool = False
    # it is reduced in that backward, or needs no gradients
    done: bool = False

    def in_backward(self) -> list[UnitRun]:
        """Return this run and those inside it in the order in which a backward comes to them."""
        runs: list[UnitRun] = [self]
        for run in reversed(self.inside):
            runs += run.in_backward() if run.inside else [run]
        return runs


@final
class UnitBackwards:
    """Let ranks reduce the gradients of units alike: what other ranks may have used counts as zero."""

    def __init__(self, groups: Mapping[Any, Sequence[Any]]) -> None:
        self._groups = groups
        self._zeroed: list[nn.Parameter] = []
        self._used: set[int] = set()
        # of the units that ran a forward whose gradients are wanted
        self.trained_when_run: dict[Any, list[bool]] = {}
        self._passed: set[Any] = set()
        self._outermost: list[UnitRun] = []
        self._skips = False

    def watch(self, run: Callable[[Any], None]) -> None:
        """Call ``run`` with the groups of parameters whose backward ends, in every backward that reaches a unit."""
        for unit, groups in self._groups.items():
            state = unit._get_fsdp_state()
            state._root_post_backward_final_callback = partial(self._end, state._root_post_backward_final_callback)
            state._pre_backward = uncompiled_method(state, "_pre_backward")
            for group in groups:
                group.pre_backward = partial(self._before_unit, unit, uncompiled_method(group, "pre_backward"))
                reduce = uncompiled_method(group, "post_backward")
                group.post_backward = partial(self._after_unit, unit, group, reduce, run)
                # selective recomputation requires the same operators each time, and does not see these
                group.unshard, group.wait_for_unshard = unseen(group.unshard), unseen(group.wait_for_unshard)

    def expect(self, outermost: list[UnitRun], *, skips: bool) -> None:
        """Expect a backward that reaches some of these runs, latest last; others may be reached by other ranks."""
        # ranks gather and reduce in one order: what this rank does not reach (``skips``) has its place, too, with zeros
        self._outermost, self._skips = outermost, skips

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
        groups = self._groups[run.unit]
        self._passed.update(groups)
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
        for group in reversed(self._groups[run.unit]):
            if group._training_state is not TrainingState.POST_BACKWARD:
                group.post_backward()

    def _after_unit(
        self, unit: nn.Module, group: Any, reduce: Callable[..., None], run: Callable[[Any], None], *args: Any
    ) -> None:
        if self._skips:
            self._pass_by(unit, ends=True)
        run(group)
        for parameter in group.fsdp_params:
            shard = parameter.sharded_param  # with the gradient of operators on the parameter itself
            if type(shard.grad) is DTensor and shard.grad.placements != shard.placements:
                shard.grad = shard.grad.redistribute(placements=shard.placements)
        if group.reduce_grads:
            self._fill(group)
        reduce(*args)

    def _fill(self, group: Any) -> None:
        """Give zeros to the parameters of a unit that this backward did not use, where it or another rank may."""
        wanted = [parameter for parameter in group.fsdp_params if parameter.sharded_param.requires_grad]
        trained = [parameter for parameter in wanted if "_unsharded_param" in parameter.__dict__]
        without_earlier = [parameter for parameter in trained if parameter.unsharded_accumulated_grad is None]
        unused = [parameter for parameter in without_earlier if parameter._unsharded_param.grad is None]
        used = len(unused) < len(trained) or group in self._passed
        if used or (group in self.trained_when_run and trained and accumulates(trained[0]._unsharded_param)):
            here = trained
            if unused:
                without = set(map(id, unused))
                here = [parameter for parameter in trained if id(parameter) not in without]
            self._used.update(map(id, [parameter.sharded_param for parameter in here]))
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
        for seen in (self._zeroed, self._used, self.trained_when_run, self._passed):
            seen.clear()
        self._outermost, self._skips = [], False
        return unused

    def turned(self) -> str | None:
        """Return the name of a parameter that was frozen, or unfrozen, since its unit ran."""
        for group, before in self.trained_when_run.items():
            now = [parameter.sharded_param.requires_grad for parameter in group.fsdp_params]
            if before != now:
                states = zip(group.fsdp_params, before, now)
                return next(parameter._param_fqn for parameter, was, is_now in states if was != is_now)
        return None

    def enter(self, unit: Any) -> None:
        """Gather a unit for the backward that runs, as FSDP2 does where a gradient reaches one of its outputs."""
        groups = self._groups[unit]
        if not groups or any(group._training_state is not TrainingState.PRE_BACKWARD for group in groups):
            unit._get_fsdp_state()._pre_backward(None)
