"""The guards of meshpar itself, a concern a file: a new one is a ``Guard`` (``step/moment.py``) in ``own_guards``."""

from __future__ import annotations

from meshpar.core.passes import Role
from meshpar.guards.agreement import Agreement
from meshpar.guards.backwards import Backwards, HookedGradients, Reentrant, UnfinishedSteps
from meshpar.guards.losses import WholeSequences
from meshpar.guards.optimizers import Optimizers
from meshpar.guards.placed_parameters import PlacedParameters, WrittenInForward
from meshpar.guards.stage_numbers import StageNumbers
from meshpar.step.moment import Guard, Guarded
from meshpar.step.outside_gradients import LeftGradients


def own_guards(guarded: Guarded) -> tuple[list[Guard], list[Guard]]:
    """Return meshpar's guards of a module, to run before and after those of other packages; none is an entry point."""
    left_gradients, divided = guarded.facts.find(LeftGradients), guarded.resolved.divided
    assert left_gradients is not None, "every plan with guards has it"
    placed = PlacedParameters(guarded)
    first: list[Guard] = [placed, UnfinishedSteps(left_gradients), Optimizers(guarded)]
    first += [StageNumbers(guarded)] if divided(Role.LAYERS) else []
    first += [WholeSequences(guarded)] if divided(Role.POSITIONS) else []
    first += [WrittenInForward(guarded), Reentrant()]
    hooked = [HookedGradients(guarded.units)] if guarded.units.modules else []
    return first, [Agreement(guarded), Backwards(guarded, placed), *hooked]
