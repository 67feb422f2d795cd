"""The objective of a recipe: found by entry point, its options checked, made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from meshpar import registry
from meshpar.launchers.recipes.schema import Section, build, section_of, validate
from meshpar.launchers.recipes.yamlfile import Document

if TYPE_CHECKING:
    from meshpar.training.objectives import Objective

OBJECTIVES = "meshpar.objectives"
_TEACHER = "teacher"


def wants_teacher(factory: object) -> bool:
    """Tell whether an objective is made with a teacher."""
    return dataclasses.is_dataclass(factory) and any(each.name == _TEACHER for each in dataclasses.fields(factory))


def option_problems(factory: object, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with an objective's options, one line each."""
    if not dataclasses.is_dataclass(factory) or not isinstance(factory, type):
        if options:
            yield f"this objective takes no options, got {', '.join(options)}"
        return
    found = validate(section_of(factory), dict(options), Document("", {}))
    if isinstance(found, list):
        yield from (text.removeprefix(": ") for text in found)


def make_objective(name: str, options: Mapping[str, Any], teacher: nn.Module | None = None) -> Objective:
    """Return the objective called ``name``.

    Raises:
        MeshparError: it is not installed or refuses its options.
    """
    factory = registry.plugin(OBJECTIVES, name)
    if not isinstance(factory, type):
        return factory
    if not dataclasses.is_dataclass(factory):
        return factory()
    section = validate(section_of(factory), dict(options), Document("", {}))
    assert isinstance(section, Section), section
    given: dict[str, Any] = {_TEACHER: teacher} if wants_teacher(factory) else {}
    return build(factory, section, **given)
