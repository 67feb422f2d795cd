"""Memory of a device lent to others for a while: its tensors' values in host memory, bit for bit, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import Tensor, nn

from meshpar.core import runtime
from meshpar.core.errors import MeshparError
from meshpar.placements import local_tensor


@contextmanager
def on_the_host(module: nn.Module, tensors: Iterable[Tensor], device: torch.device) -> Iterator[None]:
    """Keep the values of ``tensors`` in host memory for the block, and give back the memory that they had.

    Tensors, their views and everything that holds them stay the same objects. Calls of ``module`` raise MeshparError
    meanwhile.
    """
    storages = {}
    for local in map(local_tensor, tensors):
        storage = local.untyped_storage()
        if local.device.type == device.type and storage.nbytes() and storage.resizable():
            storages[storage.data_ptr()] = storage
    kept = []
    handle = module.register_forward_pre_hook(_refuse, prepend=True)
    try:
        for storage in storages.values():
            kept.append((storage, _bytes(storage).to("cpu", copy=True)))
            storage.resize_(0)
        if runtime.queues(device):
            torch.get_device_module(device).empty_cache()
        yield
    finally:
        for storage, values in kept:
            storage.resize_(values.numel())
            _bytes(storage).copy_(values)
        handle.remove()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def _refuse(module: object, args: object) -> NoReturn:
    raise MeshparError(
        "the module was called inside of par.offloaded(), where its parameters have no memory; call it after the block"
    )
