"""The one matcher of module and parameter names.

``*`` stands for exactly one part of a dotted name or a piece of it: ``layers.*`` matches ``layers.0`` and never
``layers.0.up``, which ``fnmatch`` would let through. ``**`` stands for one part or more. Fields that select parameters
take a module's name for all that is in the module: :func:`covers`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from itertools import combinations

from torch import nn


def matches(pattern: str, name: str) -> bool:
    """Return whether a dotted ``name`` matches ``pattern``, part by part.

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
    """Return whether ``pattern`` matches a dotted ``name``, or a module around it: a module's name stands for all that is in it.

    >>> from meshpar import covers
    >>> covers("vision", "vision.blocks.0.up.weight"), covers("vision.*", "vision.blocks.0.up.weight"), covers("vision", "visions.a")
    (True, True, False)
    """
    parts = name.split(".")
    ends = range(1, len(parts) + 1) if "**" in pattern else (pattern.count(".") + 1,)
    return any(matches(pattern, ".".join(parts[:end])) for end in ends)


def find_modules(module: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield ``(name, submodule)`` for every submodule whose name fits, in the order of ``named_modules``."""
    for name, child in module.named_modules():
        if matches(pattern, name):
            yield name, child


def shortest_patterns(names: Iterable[str], known: Iterable[str]) -> Iterator[str]:
    """Yield patterns that match exactly ``names`` among ``known``: for each name the one with the most ``*`` for numbers, else the name."""
    wanted, known = dict.fromkeys(names), list(known)
    fits: dict[str, bool] = {}
    covered: set[str] = set()
    for name in wanted:
        if name in covered:
            continue
        for pattern in _generalized(name):
            if pattern not in fits:
                found = [each for each in known if matches(pattern, each)]
                fits[pattern] = all(each in wanted for each in found)
                covered.update(found if fits[pattern] else ())
            if fits[pattern]:
                yield pattern
                break


def _generalized(name: str) -> Iterator[str]:
    """Yield a name with its numbers replaced by ``*``, all of them first, outer ones before inner ones, and the name itself last."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    for count in range(len(numbers), -1, -1):
        for chosen in combinations(numbers, count):
            yield ".".join("*" if place in chosen else part for place, part in enumerate(parts))


def is_called(module: nn.Module) -> bool:
    """Tell whether a module can be called: containers (ModuleList, ModuleDict) have no forward, and so nothing that a hook could run at."""
    return getattr(module.forward, "__func__", module.forward) is not nn.Module.forward


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return up to three of ``known`` that look most like ``name``, best first, one for all that differ by a number."""
    collapsed = dict.fromkeys(".".join("*" if part.isdigit() else part for part in each.split(".")) for each in known if each)
    wanted = ".".join("*" if part.isdigit() else part for part in name.split("."))
    return difflib.get_close_matches(wanted, collapsed, n=3, cutoff=0.5)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return what to say of a name that is none of ``known``: the nearest of them, or all where none is near."""
    known = list(known)
    near = nearest(name, known)
    return f"nearest: {', '.join(near)}" if near else f"there are: {', '.join(sorted(known))}"


def class_name(module: nn.Module) -> str:
    """Return the name of the module's class as its author wrote it; FSDP2 puts a class of its own before it."""
    kind = type(module)
    while hasattr(kind, "set_requires_gradient_sync") and len(kind.__bases__) > 1:
        kind = kind.__bases__[-1]
    return kind.__name__
