"""Strict models of sections: of a dataclass's fields, or written out; and their errors, in a recipe's terms."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin

import torch
from pydantic import BaseModel, ConfigDict, PlainSerializer, PlainValidator, ValidationError, create_model
from pydantic_core import ErrorDetails
from torch import nn

from meshpar.core.patterns import suggestion
from meshpar.launchers.recipes.yamlfile import Document, FieldPath

_TYPES: Mapping[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    Path: "a path",
    type(None): "null",
    torch.dtype: "a dtype",
}


class Section(BaseModel):
    """Fields under one heading: no other keys, no conversions, no changes afterwards."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, arbitrary_types_allowed=True, protected_namespaces=()
    )

    def given(self) -> dict[str, Any]:
        """Return the fields that were written, with nested sections as their objects."""
        return {name: getattr(self, name) for name in self.model_fields_set if getattr(self, name) is not None}


_S = TypeVar("_S", bound=Section)


def parse_dtype(text: object) -> torch.dtype:
    """Return the dtype called ``bfloat16``, ``bf16``, ``torch.bfloat16``, ...; raises ValueError for anything else."""
    name = str(text).removeprefix("torch.")
    value = getattr(
        torch, {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}.get(name, name), None
    )
    if not isinstance(value, torch.dtype):
        raise ValueError(f"expected a dtype such as float32, bfloat16 or float16, got {text!r}")
    return value


Dtype = Annotated[
    torch.dtype, PlainValidator(parse_dtype), PlainSerializer(lambda value: str(value).removeprefix("torch."))
]


@cache
def section_of(cls: type, *, partial: bool = True, without: tuple[str, ...] = ()) -> type[Section]:
    """Return the section of a dataclass's plain fields; ``partial``: None stands for the dataclass's default."""
    hints = typing.get_type_hints(cls, include_extras=True)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.init and field.name not in without and not _takes_functions(hints[field.name]):
            hint = _adapted(hints[field.name])
            # built at run time
            fields[field.name] = (typing.Optional[hint], None) if partial else (hint, field.default)  # noqa: UP045
    return create_model(cls.__name__, __base__=Section, **fields)


@cache
def section_of_call(factory: Callable[..., Any], without: tuple[str, ...] = ()) -> type[Section]:
    """Return the section of a callable's keywords, except functions, modules and those in ``without``."""
    fields: dict[str, Any] = {}
    parameters, hints = inspect.signature(factory).parameters.values(), _hints(factory)
    for parameter in parameters:
        name, hint = parameter.name, hints[parameter.name]
        keyword = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if keyword and name not in without and not name.startswith("_") and not _takes_functions(hint):
            fields[name] = (_adapted(hint), ... if parameter.default is parameter.empty else parameter.default)
    takes_more = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)
    settings = ConfigDict(**{**Section.model_config, "extra": "allow" if takes_more else "forbid"})
    base = types.new_class(
        "_Keywords", (Section,), exec_body=lambda body: body.update(model_config=settings, __module__=__name__)
    )
    return create_model(getattr(factory, "__name__", "options"), __base__=base, **fields)


def _hints(factory: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of a dataclass's fields or of keywords; Any where none can be read."""
    if dataclasses.is_dataclass(factory):
        return typing.get_type_hints(factory, include_extras=True)
    home = sys.modules[factory.__module__].__dict__
    annotations = {name: parameter.annotation for name, parameter in inspect.signature(factory).parameters.items()}
    return {name: Any if hint is inspect.Parameter.empty else _hint(hint, home) for name, hint in annotations.items()}


def _hint(annotation: object, home: dict[str, Any]) -> Any:
    try:
        return typing.get_type_hints(
            types.SimpleNamespace(__annotations__={"": annotation}), home, include_extras=True
        )[""]
    except (NameError, TypeError):  # a name that is imported for type checkers alone
        return Any


def build(cls: Callable[..., Any], section: Section, *arguments: Any, **given: Any) -> Any:
    """Return the object of a section made by :func:`section_of` or :func:`section_of_call`."""
    hints = _hints(cls)
    values = {}
    for name in section.model_fields_set & {*hints, *(section.model_extra or ())}:
        value, hint = getattr(section, name), hints.get(name, Any)
        kinds = (hint, *get_args(hint))
        inner = next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)
        if value is not None or type(None) in kinds or hint is Any:
            values[name] = build(cast(Any, inner), value) if inner is not None and isinstance(value, Section) else value
    return cls(*arguments, **(values | given))


def validate(model: type[_S], data: object, document: Document, place: FieldPath = ()) -> _S | list[str]:
    """Return the section of ``data``, or every problem in it, one line each with file, line and dotted path."""
    try:
        # By way of JSON, whose strict mode takes a list for a tuple and a text for a path, and nothing else.
        return model.model_validate_json(json.dumps(data, default=str))
    except ValidationError as error:
        by_place: dict[FieldPath, list[ErrorDetails]] = {}
        for detail in error.errors():
            by_place.setdefault(_in_data(detail, data), []).append(detail)
        return [
            f"{document.where((*place, *where))}: {_message(where, errors, data, model)}"
            for where, errors in by_place.items()
        ]


def describe_type(hint: object) -> str:
    """Return what a field takes, in words: ``an integer, 'epoch' or null``."""
    tags = [_tag(kind) for kind in get_args(hint) if isinstance(kind, type) and issubclass(kind, BaseModel)]
    if "own" in tags:
        return f"fields (kind: {', '.join(str(tag) for tag in tags if tag != 'own')}; or class: package.module.Name)"
    parts = list(dict.fromkeys(_words(hint)))
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"


def _words(hint: object) -> Iterator[str]:
    origin = get_origin(hint)
    if origin is Annotated:
        yield from _words(get_args(hint)[0])
    elif origin in (typing.Union, types.UnionType):
        for kind in sorted(get_args(hint), key=lambda one: one is type(None)):
            yield from _words(kind)
    elif origin is Literal:
        yield from (repr(kind) for kind in get_args(hint))
    elif origin is tuple and Ellipsis not in get_args(hint):
        yield f"a list of {len(get_args(hint))}"
    elif origin is not None or hint in (dict, list, tuple):
        yield "a mapping" if isinstance(origin, type) and issubclass(origin, Mapping) else "a list"
    elif isinstance(hint, type) and issubclass(hint, BaseModel):
        yield f"fields ({', '.join(_keys(hint))})"
    else:
        yield _TYPES.get(hint, str(hint))


def _keys(section: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in section.model_fields.items()]


def _takes_functions(hint: object) -> bool:
    return get_origin(hint) is Callable or hint is nn.Module or any(_takes_functions(kind) for kind in get_args(hint))


def _adapted(hint: object) -> Any:
    """Put dtypes and nested dataclasses in a form that a recipe can write."""
    if hint is torch.dtype:
        return Dtype
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return section_of(hint)
    if get_origin(hint) in (typing.Union, types.UnionType):
        return typing.Union[tuple(_adapted(kind) for kind in get_args(hint))]  # noqa: UP007  built at run time
    return hint


def _in_data(error: ErrorDetails, data: object) -> FieldPath:
    """Return the place in the data of pydantic's location, which also names branches of unions."""
    parts: list[str | int] = []
    for part in error["loc"]:
        if (isinstance(data, dict) and part in data) or (
            isinstance(data, list) and isinstance(part, int) and part < len(data)
        ):
            data = cast(Any, data)[part]
            parts.append(part)
    return (*parts, error["loc"][-1]) if error["type"] == "missing" and isinstance(data, dict) else tuple(parts)


def _message(place: FieldPath, errors: list[ErrorDetails], data: object, model: type[BaseModel]) -> str:
    error = errors[0]
    in_list = place and isinstance(place[-1], int)
    owner, hint = _field(model, tuple(part for part in error["loc"] if in_list or isinstance(part, str)))
    context, value = error.get("ctx", {}), data
    for part in place:
        value = cast(Any, value)[part] if isinstance(value, list) or part in cast(Any, value) else None
    match error["type"]:
        case "extra_forbidden":
            return (
                f"unknown key; {suggestion(str(place[-1]), _keys(owner), others='; `meshpar check --keys` prints all')}"
            )
        case "missing" if isinstance(place[-1], str) and place[-1] == error["loc"][-1]:
            return f"missing; expected {describe_type(hint)}"
        case "value_error":
            return str(context["error"])
        case "union_tag_invalid":
            name, tags = str(context["discriminator"]).strip("'"), str(context["expected_tags"]).replace(", 'own'", "")
            return (
                f"{name} must be one of {tags}, got {context['tag']!r}; for a class of your own write class: "
                "package.module.Name"
            )
        case kind if kind.startswith(("greater", "less")):
            return f"{error['msg'].replace('Input should', 'must')}, got {value!r}"
    return f"expected {describe_type(hint)}, got {value!r}"


def _field(model: type[BaseModel], loc: tuple[str | int, ...]) -> tuple[type[BaseModel], Any]:
    """Return the innermost section on the way to a location, and the type of the field there."""
    branches: list[type[BaseModel]] = []
    owner: type[BaseModel] = model
    hint: Any = Any
    for part in loc:
        if part in owner.model_fields:
            field = owner.model_fields[str(part)]
            hint = field.annotation
            inner = [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and issubclass(kind, BaseModel)]
            if inner and part != loc[-1]:
                owner = inner[0]
                branches = inner
        elif isinstance(part, int) and get_origin(hint) is tuple:
            hint = get_args(hint)[0 if Ellipsis in get_args(hint) else part]
        elif isinstance(part, str):
            owner = next((branch for branch in branches if _tag(branch) == part), owner) if part != loc[-1] else owner
    return owner, hint


def _tag(section: type[BaseModel]) -> object:
    return next((section.model_fields[name].default for name in ("kind", "name") if name in section.model_fields), None)
