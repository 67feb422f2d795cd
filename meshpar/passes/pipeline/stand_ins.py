"""Stand-ins: modules without parameters in the places of those that other stages compute."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from meshpar._torch.simulated_device import has_values, without_functions
from meshpar._torch.tensors import tensor_leaves, tree_map_only
from meshpar.core.errors import MeshparError

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_SETTINGS = str | int | float | None
MOST_SHAPES = 256  # that a stand-in, or an end of a cut, knows at a time


@final
class Carried:
    """The form of the value that passes from block to block: the same for all stand-ins of a model."""

    def __init__(self) -> None:
        # ``width``: of further values that a block returns in a tuple; -1: it returns the value alone
        self.width, self.dtype = -1, torch.get_default_dtype()
        # on which a forward runs
        self.device: torch.device | None = None
        # the last stage's loss runs, and not the module's call in it
        self.scores = False


LOSS_WRITES = (
    "loss writes parameters, and stages of pp run it ahead of the backwards of earlier micro-batches; write after "
    "par.backward"
)


class ElsewhereError(MeshparError):
    """A value was used that another stage of ``pp`` computes."""


class PartElsewhereError(MeshparError, AttributeError):
    """A part of a block was asked for that another stage of ``pp`` has."""


class Elsewhere(Tensor):
    """A value that a hook gets of a module which another stage computes: a hook may keep it, and nobody may use it."""

    in_hooks = False
    what = (
        "a value that a hook has kept of a block, or of a module before the blocks, which another stage of pp "
        "computes; keep values of the last stage's blocks alone"
    )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name == "__get__" or (cls.in_hooks and not (name.endswith("_") and not isinstance(args[0], cls))):
            with without_functions():
                result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and cls.in_hooks:
                return result.as_subclass(cls)
            if name == "__get__" and not isinstance(result, Tensor):
                return result
        raise ElsewhereError(f"{name} uses {cls.what}")


class WeightElsewhere(Elsewhere):
    """A parameter of another stage where the last one computes the loss: of use for its device, dtype and shape."""

    what = (
        "a parameter that another stage of pp has, in the loss, which the last stage computes; use the optimizer's "
        "weight_decay for a penalty over it, or add the penalty's gradient to its own after par.backward"
    )


class AbsentWeight(Tensor):
    """A parameter of another stage where a forward runs before the last one: of use but for writes."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name.endswith("_") and not name.endswith("__") and name != "requires_grad_" and isinstance(args[0], cls):
            raise ElsewhereError(LOSS_WRITES)
        with without_functions():
            return func(*args, **(kwargs or {}))


def is_users(hook: Any) -> bool:
    """Return whether a hook is neither torch's nor meshpar's."""
    made_by = getattr(getattr(hook, "func", hook), "__module__", None) or type(hook).__module__
    return made_by.split(".")[0] not in ("torch", "meshpar")


def tell_hooks(hook: Any, *values: Any) -> None:
    """Call a user's hook with what it may keep and not use."""
    if not all(map(has_values, tensor_leaves(values))):
        return  # they have no subclass
    Elsewhere.in_hooks = True
    try:
        hook(*tree_map_only(Tensor, lambda tensor: tensor.detach().as_subclass(Elsewhere), values))
    except ElsewhereError:  # a hook that looks at values does so where they are computed
        pass
    finally:
        Elsewhere.in_hooks = False


def tell_hooks_of(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Call the user's hooks of a module in whose place a stand-in ran."""
    for number, hook in module._forward_hooks.items():
        if is_users(hook):
            values = (args, kwargs, output) if number in module._forward_hooks_with_kwargs else (args, output)
            tell_hooks(hook, module, *values)


class StandIn(nn.Module):
    """A module whose values another stage computes, and where the user's hooks get no values."""

    stands_in = True
    carried: Carried
    # the module's own parameters that this rank lacks
    absent: Mapping[str, Tensor] = MappingProxyType({})

    def __getattr__(self, name: str) -> Any:
        """Return NaN in the shape of an absent parameter in a forward, and the shape without memory outside."""
        if (was := self.absent.get(name)) is None or self._parameters.get(name) is not None:
            return super().__getattr__(name)
        device = self.carried.device
        if device is None:
            return was
        value: Any = torch.full((), torch.nan, dtype=was.dtype, device=device).expand(was.shape)
        if type(value) is Tensor:  # a look at the model has no values
            value = value.as_subclass(WeightElsewhere if self.carried.scores else AbsentWeight)
        value._is_param = True  # torch's word for what get_parameter finds
        return value

    def take_hooks(self, module: nn.Module) -> None:
        """Take over the user's hooks of a module, which may be this one."""
        for kind in _HOOKS:
            hooks = getattr(module, kind)
            getattr(self, kind).update({at: partial(tell_hooks, hook) for at, hook in hooks.items() if is_users(hook)})
            getattr(self, f"{kind}_with_kwargs").update(getattr(module, f"{kind}_with_kwargs"))

    def register_forward_hook(self, hook: Any, **options: Any) -> Any:
        return super().register_forward_hook(partial(tell_hooks, hook) if is_users(hook) else hook, **options)

    def register_forward_pre_hook(self, hook: Any, **options: Any) -> Any:
        return super().register_forward_pre_hook(partial(tell_hooks, hook) if is_users(hook) else hook, **options)

    def register_full_backward_hook(self, hook: Any, prepend: bool = False) -> Any:
        return RemovableHandle(OrderedDict())

    register_full_backward_pre_hook = register_backward_hook = register_full_backward_hook


@final
class BlockStandIn(StandIn):
    """Return the value that a block is called with, in the form in which blocks return it."""

    def __init__(self, carried: Carried, block: nn.Module, where: str = "") -> None:
        super().__init__()
        self.take_hooks(block)
        self._carried = carried
        self._where, self._parts = where, frozenset({*block._modules, *block._parameters, *block._buffers})
        attributes = set(vars(self))
        classes = [kind for kind in reversed(type(block).__mro__) if kind not in nn.Module.__mro__]
        for name, value in [item for holder in (*classes, block) for item in vars(holder).items()]:
            if isinstance(value, _SETTINGS) and not name.startswith("__") and name not in attributes:
                self.__dict__[name] = value

    def __getattr__(self, name: str) -> Any:
        """Say where a part of the block is, also to ``hasattr``."""
        if name in self.__dict__.get("_parts", ()):
            # torch turns an AttributeError into one that does not say why
            by_name = sys._getframe(1).f_code is nn.Module.get_submodule.__code__
            raise (MeshparError if by_name else PartElsewhereError)(
                f"{self._where}.{name}: the block is on another stage of pp than this rank; ask "
                f"hasattr(block, {name!r}), or iterate over module.named_parameters(), which are those of this stage, "
                "or read its values "
                "by par.state_dict(full=True, everywhere=True)"
            )
        return super().__getattr__(name)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        width = self._carried.width
        return hidden if width < 0 else (hidden, *(None,) * width)


class HeadStandIn(StandIn):
    """Return NaN in the shape of what a module before the blocks returns: a loss that uses it is NaN."""

    # the module as it was, without values, which finds the shapes
    twin: tuple[nn.Module]
    # the model writes into what it returns, which then has memory
    written: bool

    def __getattr__(self, name: str) -> Any:
        """Return a stand-in of a part, for a model that asks for the dtype of its parameters."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            part = self.__dict__["twin"][0]._modules.get(name) if "twin" in self.__dict__ else None
            if part is None:
                raise
            return standing_for(self.carried, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        empty = self._empty(args, kwargs)
        if isinstance(empty, Tensor):
            return empty.clone() if self.written else empty.detach()
        return tree_map_only(Tensor, torch.clone if self.written else torch.detach, empty)

    def _empty(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return NaN in the shapes of what the module returns, found once for inputs of the same shapes."""
        outputs = self.__dict__.setdefault("shapes", {})
        form = self.carried.dtype, self.carried.device
        if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):
            key: Any = *form, args[0].shape, args[0].dtype
        else:
            key = *form, repr(tree_map_only(Tensor, lambda tensor: (*tensor.shape, tensor.dtype), (args, kwargs)))
        if key not in outputs:
            inputs = tree_map_only(Tensor, lambda tensor: tensor.detach().to("meta"), (args, kwargs))
            if len(outputs) >= MOST_SHAPES:
                outputs.clear()
            value = torch.full((), torch.nan, dtype=form[0], device=form[1])
            with torch.no_grad():
                returned = self.twin[0](*inputs[0], **inputs[1])
                outputs[key] = tree_map_only(Tensor, lambda tensor: value.expand(tensor.shape), returned)
        return outputs[key]


def standing_for(carried: Carried, twin: nn.Module, written: bool = False) -> HeadStandIn:
    """Return a stand-in beside the module that it answers for, which ``twin`` is without values."""
    head = HeadStandIn()
    head.carried, head.twin, head.written = carried, (twin,), written
    head.absent = {name: parameter for name, parameter in twin._parameters.items() if parameter is not None}
    return head


class TailStandIn(StandIn):
    """Return what it is called with, in the place of a norm or a head behind the last block."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden


class IdleStandIn(StandIn):
    """Refuse to run, in the place of a module that the model did not call when it was cut."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        refuse_idle(self)


def is_idle(module: nn.Module) -> bool:
    """Return whether a module refuses to run because it did not when the model was cut."""
    return isinstance(module, IdleStandIn) or refuse_idle in module._forward_pre_hooks.values()


def refuse_idle(module: nn.Module, *_: object) -> None:
    """Refuse a call of a module that did not run when the model was cut."""
    kind = type(module).__name__.removesuffix("StandIn")
    raise MeshparError(
        f"PipelineParallel cut the model by a forward that does not call {kind}, and this batch calls it; give such "
        "inputs as ModelLayout(stages=StagesLayout(example=...)), or use a mesh without pp"
    )


def with_result(output: Any, values: Mapping[int, Tensor]) -> Any:
    """Return what a module has returned with ``values`` at their places in it."""
    if not isinstance(output, tuple | list):
        return values.get(0, output)
    replaced = [values.get(number, value) for number, value in enumerate(output)]
    return replaced if isinstance(output, list) else tuple(replaced)


def put(module: nn.Module, name: str, child: nn.Module) -> None:
    """Put ``child`` into the place of the submodule ``name``."""
    parent, _, leaf = name.rpartition(".")
    owner = module.get_submodule(parent)
    if isinstance(owner, nn.ModuleList):
        owner[int(leaf)] = child
    else:
        setattr(owner, leaf, child)


def stand_in(kind: type[nn.Module], old: nn.Module, kept: Collection[int], carried: Carried) -> None:
    """Turn a module into its stand-in, of its class, without parameters but those whose numbers are ``kept``."""
    old.__dict__["carried"], old.__dict__["absent"] = carried, dict[str, nn.Parameter]()
    for name, parameter in old._parameters.items():
        if parameter is not None and id(parameter) not in kept:
            shape = torch.empty_like(parameter, device="meta")
            old.__dict__["absent"][name] = nn.Parameter(shape, parameter.requires_grad)
    old._parameters.update(dict.fromkeys(old.__dict__["absent"]))
    old._buffers.clear()
    for name, child in list(old.named_children()):
        if not any(id(parameter) in kept for parameter in child.parameters()):
            delattr(old, name)
    # of its class, by which it draws its first weights
    old.__class__ = type(f"{type(old).__name__}StandIn", (kind, type(old)), {})
    if isinstance(old, StandIn):
        old.take_hooks(old)


def twin_of(module: nn.Module, device: str | None = "meta") -> nn.Module:
    """Return a copy without values: on the meta device, or in a ``FakeTensorMode`` (None). All of it trains."""
    # the graph of a forward then tells what it uses, and no user's hook keeps what it computes
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        twin = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        trains = tensor.is_floating_point() or tensor.is_complex()
        memo[id(tensor)] = nn.Parameter(twin, trains) if isinstance(tensor, nn.Parameter) else twin
    copied = copy.deepcopy(module, memo)
    for child in copied.modules():
        for kind in (*_HOOKS, "_backward_hooks", "_backward_pre_hooks"):
            hooks = getattr(child, kind)
            for at in [at for at, hook in hooks.items() if is_users(hook)]:
                del hooks[at]
    return copied
