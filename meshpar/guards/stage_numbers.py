"""Refuse numbers that a loop makes of several parameters or gradients where each rank has some of the layers.

A loop over ``module.parameters()`` sees the parameters of one stage. What it computes from each one alone is right, and
what it computes from several, a norm or a penalty, would be another number on each stage. So parameters and gradients
know which they are while the loop has them, and what is computed from them does, too.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any, Final, NoReturn, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from meshpar._torch.optimizers import check_loads, check_scalers
from meshpar._torch.patches import while_lives
from meshpar._torch.units import Units
from meshpar.core.errors import MeshparError
from meshpar.core.guards import Guard, Guarded
from meshpar.passes.applied import applied

_READS: Final = frozenset({"item", "tolist", "__bool__", "__float__", "__int__", "__index__", "is_nonzero"})
_ARRAYS: Final = frozenset({"numpy", "__array__"})
_REMEDY: Final = (
    "each stage of pp has the parameters of its own layers, and would get another number. Call "
    "par.clip_grad_norm_(max_norm) for the norm of all gradients (float('inf') clips nothing); a number of one "
    "parameter is computed from par.whole(tensor); use the optimizer's weight_decay for a penalty over weights"
)


class _OfAStage:
    """A parameter, a gradient, or what was computed from them.

    Attributes:
        origins: numbers of the parameters.
        is_number: it was computed, and has one element.
    """

    origins: frozenset[int]
    is_number: bool

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result, name = func(*args, **(kwargs or {})), func.__name__
            if name != "as_subclass" and not _runs_for_meshpar():
                _follow(name, tree_leaves((args, kwargs)), tree_leaves(result))
            return result

    def meshpar_plain(self) -> Tensor:
        """Return the same values, of which anything may be computed: somebody asks for those of one parameter."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)  # type: ignore[attr-defined,no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[attr-defined]


class _TensorOfAStage(_OfAStage, Tensor):
    pass


class _ParameterOfAStage(_OfAStage, nn.Parameter):
    pass


class _DTensorOfAStage(_OfAStage, DTensor):  # type: ignore[misc]
    pass


_MARKED: Final[Mapping[type, type]] = {
    Tensor: _TensorOfAStage,
    nn.Parameter: _ParameterOfAStage,
    DTensor: _DTensorOfAStage,
}
_PLAIN: Final[Mapping[type, type]] = {marked: plain for plain, marked in _MARKED.items()}


def _follow(name: str, given: list[Any], results: list[Any]) -> None:
    """Mark what a function of torch returned, or refuse it."""
    marked = [leaf for leaf in given if isinstance(leaf, _OfAStage)]
    if name in _READS and marked and marked[0].is_number:
        _refuse(f"{name} reads a number made of a parameter or a gradient")
    if name in _ARRAYS and marked:
        _refuse(f"{name} makes an array of a parameter or a gradient, of which nobody sees what is computed")
    tensors = [leaf for leaf in results if isinstance(leaf, Tensor)]
    if name.startswith("_foreach") and len(tensors) == len(marked):
        sources = [leaf.origins for leaf in marked]
    else:
        sources = [frozenset[int]().union(*(leaf.origins for leaf in marked))] * len(tensors)
    for leaf, origins in zip(tensors, sources, strict=True):
        if len(origins) > 1:
            _refuse(f"{name} makes one tensor of several parameters or gradients")
        if leaf.numel() == 1 or not any(leaf is one for one in given):
            number = leaf.numel() == 1 and any(one.numel() > 1 or one.is_number for one in marked)  # type: ignore[attr-defined]
            _mark(leaf, origins, is_number=number)


def _mark(tensor: Tensor, origins: frozenset[int], *, is_number: bool) -> None:
    if type(tensor) in _MARKED:
        tensor.__class__ = _MARKED[type(tensor)]
    if isinstance(tensor, _OfAStage):
        tensor.origins, tensor.is_number = origins, is_number


def _unmark(tensor: Tensor) -> None:
    if isinstance(tensor, _OfAStage):
        del tensor.origins, tensor.is_number
        tensor.__class__ = _PLAIN[type(tensor)]


def _runs_for_meshpar() -> bool:
    """Return whether meshpar's own code called torch, but for torch functions of the loop."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = f"{frame.f_globals.get('__name__')}."
        if not name.startswith(("torch.", "meshpar._torch.")) or name.startswith("torch.testing."):
            return name.startswith(("meshpar.", "torch.testing."))
        frame = frame.f_back
    return False


@final
class StageNumbers(Guard):
    """Mark parameters and gradients outside of the module's calls, of backwards and of optimizers' steps."""

    _living: Final[weakref.WeakSet[StageNumbers]] = weakref.WeakSet()

    def __init__(self, guarded: Guarded, units: Units) -> None:
        self._module, self._units, self._steps = guarded.module, units, False
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._living.add(self)
        while_lives(guarded.module, "scalers", lambda: check_scalers(_refuse_scaled))
        while_lives(guarded.module, "optimizers' states", lambda: check_loads(_refuse_loaded))
        self._mark()

    def before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._unmark()

    def after_forward(self, output: object) -> None:
        self._mark()

    def after_error(self) -> None:
        self._mark()

    def before_backward(self, roots: Iterable[object], *, reaches: Callable[[], bool]) -> None:
        if (layers := applied(self._module).layers) is not None and layers.edges.behind:
            raise MeshparError(
                "loss runs a backward or torch.autograd.grad after the module's call, which reaches the layers of one "
                "stage of pp alone; leave the backward of the loss to par.backward, or use a mesh without pp for a "
                "gradient of a gradient"
            )
        self._unmark()

    def after_backward(self) -> None:
        self._mark()

    def before_step(self, optimizer: Optimizer, *, trains: bool) -> None:
        if not trains:
            return
        self._unmark()
        self._steps = True
        if optimizer not in self._known:
            self._known.add(optimizer)
            optimizer.register_step_post_hook(self._leave_step)

    def _leave_step(self, *args: object) -> None:
        self._steps = False
        self._mark()

    def holds(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer holds parameters of the module."""
        own = set(map(id, self._parameters()))
        return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])

    def _parameters(self) -> Iterable[Tensor]:
        """Return what a loop has of the parameters; those that a unit has gathered are the forward's."""
        return self._units.shards() if self._units.modules else self._module.parameters()

    def _mark(self) -> None:
        if self._steps:
            return
        with torch._C.DisableTorchFunctionSubclass():
            for number, parameter in enumerate(self._parameters()):
                for tensor in (parameter, parameter.grad):
                    if tensor is not None:
                        _mark(tensor, frozenset([number]), is_number=False)

    def _unmark(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self._parameters():
                if parameter.grad is not None:
                    _unmark(parameter.grad)
                _unmark(parameter)


def _refuse(what: str) -> NoReturn:
    raise MeshparError(f"{what}, and {_REMEDY}")


def _refuse_scaled(optimizer: Optimizer) -> None:
    if any(guard.holds(optimizer) for guard in list(StageNumbers._living)):
        raise MeshparError(
            "torch.amp.GradScaler looks for infinite gradients in this stage of pp alone, and the other stages would "
            "step; scale by meshpar.training.LossScaler"
        )


def _refuse_loaded(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    given = [len(group["params"]) for group in state.get("param_groups", ())]
    held = [len(group["params"]) for group in optimizer.param_groups]
    if given != held and any(guard.holds(optimizer) for guard in list(StageNumbers._living)):
        raise MeshparError(
            f"this optimizer's state is of {sum(given)} parameters, expected {sum(held)}, those of this stage of pp; "
            "save and restore it by meshpar.checkpoints.CheckpointManager, which any mesh can read"
        )
