"""A dispatch mode that finds where the host waits for the device, or for other hosts."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import meshpar.forecasting.device as device

PACKAGE = str(Path(__file__).parents[2] / "meshpar") + "/"
FSDP = str(Path(torch.__file__).parent / "distributed/fsdp/_fully_shard") + "/"

READS = {
    "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "bincount", "histc", "_unique2",
    "unique_dim",
}  # fmt: skip
"""Operators whose result, or its shape, the host needs from the device."""
COLLECTIVES = {
    *("allreduce_", "allgather_", "_allgather_base_", "alltoall_base_", "broadcast_", "reduce_scatter_", "barrier"),
    *("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast"),
}


class Waits(TorchDispatchMode):
    """Count the places where the host waits for the device, and refuse lists that mix tensors of both."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    def __enter__(self) -> Self:
        module: Any = torch.get_device_module(device.NAME)
        for owner in (device.Stream, device.StreamEvent, type(module)):
            owner.synchronize = self._synchronize  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def _synchronize(self, *_: object) -> None:
        self.places[place()] += 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.rpartition("::")[2]
        given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        on_device = any(map(_on_device, given))
        for argument in (argument for argument in args if isinstance(argument, list | tuple)):
            if len({_on_device(one) for one in argument if isinstance(one, Tensor)}) > 1:
                raise AssertionError(f"{func} mixes tensors of the host and of the device, in {place()}")
        if func._schema.name.startswith(("c10d::", "_c10d_functional::")) and name in COLLECTIVES and not on_device:
            self.places[f"{place()} (hosts)"] += 1
        waits = on_device and (name in READS or _reads_shape(name, args, kwargs))
        if waits or (_crosses(name, args, kwargs) and not _non_blocking(name, args, kwargs)):
            self.places[place()] += 1
        if name == "_local_scalar_dense":
            return _answer(args[0].dtype)
        if name in ("equal", "is_nonzero"):
            return False
        if name == "nonzero":
            return args[0].new_zeros((1, args[0].ndim), dtype=torch.int64)
        if waits:
            raise AssertionError(
                f"{func} waits for the device and the shape of its result is not known here, in {place()}"
            )
        return func(*args, **kwargs)


def _answer(dtype: torch.dtype) -> Any:
    return 1.0 if dtype.is_floating_point else False if dtype == torch.bool else 0


def _on_device(tensor: Tensor) -> bool:
    return tensor.device.type not in ("cpu", "meta")


def _reads_shape(name: str, args: Any, kwargs: Any) -> bool:
    """Tell whether the values of tensors decide the shape of the result."""
    if name == "repeat_interleave":
        return isinstance(args[-1], Tensor) and kwargs.get("output_size") is None
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1])
    return False


def _crosses(name: str, args: Any, kwargs: Any) -> bool:
    """Tell whether an operator copies between host and device."""
    if name == "_to_copy":
        return kwargs.get("device") is not None and _on_device(args[0]) != (
            torch.device(kwargs["device"]).type not in ("cpu", "meta")
        )
    return name == "copy_" and isinstance(args[1], Tensor) and _on_device(args[0]) != _on_device(args[1])


def _non_blocking(name: str, args: Any, kwargs: Any) -> bool:
    return bool(kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))


def place() -> str:
    """Return the innermost function on the stack that is this package's or FSDP2's, or "elsewhere"."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith((PACKAGE, FSDP)) and not file.startswith(PACKAGE + "forecasting/"):
            # a comprehension is a function of its own before Python 3.12
            function = frame.f_code.co_qualname.partition(".<locals>")[0]
            return f"{file.removeprefix(PACKAGE).removeprefix(FSDP).removesuffix('.py').replace('/', '.')}.{function}"
        frame = frame.f_back
    return "elsewhere"
