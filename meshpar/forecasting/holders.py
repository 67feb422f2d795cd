"""Whose a piece of memory is, told from where it was made and how long it lived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final


@final
@dataclass(slots=True, kw_only=True)
class Storage:
    """One piece of memory that the recorder watches.

    Attributes:
        size: bytes now.
        holder: whose it is, where that is known; empty: to be told from the rest.
        stream: on which it was made.
        phase: number of the phase in which it was made, -1 before the step.
        born, died: indices of the events; -1: it lives on.
        recomputed: made while a block's forward ran again.
        outside: made outside of every block.
        after_blocks: made when a block had run in this phase.
        resized: emptied and filled again: the way in which FSDP2 keeps gathered parameters.
        reference: keeps the watch.
    """

    size: int
    holder: str
    stream: str
    phase: int
    born: int
    recomputed: bool
    outside: bool
    after_blocks: bool
    reference: Any
    died: int = -1
    resized: bool = False


def holder(storage: Storage, phases: Sequence[tuple[str, int]]) -> str:
    """Return whose a storage is that nobody claimed."""
    if storage.resized or storage.stream != "compute":
        return "gathered"
    name = phases[storage.phase][0]
    ends = phases[storage.phase + 1][1] if storage.phase + 1 < len(phases) else None
    outlives = storage.died < 0 or (ends is not None and storage.died >= ends)
    if name == "forward":
        if storage.outside and storage.after_blocks:
            return "logits and loss"
        return "activations" if outlives else "temporaries"
    if name == "backward":
        if storage.outside and not storage.after_blocks:
            return "logits and loss"
        return "recomputed" if storage.recomputed else "temporaries"
    return "temporaries"
