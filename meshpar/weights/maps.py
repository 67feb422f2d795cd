"""WeightMap (a model's names <-> its published names) and WeightSource (where weights are read from), such as
layers with LoRA's adapters, merged slice by slice.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn

from meshpar.core.errors import LayoutError, MeshparError
from meshpar.core.patterns import suggestion
from meshpar.weights.rules import Rule, Spans, View, names_of, rule_from_json, spans_of


class WeightSource(Protocol):
    """Read named tensors piece by piece; ``materialize(weights=)`` accepts any such source."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return every tensor's name and shape, without reading any."""
        ...

    def read(self, name: str, index: tuple[slice, ...], out: torch.Tensor) -> None:
        """Copy ``tensor[index]`` into ``out`` (the slice's shape; cast to its dtype)."""


@runtime_checkable
class TypedSource(WeightSource, Protocol):
    """A source that also knows its dtypes; what an export asks for."""

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Return every tensor's dtype, without reading any."""
        ...


@final
@dataclass(frozen=True, slots=True)
class WeightMap:
    """Translate a model's tensor names and shapes into those of its published form, and back.

    The rules apply in order for an export, and in reverse order for a load. Each rule sees the names that the previous
    rule produced, so one rule can split a tensor and the next can permute its parts. A name that no rule matches is
    kept: ``WeightMap()`` changes nothing.

    >>> from meshpar import WeightMap
    >>> from meshpar.weights import Rename
    >>> WeightMap([Rename(ours="layers.*.up", theirs="model.layers.*.mlp.up_proj")]).theirs("layers.0.up")
    ('model.layers.0.mlp.up_proj',)

    Attributes:
        rules: the rules, in the order of an export.
    """

    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))

    def theirs(self, name: str) -> tuple[str, ...]:
        """Return the published names that hold (parts of) our tensor ``name``."""
        return _carry(name, [(names_of(rule.ours), names_of(rule.theirs)) for rule in self.rules])

    def ours(self, name: str) -> tuple[str, ...]:
        """Return our names that hold (parts of) the published tensor ``name``."""
        return _carry(name, [(names_of(rule.theirs), names_of(rule.ours)) for rule in reversed(self.rules)])

    def view(self, source: WeightSource) -> Mapped:
        """Present a published file under our names and shapes; raises LayoutError for missing parts and clashes."""
        views = _leaves(source)
        for rule in reversed(self.rules):
            views = _stage(views, rule, publish=False)
        return Mapped(views)

    def publish(self, source: WeightSource) -> Mapped:
        """Present our tensors under published names and shapes; raises LayoutError for missing parts and clashes."""
        views = _leaves(source)
        for rule in self.rules:
            views = _stage(views, rule, publish=True)
        return Mapped(views)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the rules as plain data."""
        return [{"rule": rule.kind, **dataclasses.asdict(rule)} for rule in self.rules]

    @classmethod
    def from_json(cls, data: Sequence[Mapping[str, Any]]) -> WeightMap:
        """Rebuild a map from :meth:`to_json`; raises LayoutError for a rule that this version does not know."""
        return cls(tuple(rule_from_json(rule) for rule in data))


_MOST_STARS = 4  # in one part of a name: the time to match grows with the power of their number


@lru_cache(maxsize=1024)
def _regex(pattern: str) -> re.Pattern[str]:
    """Return an expression of atomic parts: what one part's '*' stand for need not be tried again for the others."""
    if (stars := max(part.count("*") for part in pattern.split("."))) > _MOST_STARS:
        raise LayoutError(
            f"the pattern {pattern!r} has {stars} '*' in one part of a name; expected at most {_MOST_STARS}"
        )
    parts = ("([^.]*)".join(map(re.escape, part.split("*"))) for part in pattern.split("."))
    return re.compile(r"\.".join(rf"(?>{part}(?=\.|\Z))" for part in parts))


def _find(patterns: tuple[str, ...], name: str) -> tuple[str, ...] | None:
    """Return what each ``*`` stands for in ``name``, by the first pattern that fits it; None where none does."""
    match = next(filter(None, (_regex(pattern).fullmatch(name) for pattern in patterns)), None)
    return match.groups() if match else None


def _fill(pattern: str, stars: tuple[str, ...]) -> str:
    parts: Iterator[str] = iter(stars)
    return re.sub(r"\*", lambda _: next(parts), pattern)


def _carry(name: str, sides: Sequence[tuple[tuple[str, ...], tuple[str, ...]]]) -> tuple[str, ...]:
    """Return the names that a name becomes from side to side of rules, each once."""
    names: tuple[str, ...] = (name,)
    for here, there in sides:
        carried: list[str] = []
        for old in names:
            stars = _find(here, old)
            carried += (old,) if stars is None else (_fill(pattern, stars) for pattern in there)
        names = tuple(dict.fromkeys(carried))
    return names


def _stage(views: Mapping[str, View], rule: Rule, *, publish: bool) -> dict[str, View]:
    """Carry every tensor from one side of ``rule`` to the other."""
    here, there, build = names_of(rule.ours), names_of(rule.theirs), rule.forward
    if not publish:
        here, there, build = there, here, rule.backward
    carried: list[tuple[str, View]] = []
    problems: list[str] = []
    done: set[str] = set()
    for name, view in views.items():
        stars = _find(here, name)
        if stars is None:
            carried.append((name, view))
        elif name not in done:
            parts = [_fill(pattern, stars) for pattern in here]
            done.update(parts)
            if absent := ", ".join(repr(part) for part in parts if part not in views):
                problems.append(f"{name!r} is one of {len(parts)} parts, and {absent} is missing")
            else:
                names = [_fill(pattern, stars) for pattern in there]
                carried += zip(names, build([views[part] for part in parts]), strict=True)
    calls = Counter(name for name, _ in carried)
    problems += [f"two tensors would be called {name!r}" for name, count in calls.items() if count > 1]
    if problems:
        raise LayoutError("\n  ".join([f"{rule} does not fit these tensors:", *problems]))
    return dict(carried)


def dtypes_of(source: WeightSource) -> Mapping[str, torch.dtype]:
    """Return the dtypes that a source knows, by name; none where it is no :class:`TypedSource`."""
    dtypes: Callable[[], Mapping[str, torch.dtype]] | None = getattr(source, "dtypes", None)
    return {} if dtypes is None else dtypes()


def _leaves(source: WeightSource) -> dict[str, View]:
    def read(name: str, spans: Spans, out: torch.Tensor) -> None:
        source.read(name, tuple(slice(*span) for span in spans), out)

    shapes, dtypes = source.shapes(), dtypes_of(source)
    return {name: View(tuple(shapes[name]), dtypes.get(name), partial(read, name), name) for name in shapes}


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
        """Return the source's name of a tensor that is carried whole and unchanged; None if it is made of others."""
        return self._views[name].origin

    def read(self, name: str, index: tuple[slice, ...], out: torch.Tensor) -> None:
        """Copy ``tensor[index]`` into ``out`` (the slice's shape; cast to its dtype)."""
        if name not in self._views:
            raise LayoutError(f"no tensor is called {name!r}; {suggestion(name, self._views)}")
        view = self._views[name]
        view.read(spans_of(index, view.shape), out)


def average_called(weights: str, names: Collection[str]) -> str | None:
    """Return the name of the average that ``weights`` means; None: ``trained``. Raises MeshparError without one."""
    if weights == "trained" or weights in names:
        return None if weights == "trained" else weights
    if weights == "averaged" and len(names) == 1:
        return next(iter(names))
    choice = f"there are {', '.join(names)}; name one of them" if names else "there is none; take the trained weights"
    raise MeshparError(f"there is no average {weights!r}: {choice}")


NAME = "default"  # the adapter's name in peft, which is part of the names of its parameters


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers with adapters by name."""
    modules = model.named_modules()
    return {name: child for name, child in modules if hasattr(child, "base_layer") and hasattr(child, "lora_A")}


def base_name(name: str) -> str:
    """Return a parameter's name in the model without adapters."""
    return name.replace(".base_layer", "")


@runtime_checkable
class PackedAdapterLayer(Protocol):
    """A layer whose adapters belong to one packed weight (experts, rows, columns) of the module below it."""

    base_layer: nn.Module
    leaf: str
    scale: float

    def factors(self, a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
        """Return the factors (experts, rows, rank) and (experts, rank, columns) of peft's A and B."""
        ...


class AdapterFactors(NamedTuple):
    """How to read A and B of one weight as peft has them, ``alpha / rank``, and the layer of a packed weight."""

    read: Callable[[], tuple[Tensor, Tensor]]
    scale: float
    packed: PackedAdapterLayer | None = None


@final
class MergedAdapters:
    """A model's weights with adapters added, read slice by slice, as peft's ``merge_and_unload``."""

    def __init__(self, base: TypedSource, factors: Mapping[str, AdapterFactors]) -> None:
        self.shapes, self.dtypes, self._base, self._factors = base.shapes, base.dtypes, base, factors
        self._last: tuple[str, Tensor, Tensor] | None = None

    def read(self, name: str, index: tuple[slice, ...], out: Tensor) -> None:
        if name not in self._factors:
            self._base.read(name, index, out)
            return
        *outer, rows, columns = (slice(*span) for span in spans_of(index, self.shapes()[name]))
        a, b = (factor[tuple(outer)].float() for factor in self._pair(name))
        whole = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        self._base.read(name, index, whole)
        out.copy_(whole + a[..., rows, :] @ b[..., columns] * self._factors[name].scale)

    def _pair(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the left factor (..., rows, rank) and the right one (..., rank, columns)."""
        if self._last is None or self._last[0] != name:
            factors, shape = self._factors[name], self.shapes()[name]
            a, b = factors.read()
            if factors.packed is not None:
                a, b = factors.packed.factors(a, b, shape[0])
            else:  # GPT-2's Conv1D stores its weight transposed
                a, b = (b, a) if (b.shape[0], a.shape[1]) == shape else (a.T, b.T)
            self._last = (name, a, b)
        return self._last[1:]
