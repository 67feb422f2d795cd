"""The changes that meshpar made to a module: one record a module, which gives its own computation back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor, nn

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Step = Callable[[Tensor], Tensor]


@final
@dataclass(slots=True, kw_only=True)
class Changes:
    """The changes of one module.

    Attributes:
        before: the ``forward`` that the instance had of its own before, or one that stays; None: its class's.
        forward: the forward that computes now; None where none was put on.
        attributes: plain attributes that were changed -> their values before.
        product: how a linear layer multiplies, ``(x, weight, bias) -> y``; None: as torch does.
        around: what a head does before and after its one product, where that is all that it does.
        exchange: how the ranks that hold a part of the positions each exchange them; None: each rank holds all.
        reads_parameters: the forward takes this rank's part of the module's own parameters itself.
        sees: by the ranks that hold parameters whole, the modules whose parameters this one sees as plain tensors.
        aside: not empty: during one call of the model another forward computes; the instance's own of before, None
            where it had none.
    """

    before: Callable[..., Any] | None = None
    forward: Callable[..., Any] | None = None
    attributes: dict[str, Any] = field(default_factory=dict)
    product: Product | None = None
    around: tuple[Step, Step] | None = None
    exchange: Any = None
    reads_parameters: bool = False
    sees: dict[str, list[nn.Module]] = field(default_factory=dict)
    aside: list[Callable[..., Any] | None] = field(default_factory=list)


def installed(module: nn.Module) -> Changes | None:
    """Return the module's record, None where meshpar changed nothing of it."""
    return module.__dict__.get("_meshpar")


def record(module: nn.Module) -> Changes:
    """Return the module's record, made where there is none."""
    return module.__dict__.setdefault("_meshpar", Changes())


def set_forward(
    module: Any, forward: Callable[..., Any], *, reads_parameters: bool = False, stays: bool = False
) -> None:
    """Let ``module`` compute by ``forward``; ``stays``: also where the module computes as it was written."""
    changes = record(module)
    if changes.forward is None:
        changes.before = module.__dict__.get("forward")
    changes.forward = functools.update_wrapper(forward, module.forward)
    if stays:
        changes.before = changes.forward
    changes.reads_parameters |= reads_parameters
    module.forward = changes.forward


def set_attribute(module: nn.Module, name: str, value: Any) -> None:
    """Set a plain attribute (a count of heads) to this rank's."""
    record(module).attributes.setdefault(name, module.__dict__[name])
    setattr(module, name, value)


def own_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return a ``forward`` that somebody else put on this instance; None where its class's computes."""
    changes, forward = installed(module), module.__dict__.get("forward")
    if changes is None or changes.forward is None:
        return forward
    return changes.before if forward is changes.forward else forward


@contextmanager
def in_place_of(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Let ``module`` compute something else (a loss, not logits) during a call of its model; trials do not see it."""
    changes, instance_forward = record(module), module.__dict__.get("forward")
    changes.aside.append(instance_forward)
    module.forward = forward
    try:
        yield
    finally:
        changes.aside.pop()
        _put(module, instance_forward)


def own_state(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module as they are without :func:`in_place_of`."""
    state, changes = dict(vars(module)), installed(module)
    if changes is not None and changes.aside:
        del state["forward"]
        if changes.aside[0] is not None:
            state["forward"] = changes.aside[0]
    return state


def _put(module: Any, forward: Callable[..., Any] | None) -> None:
    module.__dict__.pop("forward", None)
    if forward is not None:
        module.forward = forward


def undo_changes(module: nn.Module) -> None:
    """Let a copy of a module, and all that is in it, compute as their authors wrote them."""
    for child in module.modules():
        if (changes := installed(child)) is not None:
            child.__dict__.update(changes.attributes)
            _put(child, changes.before)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Have a module in evaluation mode inside of the ``with`` block; each module in it has its own mode back after."""
    training = [child for child in module.modules() if child.training]
    module.eval()
    try:
        yield
    finally:
        for child in training:
            child.training = True
