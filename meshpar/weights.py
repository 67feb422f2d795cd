"""WeightMap (a model's names <-> its published names) and WeightSource (where weights are read from)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Protocol, final

import torch

from meshpar.errors import LayoutError


class WeightSource(Protocol):
    """Named tensors that can be read piece by piece; what ``materialize(weights=)`` asks for."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return every tensor's name and shape, without reading any."""

    def read(self, name: str, index: tuple[slice, ...], out: torch.Tensor) -> None:
        """Copy ``tensor[index]`` into ``out`` (the slice's shape; cast to its dtype)."""


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
        _check_stars(self.ours, self.theirs)

    def forward(self, name: str) -> tuple[str, ...]:
        stars = _stars(self.ours, name)
        return (name,) if stars is None else (_fill(self.theirs, stars),)

    def backward(self, name: str) -> tuple[str, ...]:
        stars = _stars(self.theirs, name)
        return (name,) if stars is None else (_fill(self.ours, stars),)


Rule = Rename
_RULES: dict[str, type[Rule]] = {rule.kind: rule for rule in (Rename,)}


@final
@dataclass(frozen=True, slots=True)
class WeightMap:
    """A model's names and shapes <-> those of its published form; the rules run top down on the way out, bottom up in.

    A name that no rule fits keeps its name, so ``WeightMap()`` is the identity.
    """

    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))

    def theirs(self, name: str) -> tuple[str, ...]:
        """Return the published names that hold (parts of) our tensor ``name``."""
        names: tuple[str, ...] = (name,)
        for rule in self.rules:
            names = tuple(dict.fromkeys(new for old in names for new in rule.forward(old)))
        return names

    def ours(self, name: str) -> tuple[str, ...]:
        """Return our names that hold (parts of) the published tensor ``name``."""
        names: tuple[str, ...] = (name,)
        for rule in reversed(self.rules):
            names = tuple(dict.fromkeys(new for old in names for new in rule.backward(old)))
        return names

    def to_json(self) -> list[dict[str, Any]]:
        """Return the rules as plain data."""
        return [{"rule": rule.kind, "ours": rule.ours, "theirs": rule.theirs} for rule in self.rules]

    @classmethod
    def from_json(cls, data: list[dict[str, Any]]) -> WeightMap:
        """Rebuild a map from :meth:`to_json`; raises LayoutError for a rule this version does not know."""
        return cls(tuple(_RULES[each["rule"]](each["ours"], each["theirs"]) for each in data))


def _check_stars(*patterns: str) -> None:
    if len({pattern.count("*") for pattern in patterns}) > 1:
        raise LayoutError(f"the patterns {', '.join(map(repr, patterns))} must hold the same number of '*', which carry over in order")


@lru_cache(maxsize=4096)
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile("([^.]*)".join(map(re.escape, pattern.split("*"))))


def _stars(pattern: str, name: str) -> tuple[str, ...] | None:
    """Return what each ``*`` of ``pattern`` stands for in ``name``; None where it does not fit."""
    found = _regex(pattern).fullmatch(name)
    return found.groups() if found else None


def _fill(pattern: str, stars: tuple[str, ...]) -> str:
    parts: Iterator[str] = iter(stars)
    return re.sub(r"\*", lambda _: next(parts), pattern)
