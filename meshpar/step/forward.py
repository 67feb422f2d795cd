"""Run: one parallel module, what its plan installed, and the door through which every call of it goes: the moments
(``step/moment.py``) around calls, backwards and steps. Stages have a door around it (``passes/pipeline/edges.py``).
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshpar._torch.autograd import check_backwards, in_backward
from meshpar._torch.calls import AdafactorOn, adafactor_on, before_steps, eager, enter_by, while_lives
from meshpar._torch.fsdp import make_ready
from meshpar._torch.units import Units, is_shard
from meshpar.core.errors import MeshparError
from meshpar.core.layout import ModelLayout
from meshpar.core.registry import layout_for
from meshpar.same_bits.trees import SameBits
from meshpar.step.backward import Backward, average_outside, trained_outputs
from meshpar.step.gathered_weights import GatheredWeights, Gathering
from meshpar.step.inner_calls import Calls, Explain
from meshpar.step.moment import Guarded, HandsOn, Listeners, Moment
from meshpar.tensors.adafactor import adafactor_by_parts
from meshpar.tensors.digests import tensors_in
from meshpar.tensors.placements import sharded_axes

Fact = TypeVar("Fact")


@final
class Run:
    """One module with a plan: its moments, of the passes, then of the guards, explained errors, and ``FirstRuns``."""

    def __init__(
        self, guarded: Guarded, moments: Sequence[Moment], *, explain: Explain | None = None, first_runs: Any = None
    ) -> None:
        self.module, self.resolved, self.meshes = guarded.module, guarded.resolved, guarded.meshes
        self.device, self.units, self.facts = guarded.device, guarded.units, guarded.facts
        self.lengths, self.guards, self.first_runs = guarded.lengths, guarded.guards, first_runs
        self.calls = Calls(self.module, explain)
        hands_on = self.facts.find(HandsOn)
        self._listeners = Listeners(())
        by_tree = self.facts.find(SameBits) is not None
        average = functools.partial(average_outside, kept=frozenset(self.resolved.same), by_tree=by_tree)
        self.backward = Backward(self.module, self.units, average, self._listeners, hands_on)
        gathering = self.facts.find(Gathering)
        self._gathered: GatheredWeights | None = None
        if gathering is not None and (gathering.keeps or gathering.slices is not None):
            self._gathered = GatheredWeights(guarded, gathering, self.agree, self.backward, self.calls)
        self.moments = moments if self._gathered is None else (self._gathered, *moments)
        if moments:
            self._install(explained=explain is not None)

    @property
    def moments(self) -> Sequence[Moment]:
        """The moments around the module's calls, backwards and steps, in order."""
        return self._listeners.moments

    @moments.setter
    def moments(self, moments: Sequence[Moment]) -> None:
        self._listeners.replace(moments)

    def find(self, kind: type[Fact]) -> Fact | None:
        """Return the fact of a type that some pass installed, None where none did."""
        return self.facts.find(kind)

    def agree(self, place: str, numbers: Sequence[int] = ()) -> list[bool]:
        """Let ranks come to ``place``; return of each number whether all have the same. Collective."""
        answers = [agree(place, numbers) for agree in self._listeners.at[Moment.agree]]
        return [all(column) for column in zip([True] * len(numbers), *answers, strict=True)]

    def _install(self, *, explained: bool) -> None:
        module: Any = self.module
        enter_by(module, functools.partial(self._enter, module._call_impl))
        self.calls.install(explained=explained)
        if self.units.modules:
            module._is_fsdp_managed_module = True  # by which transformers' generate knows that ranks must go in step
        _LIVING[next(_NUMBERS)] = self
        while_lives(self, "steps", functools.partial(before_steps, _before_every_step))
        if self.units.modules or self.guards != "off":
            checks = _refuse_reduced, _before_every_backward, _after_failures
            while_lives(self, "backwards", functools.partial(check_backwards, *checks))
        self.units.around_forwards(
            before=self._before_unit,
            gathered=self._listeners.at[Moment.unit_gathered],
            computed=self._listeners.at[Moment.after_unit],
            after=self._after_unit,
        )
        self.backward.mark()

    # A call of the module

    def _enter(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one call of the module, by ``forward`` or by a method, its hooks and the passes' inside."""
        if self.calls.depth or in_backward():
            return self.calls.explained(inner, args, kwargs)
        self.calls.depth += 1
        trials = self.first_runs
        run = self.calls.explained if trials is None else functools.partial(trials.run, self.calls.explained)
        gathers = bool(self.units.modules) or (trials is not None and trials.leaves_inference_mode)
        # torch's attention and encoder layers call their parts, as in training, and not a fused kernel
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with _outside_inference_mode() if gathers and torch.is_inference_mode_enabled() else _AS_IT_IS:
                self._before_forward(args, kwargs)
                try:
                    output = run(inner, args, kwargs)
                except Exception:
                    self._after_error()
                    raise
                self._after_forward(output)
                return output
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            self.units.hide()  # outside of the door parameters are shards
            self.calls.leave()
            if trials is not None and not trials.wait:
                self.first_runs = None

    @eager
    def _before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self.calls.reads.away:
            self.calls.reads.check("the module")
        self.backward.unwind()
        if not self.calls.has_values:
            self._check_values()
        self.backward.mark()
        self.units.hide()
        self.backward.entrances.begin()
        for look in self._listeners.at[Moment.before_forward]:
            look(args, kwargs)
        # What an earlier forward left gathered may be older than the last step: any code may have changed the shards.
        if self._gathered is None:
            self.units.reshard()
        else:
            self._gathered.serve_call()
        if not self.units.modules and torch.is_grad_enabled():
            self.backward.entrances.opens(self.module)

    def _check_values(self) -> None:
        name = next((name for name, parameter in self.module.named_parameters() if parameter.is_meta), None)
        if name is not None:
            raise MeshparError(
                f"{name} has no values yet; call par.materialize(seed=...) or (weights=...) before the first forward"
            )
        self.calls.has_values = True

    @eager
    def _after_error(self) -> None:
        self.backward.entrances.closes(self.module, None)
        for moment in reversed(self.moments):
            with suppress(Exception):  # of ranks that do not come; the error of the call is the one to tell
                moment.after_error()
        if not torch.is_grad_enabled():
            self.units.leave()

    @eager
    def _after_forward(self, output: object) -> None:
        if not self.units.modules:
            self.backward.entrances.closes(self.module, output)
        for look in reversed(self._listeners.at[Moment.after_forward]):
            look(output)
        keeps = self._gathered is not None and self._gathered.keep()
        if not keeps and not torch.is_grad_enabled():
            self.units.release(tensors_in(output, objects=True))
        self.units.hide()
        if torch.is_grad_enabled():
            self.backward.after_forward(output)

    def _before_unit(self, name: str, unit: nn.Module) -> None:
        if torch.is_inference_mode_enabled():  # a method of the module's own may have entered it
            self.calls.outside[unit] = ExitStack()
            self.calls.outside[unit].enter_context(_outside_inference_mode())
        recomputes = in_backward()
        if not self.calls.depth and not recomputes:
            self._begin_outside()
        for look in self._listeners.at[Moment.before_unit]:
            look(name, unit)
        self.units.show(unit)
        if not recomputes and torch.is_grad_enabled():
            self.units.note_trained(unit)
            self.backward.entrances.opens(unit)

    def _begin_outside(self) -> None:
        """Begin a call of a unit from outside of a call of the module."""
        make_ready(self.module)
        self.units.reshard()
        self.backward.entrances.begin()
        if self._gathered is not None:
            self._gathered.begin()

    @eager
    def _after_unit(self, unit: nn.Module, args: object, output: object) -> None:
        if type(output) is not Tensor and torch.is_grad_enabled():
            self.units.gather_before_backward(unit, output, trained_outputs(output))
        if not in_backward():
            self.backward.entrances.closes(unit, output)
        if unit in self.calls.outside:
            self.calls.outside.pop(unit).close()
        if unit is not self.module:
            self.units.hide(unit)  # outside of it nobody sees that its weights are used, and they may be freed before

    # A step

    def before_step(self, optimizer: Optimizer) -> Optimizer:
        """Look at a step of any optimizer; return what steps: itself, or for Adafactor what knows norms of shards."""
        trains = holds_some(optimizer, self.module, self.units)
        if trains:  # else another model's, which another thread may train while this one is in its backward
            self.backward.unwind()
            if not in_backward():  # whose recomputations read what is registered now
                self.units.hide()
        for look in self._listeners.at[Moment.before_step]:
            look(optimizer, trains=trains)
        if not trains:
            return optimizer
        self.backward.entrances.step()
        if isinstance(optimizer, torch.optim.Adafactor) and any(map(sharded_axes, held_by(optimizer))):
            return adafactor_on(optimizer, adafactor_by_parts)
        return optimizer

    def leave_step(self, *, by_error: bool = False) -> None:
        """Remember that a step was left before it reduced gradients; ``by_error``: ranks may have different parts."""
        for moment in self.moments:
            moment.leave_step(by_error=by_error)

    def reshard(self) -> None:
        """Let go of gathered parameters: the module's are then the shards, which are trained and saved."""
        self.backward.unwind()
        if not self.calls.depth and not in_backward():
            self.units.reshard()

    @contextmanager
    def without_trials(self) -> Iterator[None]:
        """Let calls in the ``with`` block, which are no step's, run no trial."""
        waiting, self.first_runs = self.first_runs, None
        try:
            yield
        finally:
            self.first_runs = waiting

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Move, allocate or load parameters in the block."""
        self.reshard()
        self.units.hide()
        for moment in self.moments:
            moment.before_move()
        yield
        for moment in self.moments:
            moment.after_move()


def held_by(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that an optimizer steps."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def holds_some(optimizer: Optimizer, module: nn.Module, units: Units) -> bool:
    """Return whether an optimizer holds parameters of a module, or their shards while a unit is gathered."""
    ids = set(map(id, held_by(optimizer)))
    return any(id(parameter) in ids for parameter in itertools.chain(units.shards(), module.parameters()))


_LIVING: weakref.WeakValueDictionary[int, Run] = weakref.WeakValueDictionary()
"""Those of all parallel modules, in the order in which plans made them, which is the same on every rank."""
_NUMBERS = itertools.count()


def run_of(module: nn.Module) -> Run | None:
    """Return the run of an outermost module; None where no plan was applied."""
    return next((run for run in list(_LIVING.values()) if run.module is module), None)


def fact_of(module: nn.Module, kind: type[Fact]) -> Fact | None:
    """Return the fact of a type that a pass installed on an outermost module; None where none did."""
    run = run_of(module)
    return None if run is None else run.find(kind)


def layout_of(module: nn.Module) -> ModelLayout:
    """Return the layout with which a plan was applied to an outermost module, else the one that fits it."""
    run = run_of(module)
    return layout_for(module) if run is None else run.resolved.layout


def inside_a_call() -> bool:
    """Return whether code of a parallel module runs."""
    return any(run.calls.depth for run in list(_LIVING.values()))


def _refuse_reduced(wanted: list[Any]) -> None:
    """Refuse to be asked by autograd for gradients that it does not have."""
    if any(is_shard(value) or "_meshpar_whole" in value.__dict__ for value in wanted if isinstance(value, Tensor)):
        raise MeshparError(
            "torch.autograd.grad and backward(inputs=...) find no gradients of parameters that data ranks share: "
            "those are reduced when a whole backward has run; use loss.backward() and read parameter.grad, or a mesh "
            "of tensor parallelism alone"
        )


def _before_every_backward(roots: list[Any]) -> None:
    for run in list(_LIVING.values()):
        run.backward.before(roots)


def _after_failures() -> None:
    for run in list(_LIVING.values()):
        run.backward.unwind()


def _before_every_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Look at a step of any optimizer, and let it step by what can."""
    if isinstance(optimizer, AdafactorOn):  # whose class may call the step of a base
        return None
    instead = [steps for run in list(_LIVING.values()) if (steps := run.before_step(optimizer)) is not optimizer]
    return ((instead[0], *args[1:]), kwargs) if instead else None


_AS_IT_IS = nullcontext()


@contextmanager
def _outside_inference_mode() -> Iterator[None]:
    """Run without gradients instead of in inference mode, whose tensors no later backward could use."""
    with torch.inference_mode(False), torch.no_grad():
        yield
