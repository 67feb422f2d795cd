"""Recipes that hold the keys of Hugging Face's Trainer or of accelerate: each is translated, told to have no effect, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from meshpar.launchers.recipes.yamlfile import Document, Place


@final
@dataclass(slots=True)
class Translated:
    """A recipe's data on the way from foreign keys to meshpar's.

    Attributes:
        data: the recipe's mapping, filled in place.
        document: for messages.
        problems: takes one line for each fault.
        notes: what became of each key.
        fsdp: options of the sharding pass, in the old names that :mod:`meshpar.launchers.converters.knobs` reads.
        before: passes to put before the sharding one.
        strategy: the sharding strategy where a key says it.
        known: what keys say to one another, such as ``eval_strategy`` to ``eval_steps``.
        key: the present one.
        written: fields that keys have set.
    """

    data: dict[str, Any]
    document: Document
    problems: list[str]
    notes: list[str] = field(default_factory=list)
    fsdp: dict[str, Any] = field(default_factory=dict)
    before: list[Any] = field(default_factory=list)
    strategy: str = ""
    known: dict[str, Any] = field(default_factory=dict)
    key: str = ""
    written: set[str] = field(default_factory=set)

    def put(self, path: str, value: object) -> None:
        """Set a field of the recipe (``optimizer.lr``) because of the present key; a field that the recipe writes itself is a conflict."""
        *sections, name = path.split(".")
        target = self.data
        for section in sections:
            inner = target.get(section)
            target[section] = dict(inner) if isinstance(inner, Mapping) else {}
            target = target[section]
        if name in target and path not in self.written and target[name] != value:
            self.refuse(self.key, f"the recipe says {path}: {target[name]} as well; keep one")
            return
        target[name] = value
        self.written.add(path)

    def has(self, path: str) -> bool:
        """Tell whether the recipe, or a key before, set a field."""
        target: Any = self.data
        for part in path.split("."):
            if not isinstance(target, Mapping) or part not in target:
                return False
            target = target[part]
        return True

    def note(self, key: str, text: str) -> None:
        """Tell what became of a key."""
        self.notes.append(f"{key}: {text}")

    def refuse(self, key: str, reason: str, place: Place = ()) -> None:
        """Refuse a key."""
        self.problems.append(f"{self.document.where((*place, key))}: {reason}")


Handler = Callable[[Any, Translated], str | None]
"""Takes a key's value, puts it where it belongs and returns what became of it (None: told already); raises ValueError to refuse it."""


@final
@dataclass(frozen=True, slots=True)
class Keys:
    """A table of foreign keys.

    Attributes:
        handlers: keys that are translated.
        no_effect: keys that need nothing here -> why.
        refused: keys that cannot be had -> (the values that ask for nothing, why).
    """

    handlers: Mapping[str, Handler]
    no_effect: Mapping[str, str]
    refused: Mapping[str, tuple[tuple[Any, ...], str]]

    def __iter__(self) -> Iterator[str]:
        yield from (*self.handlers, *self.no_effect, *self.refused)

    def __contains__(self, key: object) -> bool:
        return key in self.handlers or key in self.no_effect or key in self.refused

    def take(self, key: str, value: object, result: Translated, place: Place = ()) -> None:
        """Do with one key what the table says."""
        result.key = key
        if key in self.no_effect:
            result.note(key, f"has no effect: {self.no_effect[key]}")
        elif key in self.refused:
            harmless, reason = self.refused[key]
            if value is None or any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in harmless):
                result.note(key, "has no effect: this value asks for nothing")
            else:
                result.refuse(key, f"{value!r} is refused: {reason}", place)
        elif value is None:
            result.note(key, "has no effect: nothing is the default")
        else:
            try:
                told = self.handlers[key](value, result)
            except ValueError as error:
                result.refuse(key, str(error), place)
            except TypeError:
                result.refuse(key, f"cannot read {value!r}", place)
            else:
                if told is not None:
                    result.note(key, told)


def to(path: str, check: Callable[[Any], Any] = lambda value: value) -> Handler:
    """Return the handler that writes a key's value to one field."""

    def handler(value: object, result: Translated) -> str | None:
        wanted = check(value)
        result.put(path, wanted)
        return f"{value} became {path}: {_plain(wanted)}"

    return handler


def whole(value: object) -> int:
    """Return a whole number from 1; raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 1:
        raise ValueError(f"expected a whole number from 1, got {value!r}")
    return int(value)


def truth(value: object) -> bool:
    """Return true or false, also from text; raises ValueError for anything else."""
    if isinstance(value, str) and value.lower() in ("true", "yes"):
        return True
    if isinstance(value, str) and value.lower() in ("false", "no"):
        return False
    if value in (True, False, None):
        return bool(value)
    raise ValueError(f"expected true or false, got {value!r}")


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
