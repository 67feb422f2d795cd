"""DTensor's own tables of operators and plans, which have no public form.

- ``refuse_parts_as_numbers``, ``change_operators``: what DTensor does with single operators is its own table.
- ``change_attributes``: torch writes ``tensor.data = value`` into the outside of a DTensor alone, and has no hook for
  it.
- ``forget_meshes``: DTensor keeps what it planned for a mesh, whose groups may be closed, in caches by equal meshes.
- ``quiet_gathers``: torch advises about a gather over two axes of one dim by a logger of a private module, and has no
  switch for it.
- ``StridedShard``: how FSDP2 names its split of a dim that the tensor axis split before (pytorch/pytorch#126697).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

from meshpar._torch import BEFORE_2_13
from meshpar._torch.autograd import in_backward
from meshpar._torch.patches import Undo

__all__ = [
    "StridedShard",
    "change_attributes",
    "change_operators",
    "flattens",
    "forget_meshes",
    "quiet_gathers",
    "refuse_parts_as_numbers",
]


def flattens(tensor: torch.Tensor) -> bool:
    """Return whether torch can make a vector of a tensor without other ranks: before 2.13 only if it is not split
    along a later dimension.
    """
    return not (
        BEFORE_2_13
        and isinstance(tensor, DTensor)
        and any(isinstance(placement, Shard) and placement.dim > 0 for placement in tensor.placements)
    )


def refuse_parts_as_numbers(refuse: Callable[[], NoReturn]) -> Undo:
    """Let ``refuse`` answer where a DTensor is read as a number (``.item()``) while its ranks hold parts of it.

    torch returns this rank's part. Reading the whole would wait for the other ranks, who may not read.
    """

    def read(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (value,) = args
        if not all(placement.is_replicate() for placement in value.placements):
            refuse()
        return op(value.to_local())

    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    number = torch.ops.aten._local_scalar_dense.default
    handlers.setdefault(number, read)

    def undo() -> bool:
        if handlers.get(number) is read:
            del handlers[number]
        return True

    return undo


def change_attributes(assign: Callable[[DTensor, object], bool], refuse_numpy: Callable[[DTensor], NoReturn]) -> Undo:
    """Change what two attributes of DTensors do.

    Args:
        assign: answers ``tensor.data = value``, which torch ignores without an error; torch goes on where it returns
            False.
        refuse_numpy: is called in the place of ``tensor.numpy()``.
    """
    plain: Any = torch.Tensor.data

    def write(tensor: DTensor, value: Any) -> None:
        if not assign(tensor, value):
            plain.__set__(tensor, value)

    mine = property(plain.__get__, write)
    undone = _shadow(DTensor, "data", mine), _shadow(DTensor, "numpy", lambda tensor, **_: refuse_numpy(tensor))
    return partial(_undo_all, undone)


_RANDOM = (
    *(
        "normal_",
        "uniform_",
        "bernoulli_",
        "bernoulli",
        "rand_like",
        "randn_like",
        "randint_like",
        "native_dropout",
        "exponential_",
    ),
    *("geometric_", "log_normal_", "cauchy_", "random_", "poisson", "multinomial"),
)


def change_operators(
    draw: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
    refuse_unknown: Callable[[Any, Exception], None],
    refuse_lost: Callable[[], NoReturn],
) -> Undo:
    """Change what DTensors do with operators of three kinds.

    Args:
        draw: runs an operator that draws random numbers, which torch draws on a CPU for each part as if it were the
            whole.
        refuse_unknown: is called with an operator that torch cannot run on shards, and its error, which is raised
            afterwards.
        refuse_lost: is called where somebody writes into a view that is a copy, gathered from shards, so that the write
            would be lost.
    """
    undone = _run_random(draw), _watch_plans(refuse_unknown), _watch_copies(refuse_lost)
    return partial(_undo_all, undone)


def _run_random(draw: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Undo:
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    packets = [getattr(torch.ops.aten, name) for name in _RANDOM]
    random = {
        getattr(packet, overload): draw
        for packet in packets
        for overload in packet.overloads()
        if "out" not in overload
    }
    handlers.update({op: handler for op, handler in random.items() if op not in handlers})

    def undo() -> bool:
        _remove(handlers, random)
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
    guards: dict[Any, Any] = {}

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

    def install(ops: Iterable[Any], handler: Callable[..., Any]) -> None:
        added = {op: handler for op in ops if op not in handlers}
        guards.update(added)
        handlers.update(added)

    @cache
    def guard_writes() -> None:
        install(_writes(), write)

    packets = [getattr(torch.ops.aten, name) for name in _VIEWS]
    install([getattr(packet, overload) for packet in packets for overload in packet.overloads()], view)

    def undo() -> bool:
        _remove(handlers, guards)
        return True

    return undo


def _remove(handlers: dict[Any, Any], mine: Mapping[Any, Any]) -> None:
    """Take handlers out of a table, but for those that somebody replaced."""
    for op, handler in mine.items():
        if handlers.get(op) is handler:
            del handlers[op]


def _undo_all(undone: Sequence[Undo]) -> bool:
    results = [undo() for undo in undone]  # every one is called
    return all(results)


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


def forget_meshes() -> None:
    """Let DTensor plan anew: what it remembers by a mesh also serves an equal one, and may name groups that were
    closed since.
    """
    dispatcher: Any = DTensor._op_dispatcher
    dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    forget = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if forget is not None:
        forget()


@contextmanager
def quiet_gathers() -> Iterator[None]:
    """Keep DTensor's advice on slow gathers out of the log: what FSDP2 shards over tensor parallelism cannot be
    gathered in another way.
    """
    log = logging.getLogger("torch.distributed.tensor._redistribute")
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was
