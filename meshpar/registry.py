"""Plugins, by entry point. The project's own come in through the same door as a stranger's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from torch import nn

from meshpar.errors import LayoutError, MeshparError
from meshpar.layout import ModelLayout
from meshpar.patterns import find_modules, nearest

GROUPS = ("meshpar.passes", "meshpar.layouts", "meshpar.objectives", "meshpar.launchers")


@cache
def _found(group: str) -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise MeshparError(
                f"plugin {entry.name!r} of {group} is offered twice: {other.value} ({_package(other)}) "
                f"and {entry.value} ({_package(entry)}); uninstall one of these packages"
            )
    return found


def _package(entry: EntryPoint) -> str:
    return f"package {entry.dist.name}" if entry.dist is not None else "package unknown"


def names(group: str) -> list[str]:
    """Return the names of a group's plugins, without importing any."""
    return list(_found(group))


def plugin(group: str, name: str) -> Any:
    """Import and return one plugin.

    Raises:
        MeshparError: no package offers it (with the nearest names), it cannot be imported, or two packages offer it.
    """
    found = _found(group)
    if name not in found:
        near = nearest(name, found) or sorted(found)
        raise MeshparError(f"no plugin {name!r} in {group}; nearest: {near}; installed: {sorted(found)}")
    try:
        return found[name].load()
    except (ImportError, AttributeError) as error:
        raise MeshparError(
            f"plugin {name!r} of {group} ({found[name].value}, {_package(found[name])}) cannot be imported: {error}"
        ) from error


def layout_for(module: nn.Module) -> ModelLayout:
    """Return the layout that fits ``module``: its own ``meshpar_layout()``, else the first registered layout that knows it.

    Where nobody describes it, its blocks are the outermost lists of like modules, and it has no tensor-parallel table.

    Raises:
        LayoutError: ``meshpar_layout()`` returns something else.
    """
    own = getattr(module, "meshpar_layout", None)
    if callable(own):
        layout = own()
        if not isinstance(layout, ModelLayout):
            raise LayoutError(f"{type(module).__name__}.meshpar_layout() returned {type(layout).__name__}; expected a ModelLayout")
        return layout
    for name in names("meshpar.layouts"):
        layout = plugin("meshpar.layouts", name)(module)
        if layout is not None:
            return layout
    return ModelLayout(blocks=tuple(_repeated(module)))


def _repeated(module: nn.Module) -> Iterator[str]:
    """Yield patterns for every outermost ModuleList or Sequential that holds several modules of one class with parameters.

    Lists of lists (attention and feed-forward side by side) are never called themselves; what is in them is. Blocks that share a
    parameter with another are left to the outermost unit, which holds what is tied.
    """
    inside: list[str] = []
    for name, child in module.named_modules():
        if any(name.startswith(outer) for outer in inside):
            continue
        if not isinstance(child, nn.ModuleList | nn.Sequential) or not any(True for _ in child.parameters()):
            continue
        if len(child) > 1 and len({type(each) for each in child}) == 1:
            prefix = f"{name}." if name else ""
            inside.append(prefix)
            depth = "*.*" if all(isinstance(each, nn.ModuleList) for each in child) else "*"
            yield from untied(module, f"{prefix}{depth}")


def untied(module: nn.Module, pattern: str) -> Iterator[str]:
    """Yield the pattern, or the names of those blocks of it that have parameters, all their own, where not every block has."""
    blocks = {name: block for name, block in find_modules(module, pattern) if block is not module}
    owners: dict[int, set[str]] = {}
    for name, block in blocks.items():
        for parameter in block.parameters():
            owners.setdefault(id(parameter), set()).add(name)
    tied = set().union(*(names for names in owners.values() if len(names) > 1))
    own = [name for name, block in blocks.items() if name not in tied and any(True for _ in block.parameters())]
    yield from [pattern] if len(own) == len(blocks) else own
