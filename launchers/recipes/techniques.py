"""The passes of a recipe: found by entry point, checked against their own fields, made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from meshpar import registry
from meshpar.errors import MeshparError
from meshpar.launchers.recipes.converting import convert_pass
from meshpar.launchers.recipes.schema import Section, build, section_of, validate
from meshpar.launchers.recipes.yamlfile import Document, Place
from meshpar.mesh import MeshSpec, is_auto
from meshpar.passes import Pass
from meshpar.patterns import suggestion

GROUP = "meshpar.passes"
SHARDING = ("FullyShard", "HybridShard", "Replicate")
"""The passes of data parallelism that come with meshpar."""
BY_AXIS = (("ep", "ExpertParallel"), ("cp", "ContextParallel"), ("tp", "TensorParallel"))
"""Axis -> the pass that works on it, in the order in which they apply."""
Written = dict[str, dict[str, Any]]
"""A pass as a resolved recipe writes it: ``{"FullyShard": {"offload": "cpu"}}``."""


def read_passes(
    raw: object, mesh: MeshSpec | str | None, document: Document, problems: list[str], at: Place = ()
) -> tuple[list[Written], list[str]]:
    """Return the passes of a recipe, resolved, and what is to be told about old names; what is wrong goes to ``problems``.

    Args:
        raw: what stands under ``passes``; None or ``auto``: the passes that the mesh's axes call for.
        mesh: the mesh, None where it cannot be read.
        document: for messages.
        problems: takes one line for each fault.
        at: where in the document the list stands.
    """
    if raw in (None, "auto"):
        return default_passes(mesh), []
    if not isinstance(raw, list):
        problems.append(
            f"{document.where((*at, 'passes'))}: expected a list of passes (- FullyShard, or - FullyShard: {{offload: cpu}}), got {raw!r}"
        )
        return [], []
    passes: list[Written] = []
    notes: list[str] = []
    for number, item in enumerate(raw):
        place: Place = (*at, "passes", number)
        name, options = next(iter(item.items())) if isinstance(item, Mapping) and len(item) == 1 else (item, {})
        if not isinstance(name, str) or not (options is None or isinstance(options, Mapping)):
            problems.append(f"{document.where(place)}: expected a pass's name, or one name with its options, got {item!r}")
            continue
        place = (*place, name) if isinstance(item, Mapping) else place
        translated = convert_pass(name, options or {})
        problems += [f"{document.where((*place, key))}: {text}" for key, text in translated.problems.items()]
        notes += [f"{name}.{note}" for note in translated.notes]
        for each in (*translated.before, {translated.name: translated.options}):
            written = {each: {}} if isinstance(each, str) else each
            passes += _checked(written, document, place, problems)
    return passes, notes


def default_passes(mesh: MeshSpec | str | None) -> list[Written]:
    """Return the passes that a mesh's axes call for."""
    if mesh is None:
        return []
    if isinstance(mesh, str) and not is_auto(mesh):
        mesh = MeshSpec(mesh)
    axes = {"dp_replicate", "dp_shard", *(axis for axis, _ in BY_AXIS if axis in str(mesh))} if isinstance(mesh, str) else set(mesh.axes)
    names = [name for axis, name in BY_AXIS if axis in axes]
    if "dp_shard" in axes:
        names.append("HybridShard" if "dp_replicate" in axes else "FullyShard")
    elif "dp_replicate" in axes:
        names.append("Replicate")
    return [{name: {}} for name in names]


def make_passes(passes: Sequence[Mapping[str, Mapping[str, Any]]]) -> list[Pass]:
    """Return the pass objects of a resolved recipe.

    Raises:
        MeshparError: one is not installed or refuses its options.
    """
    made: list[Pass] = []
    for written in passes:
        (name, options), problems = next(iter(written.items())), list[str]()
        made += _made(name, options, Document("passes", {}), (name,), problems)
        if problems:
            raise MeshparError("\n".join(problems))
    return made


def _checked(written: Written, document: Document, place: Place, problems: list[str]) -> Iterator[Written]:
    """Yield the pass in the form that the resolved recipe has, if it is right."""
    (name, options) = next(iter(written.items()))
    before = len(problems)
    made = list(_made(name, options, document, place, problems))
    if len(problems) == before and made:
        plain = _validated(type(made[0]), options, document, place, []) if dataclasses.is_dataclass(made[0]) else None
        yield {name: plain.model_dump(mode="json", exclude_unset=True) if plain is not None else options}


def _made(name: str, options: Mapping[str, Any], document: Document, place: Place, problems: list[str]) -> Iterator[Pass]:
    if "." not in name and name not in registry.names(GROUP):
        problems.append(f"{document.where(place)}: no pass {name!r} is installed; {suggestion(name, registry.names(GROUP))}")
        return
    try:
        factory: Any = registry.plugin(GROUP, name)
        if dataclasses.is_dataclass(factory) and isinstance(factory, type):
            section = _validated(factory, options, document, place, problems)
            if section is not None:
                yield cast("Pass", build(factory, section))
        elif callable(factory):
            yield cast("Pass", factory(**options))
        elif options:
            problems.append(f"{document.where(place)}: {name} has no options")
        else:
            yield cast("Pass", factory)
    except (TypeError, ValueError, MeshparError) as error:
        problems.append(f"{document.where(place)}: {error}")


def _validated(factory: type, options: Mapping[str, Any], document: Document, place: Place, problems: list[str]) -> Section | None:
    found = validate(section_of(factory), dict(options), document, place)
    if isinstance(found, Section):
        return found
    problems += found
    return None
