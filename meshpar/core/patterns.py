"""The one matcher of dotted names: ``*`` is one part or a piece of it, which ``fnmatch`` would let cross dots."""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import combinations
from types import MappingProxyType

from torch import nn


def matches(pattern: str, name: str) -> bool:
    """Return whether a dotted ``name`` matches ``pattern``, part by part; ``**`` stands for one part or more.

    >>> from meshpar import matches
    >>> matches("layers.*", "layers.0"), matches("layers.*", "layers.0.up")
    (True, False)
    """
    want, have = pattern.split("."), name.split(".")
    if "**" in want:
        return _fits(want, have)
    return len(want) == len(have) and all(map(fnmatchcase, have, want))


def _fits(want: list[str], have: list[str]) -> bool:
    if not want or not have:
        return want == have
    if want[0] == "**":
        return any(_fits(want[1:], have[count:]) for count in range(1, len(have) + 1))
    return fnmatchcase(have[0], want[0]) and _fits(want[1:], have[1:])


def covers(pattern: str, name: str) -> bool:
    """Return whether ``pattern`` matches a dotted ``name``, or a module around it: a module's name stands for all that
    is in it.

    >>> from meshpar import covers
    >>> covers("vision", "vision.blocks.0.up.weight"), covers("vision.*", "vision.blocks.0.up.weight")
    (True, True)
    >>> covers("vision", "visions.a")
    False
    """
    parts = name.split(".")
    ends = range(1, len(parts) + 1) if "**" in pattern else (pattern.count(".") + 1,)
    return any(matches(pattern, ".".join(parts[:end])) for end in ends)


def find_modules(module: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield ``(name, submodule)`` of every submodule whose name fits, but for stand-ins of what other ranks compute."""
    for name, child in module.named_modules():
        if matches(pattern, name) and not getattr(child, "stands_in", False):
            yield name, child


def shortest_patterns(names: Iterable[str], known: Iterable[str]) -> Iterator[str]:
    """Yield patterns that match exactly ``names`` among ``known``, with as many ``*`` for numbers as possible."""
    wanted, known = dict.fromkeys(names), list(known)
    fits: dict[str, bool] = {}
    covered: set[str] = set()
    for name in wanted:
        if name in covered:
            continue
        for pattern in _generalized(name):
            if pattern not in fits:
                matching = [other for other in known if matches(pattern, other)]
                fits[pattern] = all(match in wanted for match in matching)
                covered.update(matching if fits[pattern] else ())
            if fits[pattern]:
                yield pattern
                break


def _generalized(name: str) -> Iterator[str]:
    """Yield a name with numbers as ``*``: all of them first, outer before inner ones, then the name."""
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    for count in range(len(numbers), -1, -1):
        for chosen in combinations(numbers, count):
            yield ".".join("*" if index in chosen else part for index, part in enumerate(parts))


def is_called(module: nn.Module) -> bool:
    """Return whether a module can be called: containers such as ModuleList have no forward."""
    return getattr(module.forward, "__func__", module.forward) is not nn.Module.forward


_FEW = 8
"""Names that a message lists where none of them is near."""
_NEAR = 0.75
"""Part of the letters of two names, or of two words of them, that are the same in names that are spelt alike."""
_WORDS = re.compile(r"[._-]|(?<=[a-z])(?=[A-Z])")


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return up to three of ``known`` that ``name`` may stand for, best first: spelt alike, else of the same words."""
    wanted, *names = (
        ".".join("*" if part.isdigit() else part for part in other.split(".")) for other in (name, *filter(None, known))
    )
    near = {other for other in names if _likeness(wanted, other) >= _NEAR}
    near = near or {other for other in names if _shares_words(wanted, other)}
    return sorted(near, key=lambda other: (-_likeness(wanted, other), names.index(other)))[:3]


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one.lower(), other.lower()).ratio()


def _shares_words(one: str, other: str) -> bool:
    """Return whether each word of the name that has fewer is in the other."""
    few, many = sorted(([word for word in _WORDS.split(name) if word] for name in (one, other)), key=len)
    return bool(few) and all(
        any(_likeness(word, other_word) >= _NEAR or _is_short(word, other_word) for other_word in many) for word in few
    )


def _is_short(one: str, other: str) -> bool:
    short, long = sorted((one.lower(), other.lower()), key=len)
    return len(short) >= 3 and long.startswith(short)


def suggestion(name: str, known: Iterable[str], *, others: str = "") -> str:
    """Return what a message says of an unknown name: the nearest ones, all if they are few, or none."""
    names = sorted({*known} - {""})
    if near := nearest(name, names):
        return f"nearest: {', '.join(near)}"
    return (
        f"there are: {', '.join(names) or 'none'}"
        if len(names) <= _FEW
        else f"none of the {len(names)} names is near{others}"
    )


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the module's class as its author wrote it; FSDP2 puts a class of its own before it."""
    kind = type(module)
    while hasattr(kind, "set_requires_gradient_sync") and len(kind.__bases__) > 1:
        kind = kind.__bases__[-1]
    return kind


def class_name(module: nn.Module) -> str:
    """Return the name of the module's class as its author wrote it."""
    return own_class(module).__name__


OWN_NUMBER = re.compile(r"(^|_)(idx|id|index|layer|number|place|layer_number)$")
"""Names of attributes in which a block knows its own number."""


def kind_of(
    block: nn.Module, place: int | None = None, styles: Mapping[str, object] = MappingProxyType({})
) -> Hashable:
    """Return what blocks that compute alike have in common: classes, shapes, ``styles``, settings but their number."""
    facts = []
    for name, child in block.named_modules():
        settings = tuple(
            (key, repr(value))
            for key, value in sorted(vars(child).items())
            if isinstance(value, bool | int | float | str)
            and not (type(value) is int and OWN_NUMBER.search(key) and place in (None, value))
        )
        shapes = tuple(
            (key, tuple(value.shape), value.dtype) for key, value in child._parameters.items() if value is not None
        )
        facts.append((name, class_name(child), repr(styles.get(name)), shapes, settings))
    return tuple(facts)


def tied_names(module: nn.Module) -> list[tuple[str, ...]]:
    """Return the groups of parameter names that are one tensor, each in the order of ``named_parameters``."""
    places: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    return [tuple(names) for names in places.values() if len(names) > 1]
