"""Costs of operators before any hardware is known: operations, bytes moved (also by fused operators), bytes sent."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from meshpar._torch.tensors import tensor_leaves

aten = torch.ops.aten
c10d = torch.ops.c10d
functional = torch.ops._c10d_functional

_BY_KIND = {
    "all_gather": [
        *(c10d._allgather_base_, c10d.allgather_),
        *(functional.all_gather_into_tensor, functional.all_gather_into_tensor_out),
    ],
    "reduce_scatter": [c10d._reduce_scatter_base_, c10d.reduce_scatter_, functional.reduce_scatter_tensor],
    "all_reduce": [c10d.allreduce_, functional.all_reduce, functional.all_reduce_],
    "all_to_all": [c10d.alltoall_base_, functional.all_to_all_single],
    "broadcast": [c10d.broadcast_, functional.broadcast],
    "barrier": [c10d.barrier],
    "send": [c10d.send],
    "recv": [c10d.recv_],
}
COLLECTIVES: dict[Any, str] = {operator.default: kind for kind, every in _BY_KIND.items() for operator in every}
"""Operators that cross the network. The recorder refuses one that looks like one and is not here."""

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
_INPUTS_SECOND = {c10d.alltoall_base_.default, c10d._reduce_scatter_base_.default, c10d.reduce_scatter_.default}


def is_view(func: Any) -> bool:
    """Tell operators that make no tensor of their own: views, and questions about tensors."""
    aliases = [returned.alias_info for returned in func._schema.returns]
    aliased = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
    asks = ("prim::device", "aten::is_same_size", "aten::_unsafe_view", "aten::is_pinned", "aten::detach")
    return aliased or func._schema.name in asks


def name_of(func: Any) -> str:
    """Return the name of an operator, without its library's."""
    return str(func._schema.name.rpartition("::")[2])


def matrix_shape(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return (batch, m, k, n) of a product, (batch x heads, queries, keys, channels) of attention, () of others."""
    if func in _PRODUCTS:
        first, second = (args[at].shape for at in _PRODUCTS[func])
        batch = first[0] if len(first) == 3 else 1
        return (batch, first[-2], first[-1], second[-1])
    # a product for each expert; one dim of each side or of both is divided among the experts
    if func is aten._grouped_mm.default:
        first, second, experts = args[0].shape, args[1].shape, (args[2] if len(args) > 2 else kwargs["offs"]).shape[0]
        rows = first[-2] // experts if len(first) == 2 and len(second) == 3 else first[-2]
        inner = first[-1] // experts if len(first) == 2 and len(second) == 2 else first[-1]
        return (experts, rows, inner, second[-1] // experts if len(first) == 3 and len(second) == 2 else second[-1])
    if is_attention(func):
        offset = 1 if "backward" in func._schema.name else 0
        query, key = args[offset].shape, args[offset + 1].shape
        return (query[0] * query[1], query[2], key[2], query[3])
    return ()


def computing_dtype(func: object, outputs: Sequence[Tensor]) -> str:
    """Return the dtype at whose speed the operator computes: its result's, or float8 whatever it returns."""
    if func is aten._scaled_mm.default:
        return FLOAT8
    return str(outputs[0].dtype).removeprefix("torch.") if outputs else ""


def is_attention(func: Any) -> bool:
    """Tell the fused attention operators."""
    name = func._schema.name
    return ("scaled_dot_product" in name and "flash" in name) or "scaled_dot_product_efficient" in name


def floating_point(func: Any, shape: tuple[int, ...]) -> int:
    """Return the operations of a product or of attention (its whole square; backward does five for two)."""
    if not shape:
        return 0
    batch, rows, inner, columns = shape
    if is_attention(func):
        return (10 if "backward" in func._schema.name else 4) * batch * rows * inner * columns
    return 2 * batch * rows * inner * columns


def moved_bytes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Tensor]) -> int:
    """Return the bytes that the operator reads and writes, each tensor once; a broadcast dim is not memory."""
    if is_view(func) or "empty" in name_of(func):  # which only allocates
        return 0
    if func in _LOOKUPS:
        return 2 * sum(map(stored_bytes, outputs))
    inputs = tensor_leaves((args, kwargs))
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
    counted = tensor_leaves(args[1] if func in _INPUTS_SECOND else args[0])
    if kind == "all_gather" and func is not c10d._allgather_base_.default:
        counted = tensor_leaves(outputs)
    size = sum(tensor.nbytes for tensor in counted)
    if kind == "all_to_all":
        size = max(size, sum(tensor.nbytes for tensor in tensor_leaves(outputs)))
    return size, counted[0].dtype


@final
class Fusion:
    """A run of operators between two matrix products."""

    def __init__(self) -> None:
        self._read: dict[int, int] = {}
        self._outputs: dict[int, tuple[Any, int]] = {}

    @property
    def open(self) -> bool:
        """Operators wait to be joined."""
        return bool(self._outputs or self._read)

    def add(self, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Tensor]) -> None:
        """Join one more operator."""
        for tensor in tensor_leaves((args, kwargs)):
            key = tensor.untyped_storage()._cdata
            if key not in self._outputs:
                self._read[key] = max(self._read.get(key, 0), stored_bytes(tensor))
        for output in outputs:
            storage = output.untyped_storage()
            self._outputs.setdefault(storage._cdata, (weakref.ref(storage), stored_bytes(output)))

    def close(self) -> int:
        """Return the bytes that the joined operators move together, and start anew."""
        moved = sum(self._read.values()) + sum(size for alive, size in self._outputs.values() if alive() is not None)
        self._read, self._outputs = {}, {}
        return moved
