"""Costs of operators before any hardware is known: operations, bytes moved (also by operators that a compiler
joins), bytes sent.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from meshpar._torch.pytree import tree_leaves

aten = torch.ops.aten
c10d = torch.ops.c10d
functional = torch.ops._c10d_functional

COLLECTIVES: dict[Any, str] = {
    c10d._allgather_base_.default: "all_gather",
    c10d.allgather_.default: "all_gather",
    functional.all_gather_into_tensor.default: "all_gather",
    functional.all_gather_into_tensor_out.default: "all_gather",
    c10d._reduce_scatter_base_.default: "reduce_scatter",
    c10d.reduce_scatter_.default: "reduce_scatter",
    functional.reduce_scatter_tensor.default: "reduce_scatter",
    c10d.allreduce_.default: "all_reduce",
    functional.all_reduce.default: "all_reduce",
    functional.all_reduce_.default: "all_reduce",
    c10d.alltoall_base_.default: "all_to_all",
    functional.all_to_all_single.default: "all_to_all",
    c10d.broadcast_.default: "broadcast",
    functional.broadcast.default: "broadcast",
    c10d.barrier.default: "barrier",
    c10d.send.default: "send",
    c10d.recv_.default: "recv",
}
"""Operators that cross the network. One that is not here and looks like one is refused by the recorder, never
overlooked.
"""

FLOAT8 = "float8"
"""The profiles' key for the speed of products of eight-bit numbers, in either format."""

_PRODUCTS = {
    aten.mm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.bmm.default: (0, 1),
    aten.baddbmm.default: (1, 2),
    aten._scaled_mm.default: (0, 1),
}
_LOOKUPS = {aten.embedding.default, aten.index_select.default, aten.gather.default}
_WRITES_ALL = {aten.embedding_dense_backward.default}


def is_view(func: Any) -> bool:
    """Tell operators that make no tensor of their own: views, and questions about tensors."""
    returns = func._schema.returns
    aliased = bool(returns) and all(
        returned.alias_info is not None and not returned.alias_info.is_write for returned in returns
    )
    return aliased or func._schema.name in (
        "prim::device",
        "aten::is_same_size",
        "aten::_unsafe_view",
        "aten::is_pinned",
        "aten::detach",
    )


def name_of(func: Any) -> str:
    """Return the name of an operator, without its library's."""
    return str(func._schema.name.rpartition("::")[2])


def moves_nothing(func: Any) -> bool:
    """Tell operators that only allocate."""
    return "empty" in name_of(func)


def matrix_shape(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return (batch, m, k, n) of a matrix product, (batch x heads, queries, keys, channels) of attention, () of
    anything else.
    """
    if func in _PRODUCTS:
        left, right = (args[place].shape for place in _PRODUCTS[func])
        batch = left[0] if len(left) == 3 else 1
        return (batch, left[-2], left[-1], right[-1])
    # a product for each expert; one dim of each side or of both is divided among the experts
    if func is aten._grouped_mm.default:
        left, right, experts = args[0].shape, args[1].shape, (args[2] if len(args) > 2 else kwargs["offs"]).shape[0]
        rows = left[-2] // experts if len(left) == 2 and len(right) == 3 else left[-2]
        inner = left[-1] // experts if len(left) == 2 and len(right) == 2 else left[-1]
        return (experts, rows, inner, right[-1] // experts if len(left) == 3 and len(right) == 2 else right[-1])
    if is_attention(func):
        first = 1 if "backward" in func._schema.name else 0
        query, key = args[first].shape, args[first + 1].shape
        return (query[0] * query[1], query[2], key[2], query[3])
    return ()


def computing_dtype(func: object, outputs: Sequence[Tensor]) -> str:
    """Return the dtype at whose speed the operator computes: its result's, or float8 whatever its products are
    handed out in.
    """
    if func is aten._scaled_mm.default:
        return FLOAT8
    return str(outputs[0].dtype).removeprefix("torch.") if outputs else ""


def is_attention(func: Any) -> bool:
    """Tell the fused attention operators."""
    name = func._schema.name
    return ("scaled_dot_product" in name and "flash" in name) or "scaled_dot_product_efficient" in name


def floating_point(func: Any, shape: tuple[int, ...]) -> int:
    """Return the operations of a product or of attention (its whole square, causal or not; backward does five
    products for two).
    """
    if not shape:
        return 0
    batch, rows, inner, columns = shape
    if is_attention(func):
        return (10 if "backward" in func._schema.name else 4) * batch * rows * inner * columns
    return 2 * batch * rows * inner * columns


def moved_bytes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Tensor]) -> int:
    """Return the bytes that the operator reads and writes, each tensor once; a broadcast dim is not memory."""
    if is_view(func) or moves_nothing(func):
        return 0
    if func in _LOOKUPS:
        return 2 * sum(map(stored_bytes, outputs))
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if func in _WRITES_ALL:
        return stored_bytes(inputs[0]) + 2 * sum(map(stored_bytes, outputs))
    if func._schema.name == "fsdp::all_gather_copy_in":
        return 2 * sum(stored_bytes(tensor) for tensor in args[0])
    fresh = {id(tensor): tensor for tensor in (*inputs, *outputs)}
    return sum(map(stored_bytes, fresh.values()))


def stored_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements, those along broadcast dims once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride()):
        count *= size if stride else 1
    return count


def sent(func: object, args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[int, torch.dtype | None]:
    """Return bytes and dtype of a collective, counted as :class:`meshpar.forecasting.trace.Collective` says."""
    kind = COLLECTIVES[func]
    if kind == "barrier":
        return 0, None
    if func is c10d._allgather_base_.default or func is c10d.alltoall_base_.default:
        counted = [args[0] if kind == "all_gather" else args[1]]
    elif func is c10d._reduce_scatter_base_.default:
        counted = [args[1]]
    elif kind == "all_gather":
        counted = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    elif func is c10d.reduce_scatter_.default:
        counted = [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, Tensor)]
    else:
        counted = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor)]
    size = sum(tensor.nbytes for tensor in counted)
    if kind == "all_to_all":
        size = max(size, sum(leaf.nbytes for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)))
    return size, counted[0].dtype


@final
class Fusion:
    """A run of operators between two matrix products."""

    def __init__(self) -> None:
        self._read: dict[int, int] = {}
        self._made: dict[int, tuple[Any, int]] = {}

    @property
    def open(self) -> bool:
        """Operators wait to be joined."""
        return bool(self._made or self._read)

    def add(self, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Tensor]) -> None:
        """Join one more operator."""
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                key = leaf.untyped_storage()._cdata
                if key not in self._made:
                    self._read[key] = max(self._read.get(key, 0), stored_bytes(leaf))
        for output in outputs:
            storage = output.untyped_storage()
            self._made.setdefault(storage._cdata, (weakref.ref(storage), stored_bytes(output)))

    def close(self) -> int:
        """Return the bytes that the joined operators move together, and start anew."""
        moved = sum(self._read.values()) + sum(size for made, size in self._made.values() if made() is not None)
        self._read, self._made = {}, {}
        return moved
