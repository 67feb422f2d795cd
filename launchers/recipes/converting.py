"""Converters: plugins that put another trainer's keys in a recipe's terms, so that the recipe's reader knows none of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, final

from meshpar import registry
from meshpar.launchers.recipes.yamlfile import Document, Place

CONVERTERS = "meshpar.converters"


@final
@dataclass(slots=True)
class Translation:
    """A pass in a recipe's terms.

    Attributes:
        name: of the pass.
        options: in meshpar's names.
        before: passes to put before it, as a recipe writes them.
        notes: what became of each old name.
        problems: old names that have no meaning here: option -> why.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    before: list[Any] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)


class Converter(Protocol):
    """A plugin of the group ``meshpar.converters``."""

    def keys(self, data: dict[str, Any], document: Document, problems: list[str], at: Place) -> list[str]:
        """Take every foreign key out of ``data``, fill in what it means, and return what became of each.

        Args:
            data: a recipe's top level, or the mapping of a teacher; changed in place.
            document: for messages: ``document.where((*at, key))`` begins with file and line.
            problems: takes one line for each key that is refused.
            at: where in the document the mapping stands.
        """
        ...

    def options(self, name: str, options: Mapping[str, Any]) -> Translation:
        """Return a pass of a recipe with its foreign names translated; what is not foreign comes back as it is."""
        ...


def convert_keys(data: dict[str, Any], document: Document, problems: list[str], at: Place) -> list[str]:
    """Let every converter take its keys out of ``data``; see :meth:`Converter.keys`."""
    return [note for each in _installed() for note in each.keys(data, document, problems, at)]


def convert_pass(name: str, options: Mapping[str, Any]) -> Translation:
    """Return a pass as every converter has translated it, one after another; see :meth:`Converter.options`."""
    result = Translation(name, dict(options))
    for each in _installed():
        new = each.options(result.name, result.options)
        new.before[:0], new.notes[:0] = result.before, result.notes
        new.problems = result.problems | new.problems
        result = new
    return result


def _installed() -> Iterator[Converter]:
    return (registry.plugin(CONVERTERS, name) for name in registry.names(CONVERTERS))
