"""The guards of one parallel module that meshpar itself has, a concern a file."""

from __future__ import annotations

from meshpar.core.guards import Guard, Guarded
from meshpar.exact.guards import buffers, optimizers, positions, whole


def own_guards(guarded: Guarded) -> tuple[Guard, ...]:
    """Return meshpar's own guards of a module. They are no entry points: an installation that is older than the source
    would leave them out without a word.
    """
    return tuple(guard for home in (buffers, optimizers, positions, whole) for guard in home.guards(guarded))
