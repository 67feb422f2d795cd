"""WeightMap (a model's names <-> its published names) and WeightSource (where weights are read from)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Protocol, TypeAlias, final

import torch

from meshpar.errors import LayoutError
from meshpar.patterns import nearest
from meshpar.views import View, joined, narrowed, permuted, spans_of, transposed


class WeightSource(Protocol):
    """Named tensors that can be read piece by piece; what ``materialize(weights=)`` asks for."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return every tensor's name and shape, without reading any."""

    def read(self, name: str, index: tuple[slice, ...], out: torch.Tensor) -> None:
        """Copy ``tensor[index]`` into ``out`` (the slice's shape; cast to its dtype)."""


class TypedSource(WeightSource, Protocol):
    """A source that also knows its dtypes; what an export asks for."""

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Return every tensor's dtype, without reading any."""


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


Rule: TypeAlias = Rename | Transpose | Permute | Fuse | Split
_RULES: dict[str, type[Rule]] = {"rename": Rename, "transpose": Transpose, "permute": Permute, "fuse": Fuse, "split": Split}


@final
@dataclass(frozen=True, slots=True)
class WeightMap:
    """A model's names and shapes <-> those of its published form.

    The rules are stages: top down on the way out, bottom up on the way in, and each sees the names that the one before it left. So a
    tensor can be split by one rule and its parts permuted by the next. A name that no rule fits is kept: ``WeightMap()`` changes nothing.
    """

    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))

    def theirs(self, name: str) -> tuple[str, ...]:
        """Return the published names that hold (parts of) our tensor ``name``."""
        names: tuple[str, ...] = (name,)
        for rule in self.rules:
            names = tuple(dict.fromkeys(new for old in names for new in _across(_tuple(rule.ours), _tuple(rule.theirs), old)))
        return names

    def ours(self, name: str) -> tuple[str, ...]:
        """Return our names that hold (parts of) the published tensor ``name``."""
        names: tuple[str, ...] = (name,)
        for rule in reversed(self.rules):
            names = tuple(dict.fromkeys(new for old in names for new in _across(_tuple(rule.theirs), _tuple(rule.ours), old)))
        return names

    def view(self, source: WeightSource) -> Mapped:
        """Present a published file under our names and shapes; raises LayoutError for missing parts and clashes of names."""
        views = _leaves(source)
        for rule in reversed(self.rules):
            views = _stage(views, rule, _tuple(rule.theirs), _tuple(rule.ours), rule.backward)
        return Mapped(views)

    def publish(self, source: WeightSource) -> Mapped:
        """Present our tensors under their published names and shapes; raises LayoutError for missing parts and clashes of names."""
        views = _leaves(source)
        for rule in self.rules:
            views = _stage(views, rule, _tuple(rule.ours), _tuple(rule.theirs), rule.forward)
        return Mapped(views)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the rules as plain data."""
        return [{"rule": rule.kind, **dataclasses.asdict(rule)} for rule in self.rules]

    @classmethod
    def from_json(cls, data: Sequence[Mapping[str, Any]]) -> WeightMap:
        """Rebuild a map from :meth:`to_json`; raises LayoutError for a rule that this version does not know."""
        return cls(tuple(_rule_from_json(each) for each in data))


def _rule_from_json(data: Mapping[str, Any]) -> Rule:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items() if key != "rule"}
    kind = _RULES.get(data.get("rule", ""))
    if kind is None or not {"ours", "theirs"} <= set(fields) <= {field.name for field in dataclasses.fields(kind)}:
        raise LayoutError(f"this version reads the weight rules {', '.join(_RULES)} and their fields; got {dict(data)}")
    return kind(**fields)


def _tuple(patterns: str | tuple[str, ...]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else patterns


def _check_patterns(rule: Rule) -> None:
    patterns = (*_tuple(rule.ours), *_tuple(rule.theirs))
    if len({pattern.count("*") for pattern in patterns}) > 1:
        raise LayoutError(f"{rule}: every pattern must hold the same number of '*', because they carry over in order")
    parts = getattr(rule, "parts", None)
    if parts is not None and (len(parts) != len(patterns) - 1 or len(parts) < 2 or min(parts) < 1):
        raise LayoutError(f"{rule}: expected two or more patterns on the side of several, and a positive part for each")


@lru_cache(maxsize=1024)
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile("([^.]*)".join(map(re.escape, pattern.split("*"))))


def _find(patterns: tuple[str, ...], name: str) -> tuple[str, ...] | None:
    """Return what each ``*`` stands for in ``name``, by the first pattern that fits it; None where none does."""
    found = next(filter(None, (_regex(pattern).fullmatch(name) for pattern in patterns)), None)
    return found.groups() if found else None


def _fill(pattern: str, stars: tuple[str, ...]) -> str:
    parts: Iterator[str] = iter(stars)
    return re.sub(r"\*", lambda _: next(parts), pattern)


def _across(here: tuple[str, ...], there: tuple[str, ...], name: str) -> tuple[str, ...]:
    stars = _find(here, name)
    return (name,) if stars is None else tuple(_fill(pattern, stars) for pattern in there)


def _stage(
    views: Mapping[str, View],
    rule: Rule,
    here: tuple[str, ...],
    there: tuple[str, ...],
    build: Callable[[Sequence[View]], Sequence[View]],
) -> dict[str, View]:
    """Carry every tensor from one side of ``rule`` to the other."""
    made: list[tuple[str, View]] = []
    problems: list[str] = []
    done: set[str] = set()
    for name, view in views.items():
        stars = _find(here, name)
        if stars is None:
            made.append((name, view))
        elif name not in done:
            together = [_fill(pattern, stars) for pattern in here]
            done.update(together)
            if absent := [each for each in together if each not in views]:
                problems.append(f"{name!r} is one of {len(together)} parts, and {', '.join(map(repr, absent))} is missing")
            else:
                made += zip((_fill(pattern, stars) for pattern in there), build([views[each] for each in together]), strict=True)
    seen: set[str] = set()
    problems += [f"two tensors would be called {name!r}" for name, _ in made if name in seen or seen.add(name)]  # type: ignore[func-returns-value]
    if problems:
        raise LayoutError("\n  ".join([f"{rule} does not fit these tensors:", *problems]))
    return dict(made)


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


def _leaves(source: WeightSource) -> dict[str, View]:
    dtypes: Mapping[str, torch.dtype] = source.dtypes() if hasattr(source, "dtypes") else {}
    return {name: _leaf(source, name, tuple(shape), dtypes.get(name)) for name, shape in source.shapes().items()}


def _leaf(source: WeightSource, name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> View:
    return View(shape, dtype, lambda spans, out: source.read(name, tuple(slice(*span) for span in spans), out), name)


@final
class Mapped:
    """A source seen through a WeightMap; what :meth:`WeightMap.view` and :meth:`WeightMap.publish` return."""

    def __init__(self, views: Mapping[str, View]) -> None:
        self._views = views

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return every tensor's name and shape."""
        return {name: view.shape for name, view in self._views.items()}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Return the dtypes that the source tells of."""
        return {name: view.dtype for name, view in self._views.items() if view.dtype is not None}

    def origin(self, name: str) -> str | None:
        """Return the source's name of a tensor that is carried over whole and unchanged; None where it is made of others."""
        return self._views[name].origin

    def read(self, name: str, index: tuple[slice, ...], out: torch.Tensor) -> None:
        """Copy ``tensor[index]`` into ``out`` (the slice's shape; cast to its dtype)."""
        if name not in self._views:
            raise LayoutError(f"no tensor is called {name!r}; the nearest are {nearest(name, self._views)}")
        view = self._views[name]
        view.read(spans_of(index, view.shape), out)
