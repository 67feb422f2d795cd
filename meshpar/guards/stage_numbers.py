"""Refuse numbers that a loop makes of several parameters or gradients where each rank has some of the layers: they
would differ between stages. Parameters, gradients and what is computed from them know which parameters they are.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from types import FrameType
from typing import Any, ClassVar, Final, NoReturn, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshpar._torch.simulated_device import without_functions
from meshpar._torch.tensors import tree_leaves
from meshpar.core.errors import MeshparError
from meshpar.passes.pipeline.running import Layers
from meshpar.passes.pipeline.stand_ins import LOSS_WRITES, is_users
from meshpar.passes.tensor.random import states
from meshpar.step.moment import Guard, Guarded
from meshpar.tensors.placements import local_tensor

_READS: Final = frozenset({"item", "__bool__", "__float__", "__int__", "__index__", "is_nonzero"})
_ARRAYS: Final = frozenset({"numpy", "__array__", "tolist"})
_DRAWS: Final = frozenset(
    {
        *("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_"),
        *("rand_like", "randn_like", "randint_like", "bernoulli", "multinomial", "dropout", "normal"),
        *("trunc_normal_", "kaiming_uniform_", "kaiming_normal_"),
    }
)
_HOOKS: Final = frozenset({"register_hook", "register_post_accumulate_grad_hook"})
_SET_DATA: Final = Tensor.data.__set__  # type: ignore[attr-defined]
_GRADS: Final = (Tensor.grad.__get__, Tensor.grad.__set__)  # type: ignore[union-attr]
_REMEDY: Final = (
    "each stage of pp has the parameters of its own layers, and would get another number. Call "
    "par.clip_grad_norm_(max_norm) for the norm of all gradients (float('inf') clips nothing); a number of one "
    "parameter is computed from par.whole(tensor); use the optimizer's weight_decay for a penalty over weights"
)


class _OfAStage:
    """A parameter, a gradient, or what was computed from the parameters ``origins``; ``is_number``: to one element."""

    origins: frozenset[int]
    is_number = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_functions():
            name = func.__name__
            if func in _GRADS:
                return _gradient(func, *args)
            if name == "__get__":
                result = func(*args)
                if not isinstance(result, Tensor):  # a version, a device: the loop and torch read many
                    return result
            follows = name != "as_subclass" and not _runs_for_meshpar()
            if follows and name in _HOOKS:
                for guard in list(StageNumbers._living):
                    guard.check_hooked(args[0])
                args = args[0], _followed(args[0].origins, args[1])
            elif follows:
                _check(func, args, kwargs or {})
            result = func(*args, **(kwargs or {}))
            if follows:
                _follow(name, tree_leaves((args, kwargs)), tree_leaves(result))
            return result

    def meshpar_plain(self) -> Tensor:
        """Return the same values, of which anything may be computed: somebody asks for those of one parameter."""
        with without_functions():
            return self.as_subclass(Tensor)  # type: ignore[attr-defined,no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[attr-defined]


class _TensorOfAStage(_OfAStage, Tensor):
    pass


class _ParameterOfAStage(_OfAStage, nn.Parameter):
    pass


class _FollowedMethod:
    """A method of DTensor, or what a parameter has in its place, of which torch tells no function."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, tensor: DTensor, owner: type | None = None) -> Callable[..., Any]:
        method = vars(tensor).get(self._name) or getattr(DTensor, self._name).__get__(tensor)

        def call(*args: Any, **options: Any) -> Any:
            result = method(*args, **options)
            if not _runs_for_meshpar():
                _follow("a method of DTensor", [tensor], [result])
            return result

        return call

    def __set__(self, tensor: DTensor, method: Callable[..., Any]) -> None:
        vars(tensor)[self._name] = method


class _DTensorOfAStage(_OfAStage, DTensor):  # type: ignore[misc]
    full_tensor = _FollowedMethod()  # pyright: ignore[reportAssignmentType]
    to_local = _FollowedMethod()  # pyright: ignore[reportAssignmentType]
    redistribute = _FollowedMethod()  # pyright: ignore[reportAssignmentType]


_MARKED: Final[Mapping[type, type]] = {
    Tensor: _TensorOfAStage,
    nn.Parameter: _ParameterOfAStage,
    DTensor: _DTensorOfAStage,
}
_PLAIN: Final[Mapping[type, type]] = {marked: plain for plain, marked in _MARKED.items()}


def _gradient(access: Any, tensor: Any, *to: Tensor | None) -> Tensor | None:
    """Read or write a gradient, of which loops do many; mark it as its parameter is, and refuse it in ``loss``."""
    if any(guard.loses for guard in list(StageNumbers._living)) and not _runs_for_meshpar(3):
        raise MeshparError(
            "loss reads or writes gradients, as zero_grad() does, and stages of pp run it ahead of the backwards of "
            "earlier micro-batches; call optimizer.zero_grad() before par.backward, or after the step"
        )
    gradient = access(tensor, *to)
    if type(gradient) in _MARKED and not _runs_for_meshpar(3):
        _mark(gradient, tensor.origins, is_number=False)
    return gradient  # type: ignore[no-any-return]


def _check(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse a function of torch whose result would be another on each stage, before it runs."""
    name = func.__name__
    if name in _DRAWS and kwargs.get("generator") is None:
        _refuse_drawn(name)
    if func == _SET_DATA or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_"):
        into, *sources = args or kwargs.values()
        # A write into a parameter itself is found by its version.
        unseen = [tensor for tensor in tree_leaves(into) if func == _SET_DATA or not isinstance(tensor, nn.Parameter)]
        if any(guard.loses and guard.has_memory_of(unseen) for guard in list(StageNumbers._living)):
            raise MeshparError(LOSS_WRITES)
        _check_drawn(into, *sources)


def _check_drawn(into: Any, *args: Any) -> None:
    """Refuse a write behind one into an earlier parameter if random numbers were drawn in between."""
    if not isinstance(into, _OfAStage) or not any(isinstance(argument, Tensor) for argument in args):
        return
    now = max(into.origins), torch.initial_seed(), states(into.device)  # type: ignore[attr-defined]
    before, StageNumbers._written = StageNumbers._written, now
    if before is None or before[0] >= now[0] or before[1] != now[1]:
        return
    if not all(map(torch.equal, before[2], now[2])):
        _refuse_drawn("the loop")


def _followed(origins: frozenset[int], hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Return a hook of a parameter, or of a tensor made of it, that knows of which parameter its gradient is."""

    def run(tensor: Tensor) -> Any:
        plain, marked = not isinstance(tensor, _OfAStage), [tensor]
        if plain and isinstance(tensor, nn.Parameter) and tensor.grad is not None:
            marked.append(tensor.grad)
        for followed in marked:
            _mark(followed, origins, is_number=False)
        try:
            return hook(tensor)
        finally:
            if plain and isinstance(tensor, nn.Parameter):  # functions of which the backward goes on may have kept it
                _unmark(tensor)

    return run


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
        if leaf.numel() == 1 or not any(leaf is other for other in given):
            number = leaf.numel() == 1 and any(other.numel() > 1 or other.is_number for other in marked)  # type: ignore[attr-defined]
            _mark(leaf, origins, is_number=number)


def _mark(tensor: Tensor, origins: frozenset[int], *, is_number: bool) -> None:
    if (kind := type(tensor)) in _MARKED:
        tensor.__class__ = _MARKED[kind]
    if kind in _MARKED or kind in _PLAIN:
        tensor.origins, tensor.is_number = origins, is_number  # type: ignore[attr-defined]


def _unmark(tensor: Tensor) -> None:
    if (kind := type(tensor)) in _PLAIN:
        del tensor.origins  # type: ignore[attr-defined]
        tensor.__class__ = _PLAIN[kind]


def _runs_for_meshpar(depth: int = 2) -> bool:
    """Return whether meshpar's own code called torch, ``depth`` frames from here, but for functions of the loop."""
    frame: FrameType | None = sys._getframe(depth)
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
    _written: ClassVar[tuple[int, int, list[Tensor]] | None] = None
    """The last parameter that a loop wrote into, and the seed and the random states then."""

    def __init__(self, guarded: Guarded) -> None:
        self._module, self._units, self._steps, self._reverses = guarded.module, guarded.units, False, False
        self._layers = guarded.facts.find(Layers)
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._living.add(self)
        self._holders, self._marked = self._with_parameters(), list[Tensor]()
        numbers = {parameter: number for number, parameter in enumerate(self._parameters())}
        for parameter, number in numbers.items():
            for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
                users = {at: hook for at, hook in (hooks or {}).items() if is_users(hook)}
                if users:
                    self.check_hooked(parameter)
                (hooks or {}).update({at: _followed(frozenset([number]), hook) for at, hook in users.items()})
        self._mark()
        if self._layers is not None:
            self._layers.edges.hands_back = self._mark

    @property
    def loses(self) -> bool:
        """The loss of a micro-batch runs."""
        return self._layers is not None and self._layers.edges.runs

    def before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._reverses = False
        self._unmark()

    def after_forward(self, output: object) -> None:
        if self._layers is None or not self._layers.ends_loss:
            self._mark()

    def after_error(self) -> None:
        self._mark()

    def before_backward(self, roots: Iterable[object], *, reaches: Callable[[], bool]) -> None:
        if self._layers is not None and self._layers.edges.behind:
            raise MeshparError(
                "loss runs a backward or torch.autograd.grad after the module's call, which reaches the layers of one "
                "stage of pp alone; leave the backward of the loss to par.backward, or use a mesh without pp for a "
                "gradient of a gradient"
            )
        if self._layers is not None and self._layers.edges.reverses:
            self._reverses = True
            self._unmark()

    def after_backward(self) -> None:
        self._reverses = False
        if self._layers is None or not self._layers.edges.reverses:
            self._mark()

    def before_step(self, optimizer: Optimizer, *, trains: bool) -> None:
        if not trains:
            return
        if self._layers is not None and self._layers.edges.reverses and self._layers.gradients_are_parts:
            raise MeshparError(
                "an optimizer steps in a hook of a backward, and other micro-batches or stages of pp have yet to add "
                "to its gradients; call optimizer.step() after par.backward"
            )
        self._unmark()
        self._steps = True
        if optimizer not in self._known:
            self._known.add(optimizer)
            optimizer.register_step_post_hook(self._leave_step)

    def _leave_step(self, *args: object) -> None:
        self._steps, self._holders = False, self._with_parameters()
        self._mark()

    def _with_parameters(self) -> list[dict[str, nn.Parameter | None]]:
        """Return the parameters of each module that has some, which every micro-batch goes over."""
        return [child._parameters for child in self._module.modules() if child._parameters]

    def check_hooked(self, tensor: Tensor) -> None:
        """Refuse a hook of gradients of a parameter that several stages have."""
        shared = () if self._layers is None else self._layers.ties.shared
        if name := next((name for name in shared if self._module.get_parameter(name) is tensor), None):
            raise MeshparError(
                f"a hook of {name} would get a part of its gradient, because several stages of pp have it and add up "
                "their parts when the backwards have run; change parameter.grad after par.backward"
            )

    def has_memory_of(self, tensors: Iterable[Any]) -> bool:
        """Return whether one of some tensors has the memory of a parameter."""
        with without_functions():
            memory = {local_tensor(parameter).untyped_storage().data_ptr() for parameter in self._parameters()}
            return any(local_tensor(tensor).untyped_storage().data_ptr() in memory for tensor in tensors)

    def _parameters(self) -> list[Tensor]:
        """Return what a loop may have of the parameters: shards, and what a unit has gathered in their place."""
        values = chain.from_iterable(map(dict.values, self._holders))
        registered: list[Tensor] = [parameter for parameter in values if parameter is not None]
        return [*self._units.shards(), *registered] if self._units.modules else registered

    # A stage comes here in each micro-batch: no function is called for a parameter.
    def _mark(self) -> None:
        if self._steps or self._reverses:
            return
        if self._marked:  # parameters that a unit has put away since would stay marked
            self._unmark()
        with without_functions():
            self._marked = self._parameters()
            tensor: Any
            for number, parameter in enumerate(self._marked):
                origins = frozenset((number,))
                for tensor in (parameter, parameter.grad):
                    if (kind := type(tensor)) in _MARKED:
                        tensor.__class__ = _MARKED[kind]
                        tensor.origins = origins
                    elif kind in _PLAIN:
                        tensor.origins, tensor.is_number = origins, False

    def _unmark(self) -> None:
        StageNumbers._written = None
        with without_functions():
            tensor: Any
            # A unit may have put other parameters in the place of these since.
            for parameter in self._marked:
                for tensor in (parameter.grad, parameter):
                    if (kind := type(tensor)) in _PLAIN:
                        del tensor.origins
                        tensor.__class__ = _PLAIN[kind]
            self._marked = []


def _refuse(what: str) -> NoReturn:
    raise MeshparError(f"{what}, and {_REMEDY}")


def _refuse_drawn(who: str) -> NoReturn:
    raise MeshparError(
        f"{who} draws random numbers for parameters or gradients, of which each stage of pp has others, and would draw "
        "other numbers for them than one process; draw them before plan.apply, or load whole values by "
        "par.load_state_dict, or draw by a generator that is seeded for each name: "
        "generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))"
    )
