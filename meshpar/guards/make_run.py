"""Make the run of a module on which the passes ran: its mechanisms, guards in order, explanations and trials."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import reduce
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from meshpar._torch.calls import eager
from meshpar.core import registry, runtime
from meshpar.core.passes import Installed, Role, find_blocks
from meshpar.exchange.ranks import Ranks, stages_of
from meshpar.guards import own_guards
from meshpar.guards.explain import Explanation
from meshpar.guards.operators import one_process
from meshpar.passes.pipeline.running import Layers
from meshpar.passes.pipeline.stand_ins import is_idle
from meshpar.passes.tensor.context import Context
from meshpar.passes.tensor.random import draws_random
from meshpar.same_bits.dropout import DrawsBySample, DrawsNothing
from meshpar.same_bits.gradients import TreeOfGradients, join_input_gradients
from meshpar.same_bits.trees import SameBits
from meshpar.state.full import OptimizerStates, refuse_copies
from meshpar.step.forward import Run, inside_a_call
from meshpar.step.inner_calls import installed
from meshpar.step.moment import Guarded, MakesGuards, Moment
from meshpar.step.outside_gradients import GradientHooks, LeftGradients, UnusedGradients
from meshpar.trials.engine import report
from meshpar.trials.experts import watch_experts
from meshpar.trials.positions import MixingTest
from meshpar.trials.split import SplitTest, split_test


def make_run(guarded: Guarded, installed: Sequence[Installed], *, title: str, verify: bool) -> Run:
    """Return the run of a module; ``verify``: try in the first forward what passes divide. Collective."""
    module, resolved, facts = guarded.module, guarded.resolved, guarded.facts
    by_tree = facts.find(SameBits)
    if not (resolved.passes or by_tree or registry.names(registry.GUARDS)) and dist.get_world_size() == 1:
        return Run(guarded, ())
    left_gradients = LeftGradients(module, guarded.units)
    facts.add([left_gradients])
    moments: list[Moment] = [left_gradients, *(moment for of_pass in installed for moment in of_pass.moments)]
    moments += [GradientHooks(guarded.units)] if guarded.units.modules else []
    moments += [OptimizerStates(of_some_layers=bool(resolved.divided(Role.LAYERS)))]
    if by_tree is not None:
        layers = facts.find(Layers)
        chunk, is_last = (lambda: 0, lambda: True) if layers is None else (layers.chunk, layers.is_last)
        moments.append(TreeOfGradients(module, guarded.units, by_tree, chunk, is_last))
        join_input_gradients(map(module.get_submodule, resolved.blocks))
        facts.add(moments[-1:])
        if resolved.layout.dropout or draws_random(module):
            axes, here = resolved.held.axes, resolved.held.coordinates(dist.get_rank())
            data_rank = reduce(lambda rank, axis: rank * axes[axis] + here[axis], resolved.averaged, 0)
            moments.append(DrawsBySample(module, resolved.blocks, guarded.device, data_rank, by_tree.ranks))
            if layers is not None:
                layers.edges.by_sample = True
        elif layers is None:  # stages look themselves
            moments.append(DrawsNothing(module, guarded.device))
    trials = explain = None
    if guarded.guards == "off":
        compares = resolved.reduced and dist.get_world_size() > 1
        moments.append(UnusedGradients(module, Ranks.of(module, stages_of(resolved)) if compares else None))
    else:
        first, last = own_guards(guarded)
        trials = FirstRuns(guarded) if verify else None
        # Sorted: what guards exchange comes in this order, on hosts where packages were installed in another one, too.
        names = sorted(registry.names(registry.GUARDS))
        makers: list[MakesGuards] = [registry.plugin(registry.GUARDS, name) for name in names]
        of_packages = [guard for make in makers for guard in make(guarded)]
        moments += [*first, *of_packages, *last, *([] if trials is None else [trials])]
        data_pass = resolved.data_pass
        unit_pass, features = None if data_pass is None else data_pass.name, facts.find(Context)
        if features is not None and features.parts == 1:
            features = None
        explain = Explanation(module, title, features=features, unit_pass=unit_pass).explained
    standing = (runtime.standing_in(moment) for moment in moments)
    present = tuple(moment for moment in standing if moment is not None)
    run = Run(guarded, present, explain=explain, first_runs=trials)
    if guarded.guards != "off":
        one_process(run, inside_a_call)
        _check_calls(run)
    refuse_copies(module, patch=guarded.guards != "off")
    for of_pass in installed:
        for put_around in of_pass.outermost:
            put_around()
    return run


def _check_calls(run: Run) -> None:
    """Check the calls of the inner modules from outside of the model."""
    module, resolved = run.module, run.resolved
    own_parts = [item for item in registry.called_parts(module) if any(True for _ in item[1].parameters())]
    parts = dict([*own_parts, *find_blocks(module, resolved.layout)])
    enter = "call the module, or a method by par.register_method(name)"
    if resolved.splits_sequence:
        why = (
            f"it would treat this rank's positions as the whole sequence; {enter}, or use "
            "TensorParallel(sequence_parallel=False)"
        )
        run.calls.only_inside(parts, why)
    elif (layers := run.find(Layers)) is not None:
        stand_ins = {name: part for name, part in module.named_modules() if getattr(part, "stands_in", False)}
        called = {name: part for name, part in {**parts, **stand_ins}.items() if not any(map(is_idle, part.modules()))}
        why = f"this rank has some of the layers; {enter}"
        layers.edges.outside = run.calls.only_inside(called, why, entered=layers.edges.portion.rules)
    elif resolved.data_pass is not None:
        why = f"its weights are gathered with those of a larger unit; {enter}, or name it in the pass's blocks"
        run.calls.only_inside({name: part for name, part in parts.items() if not isinstance(part, FSDPModule)}, why)
    run.calls.explain_parts(part for part in parts.values() if any(True for _ in part.children()))


@final
class FirstRuns(Moment):
    """The tests that wait for the first forwards of one module: of split blocks, and of other batches."""

    def __init__(self, guarded: Guarded) -> None:
        module, resolved, self._units = guarded.module, guarded.resolved, guarded.units
        self.split: SplitTest | None = split_test(module, resolved.blocks, guarded.device, guarded.facts)
        self.mixing: MixingTest | None = None
        changes = installed(module)
        # it runs the model on other batches, which a stage cannot do alone
        if changes is not None and changes.exchange is not None and not resolved.divided(Role.LAYERS):
            self.mixing = MixingTest(module, changes.exchange, resolved.blocks)
        watch_experts(module, resolved.layout, guarded.facts)
        self._eager = ExitStack()

    @property
    def wait(self) -> bool:
        """A test waits for the next forward."""
        return self.split is not None or self.mixing is not None

    @property
    def leaves_inference_mode(self) -> bool:
        """The next forward runs on other batches, too, whose tensors must be plain ones."""
        return self.mixing is not None

    @eager
    def run(self, forward: Callable[..., Any], inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return ``forward(inner, args, kwargs)``, and run the tests that wait for it."""
        if self.mixing is not None:
            self.mixing.run(inner, args, kwargs)
            self.mixing = None
        if not torch.is_grad_enabled() or self.split is None:
            return forward(inner, args, kwargs)
        test, self.split = self.split, None
        self._eager.enter_context(test.eagerly())
        with test.watch():
            output = forward(inner, args, kwargs)
        test.returned(output)
        self._units.reshard()
        report(test.run())
        return output

    def close_backward(self) -> None:
        """Let what ran eagerly for a test be compiled again."""
        self._eager.close()
