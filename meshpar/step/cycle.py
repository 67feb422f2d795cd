"""Run a parallel module's forward, the end of its backward and its optimizer step: gather, reduce, check.

A module on a mesh differs from a plain one in what has to happen around a forward (weights are gathered, and must be
those of the last optimizer step) and after a backward (gradients are reduced, compared between ranks, handed to hooks).
Here is the one door through which every call of the module goes, and the one place where a backward ends. FSDP2 reduces
the gradients of its units in the backward (``_torch/units.py``); here those are reduced that ranks keep whole
(``passes/data/whole_parameters.py``). A stage of a pipeline has a door of its own around this one
(``passes/pipeline/running.py``).
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshpar._torch.autograd import at_end_of_backward, backward, check_backwards, in_backward
from meshpar._torch.calls import eager, enter_by
from meshpar._torch.fsdp import gather_before_backward, make_ready
from meshpar._torch.optimizers import AdafactorOn, adafactor_on, before_steps
from meshpar._torch.patches import while_lives
from meshpar._torch.units import Units
from meshpar.core.errors import MeshparError
from meshpar.core.guards import Guard, Guards
from meshpar.core.waiting import reads_of
from meshpar.passes.applied import applied
from meshpar.passes.data.external_gradients import average_outside
from meshpar.state.full import guard_optimizer, refuse_reduced
from meshpar.step.adafactor import adafactor_by_parts
from meshpar.step.backward_entrances import Entrances
from meshpar.step.backwards import Backwards, Forward, refuse_second_order
from meshpar.step.calls import Calls
from meshpar.step.comparisons import Comparisons
from meshpar.step.explain import Explanation
from meshpar.step.gradient_hooks import GradientHooks
from meshpar.step.left_gradients import LeftGradients
from meshpar.step.operators import one_process
from meshpar.step.placed_parameters import Placed
from meshpar.step.placements import sharded_axes
from meshpar.step.pytrees import leaves
from meshpar.step.shared_weights import SharedWeights
from meshpar.trials.first_runs import FirstRuns


@final
class Cycle:
    """The work around every forward, backward and optimizer step of one parallel module.

    Args:
        module: the outermost module, to which a plan was applied.
        units: of the module.
        explanation: tells errors in the user's terms; None leaves them as they are.
        same_axes: the axes whose ranks see the same samples.
        watching: the guards, which come in this order; after a forward in the opposite one.
        parts: takes the lengths that ``par.split`` has given.
        agreement: the exchanges of the ranks.
        guards: when to compare; off: gather and free weights, reduce what units do not, and refuse nothing.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Units,
        explanation: Explanation | None,
        same_axes: Collection[str],
        *,
        watching: Iterable[Guard],
        parts: set[int],
        agreement: Comparisons,
        guards: Guards,
    ) -> None:
        self.guards, self._on = guards, guards != "off"
        self.module, self._same_axes = module, frozenset(same_axes)
        self.placed = Placed(module)
        self.agreement: Comparisons | None = agreement
        self.watching, self.parts = tuple(watching), parts
        self.reducing = True
        self.calls = Calls(module, explanation)
        self._units = units
        self._entrances = Entrances(self._enter_backward)
        self._shared = SharedWeights(module, self._units, compares=guards == "always")
        self._backwards = Backwards(module, self._units, lambda: self.placed.parameters, refuses=self._on)
        self._hooks = GradientHooks(self._units, refuses=self._on)
        self.first_runs = FirstRuns(self._units)
        self.left_gradients = LeftGradients(module, self._units, refuses=self._on)
        self._ready = False
        self._backward = -1  # the number of the one that runs
        self._outside: dict[nn.Module, ExitStack] = {}
        self._guarded: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.whole = applied(module).whole
        self._names = {unit: name for name, unit in module.named_modules()}
        self._install()

    def _install(self) -> None:
        module: Any = self.module
        enter_by(module, functools.partial(self._enter, module._call_impl))
        self.calls.install(explained=self._on)
        if self._units.modules:
            module._is_fsdp_managed_module = True  # by which transformers' generate knows that ranks must go in step
        self._shared.free_before_training(self.reshard)
        _LIVING[next(_NUMBERS)] = self
        while_lives(self, "steps", functools.partial(before_steps, _before_every_step))
        if self._on or self._units.modules:  # a backward that comes into a unit by another way than its outputs
            while_lives(
                self,
                "backwards",
                functools.partial(check_backwards, refuse_reduced, _before_every_backward, _after_failures),
            )
        if self._on:
            one_process(self, _inside)

        for unit in self._units.modules:
            unit.register_forward_pre_hook(self._before_unit, prepend=True)
            unit.register_forward_hook(self._after_unit, always_call=True)
        self._units.watch(self.expect_end)
        self._mark()

    def check_parameters(self) -> None:
        """Refuse parameters that the plan did not place."""
        self._units.hide()
        if self._on:
            self.placed.check(self._units.shards)

    # Forward

    def _enter(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one call of the module, by ``forward`` or by a method, its hooks and the passes' inside."""
        if self.calls.depth or in_backward():
            return self.calls.explained(inner, args, kwargs)
        self.calls.depth += 1
        try:
            gathers = bool(self._units.modules) or self.first_runs.mixing is not None
            with _outside_inference_mode() if gathers else nullcontext(), _parts_called():
                self._before_forward(args, kwargs)
                run = self.calls.explained
                if self.first_runs.wait:
                    run = functools.partial(self.first_runs.run, run)
                if not self._units.modules and torch.is_grad_enabled():
                    self._entrances.opens(self.module)
                output = None
                try:
                    output = run(inner, args, kwargs)
                except Exception:
                    self._failed()
                    raise
                finally:
                    if not self._units.modules:
                        self._entrances.closes(self.module, output)
                self._returned(output)
                self.check_parameters()
                if torch.is_grad_enabled():
                    self._after_forward(output)
                    self._shared.trained()
                else:
                    self._shared.evaluated(output)
                return output
        finally:
            self._units.hide()  # outside of the door parameters are shards
            self.calls.leave()

    @eager
    def _before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        reads_of(self.module).check("the module")
        self._unwind()
        if not self._ready:
            name = next((name for name, parameter in self.module.named_parameters() if parameter.is_meta), None)
            if name is not None:
                raise MeshparError(
                    f"{name} has no values yet; call par.materialize(seed=...) or (weights=...) before the first "
                    "forward"
                )
            self._ready = True
        self._mark()
        self.check_parameters()
        # Parameters that an earlier forward left gathered may be older than the last step: any code may have changed
        # the shards since.
        if not self._shared.serve(self.agreement):
            self._units.reshard()
        self._entrances.begin()
        self._shared.begin(reducing=self.reducing)
        if torch.is_grad_enabled():
            self.left_gradients.refuse()
        for guard in self.watching:
            guard.before_forward(args, kwargs)

    @eager
    def _failed(self) -> None:
        for guard in reversed(self.watching):
            with suppress(Exception):  # of ranks that do not come; the error of the call is the one to tell
                guard.after_error()
        if not torch.is_grad_enabled():
            self._shared.failed()

    @eager
    def _returned(self, output: object) -> None:
        for guard in reversed(self.watching):
            guard.after_forward(output)

    @eager
    def _before_unit(self, unit: nn.Module, args: object) -> None:
        if torch.is_inference_mode_enabled():  # a method of the module's own may have entered it
            stack = ExitStack()
            stack.enter_context(_outside_inference_mode())
            self._outside[unit] = stack
        if not self.calls.depth and not in_backward():
            make_ready(self.module)
            self._units.reshard()
            self._entrances.begin()
            self._shared.begin(reducing=self.reducing)
        self._units.show(unit)
        for guard in self.watching:
            guard.before_unit(self._names[unit], unit)
        if torch.is_grad_enabled() and not in_backward():
            self._units.runs(unit)
            self._entrances.opens(unit)

    def _mark(self) -> None:
        """Mark the shards, and average gradients that reach them from outside of a call, as by ``full_tensor()``."""
        for parameter in self._units.mark():
            average_outside(parameter, self._same_axes, functools.partial(self._reached_outside, parameter))

    def _reached_outside(self, parameter: nn.Parameter) -> None:
        self.expect_end()
        self._units.use(parameter)

    @eager
    def _after_unit(self, unit: nn.Module, args: object, output: object) -> None:
        if torch.is_grad_enabled() and not isinstance(output, Tensor):
            gather_before_backward(unit, output, _trained(output))
        if not in_backward():
            self._entrances.closes(unit, output)
        if (stack := self._outside.pop(unit, None)) is not None:
            stack.close()
        if unit is not self.module:
            self._units.hide(unit)  # outside of it nobody sees that its weights are used, and they may be freed before

    @eager
    def _after_forward(self, output: object) -> None:
        forward, tensors = self._backwards.after_forward(), _trained(output)
        begin = functools.partial(self._begin_backward, forward)
        for tensor in tensors:
            tensor.register_hook(begin)

    # Backward

    def before_backward(self, roots: list[Any]) -> None:
        """Check a backward, of any model, that is about to run from ``roots``, tensors or nodes."""
        if in_backward():
            return
        self.left_gradients.forget_cleared()
        if self._shared.kept:  # since an evaluation, whose weights may have been swapped back
            self._units.reshard()  # of this rank alone: the ranks still ask
        reaches = functools.cache(functools.partial(self._entrances.reached, roots))
        if self._units.modules:
            self._units.expect(self._entrances.look(roots))
            if self._on and (self._backwards.turned or self._backwards.written) and reaches():
                self._backwards.refuse_changed()
        for guard in self.watching:
            guard.before_backward(roots, reaches=reaches)

    def _begin_backward(self, forward: Forward, grad: Tensor) -> None:
        """Look at a backward that reaches an output of the module, and see that its end is noticed."""
        if self._backwards.begin(forward):
            self._units.show()
        self.expect_end()

    def _enter_backward(self, unit: nn.Module) -> None:
        """Gather a unit for a backward that comes into it by a loss that a block keeps, not by its outputs."""
        if self._on:
            refuse_second_order()
        self.expect_end()
        self._units.enters_backward(unit)
        self._units.show(unit)

    def expect_end(self) -> None:
        """Run :meth:`_end_backward` when the backward that runs now ends."""
        if self._backward == -1:
            self._backward = backward()
            self._hooks.begin_backward()
            at_end_of_backward(self._end_backward)

    def _unwind(self) -> None:
        """Wind up a backward that an error ended; the gradients that it left are refused until somebody clears them."""
        begun = self._backward != -1 or self._units.in_backward()  # it came by FSDP2's hook, and no further
        if not begun or in_backward():
            return
        self._close_backward()
        self._units.unwind()
        self.left_gradients.leave(by_error=True)
        self._backwards.fail()

    def _close_backward(self) -> None:
        self._backward = -1
        self.first_runs.end_backward()
        self._backwards.close()

    def _end_backward(self) -> None:
        self._close_backward()
        if (name := self._units.take_lost()) is not None and self._on:
            raise MeshparError(
                f"{name} was written in a backward, by a hook; write after it, outside of the module's calls"
            )
        self._backwards.end()
        if self._units.modules and not (self.reducing and self._units.reduces()):
            self._hooks.refuse_unreduced()
            return
        self._shared.end_step()
        unused = self._units.take_filled() + ([] if self.whole is None else self.whole.reduce())
        held = self.module.parameters() if self._units.modules else self.placed.parameters
        if self.agreement is not None and any(parameter.grad is not None for parameter in held):
            self.agreement.gradients(unused)
        self._hooks.refuse_unused(unused)
        self._hooks.run()
        for guard in self.watching:
            guard.after_backward()

    # Step

    def _before_step(self, optimizer: Optimizer) -> Optimizer:
        """Check a step; return what steps: ``optimizer``, or for Adafactor what knows norms of shards."""
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        own = {id(parameter) for parameter in (*self.module.parameters(), *self._units.shards())}
        trains = any(id(parameter) in own for parameter in held)
        if trains:  # else another model's, which another thread may train while this one is in its backward
            self._unwind()
            if not in_backward():  # whose recomputations read what is registered now
                self.check_parameters()
        for guard in self.watching:
            guard.before_step(optimizer, trains=trains)
        if not trains:
            return optimizer
        self._backwards.step()
        self._entrances.step()
        self.left_gradients.refuse()
        if optimizer not in self._guarded:
            self._guarded.add(optimizer)
            guard_optimizer(optimizer, of_some_layers=bool(applied(self.module).elsewhere))
        if isinstance(optimizer, torch.optim.Adafactor) and any(sharded_axes(parameter) for parameter in held):
            return adafactor_on(optimizer, adafactor_by_parts)
        return optimizer

    def leave_step(self, *, by_error: bool = False) -> None:
        """Remember that a step was left before its gradients were reduced, until somebody clears gradients.

        Args:
            by_error: ranks may have different parts of the gradients.
        """
        if self._units.modules or by_error:
            self.left_gradients.leave(by_error=by_error)

    def reshard(self) -> None:
        """Let go of gathered parameters, so that the module's parameters are the shards, which are what is trained
        and saved.
        """
        self._unwind()
        if not self.calls.depth and not in_backward():
            self._units.reshard()


def _inside() -> bool:
    return any(cycle.calls.depth for cycle in list(_LIVING.values()))


def _before_every_backward(roots: list[Any]) -> None:
    for cycle in list(_LIVING.values()):
        cycle.before_backward(roots)


def _after_failures() -> None:
    for cycle in list(_LIVING.values()):
        cycle._unwind()


_LIVING: weakref.WeakValueDictionary[int, Cycle] = weakref.WeakValueDictionary()
"""Those of all parallel modules, in the order in which plans made them, which is the same on every rank."""
_NUMBERS = itertools.count()


def _before_every_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Check a step of any optimizer, and let it step by what can."""
    if isinstance(optimizer, AdafactorOn):  # whose class may call the step of a base
        return None
    instead = [steps for cycle in list(_LIVING.values()) if (steps := cycle._before_step(optimizer)) is not optimizer]
    return ((instead[0], *args[1:]), kwargs) if instead else None


@contextmanager
def _parts_called() -> Iterator[None]:
    """Let torch's attention and encoder layers call their parts in evaluation, not a fused kernel."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _trained(output: object) -> list[Tensor]:
    return [leaf for leaf in leaves(output, objects=True) if isinstance(leaf, Tensor) and leaf.requires_grad]


@contextmanager
def _outside_inference_mode() -> Iterator[None]:
    """Run without gradients instead of in inference mode, whose tensors no later backward could use."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        yield
