"""Make the run of a module on which the passes ran: an ordered list of moments, those of the passes, then the guards.

Each file here is a concern of meshpar's own guards. A new one is a ``Guard`` (``step/moment.py``), such as
``WholeSequences``, in the list of ``_guards_of``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from meshpar.core import registry, runtime
from meshpar.core.errors import MeshparError
from meshpar.core.passes import Installed, Role, find_blocks
from meshpar.exchange.ranks import Ranks, stages_of
from meshpar.guards.agreement import Agreement
from meshpar.guards.backwards import Backwards, HookedGradients, Reentrant, UnfinishedSteps
from meshpar.guards.explain import Explanation
from meshpar.guards.operators import one_process
from meshpar.guards.optimizers import Optimizers
from meshpar.guards.placed_parameters import PlacedParameters, WrittenInForward
from meshpar.guards.stage_numbers import StageNumbers
from meshpar.passes.pipeline.running import Layers
from meshpar.passes.pipeline.stand_ins import is_idle
from meshpar.passes.tensor.context import Context
from meshpar.passes.tensor.random import draws_random
from meshpar.same_bits.dropout import DrawsBySample
from meshpar.same_bits.gradients import TreeOfGradients
from meshpar.same_bits.trees import SameBits
from meshpar.state.full import OptimizerStates, refuse_copies
from meshpar.step.forward import Run, inside_a_call
from meshpar.step.moment import GradientHooks, Guard, Guarded, LeftGradients, MakesGuards, Moment, UnusedGradients
from meshpar.tensors.digests import tensors_in
from meshpar.trials import FirstRuns


def make_run(guarded: Guarded, installed: Sequence[Installed], *, title: str, verify: bool) -> Run:
    """Return the run of a module; ``verify``: try in the first forward what passes divide. Collective."""
    module, resolved, facts = guarded.module, guarded.resolved, guarded.facts
    by_tree = facts.find(SameBits)
    if not (resolved.passes or by_tree or registry.names(registry.GUARDS)) and dist.get_world_size() == 1:
        return Run(guarded, ())
    left_gradients = LeftGradients(module, guarded.units)
    moments: list[Moment] = [left_gradients, *(moment for of_pass in installed for moment in of_pass.moments)]
    moments += [GradientHooks(guarded.units)] if guarded.units.modules else []
    moments += [OptimizerStates(of_some_layers=bool(resolved.divided(Role.LAYERS)))]
    if by_tree is not None:
        layers = facts.find(Layers)
        moments.append(TreeOfGradients(guarded, by_tree.ranks, layers))
        facts.add(moments[-1:])
        declared = resolved.layout.dropout or draws_random(module)
        if declared or layers is None:  # stages refuse undeclared draws themselves
            rank = resolved.held.index(resolved.held.coordinates(dist.get_rank()), resolved.averaged)
            moments.append(DrawsBySample(guarded, rank, by_tree.ranks, declared=declared))
        if layers is not None:
            layers.edges.by_sample = declared
    trials = explain = None
    ranks = Ranks.of(module, stages_of(resolved)) if resolved.reduced or guarded.guards != "off" else None
    facts.add([ranks])
    moments.append(UnusedGradients(module, ranks if resolved.reduced else None, guarded.device, guarded.guards))
    if guarded.guards != "off":
        trials = FirstRuns(guarded) if verify else None
        moments += [*_guards_of(guarded, left_gradients), *([] if trials is None else [trials])]
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


def _guards_of(guarded: Guarded, left_gradients: LeftGradients) -> list[Guard]:
    """Return the guards of a module: meshpar's, and between them those of other packages, none of ours among these."""
    divided, placed = guarded.resolved.divided, PlacedParameters(guarded)
    guards: list[Guard] = [placed, UnfinishedSteps(left_gradients), Optimizers(guarded)]
    guards += [StageNumbers(guarded)] if divided(Role.LAYERS) else []
    guards += [WholeSequences(guarded)] if divided(Role.POSITIONS) else []
    guards += [WrittenInForward(guarded), Reentrant()]
    # Sorted: what guards exchange comes in this order, on hosts where packages were installed in another one, too.
    for name in sorted(registry.names(registry.GUARDS)):
        make: MakesGuards = registry.plugin(registry.GUARDS, name)
        guards += make(guarded)
    guards += [Agreement(guarded), Backwards(guarded, placed)]
    return guards + ([HookedGradients(guarded.units)] if guarded.units.modules else [])


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
class WholeSequences(Guard):
    """Refuse labels that a model would shift, and batches that did not go through ``par.split``."""

    def __init__(self, guarded: Guarded) -> None:
        self._forward, self._lengths = type(guarded.module).forward, guarded.lengths

    def before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        named = dict(zip(inspect.signature(self._forward).parameters, (None, *args))) | dict(kwargs)
        if any(named.get(argument) is not None for argument in ("labels", "shift_labels")):
            raise MeshparError(
                "the module got labels, but each rank has only a part of the positions: a model that shifts labels "
                "loses one label at the end of each part, and its mean covers the part alone; compute the sum of the "
                "loss from the logits and aligned labels, and multiply it by par.token_scale"
            )
        ids = (tensor for tensor in tensors_in((args, kwargs)) if tensor.ndim == 2 and not tensor.is_floating_point())
        length = next((tensor.shape[1] for tensor in ids), None)
        if self._lengths and length is not None and length not in self._lengths:
            raise MeshparError(
                f"the module got {length} positions, and par.split gave parts of {sorted(self._lengths)}: pass every "
                "batch through par.split, also in evaluation"
            )
