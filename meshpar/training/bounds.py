"""Bounds on the numbers of settings, declared beside the fields that they bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Literal, final, get_args, get_origin, get_type_hints


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Bounds on a field's value, as an annotation of its type: ``Annotated[int, Bound(ge=1)]``.

    A settings class checks its bounds with :func:`bound_problems`. Pydantic reads them as well, so that a recipe's section has the
    same bounds without a second declaration.

    Attributes:
        ge, gt, le: the value is at least ``ge``, above ``gt``, at most ``le``.
        lt: the value is below ``lt``.
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def __contains__(self, value: Any) -> bool:
        low = (self.ge is None or value >= self.ge) and (self.gt is None or value > self.gt)
        return low and (self.le is None or value <= self.le) and (self.lt is None or value < self.lt)

    def __str__(self) -> str:
        words = {"from": self.ge, "above": self.gt, "to": self.le, "below": self.lt}
        return " ".join(f"{word} {value}" for word, value in words.items() if value is not None)

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        bounds = {"ge": self.ge, "gt": self.gt, "le": self.le, "lt": self.lt}
        return handler(source) | {name: value for name, value in bounds.items() if value is not None}


Count = Annotated[int, Bound(ge=1)]
"""A number of things of which there is at least one."""

Every = Count | Literal["epoch"] | None
"""How often something happens: steps between two times, ``"epoch"`` (at its end) or None (never)."""

Part = Annotated[float, Bound(ge=0, lt=1)]
"""A part of a whole, and not all of it."""


def bound_problems(settings: Any) -> Iterator[str]:
    """Yield one line for each field of a dataclass object whose value is outside its bounds."""
    for name, hint in get_type_hints(type(settings), include_extras=True).items():
        kinds = [hint] if get_origin(hint) is Annotated else list(get_args(hint))
        several = get_origin(hint) is tuple
        for place, number in enumerate(kinds):
            if get_origin(number) is not Annotated:
                continue
            kind, bound = get_args(number)
            value, others = getattr(settings, name), list[Any]()
            if several:
                value = value[place]
            else:
                others = [None if each is NoneType else each for one in kinds if one is not number for each in get_args(one) or [one]]
            if value not in others and not (isinstance(value, kind if kind is int else (int, float)) and value in bound):
                whole = "a whole number " if kind is int else ""
                yield f"{name} must be {whole}{bound}{''.join(f' or {each!r}' for each in others)}, got {value!r}"
