"""DTensor's own tables of operators and plans, which have no public form.

- ``refuse_parts_as_numbers``, ``change_operators``: what DTensor does with single operators is its own table.
- ``change_attributes``: torch writes ``tensor.data = value`` into the outside of a DTensor alone, without a hook.
- ``tell_apart``, ``forget_meshes``: DTensor keeps what it planned for a mesh, whose groups may be closed, in
  caches by equal meshes, and an axis of one mesh equals that of another with the same ranks.
- ``quiet_gathers``: advice about a gather over two axes of one dim comes by a private logger, without a switch.
- ``StridedShard``: how FSDP2 names its split of a dim that the tensor axis split before (pytorch/pytorch#126697).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, placement_types

from meshpar._torch import BEFORE_2_13
from meshpar._torch.autograd import in_backward
from meshpar._torch.calls import Undo, set_attribute, undo_all, while_lives
from meshpar._torch.groups import root_of

StridedShard = placement_types._StridedShard


def flattens(tensor: torch.Tensor) -> bool:
    """Return whether torch can make a vector of a tensor without other ranks: before 2.13 not of every split one."""
    return not (
        BEFORE_2_13
        and isinstance(tensor, DTensor)
        and any(isinstance(placement, Shard) and placement.dim > 0 for placement in tensor.placements)
    )


def refuse_parts_as_numbers(refuse: Callable[[], NoReturn]) -> Undo:
    """Let ``refuse`` answer where a DTensor is read as a number while ranks hold parts: torch reads a part."""

    # reading the whole would wait for the other ranks, who may not read
    def read(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (value,) = args
        if not all(placement.is_replicate() for placement in value.placements):
            refuse()
        return op(value.to_local())

    return _handle([torch.ops.aten._local_scalar_dense.default], read)


def change_attributes(assign: Callable[[DTensor, object], bool], refuse_numpy: Callable[[DTensor], NoReturn]) -> Undo:
    """Let ``assign`` answer ``tensor.data = value`` of DTensors, if it returns True, and refuse ``numpy()``."""
    plain: Any = torch.Tensor.data

    def write(tensor: DTensor, value: Any) -> None:
        if not assign(tensor, value):
            plain.__set__(tensor, value)

    data = _shadow(DTensor, "data", property(plain.__get__, write))
    return undo_all([data, _shadow(DTensor, "numpy", lambda tensor, **_: refuse_numpy(tensor))])


_DRAWS = ("bernoulli", "rand_like", "randn_like", "randint_like", "native_dropout", "poisson", "multinomial")
_FILLS = ("normal_", "uniform_", "bernoulli_", "exponential_", "geometric_", "log_normal_", "cauchy_", "random_")


def change_operators(
    draw: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
    refuse_unknown: Callable[[Any, Exception], None],
    refuse_lost: Callable[[], NoReturn],
) -> Undo:
    """Let DTensors draw random numbers by ``draw``, and refuse what has no plan and writes into copied views."""
    random = _handle((op for op in _overloads(_DRAWS + _FILLS) if "out" not in op._overloadname), draw)
    return undo_all([random, _watch_plans(refuse_unknown), _watch_copies(refuse_lost)])


def _overloads(names: Iterable[str]) -> Iterator[Any]:
    packets = (getattr(torch.ops.aten, name) for name in names)
    return (getattr(packet, overload) for packet in packets for overload in packet.overloads())


def _handle(ops: Iterable[Any], handler: Callable[..., Any]) -> Undo:
    """Let a handler answer operators on DTensors that have none; undoing it leaves those of others."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    added = [op for op in ops if op not in handlers]
    handlers.update(dict.fromkeys(added, handler))

    def undo() -> bool:
        for op in added:
            if handlers.get(op) is handler:
                del handlers[op]
        return True

    return undo


def _watch_plans(refuse_unknown: Callable[[Any, Exception], None]) -> Undo:
    """Call ``refuse_unknown`` where DTensor has no plan for an operator."""
    dispatcher: Any = DTensor._op_dispatcher
    infer = dispatcher._propagate_op_sharding_dispatch_slow_path

    def inferred(op: Any, *args: Any) -> Any:
        try:
            return infer(op, *args)
        except RuntimeError as error:
            refuse_unknown(op, error)
            raise

    return _shadow(dispatcher, "_propagate_op_sharding_dispatch_slow_path", inferred)


_VIEWS = ("diagonal", "select", "slice", "split", "split_with_sizes", "squeeze", "unbind", "unfold", "view")


def _watch_copies(refuse_lost: Callable[[], NoReturn]) -> Undo:
    """Mark views that are copies, and call ``refuse_lost`` where one is written."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    undone = list[Undo]()

    def unguarded(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handler = handlers.pop(op)
        try:
            return op(*args, **kwargs)
        finally:
            handlers[op] = handler

    def view(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        base, results = args[0], unguarded(op, args, kwargs)
        if isinstance(base, DTensor) and base.is_leaf and not in_backward():
            for result in results if isinstance(results, list | tuple) else [results]:
                memory = result._local_tensor.untyped_storage()
                if memory._cdata != base._local_tensor.untyped_storage()._cdata:
                    memory.meshpar_copy = True
                    guard_writes()
        return results

    def write(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = args[0]
        if isinstance(written, DTensor) and hasattr(written._local_tensor.untyped_storage(), "meshpar_copy"):
            refuse_lost()
        return unguarded(op, args, kwargs)

    @cache
    def guard_writes() -> None:
        undone.append(_handle(_writes(), write))

    undone.append(_handle(_overloads(_VIEWS), view))
    return undo_all(undone)


def _shadow(owner: Any, name: str, value: Any) -> Undo:
    """Set an attribute of an object, in front of its class's."""
    setattr(owner, name, value)

    def undo() -> bool:
        if vars(owner).get(name) is value:
            delattr(owner, name)
        return True

    return undo


def _writes() -> Iterator[Any]:
    """Yield the operators that write their first tensor."""
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if name.startswith("aten::") and packet.endswith("_") and not packet.startswith("_"):
            yield getattr(getattr(torch.ops.aten, packet), overload or "default")


def tell_apart(root: DeviceMesh) -> None:
    """Let a plan's mesh of all ranks, and its axes, equal none of another plan's: DTensors stay on their own mesh."""
    vars(root)["_meshpar_id"] = id(root)
    while_lives(root, "equal meshes", _compare_roots)


def _compare_roots() -> Undo:
    equal: Callable[[DeviceMesh, object], bool] = DeviceMesh.__eq__

    def are_equal(mesh: DeviceMesh, other: object) -> bool:
        if mesh is other or not equal(mesh, other):
            return mesh is other
        first, second = root_of(mesh), root_of(other)  # type: ignore[arg-type]
        return first is second or not (_is_of_plan(first) and _is_of_plan(second))

    return set_attribute(DeviceMesh, "__eq__", are_equal)


def _is_of_plan(root: DeviceMesh) -> bool:
    # a copy, such as one that was pickled, has the mark of another object, and equals the original
    return vars(root).get("_meshpar_id") == id(root)


def forget_meshes() -> None:
    """Let DTensor plan again: what it remembers by a mesh may name groups that were closed since."""
    dispatcher: Any = DTensor._op_dispatcher
    dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    forget = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if forget is not None:
        forget()


@contextmanager
def quiet_gathers() -> Iterator[None]:
    """Keep DTensor's advice on slow gathers out of the log: shards over tensor parallelism have no other."""
    log = logging.getLogger("torch.distributed.tensor._redistribute")
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was
