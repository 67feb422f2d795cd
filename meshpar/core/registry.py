"""Plugins, by entry point: the project's own (but for guards, which guards/ lists) and those of other packages."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, final

import torch
from torch import nn

from meshpar.core.errors import LayoutError, MeshparError, brief
from meshpar.core.layout import ModelLayout
from meshpar.core.passes import Pass
from meshpar.core.patterns import is_called, shortest_patterns, suggestion

PASSES, LAYOUTS, GUARDS = "meshpar.passes", "meshpar.layouts", "meshpar.guards"
OBJECTIVES, TRACKERS, EVALUATIONS = "meshpar.objectives", "meshpar.trackers", "meshpar.evaluations"
LAUNCHERS = "meshpar.launchers"
GROUPS = (PASSES, LAYOUTS, GUARDS, OBJECTIVES, TRACKERS, EVALUATIONS, LAUNCHERS)
"""The groups of entry points."""
STREAMS = "meshpar.streams"
"""Of meshpar alone: what hands out the weights of a parallel module, ``(par, ...)``, from a floor above it."""


@cache
def _found(group: str) -> dict[str, EntryPoint]:
    entries: dict[str, EntryPoint] = {}
    own_package = __name__.partition(".")[0]
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.value.partition(".")[0] != own_package):
        other = entries.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise MeshparError(
                f"plugin {entry.name!r} of {group} is offered twice: {other.value} ({_package(other)}) "
                f"and {entry.value} ({_package(entry)}); uninstall one of these packages"
            )
    return entries


def _package(entry: EntryPoint) -> str:
    return f"package {entry.dist.name}" if entry.dist is not None else "package unknown"


def names(group: str) -> list[str]:
    """Return the names of a group's plugins, the project's own first, without importing any."""
    return list(_found(group))


def offered(group: str) -> list[str]:
    """Return the plugins of a group as messages call them, sorted: with their import paths and packages."""
    return sorted(f"{name} ({entry.value}, {_package(entry)})" for name, entry in _found(group).items())


def plugin(group: str, name: str) -> Any:  # noqa: ANN401 - what the package offers
    """Import and return one plugin; MeshparError where none has the name, two have it, or its import fails."""
    entries = _found(group)
    if name not in entries:
        raise MeshparError(f"no plugin {name!r} in {group}; {suggestion(name, entries)}")
    try:
        return entries[name].load()
    except (ImportError, AttributeError) as error:
        raise MeshparError(
            f"plugin {name!r} of {group} ({entries[name].value}, {_package(entries[name])}) cannot be imported: {error}"
        ) from error


@final
@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of class that data may name, such as a recipe's passes: by plugin, import path or class of ``modules``."""

    words: str
    base: type = object
    methods: tuple[str, ...] = ()
    group: str = ""
    modules: tuple[str, ...] = ()

    def has(self, name: str) -> bool:
        """Return whether a name stands for an installed plugin, not for an import path."""
        return (bool(self.group) and "." not in name) or name.rpartition(".")[0] in self.modules

    def find(self, name: str) -> Any:  # noqa: ANN401 - what the package offers
        """Return the plugin called ``name``, or the class at the import path ``name``, if it is of this kind."""
        if self.group and "." not in name:
            return plugin(self.group, name)
        value = imported(name)
        defined = {method for cls in value.__mro__ for method in vars(cls)} if isinstance(value, type) else set[str]()
        if not isinstance(value, type) or not issubclass(value, self.base) or not defined.issuperset(self.methods):
            what = "class" if isinstance(value, type) else type(value).__name__
            raise MeshparError(f"{name} is a {what}; expected {self.words}")
        return value


PASS = Kind("a subclass of meshpar.Pass", Pass, group=PASSES)
MODEL = Kind("a subclass of torch.nn.Module", nn.Module)
OPTIMIZER = Kind("a subclass of torch.optim.Optimizer", torch.optim.Optimizer, modules=("torch.optim", "meshpar.optim"))
DATASET = Kind("a class with __len__ and __getitem__", methods=("__len__", "__getitem__"))
OBJECTIVE = Kind("a class with tokens and loss", methods=("tokens", "loss"), group=OBJECTIVES)
TRACKER = Kind("a class with send and close", methods=("send", "close"), group=TRACKERS)
EVALUATION = Kind("a class with __call__", methods=("__call__",), group=EVALUATIONS)


def check_path(path: str) -> None:
    """Raise MeshparError unless ``path`` is written as an import path."""
    if "." not in path or not all(part.isidentifier() for part in path.split(".")):
        raise MeshparError(f"{path!r} is no import path; expected package.module.Name")


def imported(path: str) -> Any:  # noqa: ANN401 - whatever stands there
    """Return what stands at ``package.module.Name``; MeshparError, with the place of the failure, where that fails."""
    check_path(path)
    home, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{home}.".startswith(f"{error.name}."):
            raise MeshparError(f"{home} cannot be imported: {error}; install what it needs") from error
        raise MeshparError(
            f"there is no module {error.name}; put it next to the recipe, install its package, or correct the import "
            f"path {path!r}"
        ) from error
    except Exception as error:  # the code of a user
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise MeshparError(f"{home} cannot be imported: {brief(error)} ({last.filename}:{last.lineno})") from error
    if not hasattr(module, name):
        public = [attribute for attribute in vars(module) if not attribute.startswith("_")]
        raise MeshparError(f"{home} has no {name}; {suggestion(name, public)}; it is {module.__file__}")
    return getattr(module, name)


def layout_for(module: nn.Module) -> ModelLayout:
    """Return the module's ``meshpar_layout()``, else that of the first plugin that knows it, else its lists."""
    describe = getattr(module, "meshpar_layout", None)
    if callable(describe):
        layout = describe()
        if not isinstance(layout, ModelLayout):
            raise LayoutError(
                f"{type(module).__name__}.meshpar_layout() returned {type(layout).__name__}; expected a ModelLayout"
            )
        return layout
    for name in names(LAYOUTS):
        layout = plugin(LAYOUTS, name)(module)
        if layout is not None:
            return layout
    return ModelLayout(blocks=tuple(untied(module, _repeated(module))))


def _repeated(module: nn.Module) -> Iterator[str]:
    """Yield the names of blocks: what is called in each outermost list of like modules, but for lists of vectors."""
    prefixes: list[str] = []
    for name, child in module.named_modules():
        if any(name.startswith(outer) for outer in prefixes) or not isinstance(child, nn.ModuleList | nn.Sequential):
            continue
        # None holds the place of a layer that is left out
        entries = [grandchild for grandchild in child._modules.values() if grandchild is not None]
        if len(entries) > 1 and len({type(entry) for entry in entries}) == 1:
            prefix = f"{name}." if name else ""
            prefixes.append(prefix)
            yield from (
                f"{prefix}{path}"
                for path, block in called_parts(child)
                if any(parameter.ndim > 1 for parameter in block.parameters())
            )


def called_parts(container: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of a module's parts; a container in it is replaced by its contents."""
    for name, child in container.named_children():
        if is_called(child):
            yield name, child
        else:
            yield from ((f"{name}.{path}", inner) for path, inner in called_parts(child))


def untied(module: nn.Module, names: Iterable[str]) -> Iterator[str]:
    """Yield, as patterns, the named blocks that have parameters, all their own; the outermost unit has tied ones."""
    every = dict(module.named_modules())
    blocks = {name: every[name] for name in names if every.get(name, module) is not module}
    owners: dict[int, set[str]] = {}
    for name, block in blocks.items():
        for parameter in block.parameters():
            owners.setdefault(id(parameter), set()).add(name)
    tied = set().union(*(names for names in owners.values() if len(names) > 1))
    separate = [name for name, block in blocks.items() if name not in tied and any(True for _ in block.parameters())]
    yield from shortest_patterns(separate, every)
