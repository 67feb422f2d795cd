"""The objects that a recipe names, found, checked and made; import paths for a job alone, or where trusted."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast, final

from torch import nn

from meshpar.core import registry
from meshpar.core.errors import MeshparError, RecipeError, brief
from meshpar.core.mesh import MeshSpec, is_auto
from meshpar.core.patterns import suggestion
from meshpar.launchers.recipes.schema import Section, build, section_of, section_of_call, validate
from meshpar.launchers.recipes.yamlfile import Document, Place
from meshpar.passes import Pass

if TYPE_CHECKING:
    from meshpar.training.objectives import Objective

_TEACHER = "teacher"
BY_AXIS = (("ep", "ExpertParallel"), ("cp", "ContextParallel"), ("tp", "TensorParallel"))
"""Axis -> the pass that works on it, in the order in which they apply."""
Written = dict[str, dict[str, Any]]
"""A pass as a resolved recipe writes it: ``{"FullyShard": {"offload": "cpu"}}``."""
Find: TypeAlias = Callable[[registry.Kind, str], Any]
"""Return the class that a name stands for, see :meth:`meshpar.core.registry.Kind.find`."""


class UntrustedError(RecipeError):
    """Raised where a command that only looks needs a class that a recipe names by import path."""


@final
@dataclass(frozen=True, slots=True)
class Classes:
    """The classes that a recipe names: import paths by place, of those that are no plugins; ``trusted``: to import."""

    paths: Mapping[Place, str] = field(default_factory=dict)
    trusted: bool = False
    document: Document = field(default_factory=lambda: Document("", {}))

    def find(self, kind: registry.Kind, name: str) -> Any:
        """Return the plugin or class called ``name``; raises UntrustedError if it may not be imported."""
        if not self.trusted and not kind.has(name):
            registry.check_path(name)
            where = next((f"{self.document.where(at)}: " for at, path in self.paths.items() if path == name), "")
            raise UntrustedError(
                f"{where}this command imports no class that a recipe names, got {name}; if you trust the recipe and "
                "the code that it names, add --trust"
            )
        return kind.find(name)

    @property
    def unseen(self) -> dict[Place, str]:
        return {} if self.trusted else dict(self.paths)

    def origins(self) -> str:
        """Return one line: which classes are imported from which files."""
        files: dict[str, list[str]] = {}
        for path in dict.fromkeys(self.paths.values()):
            home = path.rpartition(".")[0]
            files.setdefault(vars(sys.modules[home]).get("__file__") or home, []).append(path)
        parts = [f"{', '.join(names)} from {file}" for file, names in files.items()]
        return f"imports {'; '.join(parts)}" if parts else ""


def make_importable(folder: Path) -> None:
    """Append ``folder`` to the import path: a file there does not hide an installed package."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def own_problems(
    factory: object, keywords: Mapping[str, Any], document: Document, place: Place, given: tuple[str, ...] = ()
) -> list[str]:
    """Return problems of a class's keywords, with file and line; ``given``: arguments that meshpar passes."""
    if not callable(factory) or (not isinstance(factory, type) and not inspect.isroutine(factory)):
        return [
            f"{document.where((*place, name))}: {type(factory).__name__} is an object already and accepts no keywords"
            for name in keywords
        ]
    try:
        section = validate(section_of_call(factory, given), dict(keywords), document, place)
    except ValueError as error:  # a builtin without a signature
        return [f"{document.where(place)}: {error}"]
    return section if isinstance(section, list) else []


def make_own(factory: Any, keywords: Mapping[str, Any], *arguments: Any, **given: Any) -> Any:
    """Return what a class or function makes of its keywords; objects as they are. Raises RecipeError."""
    if not isinstance(factory, type) and not inspect.isroutine(factory):
        return factory
    leading = tuple(inspect.signature(factory).parameters)[: len(arguments)]
    section = validate(section_of_call(factory, (*leading, *given)), dict(keywords), Document("", {}))
    if not isinstance(section, Section):
        raise RecipeError("; ".join(text.removeprefix(": ") for text in section))
    try:
        return build(factory, section, *arguments, **given)
    except MeshparError:
        raise
    except Exception as error:  # the code of a user
        raise RecipeError(f"{factory.__name__} cannot be made with these keywords: {brief(error)}") from error


def has_keyword(factory: Any, name: str) -> bool:
    return callable(factory) and name in inspect.signature(factory).parameters


def wants_teacher(factory: Any) -> bool:
    return isinstance(factory, type) and has_keyword(factory, _TEACHER)


def make_objective(factory: Any, options: Mapping[str, Any], teacher: nn.Module | None = None) -> Objective:
    """Return the objective of a plugin or a class; raises MeshparError where it refuses its options."""
    objective: Objective = make_own(factory, options, **({_TEACHER: teacher} if wants_teacher(factory) else {}))
    return objective


def read_passes(
    raw: object, mesh: MeshSpec | str | None, classes: Classes, problems: list[str], at: Place = ()
) -> list[Written]:
    """Return a recipe's passes, resolved, or those that the mesh requires; adds problems to ``problems``."""
    document = classes.document
    if raw in (None, "auto"):
        return default_passes(mesh)
    if not isinstance(raw, list):
        problems.append(
            f"{document.where((*at, 'passes'))}: expected a list of passes (- FullyShard, or - FullyShard: {{offload: "
            f"cpu}}), got {raw!r}"
        )
        return []
    passes: list[Written] = []
    for number, item in enumerate(raw):
        entry: Place = (*at, "passes", number)
        name, options = next(iter(item.items())) if isinstance(item, Mapping) and len(item) == 1 else (item, {})
        if not isinstance(name, str) or not (options is None or isinstance(options, Mapping)):
            expected = "expected a pass's name, or one name with its options"
            problems.append(f"{document.where(entry)}: {expected}, got {item!r}")
            continue
        options = dict(options or {})
        try:
            entry = (*entry, name) if isinstance(item, Mapping) else entry
            wrong, _, section = _make_pass(name, options, classes.find, document, entry)
        except UntrustedError:  # it stays as it is written
            passes.append({name: options})
            continue
        problems += wrong
        if not wrong:
            passes.append({name: options if section is None else section.model_dump(mode="json", exclude_unset=True)})
    return passes


def default_passes(mesh: MeshSpec | str | None) -> list[Written]:
    if mesh is None:
        return []
    if isinstance(mesh, str) and not is_auto(mesh):
        mesh = MeshSpec(mesh)
    axes = (
        {"dp_replicate", "dp_shard", *(axis for axis, _ in BY_AXIS if axis in str(mesh))}
        if isinstance(mesh, str)
        else set(mesh.axes)
    )
    names = [name for axis, name in BY_AXIS if axis in axes]
    if data := axes & {"dp_shard", "dp_replicate"}:
        names.append("HybridShard" if len(data) > 1 else "FullyShard" if "dp_shard" in data else "Replicate")
    return [{name: {}} for name in names]


def make_passes(passes: Sequence[Mapping[str, Mapping[str, Any]]], find: Find = registry.Kind.find) -> list[Pass]:
    """Return the pass objects of a resolved recipe, whose classes ``find`` finds; raises MeshparError."""
    made: list[Pass] = []
    for written in passes:
        ((name, options),) = written.items()
        problems, pass_, _ = _make_pass(name, options, find, Document("passes", {}), (name,))
        if pass_ is None:
            raise MeshparError("\n".join(problems))
        made.append(pass_)
    return made


def _make_pass(
    name: str, options: Mapping[str, Any], find: Find, document: Document, at: Place
) -> tuple[list[str], Pass | None, Section | None]:
    """Return the problems of a pass, the pass if there are none, and the section of its options if it has one."""
    where, installed = document.where(at), registry.names(registry.PASSES)
    if "." not in name and name not in installed:
        return [f"{where}: no pass {name!r} is installed; {suggestion(name, installed)}"], None, None
    try:
        factory = find(registry.PASS, name)
        if dataclasses.is_dataclass(factory) and isinstance(factory, type):
            section = validate(section_of(factory), dict(options), document, at)
            if not isinstance(section, Section):
                return section, None, None
            return [], cast("Pass", build(factory, section)), section
        if options and not callable(factory):
            return [f"{where}: {name} has no options"], None, None
        return [], cast("Pass", factory(**options) if callable(factory) else factory), None
    except UntrustedError:
        raise
    except (TypeError, ValueError, MeshparError) as error:
        return [f"{where}: {error}"], None, None
