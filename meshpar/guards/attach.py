"""Make the run of a module on which the passes ran: its mechanisms, its guards in their order, what explains errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshpar.core import registry, runtime
from meshpar.core.passes import Installed, Role, find_blocks
from meshpar.exchange.ranks import Ranks, stages_of
from meshpar.guards import own_guards
from meshpar.guards.explain import Explanation
from meshpar.guards.operators import one_process
from meshpar.passes.pipeline.stand_ins import is_idle
from meshpar.passes.tensor.context import Context
from meshpar.state.full import OptimizerStates, refuse_copies
from meshpar.step.gradients import GradientHooks, LeftGradients, UnusedGradients
from meshpar.step.moment import Guarded, Moment, guards_of
from meshpar.step.run import Run, inside_a_call
from meshpar.trials.first_runs import FirstRuns


def make_run(guarded: Guarded, installed: Sequence[Installed], *, title: str, verify: bool) -> Run:
    """Return the run of a module; ``verify``: try in the first forward what passes divide. Collective."""
    module, resolved, facts = guarded.module, guarded.resolved, guarded.facts
    if not resolved.passes and dist.get_world_size() == 1 and not registry.names(registry.GUARDS):
        return Run(guarded, ())
    left_gradients = LeftGradients(module, guarded.units)
    facts.add([left_gradients])
    moments: list[Moment] = [left_gradients, *(moment for of_pass in installed for moment in of_pass.moments)]
    moments += [GradientHooks(guarded.units)] if guarded.units.modules else []
    moments += [OptimizerStates(of_some_layers=bool(resolved.divided(Role.LAYERS)))]
    if guarded.guards == "off":
        compares = resolved.reduced and dist.get_world_size() > 1
        moments.append(UnusedGradients(module, Ranks.of(module, stages_of(resolved)) if compares else None))
        run = Run(guarded, _standing_in(moments))
    else:
        first, last = own_guards(guarded)
        trials = runtime.standing_in(FirstRuns(guarded)) if verify else None
        moments += [*first, *guards_of(guarded), *last, *([] if trials is None else [trials])]
        run = Run(guarded, _standing_in(moments), explanation=_explanation(guarded, title), first_runs=trials)
        one_process(run, inside_a_call)
        _check_calls(run)
    refuse_copies(module, patch=guarded.guards != "off")
    for of_pass in installed:
        for put_around in of_pass.outermost:
            put_around()
    return run


def _explanation(guarded: Guarded, title: str) -> Explanation:
    unit_pass = guarded.resolved.data_pass
    features = guarded.facts.find(Context) if guarded.resolved.divided(Role.FEATURES) else None
    name = None if unit_pass is None else unit_pass.name
    return Explanation(guarded.module, title, features=features, unit_pass=name)


def _standing_in(moments: Sequence[Moment]) -> tuple[Moment, ...]:
    standing = (runtime.standing_in(moment) for moment in moments)
    return tuple(moment for moment in standing if moment is not None)


def _check_calls(run: Run) -> None:
    """Check the calls of the inner modules from outside of the model."""
    module, resolved = run.module, run.resolved
    parts = dict([*_parts(module), *find_blocks(module, resolved.layout)])
    enter = "call the module, or a method by par.register_method(name)"
    if resolved.splits_sequence:
        why = (
            f"it would treat this rank's positions as the whole sequence; {enter}, or use "
            "TensorParallel(sequence_parallel=False)"
        )
        run.calls.only_inside(parts, why)
    elif resolved.divided(Role.LAYERS):
        stand_ins = {name: part for name, part in module.named_modules() if getattr(part, "stands_in", False)}
        called = {name: part for name, part in {**parts, **stand_ins}.items() if not any(map(is_idle, part.modules()))}
        run.calls.only_inside(called, f"this rank has some of the layers; {enter}")
    elif resolved.data_pass is not None:
        why = f"its weights are gathered with those of a larger unit; {enter}, or name it in the pass's blocks"
        run.calls.only_inside({name: part for name, part in parts.items() if not isinstance(part, FSDPModule)}, why)
    run.calls.explain_parts(part for part in parts.values() if any(True for _ in part.children()))


def _parts(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that the outermost one calls, also those in its lists."""
    for inner, child in module.named_children():
        full = f"{name}.{inner}" if name else inner
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _parts(child, full)
        elif any(True for _ in child.parameters()):
            yield full, child
