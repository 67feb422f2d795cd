"""Copies of a user's model, or of a block of it, on which trials compute: the model's own state is not touched."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import random
import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshpar._torch.autograd import StorageWeakRef
from meshpar.core import runtime
from meshpar.core.patterns import own_class
from meshpar.passes.experts.routing import Chosen
from meshpar.passes.tensor.collectives import gather_values, join_chunks, take_chunk
from meshpar.passes.tensor.context import Context
from meshpar.step.inner_calls import CONTAINERS, Changes, items_in, own_state, refill

_LIBRARIES = ("torch", "meshpar", "transformers", "tokenizers", "huggingface_hub", "logging")
"""Packages whose objects, other than modules and tensors, copies share."""
_PLAIN = (int, float, str, bytes, bool, complex, type(None), list, dict, tuple, set)
_SHARED = (type, ModuleType, CodeType, inspect.Signature, dist.ProcessGroup, Tensor, torch.Generator)
_WEAK = (weakref.ref, weakref.ProxyType)
_CACHE = type(functools.lru_cache(len))
_HOOKS = {name for name in vars(nn.Module()) if name.endswith("_hooks")}


class CannotCopy(RuntimeError):
    """A module holds something that cannot be copied, so trials do not run it."""


def copy_block(block: nn.Module, replaced: Mapping[Tensor, Tensor], values: Any) -> tuple[Any, Any]:
    """Return a copy of a block, without the user's hooks, and of ``values``; ``replaced``: tensor -> the copy's."""
    by_id = {id(tensor): instead for tensor, instead in replaced.items()}
    return _copy((block, values), by_id, {id(module) for module in block.modules()})


def free(copied: nn.Module) -> None:
    """Let go of what a copy holds: its functions refer to it, and it would stay until garbage is collected."""
    for child in list(copied.modules()):
        vars(child).clear()


@contextmanager
def copied_state(module: nn.Module, values: Any) -> Iterator[Any]:
    """Let a module work on a copy of its state, with its parameters and FSDP2's hooks; yield a copy of ``values``."""
    # A copy refers to the module's own parameters and children, to what intercepts its calls, and of its hooks to those
    # of libraries; all else is copied. The modules keep their identity, and get the copies as ``__dict__``.
    children, replaced = list(module.modules()), dict[int, Any]()
    states = [vars(child) for child in children]
    for name, value in (item for state in states for item in state.items()):
        if name in ("_parameters", "_modules") or _is_interception(name, value):
            replaced[id(value)] = value
        elif name in _HOOKS:
            replaced[id(value)] = _hooks_of(_LIBRARIES, value)
    copies, values = _copy(([*map(own_state, children)], values), replaced, set())
    with undisturbed(children):
        try:
            for child, copied in zip(children, copies, strict=True):
                object.__setattr__(child, "__dict__", copied)
            yield values
        finally:
            for child, state in zip(children, states, strict=True):
                object.__setattr__(child, "__dict__", state)
            for copied in copies:
                copied.clear()


@contextmanager
def undisturbed(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put back random states, and plain containers and numbers in the modules' classes and in the files of these."""
    modules = list(modules)
    classes = {kind for module in modules for kind in type(module).__mro__}
    classes = {kind for kind in classes if _package(kind) not in sys.stdlib_module_names.union(_LIBRARIES)}
    variables = [
        (space, name, value, items_in(value))
        for space in (*classes, *filter(None, {sys.modules.get(kind.__module__) for kind in classes}))
        for name, value in [*vars(space).items()]
        if type(value) in (int, float, *CONTAINERS)
    ]
    devices = [
        device
        for device in {parameter.device for module in modules for parameter in module.parameters(recurse=False)}
        if not runtime.on_host(device)
    ]
    numpy: Any = sys.modules.get("numpy.random")
    states = random.getstate(), None if numpy is None else numpy.get_state()
    with torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda"):
        try:
            yield
        finally:
            random.setstate(states[0])
            if numpy is not None:
                numpy.set_state(states[1])
            for variable in variables:
                _put_back(*variable)


def _put_back(space: Any, name: str, value: Any, items: list[Any]) -> None:
    if vars(space).get(name) is not value:
        setattr(space, name, value)
    refill(value, items)


def widen(tensor: Tensor) -> Tensor:
    """Return a floating-point tensor in float32 or wider, and any other as it is."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) if tensor.is_floating_point() else tensor


def largest(value: float, device: torch.device, group: Any) -> float:
    """Return the largest value of a group's ranks: above 0 where one failed, or said True. Collective over it."""
    return float(gather_values(torch.tensor([float(value)], device=device), group).max())


def _package(value: Any) -> str:
    return (getattr(value, "__module__", None) or "").partition(".")[0]


def _hooks_of(prefixes: tuple[str, ...], hooks: Mapping[int, Any]) -> OrderedDict[int, Any]:
    """Return the hooks that are defined in modules of Python whose names begin so."""
    chosen = OrderedDict[int, Any]()
    for number, hook in hooks.items():
        function = hook
        while isinstance(function, functools.partial):
            function = function.func
        if (getattr(function, "__module__", None) or "").startswith(prefixes):
            chosen[number] = hook
    return chosen


def _is_interception(name: str, value: object) -> bool:
    """Return whether an attribute takes the place of a method of every module's, as meshpar's own do."""
    return callable(value) and name in vars(nn.Module) and name != "forward"


def _copy(values: Any, replaced: Mapping[int, Any], inside: set[int]) -> Any:
    file = io.BytesIO()
    try:
        copier = _StateWriter(file, replaced, inside)
        copier.dump(values)
        file.seek(0)
        reader = _StateReader(file)
        reader.table = copier.table
        return reader.load()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise CannotCopy(f"it cannot be copied: {error}") from error


@final
class _StateReader(pickle.Unpickler):
    table: list[Any]

    def persistent_load(self, number: int) -> Any:
        return self.table[number]


@final
class _StateWriter(pickle.Pickler):
    """Writes values, and by number those that copies share or have replaced; ``inside``: ids of modules to copy."""

    def __init__(self, file: io.BytesIO, replaced: Mapping[int, Any], inside: set[int]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._replaced, self._inside = replaced, inside
        self.table: list[Any] = []
        # with the value, as an object that is gone may give its id to another one
        self._numbers: dict[int, tuple[int, Any]] = {}

    def persistent_id(self, value: Any) -> int | None:
        if id(value) not in self._numbers:
            kind = type(value)
            if id(value) in self._replaced:
                self.table.append(self._replaced[id(value)])
            elif kind in _PLAIN or self._is_written(kind, value):
                return None
            else:
                self.table.append(_copy_alone(value))
            self._numbers[id(value)] = len(self.table) - 1, value
        return self._numbers[id(value)][0]

    def _is_written(self, kind: type, value: Any) -> bool:
        """Return whether a value is copied part by part; an iterator is, as a copy of it must not move the user's."""
        if issubclass(kind, _WEAK):
            return id(_referent(value)) in self._inside
        if issubclass(kind, nn.Module):
            return id(value) in self._inside
        if issubclass(kind, FunctionType):
            return value.__closure__ is not None
        if issubclass(kind, BuiltinFunctionType):
            return not isinstance(value.__self__, type | ModuleType | None)
        if issubclass(kind, _SHARED) or kind.__name__ == "memmap":
            return False
        is_of_a_library = any(_package(base) in _LIBRARIES for base in kind.__mro__)
        return issubclass(kind, Changes | Chosen) or hasattr(kind, "__next__") or not is_of_a_library

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if issubclass(kind, nn.Module):
            return object.__new__, (own_class(value),), _state_of(value), None, None, _set_state
        if kind is FunctionType:
            # what wraps a function, as torch's compiler does, may keep another function among its attributes
            return _FunctionMaker(value), (value.__closure__,), dict(vars(value)), None, None, _set_state
        if kind is _CACHE:
            return copy.copy, (value.__wrapped__,)
        if kind is CellType:
            return CellType, (), _content_of(value), None, None, _fill
        if kind is MethodType:
            return MethodType, (value.__func__, value.__self__)
        if issubclass(kind, _WEAK):
            return weakref.ref if issubclass(kind, weakref.ref) else weakref.proxy, (_referent(value),)
        return NotImplemented


def _copy_alone(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value


def _referent(reference: Any) -> Any:
    """Return what a weak reference refers to, or a proxy, which hands all but its own methods on to it."""
    return reference() if isinstance(reference, weakref.ref) else reference.__repr__.__self__


def _state_of(module: nn.Module) -> dict[str, Any]:
    """Return what a copy of a module holds: its class's call, and of hooks torch's, which compute weights."""
    state = {
        name: _hooks_of(("torch.nn.",), value) if name in _HOOKS else value
        for name, value in own_state(module).items()
        if not name.startswith("__") and not _is_interception(name, value)
    }
    return {**state, "training": False}


def _set_state(copied: object, state: dict[str, Any]) -> None:
    vars(copied).update(state)


@final
@dataclass(frozen=True)
class _FunctionMaker:
    function: Any

    def __call__(self, cells: tuple[CellType, ...]) -> FunctionType:
        function = self.function
        copied = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
        copied.__kwdefaults__ = function.__kwdefaults__
        copied.__module__, copied.__qualname__ = function.__module__, function.__qualname__
        return copied


def _content_of(cell: CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # nothing was assigned yet
        return ()


def _fill(cell: CellType, content: tuple[Any, ...]) -> None:
    if content:
        (cell.cell_contents,) = content


Cut = tuple[int, int]
"""The dim along which a parameter is split, and its whole length."""


class _WholeRead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, reads: WholeReads) -> Tensor:
        ctx.chunk = *reads.cuts[part], reads.context.group
        return reads.join(part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return take_chunk(grad, *ctx.chunk), None


@final
class WholeReads:
    """Reads of whole parameters, by the ranks of the axis together; ``failed_elsewhere``: another rank's error code.

    A copy's dicts of parameters (``_Read``) join a part when it is read. Autograd would keep the joined tensor, so that
    saved tensors are packed as the part, and joined again in backward; ``_WholeRead`` hands each rank its gradient.
    """

    def __init__(self, context: Context) -> None:
        self.context, self.failed_elsewhere = context, 0
        self.cuts: dict[Tensor, Cut] = {}
        self._parts: dict[StorageWeakRef, Tensor] = {}

    def read(self, part: Any) -> Any:
        """Return the whole of a part, and anything else as it is. Collective over the axis."""
        if not isinstance(part, Tensor) or part not in self.cuts:
            return part
        whole: Any = _WholeRead.apply(part, self)
        self._parts[StorageWeakRef(whole.untyped_storage())] = part
        return whole

    def join(self, part: Tensor) -> Tensor:
        """Return the ranks' parts joined. Collective over the axis."""
        self.failed_elsewhere = int(largest(0, part.device, self.context.group))
        if self.failed_elsewhere:
            raise RuntimeError("another rank of the axis failed")
        return join_chunks(part, *self.cuts[part], self.context.group)

    def of(self, block: nn.Module) -> AbstractContextManager[object]:
        """Let a copy, which holds the parts, read whole parameters; it runs, forward and backward, in this context."""
        for child in block.modules():
            vars(child)["_parameters"] = _Read(child._parameters, self)
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, saved: Tensor) -> Any:
        part = None if saved.layout != torch.strided else self._parts.get(StorageWeakRef(saved.untyped_storage()))
        if part is None or part.dtype != saved.dtype:
            return saved
        return part, saved.shape, saved.stride(), saved.storage_offset()

    def _unpack(self, packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else self.join(packed[0]).as_strided(*packed[1:])


class _Read(dict[str, Any]):
    """A module's parameters, each whole where it is read."""

    def __init__(self, parameters: Mapping[str, Any], reads: WholeReads) -> None:
        super().__init__(parameters)
        self._reads = reads

    def __getitem__(self, name: str) -> Any:
        return self._reads.read(super().__getitem__(name))

    def values(self) -> Iterable[Any]:  # type: ignore[override]
        return (self[name] for name in self)

    def items(self) -> Iterable[tuple[str, Any]]:  # type: ignore[override]
        return ((name, self[name]) for name in self)
