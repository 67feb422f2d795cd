"""The memory that tensors of a rank take, compared with the description of its plan."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.autograd.profiler import profile
from torch.distributed.tensor import DTensor

Result = TypeVar("Result")


def storages() -> dict[int, Tensor]:
    """Return a tensor for each storage of this process that has memory, by the storage's number; garbage counts until it is collected."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    waiting: list[Any] = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        # Nothing in Python may refer to them, and then the collector does not know them.
        waiting += [each for each in (tensor.grad if tensor.is_leaf else None, tensor._base) if each is not None]
        if tensor.is_meta or isinstance(tensor, DTensor):  # its part here is a tensor of its own
            continue
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr():
            found.setdefault(storage._cdata, tensor)
    return found


def allocated(run: Callable[[], Result]) -> tuple[Result, int, int]:
    """Run something; return its result, the most bytes of host memory that tensors took at a time, and those that are left."""
    with profile(profile_memory=True) as seen:
        result = run()
    events = (each for each in seen.kineto_results.events() if each.name() == "[memory]")
    total = most = 0
    for each in sorted(events, key=lambda each: each.start_ns()):
        total += each.nbytes()
        most = max(most, total)
    return result, most, total
