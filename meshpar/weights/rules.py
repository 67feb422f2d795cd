"""The rules of a weight map: how one or several of our tensors are one or several of the published ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, final

from meshpar.errors import LayoutError
from meshpar.weights.views import View, joined, narrowed, permuted, selected, stacked, transposed


@final
@dataclass(frozen=True, slots=True)
class Rename:
    """One tensor under another name: ``Rename("layers.*.up.weight", "model.layers.*.mlp.up_proj.weight")``.

    Each ``*`` stands for one part of a dotted name or a piece of it, and carries over in order.
    """

    ours: str
    theirs: str
    kind: ClassVar[str] = "rename"

    def __post_init__(self) -> None:
        _check_patterns(self)

    def forward(self, views: Sequence[View]) -> Sequence[View]:
        return views

    backward = forward


@final
@dataclass(frozen=True, slots=True)
class Transpose:
    """One tensor with its last two dims exchanged: ``nn.Linear`` here, transformers' ``Conv1D`` there."""

    ours: str
    theirs: str
    kind: ClassVar[str] = "transpose"

    def __post_init__(self) -> None:
        _check_patterns(self)

    def forward(self, views: Sequence[View]) -> Sequence[View]:
        if len(views[0].shape) < 2:
            raise LayoutError(f"{self} fits a tensor of shape {views[0].shape}, which has no two dims to exchange; narrow the pattern")
        return [transposed(views[0])]

    backward = forward


@final
@dataclass(frozen=True, slots=True)
class Permute:
    """One tensor with its rows in another order along ``dim``.

    Within every block of ``outer * inner * unit`` rows, seen as ``(outer, inner, unit)`` in ours, outer and inner change places in
    theirs. Interleaved rotary pairs here, halves there: ``outer=head_dim // 2, inner=2``.
    """

    ours: str
    theirs: str
    outer: int
    inner: int
    unit: int = 1
    dim: int = 0
    kind: ClassVar[str] = "permute"

    def __post_init__(self) -> None:
        _check_patterns(self)

    def forward(self, views: Sequence[View]) -> Sequence[View]:
        return [permuted(self._checked(views[0]), self.dim % len(views[0].shape), self.outer, self.inner, self.unit)]

    def backward(self, views: Sequence[View]) -> Sequence[View]:
        return [permuted(self._checked(views[0]), self.dim % len(views[0].shape), self.inner, self.outer, self.unit)]

    def _checked(self, view: View) -> View:
        _length(view, self.dim, self.outer * self.inner * self.unit, self)
        return view


@final
@dataclass(frozen=True, slots=True)
class Fuse:
    """Several of ours are one of theirs, one after another along ``dim``.

    ``parts`` are their lengths, or anything in the same proportion (``(q_heads, kv_heads, kv_heads)``); empty: equal lengths.
    """

    ours: tuple[str, ...]
    theirs: str
    dim: int = 0
    parts: tuple[int, ...] = ()
    kind: ClassVar[str] = "fuse"

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts) or (1,) * len(self.ours))
        _check_patterns(self)

    def forward(self, views: Sequence[View]) -> Sequence[View]:
        return [_concat(views, self.dim, self.parts, self)]

    def backward(self, views: Sequence[View]) -> Sequence[View]:
        return _cut(views[0], self.dim, self.parts, self)


@final
@dataclass(frozen=True, slots=True)
class Split:
    """One of ours is several of theirs, one after another along ``dim``; ``parts`` as for :class:`Fuse`."""

    ours: str
    theirs: tuple[str, ...]
    dim: int = 0
    parts: tuple[int, ...] = ()
    kind: ClassVar[str] = "split"

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts) or (1,) * len(self.theirs))
        _check_patterns(self)

    def forward(self, views: Sequence[View]) -> Sequence[View]:
        return _cut(views[0], self.dim, self.parts, self)

    def backward(self, views: Sequence[View]) -> Sequence[View]:
        return [_concat(views, self.dim, self.parts, self)]


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
        return [selected(whole, self.dim, place) for place in range(len(self.theirs))]

    def backward(self, views: Sequence[View]) -> Sequence[View]:
        """Return the stacked tensor."""
        if len({(view.shape, view.dtype) for view in views}) > 1:
            raise LayoutError(f"{self} needs parts of one shape and dtype; got {[(view.shape, view.dtype) for view in views]}")
        return [stacked(views, self.dim)]


Rule: TypeAlias = Rename | Transpose | Permute | Fuse | Split | Unstack
_RULES: dict[str, type[Rule]] = {kind.kind: kind for kind in (Rename, Transpose, Permute, Fuse, Split, Unstack)}


def rule_from_json(data: Mapping[str, Any]) -> Rule:
    """Rebuild a rule from its plain data; raises LayoutError for one that this version does not know."""
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items() if key != "rule"}
    kind = _RULES.get(data.get("rule", ""))
    if kind is None or not {"ours", "theirs"} <= set(fields) <= {field.name for field in dataclasses.fields(kind)}:
        raise LayoutError(f"this version reads the weight rules {', '.join(_RULES)} and their fields; got {dict(data)}")
    return kind(**fields)


def names_of(patterns: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return one side of a rule as its patterns."""
    return (patterns,) if isinstance(patterns, str) else patterns


def _check_patterns(rule: Rule) -> None:
    patterns = (*names_of(rule.ours), *names_of(rule.theirs))
    if len({pattern.count("*") for pattern in patterns}) > 1:
        raise LayoutError(f"{rule}: every pattern must hold the same number of '*', because they carry over in order")
    parts = getattr(rule, "parts", None)
    if parts is not None and (len(parts) != len(patterns) - 1 or len(parts) < 2 or min(parts) < 1):
        raise LayoutError(f"{rule}: expected two or more patterns on the side of several, and a positive part for each")


def _length(view: View, dim: int, unit: int, rule: Rule) -> int:
    """Return how often ``unit`` goes into the view's dim; raises LayoutError where it does not."""
    if not -len(view.shape) <= dim < len(view.shape) or view.shape[dim] % unit:
        raise LayoutError(f"{rule} needs dim {dim} to be a multiple of {unit}; got a tensor of shape {view.shape}")
    return view.shape[dim] // unit


def _cut(view: View, dim: int, parts: tuple[int, ...], rule: Rule) -> list[View]:
    each = _length(view, dim, sum(parts), rule)
    starts = [sum(parts[:i]) * each for i in range(len(parts))]
    return [narrowed(view, dim % len(view.shape), start, part * each) for start, part in zip(starts, parts)]


def _concat(views: Sequence[View], dim: int, parts: tuple[int, ...], rule: Rule) -> View:
    each = _length(views[0], dim, parts[0], rule)
    dim %= len(views[0].shape)
    wanted = [(*views[0].shape[:dim], part * each, *views[0].shape[dim + 1 :]) for part in parts]
    if [view.shape for view in views] != wanted or len({view.dtype for view in views}) > 1:
        have = [(view.shape, view.dtype) for view in views]
        raise LayoutError(f"{rule} needs parts of one dtype with shapes {wanted}; got {have}")
    return joined(views, dim)
