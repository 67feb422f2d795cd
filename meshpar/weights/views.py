"""Tensors made of other tensors and read piece by piece: what the rules of a weight map build."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import torch

from meshpar.errors import LayoutError

Spans: TypeAlias = tuple[tuple[int, int], ...]
"""(start, stop) along every dim of a tensor."""


@final
@dataclass(frozen=True, slots=True)
class View:
    """A tensor that is not in memory.

    Attributes:
        shape: its shape.
        dtype: its dtype; None where the source does not tell.
        read: copies the piece at ``spans`` into a tensor of the piece's shape, casting to its dtype.
        origin: the source's name of the tensor that this one is, whole and unchanged; None where it is made of others.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    read: Callable[[Spans, torch.Tensor], None]
    origin: str | None = None


def spans_of(index: Sequence[slice], shape: tuple[int, ...]) -> Spans:
    """Return (start, stop) along every dim; raises LayoutError for a step, or for more slices than dims."""
    if len(index) > len(shape) or any(each.step not in (None, 1) for each in index):
        raise LayoutError(f"expected at most {len(shape)} slices without a step for the shape {shape}, got {tuple(index)}")
    full = (*index, *(slice(None) for _ in shape[len(index) :]))
    bounds = [each.indices(size)[:2] for each, size in zip(full, shape)]
    return tuple((start, max(start, stop)) for start, stop in bounds)


def transposed(of: View) -> View:
    """Exchange the last two dims."""

    def read(spans: Spans, out: torch.Tensor) -> None:
        of.read((*spans[:-2], spans[-1], spans[-2]), out.mT)

    return View((*of.shape[:-2], of.shape[-1], of.shape[-2]), of.dtype, read)


def narrowed(of: View, dim: int, start: int, length: int) -> View:
    """Take ``length`` rows from ``start`` along ``dim``."""

    def read(spans: Spans, out: torch.Tensor) -> None:
        low, high = spans[dim]
        of.read(_put(spans, dim, low + start, high + start), out)

    return View(_put(of.shape, dim, length), of.dtype, read)


def joined(parts: Sequence[View], dim: int) -> View:
    """Put the parts, alike but for their length along ``dim``, one after another."""

    def read(spans: Spans, out: torch.Tensor) -> None:
        start, stop = spans[dim]
        offset = 0
        for part in parts:
            low, high = max(start, offset), min(stop, offset + part.shape[dim])
            if low < high:
                part.read(_put(spans, dim, low - offset, high - offset), out.narrow(dim, low - start, high - low))
            offset += part.shape[dim]

    return View(_put(parts[0].shape, dim, sum(part.shape[dim] for part in parts)), parts[0].dtype, read)


def permuted(of: View, dim: int, outer: int, inner: int, unit: int) -> View:
    """See every block of rows along ``dim`` as (outer, inner, unit) and exchange outer and inner; reads whole blocks."""
    block = outer * inner * unit

    def read(spans: Spans, out: torch.Tensor) -> None:
        start, stop = spans[dim]
        low, high = start // block * block, -(-stop // block) * block
        rows = out.new_empty(_put(tuple(b - a for a, b in spans), dim, high - low))
        of.read(_put(spans, dim, low, high), rows)
        blocks = rows.unflatten(dim, (-1, outer, inner, unit))
        out.copy_(blocks.transpose(dim + 1, dim + 2).flatten(dim, dim + 3).narrow(dim, start - low, stop - start))

    return View(of.shape, of.dtype, read)


def selected(of: View, dim: int, place: int) -> View:
    """Return the view without ``dim``, at one ``place`` of it."""

    def read(spans: Spans, out: torch.Tensor) -> None:
        of.read((*spans[:dim], (place, place + 1), *spans[dim:]), out.unsqueeze(dim))

    return View((*of.shape[:dim], *of.shape[dim + 1 :]), of.dtype, read)


def stacked(parts: Sequence[View], dim: int) -> View:
    """Return views of one shape stacked along a new ``dim``."""
    shape = parts[0].shape

    def read(spans: Spans, out: torch.Tensor) -> None:
        first, last = spans[dim]
        rest = (*spans[:dim], *spans[dim + 1 :])
        for place in range(first, last):
            parts[place].read(rest, out.select(dim, place - first))

    return View((*shape[:dim], len(parts), *shape[dim:]), parts[0].dtype, read)


def _put(values: tuple, dim: int, *value: object) -> tuple:  # type: ignore[type-arg]
    """Replace the value of one dim: a size by a size, a span by (start, stop)."""
    return (*values[:dim], value[0] if len(value) == 1 else value, *values[dim + 1 :])
