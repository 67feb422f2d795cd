"""A tensor that several equal parts stand for, each computed by itself.

- ``TensorInParts``: torch has no public form of a tensor without memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from meshpar.core.errors import MeshparError

BEFORE_PART: ContextVar[Callable[[int], None] | None] = ContextVar("before_part", default=None)
"""What runs before each function of the part of a number, while parts draw random numbers of their own."""


@final
class TensorInParts(Tensor):
    """Equal parts of one tensor: each operator runs part by part, as it would on a rank that has one of them.

    Shape, dtype and device are those of one part. A value that Python reads must be the same in all parts.
    """

    parts: tuple[Tensor, ...]

    @staticmethod
    def __new__(cls, parts: Sequence[Tensor]) -> TensorInParts:
        first = parts[0]
        shell: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            first.shape,
            strides=first.stride(),
            dtype=first.dtype,
            device=first.device,
            requires_grad=first.requires_grad,
        )
        shell.parts = tuple(parts)
        return shell  # type: ignore[no-any-return]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{len(self.parts)} parts of {tuple(self.parts[0].shape)}, {self.parts[0].dtype}"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        values, form = tree_flatten((args, kwargs))
        wholes = [value for value in values if isinstance(value, TensorInParts)]
        name = getattr(func, "__name__", str(func))
        _check(func, name, args, kwargs, wholes)
        if func is torch.Tensor.__iter__:
            return iter(wholes[0].unbind(0))
        if func is torch.Tensor.register_hook:
            handles = [func(part, *args[1:], **kwargs) for part in wholes[0].parts]
            return SimpleNamespace(remove=lambda: [handle.remove() for handle in handles])
        begin, results = BEFORE_PART.get(), []
        for number in range(len(wholes[0].parts)):
            if begin is not None:
                begin(number)
            of_part = [value.parts[number] if isinstance(value, TensorInParts) else value for value in values]
            args, kwargs = tree_unflatten(of_part, form)
            results.append(func(*args, **kwargs))
        return tree_map(partial(_join, name), *results)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise MeshparError(
            f"{func} cannot compute in equal parts of tp: something inside of a split layer calls it past torch's "
            "functions; drop parts= from TensorParallel"
        )


def _check(func: Any, name: str, args: Any, kwargs: dict[str, Any], wholes: Sequence[TensorInParts]) -> None:
    """Refuse what would lose gradients, or write each part into the same memory."""
    with torch._C.DisableTorchFunctionSubclass():
        if any(whole.grad_fn is not None for whole in wholes):
            raise MeshparError(
                "a torch.autograd.Function inside of a split layer cannot compute in equal parts of tp; write it with "
                "torch's operators, or drop parts= from TensorParallel"
            )
    writes = func is torch.Tensor.__setitem__ or (name.endswith("_") and not name.endswith("__"))
    target = args[0] if writes and args else kwargs.get("out")
    parts = parts_of(target) if isinstance(target, Tensor) else ()
    # one memory, which is whole: that of a plain tensor, or of an input that all parts see
    if len({(part.untyped_storage()._cdata, part.storage_offset()) for part in parts}) == 1:
        raise MeshparError(
            f"{name} writes values of a split layer, computed in equal parts of tp, into a tensor that is whole; "
            "write it without writing in place, or drop parts= from TensorParallel"
        )


def _join(name: str, first: Any, *others: Any) -> Any:
    """Return what several parts gave as one value."""
    if isinstance(first, Tensor):
        return TensorInParts([first, *others])
    if any(value != first for value in others):
        raise MeshparError(
            f"{name} gives Python another value in each of the equal parts of tp; use torch.where, or "
            "drop parts= from TensorParallel"
        )
    return first


def in_parts(parts: Sequence[Tensor]) -> Tensor:
    """Return one tensor in several parts, and a single part as it is."""
    return parts[0] if len(parts) == 1 else TensorInParts(parts)


def parts_of(x: Tensor) -> tuple[Tensor, ...]:
    """Return the parts of a tensor, which is itself the only part of a plain one."""
    return x.parts if isinstance(x, TensorInParts) else (x,)


def set_parts(mesh: DeviceMesh, parts: int) -> None:
    """Let sums over an axis follow the tree over ``parts`` equal parts, 0 where each rank computes its own."""
    vars(mesh)["_meshpar_parts"] = parts


def parts_on(mesh: DeviceMesh) -> int:
    """Return in how many equal parts an axis computes, 0 where each rank computes its own."""
    return vars(mesh).get("_meshpar_parts", 0)  # type: ignore[no-any-return]
