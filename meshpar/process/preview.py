"""``meshpar plan --script``: a script runs in this one process, up to where it puts models on a mesh."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """A model that a script puts on a mesh, and the first of ``micro_batches`` micro-batches of a step, if known."""

    name: str
    plan: Any
    module: Any
    layout: Any = None
    batch: Any = None
    micro_batches: int = 1


@final
class EndOfPreview(BaseException):
    """Raised where a script of a preview puts models on a mesh; no Exception, so that no library handles it."""

    def __init__(self, *models: PlannedModel) -> None:
        super().__init__("the script puts models on a mesh here")
        self.models = models


_RANKS = ContextVar[tuple[int | None, int] | None]("ranks of a preview", default=None)


@contextmanager
def previewing(ranks: int | None, node: int) -> Iterator[None]:
    """Run a script in the block for ``ranks``; None: those of its plan's mesh, or of a node where it does not say."""
    before = _RANKS.set((ranks, node))
    try:
        yield
    finally:
        _RANKS.reset(before)


def is_preview() -> bool:
    """Return whether a script runs for its plan alone."""
    return _RANKS.get() is not None


def planned_ranks(mesh_size: int | None, world_size: int) -> int:
    """Return for how many ranks a plan is: in a preview not for those of this process."""
    if (preview := _RANKS.get()) is None:
        return world_size
    ranks, node = preview
    return ranks or mesh_size or node
