"""The order in which a rank runs the forwards and backwards of a step's micro-batches, as data.

A new schedule is a name in ``Schedule`` and the number of forwards that it runs ahead, in ``actions``;
``tests/accelerator`` runs all of them by NCCL's rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, final, get_args

Schedule = Literal["gpipe", "1f1b"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)


@final
@dataclass(frozen=True, slots=True)
class Action:
    """One forward (``F``) or backward (``B``) of a micro-batch in one chunk of the rank's blocks."""

    kind: Literal["F", "B"]
    number: int
    chunk: int = 0


@lru_cache
def actions(schedule: str, rank: int, ranks: int, micro_batches: int, chunks: int = 1) -> tuple[Action, ...]:
    """Return what one rank runs, in order: GPipe (arXiv 1811.06965), or 1F1B (PipeDream-Flush, arXiv 2006.09503).

    1F1B runs a backward as soon as one may. With several chunks a rank it is interleaved (Megatron-LM, arXiv
    2104.04473). Backwards of a chunk run in the order of its forwards, in which one process adds up gradients.
    """
    forwards = [Action("F", number, chunk) for number, chunk in _in_groups(ranks, micro_batches, range(chunks))]
    backwards = [
        Action("B", number, chunk) for number, chunk in _in_groups(ranks, micro_batches, range(chunks - 1, -1, -1))
    ]
    interleaved = (chunks - 1) * max(_groups(ranks, micro_batches)) + 2 * (ranks - rank - 1)
    ahead = {"gpipe": len(forwards), "1f1b": ranks - rank - 1 if chunks == 1 else interleaved}[schedule]
    ahead = min(ahead, len(forwards))
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards):
        order += [forward, backward]
    return *order, *backwards[len(forwards) - ahead :]


def _in_groups(ranks: int, micro_batches: int, chunks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield micro-batches and chunks: those of a group in one chunk, then in the next one."""
    order, first = list(chunks), 0
    for size in _groups(ranks, micro_batches):
        for chunk in order:
            yield from ((number, chunk) for number in range(first, first + size))
        first += size


def _groups(ranks: int, micro_batches: int) -> list[int]:
    """Return numbers of micro-batches, as even as can be, of which none is below ``ranks`` where there are so many."""
    count = max(micro_batches // ranks, 1)
    return [micro_batches // count + (index < micro_batches % count) for index in range(count)]
