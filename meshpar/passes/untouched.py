"""Run a piece of a user's model once more and leave no trace: what it can reach is as it was when the run is over.

A copy would not do: what FSDP2 shards cannot be copied, forwards and hooks hold on to the modules that they were made
for, and what a hook changes is the original all the same. So everything that can be reached is looked up first, by
attributes, containers, closures, defaults, classes and the globals that functions name. While the code runs, tensors,
generators and caches are replaced by copies; afterwards every container and attribute holds again what it held. Tensors
and arrays in places that nobody can write (a set, a default of a function, the objects that the caller hands in) stay
there, and get their values back.

Refused, before anything runs, is what nobody can put back: iterators, and what other threads and processes use as well
(queues, threads, executors, files, sockets, objects that hold a lock). Objects of C that tell nothing of what they hold
count as constant.
"""

from __future__ import annotations

import array
import builtins
import copy
import dis
import functools
import random
import sys
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from enum import Enum
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshpar._torch.autograd import keep_version
from meshpar.core import runtime
from meshpar.step.placements import local_tensor


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


LARGEST = 1 << 27
"""Elements of tensors, beside parameters, that are copied at most: 512 MiB in float32."""
MOST = 1 << 20
"""Objects that are looked at, at most."""
_PLAIN = (
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    slice,
    range,
    Enum,
    ModuleType,
    type(None),
    type(...),
)
_CLOSED = {"torch", "meshpar", "numpy", "logging", "threading", "multiprocessing", "concurrent", "asyncio", "io", "re"}
_CLOSED |= {"transformers", "tokenizers", "huggingface_hub"}
_SHARED = {"queue", "_queue", "threading", "multiprocessing", "concurrent", "asyncio", "subprocess"}
_SHARED |= {"io", "_io", "socket", "_socket", "mmap"}
"""Packages of what other threads or processes use, too."""
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
"""Packages whose objects are left alone, but for modules of torch's and what wraps a function."""
_CALLABLE = (FunctionType, MethodType, functools.partial, nn.Module)
_ITERATORS = ("count", "repeat", "list_iterator", "tuple_iterator", "range_iterator")
"""Those that a copy goes on from where they are; others share what they iterate over with their copies."""
_LRU: Any = type(functools.lru_cache(lambda: None))
_Items = list[tuple[Any, Any]]
_Access = tuple[Callable[[], _Items], Callable[[_Items], None]]


class CannotKeep(RuntimeError):
    """Something that can be reached cannot be put back, so the code must not run."""


@contextmanager
def untouched(*roots: object) -> Iterator[None]:
    """Let code run that uses ``roots``, and put back everything that it can reach from there, and random states.

    Parameters in their places are the caller's to replace; a gradient that the code leaves in one is dropped.

    Raises:
        CannotKeep: before anything is changed; says why.
    """
    reached = _Reached()
    reached.look(reached.fixed(roots))
    with _random_states(reached.devices):
        reached.replace()
        try:
            yield
        finally:
            reached.put_back()


@final
class _Reached:
    """All that can be reached from some objects, and how it was."""

    def __init__(self) -> None:
        self.devices: set[torch.device] = set()
        self._seen: dict[int, Any] = {}
        self._holders: list[tuple[Callable[[], _Items], Callable[[_Items], None], _Items, bool]] = []
        self._leaves: list[tuple[Tensor, Tensor | None]] = []
        self._fixed: dict[int, Any] = {}
        self._values = ExitStack()
        self._copies: dict[int, Any] = {}
        self._elements = 0

    def look(self, roots: Iterable[object]) -> None:
        stack = list(roots)
        while stack:
            value = stack.pop()
            if isinstance(value, _PLAIN) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if len(self._seen) > MOST:
                raise CannotKeep(f"it reaches more than {MOST} objects")
            if any(_package(base) in _SHARED for base in type(value).__mro__):
                raise CannotKeep(f"it reaches a {type(value).__name__}, which other threads or processes may use")
            stack += self._inside(value)

    def fixed(self, values: Iterable[Any]) -> list[Any]:
        """Remember tensors and arrays that stand where nothing can be put in their place, and return the values."""
        held = list(values)
        for value in held:
            if isinstance(value, tuple | frozenset):
                self.fixed(value)
            elif isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                if value.grad_fn is not None and not value.is_meta:
                    # The graph of what is written in place would stay; detached, it is another tensor.
                    raise CannotKeep("it reaches a tensor of autograd's graph where no copy can take its place")
                self._fixed[id(value)] = value
            elif _is_numpy(value):
                self._fixed[id(value)] = value
            elif isinstance(value, torch.Generator | random.Random | bytearray | array.array) or _is_numpy_random(
                value
            ):
                raise CannotKeep(f"it reaches a {type(value).__name__} where no copy can take its place")
        return held

    def replace(self) -> None:
        """Put copies in the places of what code may change in place; keep the values of what must stay where it is."""
        for container in self._fixed.values():
            self._values.enter_context(_same_values(container))
        new = [
            (write, [(key, self._copied(value)) for key, value in items], items)
            for _, write, items, swaps in self._holders
            if swaps
        ]
        for write, copies, items in new:
            if any(one is not other for (_, one), (_, other) in zip(copies, items)):
                write(copies)
        for leaf, _ in self._leaves:
            leaf.grad = None

    def put_back(self) -> None:
        for read, write, items, _ in self._holders:
            now = read()
            if len(now) != len(items) or any(a is not c or b is not d for (a, b), (c, d) in zip(now, items)):
                write(items)
        for leaf, grad in self._leaves:
            leaf.grad = grad
        self._values.close()

    def _hold(self, read: Callable[[], _Items], write: Callable[[_Items], None], *, swaps: bool = True) -> list[Any]:
        items = read()
        self._holders.append((read, write, items, swaps))
        keys, values = ([value[place] for value in items] for place in (0, 1))
        return [*self.fixed(keys), *(values if swaps else self.fixed(values))]

    def _inside(self, value: Any) -> list[Any]:
        """Return what ``value`` holds; remember it where it can change."""
        if isinstance(value, Tensor):
            self._tensor(value)
            own = getattr(value, "__dict__", None)
            return self._hold(*_of_dict(own)) if own else []
        if isinstance(value, list | deque | dict | set) and len(value) > MOST:
            raise CannotKeep(f"it reaches a {type(value).__name__} of more than {MOST} items")
        if (
            hasattr(type(value), "__next__")
            and not _steps_in_python(type(value))
            and type(value).__name__ not in _ITERATORS
        ):
            raise CannotKeep(f"it reaches an iterator ({type(value).__name__}), which cannot be put back")
        if isinstance(value, weakref.ref):
            return self.fixed([value()])
        if _is_numpy(value) or isinstance(value, bytearray | array.array):
            self._count(int(getattr(value, "size", 1)) if _is_numpy(value) else len(value))
            return []
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            return self.fixed([value.__self__, value.__func__])
        if isinstance(value, functools.partial):
            return [
                *self.fixed([value.func, *value.args]),
                *self._hold(*_of_dict(value.keywords)),
                *self._hold(*_of_dict(vars(value))),
            ]
        if isinstance(value, staticmethod | classmethod | _LRU):
            return [getattr(value, "__wrapped__")]  # noqa: B009  pyright does not know it
        if isinstance(value, property):
            return [value.fget, value.fset]
        if isinstance(value, type):
            closed = _package(value) in sys.stdlib_module_names | _CLOSED
            return [*value.__bases__, *([] if closed else self._hold(*_of_class(value)))]
        return [*self._container(value), *self._attributes(value)]

    def _container(self, container: Any) -> list[Any]:
        if isinstance(container, dict):
            return self._hold(*_of_dict(container))
        if isinstance(container, list):
            return self._hold(*_of_values(container, list.clear, list.extend))
        if isinstance(container, deque):
            return self._hold(*_of_values(container, deque.clear, deque.extend))
        if isinstance(container, set):
            return self._hold(*_of_values(container, set.clear, set.update), swaps=False)
        if isinstance(container, frozenset):
            return self.fixed(container)
        return list(container) if isinstance(container, tuple) else []

    def _attributes(self, value: Any) -> list[Any]:
        kind = type(value)
        if isinstance(value, nn.Module):
            held = vars(value)
            self._seen[id(held["_parameters"])] = held["_parameters"]
            known = held.get("_meshpar")
            forwards = [getattr(known, name, None) for name in ("before", "forward")]
            inside = self._hold(*_of_dict(held))
            _refuse_locks(kind, inside)
            return [kind, *inside, *held["_parameters"].values(), *forwards]
        if _package(kind) in _CLOSED:
            return []
        own = getattr(value, "__dict__", None)
        inside = self._hold(*_of_dict(own)) if isinstance(own, dict) else []
        slots = [name for base in kind.__mro__ for name in _names(vars(base).get("__slots__", ()))]
        if slots and _package(kind) not in sys.stdlib_module_names:
            inside += self._hold(*_of_slots(value, slots))
        _refuse_locks(kind, inside)
        return [kind, *inside]

    def _function(self, function: FunctionType) -> list[Any]:
        cells = function.__closure__ or ()
        if _package(function) in _CLOSED:  # a wrapper of ours or torch's: what it wraps is the user's
            inside = [value for cell in cells for value in _contents(cell)]
            return [function.__dict__.get("__wrapped__"), *(value for value in inside if isinstance(value, _CALLABLE))]
        inside = [*self.fixed(function.__defaults__ or ()), *self._hold(*_of_dict(function.__dict__))]
        inside += [] if function.__kwdefaults__ is None else self._hold(*_of_dict(function.__kwdefaults__))
        for cell in cells:
            inside += self._hold(*_of_cell(cell))
        if _package(function) in sys.stdlib_module_names:
            return inside
        names = set(_named(function.__code__))
        inside += self._hold(*_of_names(function.__globals__, set(_globals(function.__code__))))
        for value in list(inside):
            if (
                isinstance(value, ModuleType)
                and value.__name__.partition(".")[0] not in sys.stdlib_module_names | _CLOSED
            ):
                inside += self._hold(*_of_names(vars(value), names))
        return inside

    def _tensor(self, tensor: Tensor) -> None:
        if not runtime.on_host(tensor.device):
            self.devices.add(tensor.device)
        if tensor.is_leaf and tensor.requires_grad:
            self._leaves.append((tensor, tensor.grad))
        if not isinstance(tensor, nn.Parameter):
            self._count(tensor.numel())

    def _count(self, elements: int) -> None:
        self._elements += elements
        if self._elements > LARGEST:
            raise CannotKeep(f"it reaches tensors of more than {LARGEST} elements beside parameters")

    def _copied(self, value: Any) -> Any:
        if isinstance(value, _PLAIN):
            return value
        if id(value) not in self._copies:
            self._copies[id(value)] = self._copy(value)
        return self._copies[id(value)]

    def _copy(self, value: Any) -> Any:
        if isinstance(value, nn.Parameter):
            return value
        if isinstance(value, Tensor):
            fresh = value.detach().clone().requires_grad_(value.requires_grad)
            vars(fresh).update(getattr(value, "__dict__", {}))
            return fresh
        if isinstance(value, tuple):
            return self._copy_of_tuple(value)
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if isinstance(value, _LRU):
            return value.__wrapped__
        if _is_numpy_random(value):
            return copy.deepcopy(value)
        copied = type(value).__name__ in _ITERATORS and hasattr(type(value), "__next__")
        if copied or _is_numpy(value) or isinstance(value, random.Random | bytearray | array.array):
            return copy.copy(value)
        return value

    def _copy_of_tuple(self, value: tuple[Any, ...]) -> Any:
        parts, kind = [self._copied(part) for part in value], type(value)
        if all(one is other for one, other in zip(parts, value)):
            return value
        if hasattr(kind, "n_sequence_fields"):  # of C, such as what torch.max returns
            return kind(parts)
        fresh = tuple.__new__(kind, parts)
        getattr(fresh, "__dict__", {}).update(getattr(value, "__dict__", {}))
        return fresh


def _is_numpy(value: object) -> bool:
    """Return whether a value is an array of numpy's in memory; one that is mapped from a file is left alone."""
    return type(value).__module__ == "numpy" and type(value).__name__ != "memmap"


def _refuse_locks(kind: type, held: list[Any]) -> None:
    if any(isinstance(value, _LOCKS) for value in held) and _package(kind) not in sys.stdlib_module_names:
        raise CannotKeep(f"it reaches a {kind.__name__}, which other threads may use: it holds a lock")


def _is_numpy_random(value: object) -> bool:
    return type(value).__module__.startswith("numpy.random") and hasattr(value, "random")


def _steps_in_python(kind: type) -> bool:
    """Tell an iterator whose state is in attributes."""
    return (
        isinstance(getattr(kind, "__next__", None), FunctionType)
        and _package(kind) not in sys.stdlib_module_names | _CLOSED
    )


@contextmanager
def _same_values(value: Any) -> Iterator[None]:
    """Let a tensor or an array have the values of before when code that may write it in place is over."""
    if not isinstance(value, Tensor):
        array = value.copy()
        yield
        if value.flags.writeable:
            value[...] = array
        return
    held, wanted = local_tensor(value), value.requires_grad
    if value.is_meta or held.layout != torch.strided or 0 in held.stride():  # the last nobody can write in place
        yield
        return
    before = held.clone()
    with nullcontext() if value.is_inference() else keep_version(value):
        yield
        if value.grad_fn is not None:
            value.detach_()
        value.requires_grad_(wanted)
        if not isinstance(value, DTensor):
            value.data = held  # whatever shape and memory it has now
        if not torch.equal(held, before):
            with torch.inference_mode(value.is_inference()):
                held.copy_(before)


def _of_dict(held: dict[Any, Any]) -> _Access:
    base: Any = OrderedDict if isinstance(held, OrderedDict) else dict

    def write(items: _Items) -> None:
        base.clear(held)
        for key, value in items:
            base.__setitem__(held, key, value)

    return lambda: list(base.items(held)), write


def _of_values(held: Any, clear: Callable[[Any], None], extend: Callable[..., None]) -> _Access:
    def write(items: _Items) -> None:
        clear(held)
        extend(held, [value for _, value in items])

    return lambda: [(None, value) for value in held], write


def _of_names(held: dict[str, Any], names: set[str]) -> _Access:
    """Return how to read and write some names of a namespace, in their places."""
    known = sorted(name for name in names if name in held or name not in vars(builtins))

    def write(items: _Items) -> None:
        for name in {name for name in known if name in held} - {name for name, _ in items}:
            del held[name]
        held.update(items)

    return lambda: [(name, held[name]) for name in known if name in held], write


def _of_class(kind: type) -> _Access:
    def read() -> _Items:
        return [
            (name, value)
            for name, value in vars(kind).items()
            if name not in ("__dict__", "__weakref__", "__abstractmethods__")
        ]

    def write(items: _Items) -> None:
        kept = dict(items)
        for name, value in read():
            if name not in kept:
                type.__delattr__(kind, name)
            elif kept[name] is not value:
                type.__setattr__(kind, name, kept[name])
        for name, value in items:
            if name not in vars(kind):
                type.__setattr__(kind, name, value)

    return read, write


def _of_slots(owner: Any, slots: list[str]) -> _Access:
    def read() -> _Items:
        return [(name, getattr(owner, name)) for name in slots if hasattr(owner, name)]

    def write(items: _Items) -> None:
        for name, _ in read():
            with suppress(AttributeError):
                object.__delattr__(owner, name)
        for name, value in items:
            with suppress(AttributeError):
                object.__setattr__(owner, name, value)

    return read, write


def _of_cell(cell: CellType) -> _Access:
    def write(items: _Items) -> None:
        del cell.cell_contents
        for _, value in items:
            cell.cell_contents = value

    return lambda: [(None, value) for value in _contents(cell)], write


def _contents(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # nothing was assigned yet
        return []


def _names(slots: Any) -> list[str]:
    return [slot for slot in ([slots] if isinstance(slots, str) else slots) if slot not in ("__dict__", "__weakref__")]


def _named(code: CodeType) -> Iterator[str]:
    """Yield the names that a function, and what is defined in it, looks up outside of itself."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _named(constant)


def _globals(code: CodeType) -> Iterator[str]:
    """Yield the global names that a function and its inner ones use, without names of attributes."""
    yield from (
        step.argval for step in dis.get_instructions(code) if "GLOBAL" in step.opname or step.opname.endswith("_NAME")
    )
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals(constant)


def _package(value: Any) -> str:
    return (getattr(value, "__module__", None) or "").partition(".")[0]


@contextmanager
def _random_states(devices: set[torch.device]) -> Iterator[None]:
    """Leave the random states of torch, Python and numpy as they are."""
    numpy: Any = sys.modules.get("numpy.random")
    kept, here = (random.getstate(), torch.get_rng_state(), None if numpy is None else numpy.get_state()), {}
    for device in devices:
        here[device] = torch.get_device_module(device).get_rng_state(device)
    try:
        yield
    finally:
        random.setstate(kept[0])
        torch.set_rng_state(kept[1])
        if numpy is not None:
            numpy.set_state(kept[2])
        for device, state in here.items():
            torch.get_device_module(device).set_rng_state(state, device)
