"""Stand-ins: modules without parameters in the places of those that other stages compute."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from meshpar.core.errors import MeshparError

_SETTINGS = str | int | float | None
MOST_SHAPES = 256  # that a stand-in, or an end of a cut, knows at a time


@final
class Carried:
    """The form of the value that passes from block to block: the same for all stand-ins of a model.

    Attributes:
        width: number of further values that a block returns beside it, in a tuple; -1: it returns the value alone.
        dtype: of the value.
        device: on which a forward runs; None where none does.
    """

    def __init__(self) -> None:
        self.width, self.dtype = -1, torch.get_default_dtype()
        self.device: torch.device | None = None


@final
class BlockStandIn(nn.Module):
    """Return the value that a block is called with, in the form in which blocks return it.

    Args:
        carried: the form.
        block: whose settings, such as a kind of attention, the model may read here, too.
    """

    stands_in = True

    def __init__(self, carried: Carried, block: nn.Module) -> None:
        super().__init__()
        self._carried = carried
        known = set(vars(self))
        own = [kind for kind in reversed(type(block).__mro__) if kind not in nn.Module.__mro__]
        for name, value in [item for holder in (*own, block) for item in vars(holder).items()]:
            if isinstance(value, _SETTINGS) and not name.startswith("__") and name not in known:
                self.__dict__[name] = value

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        width = self._carried.width
        return hidden if width < 0 else (hidden, *(None,) * width)


class HeadStandIn(nn.Module):
    """Return NaN in the shape of what a module before the blocks returns, without memory: a loss that uses it is NaN.

    Attributes:
        carried: the dtype of what passes from block to block, which the NaN has.
        twin: the module as it was, without values, which finds the shapes.
        written: the model writes into what it returns, which then has memory.
    """

    stands_in = True
    carried: Carried
    twin: tuple[nn.Module]
    written: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        empty = self._empty(args, kwargs)
        if isinstance(empty, Tensor):
            return empty.clone() if self.written else empty.detach()
        return tree_map_only(Tensor, torch.clone if self.written else torch.detach, empty)

    def __getattr__(self, name: str) -> Any:
        """Return NaN in the shape of a parameter to a forward that asks for its device or dtype."""
        value = super().__getattr__(name)
        if value is None and self.carried.device is not None and name in self.twin[0]._parameters:
            was: Any = self.twin[0]._parameters[name]
            return (
                None
                if was is None
                else torch.full((), torch.nan, dtype=was.dtype, device=self.carried.device).expand(was.shape)
            )
        return value

    def _empty(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return NaN in the shapes of what the module returns, found once for inputs of the same shapes."""
        known = self.__dict__.setdefault("shapes", {})
        form = self.carried.dtype, self.carried.device
        if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):
            key: Any = *form, args[0].shape, args[0].dtype
        else:
            key = *form, repr(tree_map_only(Tensor, lambda tensor: (*tensor.shape, tensor.dtype), (args, kwargs)))
        if key not in known:
            given = tree_map_only(Tensor, lambda tensor: tensor.detach().to("meta"), (args, kwargs))
            if len(known) >= MOST_SHAPES:
                known.clear()
            value = torch.full((), torch.nan, dtype=form[0], device=form[1])
            with torch.no_grad():
                returned = self.twin[0](*given[0], **given[1])
                known[key] = tree_map_only(Tensor, lambda tensor: value.expand(tensor.shape), returned)
        return known[key]


class TailStandIn(nn.Module):
    """Return what it is called with, in the place of a norm or a head behind the last block."""

    stands_in = True

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden


class IdleStandIn(nn.Module):
    """Refuse to run, in the place of a module that the model did not call when it was cut, such as a tower for
    images.
    """

    stands_in = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        refuse_idle(self)


def refuse_idle(module: nn.Module, *_: object) -> None:
    """Refuse a call of a module that did not run when the model was cut.

    Raises:
        MeshparError: always.
    """
    kind = type(module).__name__.removesuffix("StandIn")
    raise MeshparError(
        f"PipelineParallel cut the model by a forward of token ids, which does not call {kind}, and this batch does: "
        "its inputs are more than token ids; use a mesh without pp for them"
    )


def with_result(output: Any, values: Mapping[int, Tensor]) -> Any:
    """Return what a module has returned with ``values`` at their places in it."""
    if not isinstance(output, tuple | list):
        return values.get(0, output)
    found = [values.get(place, value) for place, value in enumerate(output)]
    return found if isinstance(output, list) else tuple(found)


def put(module: nn.Module, name: str, child: nn.Module) -> None:
    """Put ``child`` into the place of the submodule ``name``."""
    parent, _, leaf = name.rpartition(".")
    owner = module.get_submodule(parent)
    if isinstance(owner, nn.ModuleList):
        owner[int(leaf)] = child
    else:
        setattr(owner, leaf, child)


def stand_in(kind: type[nn.Module], old: nn.Module, kept: Collection[int]) -> None:
    """Turn a module into its stand-in, which is of its class and draws its first weights, without parameters but those
    whose numbers are ``kept``, because another module of this stage has them.
    """
    for name, parameter in old._parameters.items():
        if id(parameter) not in kept:
            old._parameters[name] = None
    old._buffers.clear()
    for name, child in list(old.named_children()):
        if not any(id(parameter) in kept for parameter in child.parameters()):
            delattr(old, name)
    old.__class__ = type(f"{type(old).__name__}StandIn", (kind, type(old)), {})


def twin_of(module: nn.Module, device: str | None = "meta") -> nn.Module:
    """Return a copy of a module whose tensors have shapes alone: on the meta device, or, in a
    ``FakeTensorMode``, on the one of new tensors (None).

    Frozen parameters of it train, too: the graph of a forward then tells what it uses.
    """
    memo: dict[int, Any] = {}
    for one in (*module.parameters(), *module.buffers()):
        twin = torch.empty(one.shape, dtype=one.dtype, device=device)
        trains = one.is_floating_point() or one.is_complex()
        memo[id(one)] = nn.Parameter(twin, trains) if isinstance(one, nn.Parameter) else twin
    return copy.deepcopy(module, memo)


def tensors(value: object) -> list[Tensor]:
    """Return the tensors in a value."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
