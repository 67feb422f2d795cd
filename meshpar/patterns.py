"""The one matcher of module and parameter names.

``*`` stands for exactly one part of a dotted name or a piece of it: ``layers.*`` matches ``layers.0`` and never
``layers.0.up``, which ``fnmatch`` would let through.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from torch import nn


def matches(pattern: str, name: str) -> bool:
    """Tell whether a dotted ``name`` fits ``pattern``, part by part."""
    want, have = pattern.split("."), name.split(".")
    return len(want) == len(have) and all(map(fnmatchcase, have, want))


def find_modules(module: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield ``(name, submodule)`` for every submodule whose name fits, in the order of ``named_modules``."""
    for name, child in module.named_modules():
        if matches(pattern, name):
            yield name, child


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Return up to ``count`` of ``known`` that look most like ``name``, best first, one for all that differ by a number."""
    collapsed = dict.fromkeys(".".join("*" if part.isdigit() else part for part in each.split(".")) for each in known if each)
    wanted = ".".join("*" if part.isdigit() else part for part in name.split("."))
    return difflib.get_close_matches(wanted, collapsed, n=count, cutoff=0.3)


def class_name(module: nn.Module) -> str:
    """Return the name of the module's class as its author wrote it; FSDP2 puts a class of its own before it."""
    kind = type(module)
    while hasattr(kind, "set_requires_gradient_sync") and len(kind.__bases__) > 1:
        kind = kind.__bases__[-1]
    return kind.__name__
