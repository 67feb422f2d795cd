"""The weight rule for tensors that are stored one by one and kept stacked: a model's experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch

from meshpar.errors import LayoutError
from meshpar.views import Spans, View


@final
@dataclass(frozen=True, slots=True)
class Unstack:
    """One of ours is several of theirs, stacked along ``dim``: theirs have that dim no more.

    Each ``*`` carries over in order, as in the other rules; the numbers of the parts are written out.
    """

    ours: str
    theirs: tuple[str, ...]
    dim: int = 0
    kind: ClassVar[str] = "unstack"

    def __post_init__(self) -> None:
        if not self.theirs or len({pattern.count("*") for pattern in (self.ours, *self.theirs)}) > 1:
            raise LayoutError(f"{self}: expected one part or more, and the same number of '*' in every pattern")

    def forward(self, views: Sequence[View]) -> Sequence[View]:
        """Return the parts of one stacked tensor."""
        (whole,) = views
        if len(whole.shape) <= self.dim or whole.shape[self.dim] != len(self.theirs):
            raise LayoutError(f"{self} needs {len(self.theirs)} parts along dim {self.dim}; got a tensor of shape {whole.shape}")
        return [_selected(whole, self.dim, place) for place in range(len(self.theirs))]

    def backward(self, views: Sequence[View]) -> Sequence[View]:
        """Return the stacked tensor."""
        if len({(view.shape, view.dtype) for view in views}) > 1:
            raise LayoutError(f"{self} needs parts of one shape and dtype; got {[(view.shape, view.dtype) for view in views]}")
        return [_stacked(views, self.dim)]


def _selected(of: View, dim: int, place: int) -> View:
    def read(spans: Spans, out: torch.Tensor) -> None:
        of.read((*spans[:dim], (place, place + 1), *spans[dim:]), out.unsqueeze(dim))

    return View((*of.shape[:dim], *of.shape[dim + 1 :]), of.dtype, read)


def _stacked(parts: Sequence[View], dim: int) -> View:
    shape = parts[0].shape

    def read(spans: Spans, out: torch.Tensor) -> None:
        first, last = spans[dim]
        rest = (*spans[:dim], *spans[dim + 1 :])
        for place in range(first, last):
            parts[place].read(rest, out.select(dim, place - first))

    return View((*shape[:dim], len(parts), *shape[dim:]), parts[0].dtype, read)
