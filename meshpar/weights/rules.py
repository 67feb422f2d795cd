"""The rules of a weight map: how our tensors are published ones, split, joined or reordered, read as views."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar, TypeAlias, final

import torch

from meshpar.core.errors import LayoutError

Spans: TypeAlias = tuple[tuple[int, int], ...]  # (start, stop) along every dim of a tensor


@final
@dataclass(frozen=True, slots=True)
class View:
    """A tensor that is not in memory; ``read`` copies and casts a piece, ``origin`` names one carried over whole."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    read: Callable[[Spans, torch.Tensor], None]
    origin: str | None = None


def spans_of(index: Sequence[slice], shape: tuple[int, ...]) -> Spans:
    """Return (start, stop) along every dim; raises LayoutError for a step, or for more slices than dims."""
    if len(index) > len(shape) or any(part.step not in (None, 1) for part in index):
        raise LayoutError(
            f"expected at most {len(shape)} slices without a step for the shape {shape}, got {tuple(index)}"
        )
    full = (*index, *(slice(None) for _ in shape[len(index) :]))
    bounds = [part.indices(size)[:2] for part, size in zip(full, shape)]
    return tuple((start, max(start, stop)) for start, stop in bounds)


def overlap(spans: Spans, other: Spans) -> Spans | None:
    """Return what two boxes of a tensor have in common; None if they have nothing."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(spans, other))
    return shared if all(a < b for a, b in shared) else None


def within(spans: Spans, around: Spans) -> tuple[slice, ...]:
    """Return the index of a box in the tensor of the box ``around`` it."""
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(spans, around))


def narrowed(of: View, dim: int, start: int, length: int) -> View:
    """Take ``length`` rows from ``start`` along ``dim``."""

    def read(spans: Spans, out: torch.Tensor) -> None:
        low, high = spans[dim]
        of.read(_put(spans, dim, low + start, high + start), out)

    return View(_put(of.shape, dim, length), of.dtype, read)


def selected(of: View, dim: int, place: int) -> View:
    """Return the view without ``dim``, at one ``place`` of it."""

    def read(spans: Spans, out: torch.Tensor) -> None:
        of.read((*spans[:dim], (place, place + 1), *spans[dim:]), out.unsqueeze(dim))

    return View((*of.shape[:dim], *of.shape[dim + 1 :]), of.dtype, read)


def _put(values: tuple, dim: int, *value: object) -> tuple:  # type: ignore[type-arg]
    """Replace the value of one dim: a size by a size, a span by (start, stop)."""
    return (*values[:dim], value[0] if len(value) == 1 else value, *values[dim + 1 :])


class _PatternsRule:
    """The two sides of a rule, whose ``*`` carry over in order."""

    __slots__ = ()
    ours: Any
    theirs: Any

    def __post_init__(self) -> None:
        patterns = (*names_of(self.ours), *names_of(self.theirs))
        if len({pattern.count("*") for pattern in patterns}) > 1:
            raise LayoutError(
                f"{self}: every pattern must hold the same number of '*', because they carry over in order"
            )


class _PartsRule(_PatternsRule):
    """A rule of which one side has several tensors, one after another along ``dim``; empty parts are equal ones."""

    __slots__ = ()
    dim: int
    parts: tuple[int, ...]

    def __post_init__(self) -> None:
        count = len(names_of(self.ours)) + len(names_of(self.theirs)) - 1
        object.__setattr__(self, "parts", tuple(self.parts) or (1,) * count)
        super().__post_init__()
        if len(self.parts) != count or count < 2 or min(self.parts) < 1:
            raise LayoutError(
                f"{self}: expected two or more patterns on the side of several, and a positive part for each"
            )

    def _cut(self, views: Sequence[View]) -> Sequence[View]:
        (view,) = views
        unit = _length(view, self.dim, sum(self.parts), self)
        ends = [end * unit for end in accumulate(self.parts, initial=0)]
        return [narrowed(view, self.dim % len(view.shape), start, end - start) for start, end in pairwise(ends)]

    def _join(self, views: Sequence[View]) -> Sequence[View]:
        first, unit = views[0].shape, _length(views[0], self.dim, self.parts[0], self)
        dim = self.dim % len(first)
        wanted = [_put(first, dim, part * unit) for part in self.parts]
        if [view.shape for view in views] != wanted or len({view.dtype for view in views}) > 1:
            shapes = [(view.shape, view.dtype) for view in views]
            raise LayoutError(f"{self} needs parts of one dtype with shapes {wanted}; got {shapes}")

        def read(spans: Spans, out: torch.Tensor) -> None:
            start, stop = spans[dim]
            offset = 0
            for part in views:
                low, high = max(start, offset), min(stop, offset + part.shape[dim])
                if low < high:
                    part.read(_put(spans, dim, low - offset, high - offset), out.narrow(dim, low - start, high - low))
                offset += part.shape[dim]

        return [View(_put(first, dim, sum(self.parts) * unit), views[0].dtype, read)]


@final
@dataclass(frozen=True, slots=True)
class Rename(_PatternsRule):
    """One tensor under another name: ``Rename("layers.*.up.weight", "model.layers.*.mlp.up_proj.weight")``.

    Each ``*`` stands for one part of a dotted name or a piece of it, and carries over in order.
    """

    ours: str
    theirs: str
    kind: ClassVar[str] = "rename"

    def forward(self, views: Sequence[View]) -> Sequence[View]:
        return views

    backward = forward


@final
@dataclass(frozen=True, slots=True)
class Transpose(_PatternsRule):
    """One tensor with its last two dims exchanged: ``nn.Linear`` here, transformers' ``Conv1D`` there."""

    ours: str
    theirs: str
    kind: ClassVar[str] = "transpose"

    def forward(self, views: Sequence[View]) -> Sequence[View]:
        (view,) = views
        if len(view.shape) < 2:
            raise LayoutError(
                f"{self} fits a tensor of shape {view.shape}, which has no two dims to exchange; narrow the pattern"
            )

        def read(spans: Spans, out: torch.Tensor) -> None:
            view.read((*spans[:-2], spans[-1], spans[-2]), out.mT)

        return [View((*view.shape[:-2], view.shape[-1], view.shape[-2]), view.dtype, read)]

    backward = forward


@final
@dataclass(frozen=True, slots=True)
class Permute(_PatternsRule):
    """One tensor with its rows in another order along ``dim``.

    Within every block of ``outer * inner * unit`` rows, seen as ``(outer, inner, unit)`` in ours, outer and inner
    change places in theirs. Interleaved rotary pairs here, halves there: ``outer=head_dim // 2, inner=2``.
    """

    ours: str
    theirs: str
    outer: int
    inner: int
    unit: int = 1
    dim: int = 0
    kind: ClassVar[str] = "permute"

    def forward(self, views: Sequence[View]) -> Sequence[View]:
        return self._permute(views[0], self.outer, self.inner)

    def backward(self, views: Sequence[View]) -> Sequence[View]:
        return self._permute(views[0], self.inner, self.outer)

    def _permute(self, view: View, outer: int, inner: int) -> Sequence[View]:
        block = outer * inner * self.unit
        _length(view, self.dim, block, self)
        dim = self.dim % len(view.shape)

        def read(spans: Spans, out: torch.Tensor) -> None:  # whole blocks
            start, stop = spans[dim]
            low, high = start // block * block, -(-stop // block) * block
            rows = out.new_empty(_put(tuple(b - a for a, b in spans), dim, high - low))
            view.read(_put(spans, dim, low, high), rows)
            blocks = rows.unflatten(dim, (-1, outer, inner, self.unit)).transpose(dim + 1, dim + 2)
            out.copy_(blocks.flatten(dim, dim + 3).narrow(dim, start - low, stop - start))

        return [View(view.shape, view.dtype, read)]


@final
@dataclass(frozen=True, slots=True)
class Fuse(_PartsRule):
    """Several of ours are one of theirs, one after another along ``dim``.

    ``parts`` are their lengths, or anything in the same proportion (``(q_heads, kv_heads, kv_heads)``); empty: equal
    lengths.
    """

    ours: tuple[str, ...]
    theirs: str
    dim: int = 0
    parts: tuple[int, ...] = ()
    kind: ClassVar[str] = "fuse"

    forward, backward = _PartsRule._join, _PartsRule._cut


@final
@dataclass(frozen=True, slots=True)
class Split(_PartsRule):
    """One of ours is several of theirs, one after another along ``dim``; ``parts`` as for :class:`Fuse`."""

    ours: str
    theirs: tuple[str, ...]
    dim: int = 0
    parts: tuple[int, ...] = ()
    kind: ClassVar[str] = "split"

    forward, backward = _PartsRule._cut, _PartsRule._join


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
        (whole,) = views
        if len(whole.shape) <= self.dim or whole.shape[self.dim] != len(self.theirs):
            raise LayoutError(
                f"{self} needs {len(self.theirs)} parts along dim {self.dim}; got a tensor of shape {whole.shape}"
            )
        return [selected(whole, self.dim, number) for number in range(len(self.theirs))]

    def backward(self, views: Sequence[View]) -> Sequence[View]:
        if len({(view.shape, view.dtype) for view in views}) > 1:
            raise LayoutError(
                f"{self} needs parts of one shape and dtype; got {[(view.shape, view.dtype) for view in views]}"
            )
        shape, dim = views[0].shape, self.dim

        def read(spans: Spans, out: torch.Tensor) -> None:
            first, last = spans[dim]
            for number in range(first, last):
                views[number].read((*spans[:dim], *spans[dim + 1 :]), out.select(dim, number - first))

        return [View((*shape[:dim], len(views), *shape[dim:]), views[0].dtype, read)]


Rule: TypeAlias = Rename | Transpose | Permute | Fuse | Split | Unstack
_RULES: dict[str, type[Rule]] = {kind.kind: kind for kind in (Rename, Transpose, Permute, Fuse, Split, Unstack)}


def rule_from_json(data: Mapping[str, Any]) -> Rule:
    """Rebuild a rule from its plain data; raises LayoutError for one that this version does not know."""
    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in data.items() if key != "rule"
    }
    kind = _RULES.get(data.get("rule", ""))
    if kind is None or not {"ours", "theirs"} <= set(fields) <= {field.name for field in dataclasses.fields(kind)}:
        raise LayoutError(f"this version reads the weight rules {', '.join(_RULES)} and their fields; got {dict(data)}")
    return kind(**fields)


def names_of(patterns: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return one side of a rule as its patterns."""
    return (patterns,) if isinstance(patterns, str) else patterns


def _length(view: View, dim: int, unit: int, rule: object) -> int:
    """Return how often ``unit`` goes into the view's dim; raises LayoutError where it does not."""
    if not -len(view.shape) <= dim < len(view.shape) or view.shape[dim] % unit:
        raise LayoutError(f"{rule} needs dim {dim} to be a multiple of {unit}; got a tensor of shape {view.shape}")
    return view.shape[dim] // unit
