"""YAML as recipes are written: line numbers for messages, no key twice, and ``1e-4`` is a number."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, final

import yaml

from meshpar.core.errors import RecipeError

FieldPath = tuple[str | int, ...]
"""A place in a document: ``("passes", 0, "FullyShard")``."""

_SIZE, _DEPTH, _VALUES = 1 << 18, 32, 10_000
"""Largest number of characters, of levels and of values of a file, so that any file is read within seconds."""


class BoundedLoader(yaml.SafeLoader):
    """PyYAML's safe loader without aliases, whose expansion is unbounded, and with limits."""

    depth = values = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the next value of the file."""
        self.depth, self.values = self.depth + 1, self.values + 1
        mark = self.peek_event().start_mark
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not read; write the value out", problem_mark=mark)
        if self.depth > _DEPTH or self.values > _VALUES:
            limit = f"{_DEPTH} levels" if self.depth > _DEPTH else f"{_VALUES:,} values"
            raise yaml.MarkedYAMLError(problem=f"more than {limit} in a file", problem_mark=mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Loader(BoundedLoader):
    """The loader with YAML 1.2's numbers: in 1.1 ``1e-4`` is text and ``12:30:00`` a number."""


_REPLACED = {f"tag:yaml.org,2002:{kind}" for kind in ("float", "int", "timestamp")}
_Loader.yaml_implicit_resolvers = {
    first: [resolver for resolver in resolvers if resolver[0] not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?[0-9][0-9_]*\Z"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"(?:[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
    ),
    list("-+.0123456789"),
)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(str(node.value).replace("_", "")))


@final
@dataclass(slots=True)
class Document:
    """A recipe's data, before anything is known about its fields, with the line, or the override, of each place."""

    name: str
    data: dict[str, Any]
    lines: dict[FieldPath, int] = field(default_factory=dict)
    overrides: dict[FieldPath, str] = field(default_factory=dict)

    def where(self, place: FieldPath) -> str:
        """Return ``file:line: path``, or the override, for a message."""
        for size in range(len(place), 0, -1):
            if place[:size] in self.overrides:
                return f"override {self.overrides[place[:size]]!r}: {dotted(place)}"
        below = [text for key, text in self.overrides.items() if key[: len(place)] == place]
        if below and place not in self.lines:
            return f"override {below[0]!r}: {dotted(place)}"
        line = next((self.lines[place[:size]] for size in range(len(place), 0, -1) if place[:size] in self.lines), None)
        return f"{self.name}{'' if line is None else f':{line}'}: {dotted(place)}"


def read_document(path: Path) -> Document:
    """Read a file; raises RecipeError if it is no small YAML mapping, or has aliases or double keys."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_SIZE + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read recipe {path}: {error}") from error
    return parse_document(text, str(path))


def parse_document(text: str, name: str) -> Document:
    if len(text) > _SIZE:
        raise RecipeError(f"{name} is no recipe: it has more than {_SIZE:,} characters")
    try:
        loader = _Loader(text)
    except yaml.YAMLError as error:  # control characters
        raise RecipeError(f"{name} is not YAML: {error}") from error
    try:
        node = loader.get_single_node()
        lines: dict[FieldPath, int] = {}
        problems = list(_note_lines(node, (), lines))
        data = None if node is None else loader.construct_document(node)  # type: ignore[no-untyped-call]
    except (yaml.YAMLError, ValueError) as error:  # a ValueError of a number or a date
        raise RecipeError(f"{name} is not YAML: {error}") from error
    finally:
        loader.dispose()  # type: ignore[no-untyped-call]
    if problems:
        raise RecipeError("\n".join(f"{name}:{problem}" for problem in problems))
    if not isinstance(data, dict):
        raise RecipeError(f"{name} is not a recipe: expected fields (model: ..., data: ...), got {type(data).__name__}")
    return Document(name, data, lines)


def apply_overrides(document: Document, overrides: Sequence[str]) -> None:
    """Set fields, ``training.steps=50``, values as YAML; raises RecipeError with every bad override."""
    problems = []
    for text in overrides:
        path, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"\w[\w-]*(\.[\w-]+)*", path.strip()):
            problems.append(f"override {text!r}: expected field=value, such as training.steps=50")
            continue
        field_place = place_of(path.strip())
        try:
            _set(document.data, field_place, yaml.load(value, Loader=_Loader))
        except (yaml.YAMLError, LookupError, TypeError, ValueError) as error:
            problems.append(f"override {text!r}: {' '.join(str(error).split())}")
            continue
        for replaced in [line for line in document.lines if line[: len(field_place)] == field_place]:
            del document.lines[replaced]
        document.overrides[field_place] = text
    if problems:
        raise RecipeError("\n".join(problems))


def to_yaml(data: Mapping[str, Any]) -> str:
    return yaml.dump(json.loads(json.dumps(data)), Dumper=_RecipeDumper, sort_keys=False, allow_unicode=True, width=120)


def place_of(path: str) -> FieldPath:
    """Return the place of a dotted path, the reverse of :func:`dotted`."""
    return tuple(int(part) if part.isdigit() else part for part in path.split("."))


def dotted(place: FieldPath) -> str:
    """Return ``passes.0.FullyShard``; a key with control characters, which a terminal obeys, by its repr."""
    return ".".join(part if part.isprintable() else repr(part) for part in map(str, place)) or "the whole file"


class _RecipeDumper(yaml.SafeDumper):
    """Short lists on one line, long numbers as YAML 1.2 reads them."""


def _write_float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    text = {float("inf"): ".inf", float("-inf"): "-.inf"}.get(value, repr(value))
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


def _write_list(dumper: yaml.SafeDumper, value: list[Any]) -> yaml.SequenceNode:
    plain = all(not isinstance(element, (dict, list)) for element in value)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=plain)


_RecipeDumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers
_RecipeDumper.add_representer(float, _write_float)
_RecipeDumper.add_representer(list, _write_list)


def _note_lines(node: yaml.Node | None, place: FieldPath, lines: dict[FieldPath, int]) -> Iterator[str]:
    """Note the line of every place and yield keys that stand twice."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*place, str(key.value))
            if here in lines:
                yield f"{key.start_mark.line + 1}: {dotted(here)} appears twice (first in line {lines[here]}); keep one"
            lines[here] = key.start_mark.line + 1
            yield from _note_lines(value, here, lines)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            lines[(*place, number)] = value.start_mark.line + 1
            yield from _note_lines(value, (*place, number), lines)


def _set(data: object, place: FieldPath, value: object) -> None:
    for done, part in enumerate(place[:-1]):
        data = _enter(data, part, place[:done])
    last = place[-1]
    if isinstance(data, list) and last == len(data):
        data.append(value)
    elif isinstance(data, dict) or (isinstance(data, list) and isinstance(last, int)):
        cast(Any, data)[last] = value
    else:
        raise TypeError(f"{dotted(place[:-1])} is {data!r}, which has no field {last!r}")


def _enter(data: object, part: str | int, place: FieldPath) -> Any:
    """Return what lies under ``part``; a part of a list may be its number, or the name of a pass in it."""
    if isinstance(data, list) and isinstance(part, str):
        places = [
            number for number, item in enumerate(data) if item == part or (isinstance(item, dict) and part in item)
        ]
        if places:
            data[places[0]] = {part: {}} if data[places[0]] == part else data[places[0]]
            data = data[places[0]]
    if isinstance(data, dict):
        data[part] = {} if data.get(part) is None else data[part]
        return data[part]
    if isinstance(data, list) and isinstance(part, int) and part < len(data):
        data[part] = {data[part]: {}} if isinstance(data[part], str) else data[part]
        return data[part]
    raise TypeError(f"{dotted(place)} is {data!r}, which has no field {part!r}")
