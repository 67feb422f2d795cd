"""Objects that a recipe calls by name: an objective, or a class of the user's own; found, its keywords checked, made."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from meshpar import registry
from meshpar.errors import MeshparError, RecipeError, brief
from meshpar.launchers.recipes.schema import Section, build, section_of_call, validate
from meshpar.launchers.recipes.yamlfile import Document, Place

if TYPE_CHECKING:
    from meshpar.training.objectives import Objective

OBJECTIVES = "meshpar.objectives"
_TEACHER = "teacher"


def make_importable(folder: Path) -> None:
    """Let modules of ``folder`` be imported, after all installed ones: a file there called like a package does not hide the package."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def own_problems(factory: object, keywords: Mapping[str, Any], document: Document, place: Place, given: tuple[str, ...] = ()) -> list[str]:
    """Return what is wrong with the keywords of a class or function, one line each with file and line.

    Args:
        factory: the class, the function, or an object that takes no keywords.
        keywords: as a recipe writes them.
        document: for messages.
        place: where in the document the keywords stand.
        given: names of keywords, or of leading arguments, that meshpar passes itself.
    """
    if not callable(factory) or (not isinstance(factory, type) and not inspect.isroutine(factory)):
        return [
            f"{document.where((*place, name))}: {type(factory).__name__} is an object already and accepts no keywords" for name in keywords
        ]
    try:
        found = validate(section_of_call(factory, given), dict(keywords), document, place)
    except ValueError as error:  # a builtin without a signature
        return [f"{document.where(place)}: {error}"]
    return found if isinstance(found, list) else []


def make_own(factory: Any, keywords: Mapping[str, Any], *arguments: Any, **given: Any) -> Any:
    """Return what a class or function makes of its keywords, which :func:`own_problems` has checked; an object is returned as it is.

    Raises:
        RecipeError: it raises an error, or its keywords do not fit.
    """
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
    """Tell whether a class or function names a keyword."""
    return callable(factory) and name in inspect.signature(factory).parameters


def objective_factory(name: str) -> Any:
    """Return what makes the objective called ``name``: a plugin, or what stands at an import path; raises MeshparError without one."""
    return registry.plugin(OBJECTIVES, name)


def wants_teacher(factory: Any) -> bool:
    """Tell whether an objective is made with a teacher."""
    return isinstance(factory, type) and has_keyword(factory, _TEACHER)


def make_objective(name: str, options: Mapping[str, Any], teacher: nn.Module | None = None) -> Objective:
    """Return the objective called ``name``.

    Raises:
        MeshparError: it is not installed, refuses its options, or is no objective.
    """
    factory = objective_factory(name)
    made = make_own(factory, options, **({_TEACHER: teacher} if wants_teacher(factory) else {}))
    missing = [each for each in ("tokens", "loss") if not callable(getattr(made, each, None))]
    if missing:
        raise RecipeError(f"{name} has no {' and no '.join(missing)}; an objective has tokens(batch) and loss(model, batch)")
    return made
