"""The guards of one parallel module that meshpar itself has, a concern a file."""

from __future__ import annotations

from meshpar._torch.units import Units
from meshpar.core.guards import Guard, Guarded
from meshpar.core.passes import Role
from meshpar.guards.buffers import RecomputedBuffers
from meshpar.guards.optimizers import Optimizers
from meshpar.guards.reentrant import Reentrant
from meshpar.guards.stage_numbers import StageNumbers
from meshpar.guards.whole_sequences import WholeSequences
from meshpar.guards.written_parameters import WrittenInForward


def own_guards(guarded: Guarded, units: Units) -> tuple[Guard, ...]:
    """Return meshpar's own guards of a module. They are no entry points: an installation that is older than the source
    would leave them out without a word.

    Args:
        guarded: the module.
        units: of the module.
    """
    positions = (WholeSequences(guarded),) if guarded.resolved.divided(Role.POSITIONS) else ()
    stages = (StageNumbers(guarded, units),) if guarded.resolved.divided(Role.LAYERS) else ()
    return (
        RecomputedBuffers(guarded),
        Optimizers(guarded),
        *stages,
        *positions,
        WrittenInForward(guarded, units),
        Reentrant(),
    )
