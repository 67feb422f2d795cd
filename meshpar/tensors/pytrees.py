"""The values in arguments and results, nested as they may be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn


def leaves(values: object, *, objects: bool = False, around: tuple[int, ...] = ()) -> Iterator[Any]:
    """Yield what is in lists, tuples, mappings and dataclasses, in order; with ``objects`` in their attributes, too."""
    if id(values) in around:
        return
    values_inside: Iterable[Any]
    if isinstance(values, Tensor | str | nn.Module | type):
        yield values
        return
    if isinstance(values, Mapping):
        values_inside = values.values()
    elif isinstance(values, list | tuple):
        values_inside = values
    elif is_dataclass(values):
        values_inside = [getattr(values, field.name) for field in fields(values)]
    elif objects and hasattr(values, "__dict__"):
        values_inside = vars(values).values()
    else:
        yield values
        return
    for part in values_inside:
        yield from leaves(part, objects=objects, around=(*around, id(values)))
