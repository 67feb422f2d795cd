"""The order in which a stage runs the forwards and backwards of a step's micro-batches, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final, get_args

Schedule = Literal["gpipe", "1f1b"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)


@final
@dataclass(frozen=True, slots=True)
class Action:
    """One forward or backward of a micro-batch.

    Attributes:
        kind: ``F`` or ``B``.
        number: of the micro-batch.
    """

    kind: Literal["F", "B"]
    number: int


def actions(schedule: str, rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """Return what one stage runs, in order.

    GPipe (arXiv 1811.06965) runs all forwards, then all backwards. 1F1B (PipeDream-Flush, arXiv 2006.09503) runs a
    backward after each forward as soon as one may: a stage holds the activations of at most ``ranks`` - ``rank``
    micro-batches. Backwards run in the order of their forwards, in which one process adds up gradients.
    """
    ahead = micro_batches if schedule == "gpipe" else min(ranks - rank - 1, micro_batches)
    found = [Action("F", number) for number in range(ahead)]
    for number in range(ahead, micro_batches):
        found += [Action("F", number), Action("B", number - ahead)]
    return found + [Action("B", number) for number in range(micro_batches - ahead, micro_batches)]
