"""Attributes of tensors and modules, nested tensors, and operators on lists, none of which torch has made public.

- ``tree_*``: nested values, as torch's own wrappers flatten them (pytorch/pytorch#112111).
- ``foreach_*``: operators on lists of tensors, in few kernels, which torch's optimizers use (pytorch/pytorch#58833).
- ``BatchNorm``, ``Dropout``: what these modules inherit from, also those of other packages.
- ``persistent_buffers``, ``call_hooks``, ``gradient_hooks``: torch lists none of them.
- ``memory_of``: the address of a storage's own object, by which storages without bytes differ, too.
- ``stored_at``: a checkpoint's ``.metadata`` places parts by a private class.
- ``memory_history``: torch documents it (https://docs.pytorch.org/docs/stable/torch_cuda_memory.html).
- ``held_part``: :meth:`DTensor.to_local` returns a view, whose version and memory are the part's own here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import _foreach_add_ as foreach_add_
from torch import _foreach_copy_ as foreach_copy_
from torch import _foreach_lerp_ as foreach_lerp_
from torch import _foreach_mul_ as foreach_mul_
from torch import _foreach_norm as foreach_norm
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

__all__ = [
    "BatchNorm", "Dropout", "call_hooks", "foreach_add_", "foreach_copy_", "foreach_lerp_", "foreach_mul_",
    "foreach_norm", "gradient_hooks", "held_part", "memory_history", "memory_of", "persistent_buffers", "stored_at",
    "tensor_leaves", "tree_leaves", "tree_map", "tree_map_only",
]  # fmt: skip


def tensor_leaves(*values: object) -> list[Tensor]:
    """Return the tensors in nested values; plain ones, which each micro-batch of a pipeline has, without a look."""
    plain: list[Any] = [value for value in values if type(value) is Tensor]
    return plain if len(plain) == len(values) else [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's own buffers that belong to its state, by name."""
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def call_hooks(module: nn.Module, *, backward: bool = False) -> list[Any]:
    """Return the hooks of a module's calls, or those of its backwards."""
    before, after = module._forward_pre_hooks, module._forward_hooks
    if backward:
        before, after = module._backward_pre_hooks, module._backward_hooks
    return [*before.values(), *after.values()]


def gradient_hooks(parameter: Tensor) -> list[Any]:
    """Return the hooks on a parameter's gradient, before and after it is accumulated."""
    kinds = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    return [hook for hooks in kinds for hook in (hooks or {}).values()]


def held_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, the object that it holds; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def memory_of(value: Tensor | torch.UntypedStorage) -> int:
    """Return the number by which torch knows a storage, or that of a tensor, while it lives."""
    return (value.untyped_storage() if isinstance(value, Tensor) else value)._cdata


def stored_at(file: str, position: int, length: int) -> Any:
    """Return a part's place in a distributed checkpoint, in bytes, as ``.metadata`` has it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # loads all of torch's checkpoints, which few need

    return _StorageInfo(file, position, length)


_ENTRIES = 200_000


@contextmanager
def memory_history() -> Iterator[Callable[[Path], None]]:
    """Record allocations inside of the ``with`` block, which gets a function that writes them to a file."""
    torch.cuda.memory._record_memory_history(max_entries=_ENTRIES)
    yield lambda path: torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)
