"""When the guards of a plan compare: the one setting that all of them follow."""

from __future__ import annotations

from typing import Literal

from meshpar.core.errors import PlanError

Guards = Literal["always", "first", "off"]
"""``always``: guards compare in every step, beside an accelerator in the first ones and then without waiting.
``first``: they exchange in the first steps, and then compare only what costs no exchange. ``off``: the passes run
alone.
"""
SETTINGS = ("always", "first", "off")


def check_guards(guards: object) -> None:
    """Raise PlanError for a value that is no setting of the guards."""
    if guards not in SETTINGS:
        raise PlanError(
            [f"guards={guards!r} is not known; expected one of {', '.join(map(repr, SETTINGS))}: write guards='first'"]
        )
