"""Memory of a device lent to others: its tensors' values in page-locked host memory, bit for bit, and back."""

from __future__ import annotations

import itertools
import mmap
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from meshpar._torch.tensors import memory_of
from meshpar.core import runtime
from meshpar.core.errors import MeshparError
from meshpar.process.waiting import reads_of
from meshpar.tensors.placements import local_tensor

ALIGNMENT = 64
_INSIDE = "inside of par.offloaded(), where its parameters have no memory; call it after the block"
_AGAIN = (
    "after par.offloaded() had failed to take memory back; free the device's memory, then run `with par.offloaded(): "
    "pass`, which tries again"
)


def starts(sizes: Iterable[int]) -> list[int]:
    """Return where parts of so many bytes begin in a slab, and the size of the slab."""
    return list(itertools.accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))


@final
class Slab:
    """Host memory of exactly ``nbytes``, given back unlike torch's; pinned, it is whole pages of its own."""

    def __init__(self, nbytes: int, *, pin: bool) -> None:
        if not pin or not nbytes:
            self.memory = torch.empty(nbytes, dtype=torch.uint8)
            return
        self.memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        if torch.cuda.is_available():  # other accelerators copy from and to memory that is not pinned
            runtime_of_cuda: Any = torch.cuda.cudart()
            torch.cuda.check_error(runtime_of_cuda.cudaHostRegister(self.memory.data_ptr(), nbytes, 0))
            weakref.finalize(self, _unpin, self.memory).atexit = False


def _unpin(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[union-attr]


@final
@dataclass(slots=True)
class _Lent:
    """The memory that a module lends, with its only copy on the host: page-locked, kept for the next block."""

    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    slab: Slab = field(default_factory=lambda: Slab(0, pin=False))
    hooks: list[RemovableHandle] = field(default_factory=list)

    def room(self, sizes: list[int], device: torch.device) -> list[Tensor]:
        """Return host memory of these sizes for what ``device`` lends."""
        if not runtime.queues(device):
            return [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
        places = starts(sizes)
        if self.copies or self.slab.memory.numel() < places[-1]:
            self.slab = Slab(0, pin=False)  # the smaller one goes first
            self.slab = Slab(places[-1], pin=True)
        return [self.slab.memory[start : start + size] for start, size in zip(places, sizes)]


_LENT: weakref.WeakKeyDictionary[nn.Module, _Lent] = weakref.WeakKeyDictionary()


@contextmanager
def on_the_host(module: nn.Module, tensors: Iterable[Tensor], device: torch.device) -> Iterator[None]:
    """Keep the values of ``tensors`` in host memory for the block, and give back the memory that they had.

    Calls of ``module``, saves and steps raise MeshparError meanwhile. So does the end of the block where the device has
    no memory for the values: they stay on the host, and the next block gives back these, too.
    """
    reads, lent = reads_of(module), _LENT.setdefault(module, _Lent())
    if reads.away == _AGAIN:
        reads.away = ""
    reads.wait("par.offloaded()")
    storages = {}
    for local in map(local_tensor, tensors):
        storage = local.untyped_storage()
        if local.device.type == device.type and storage.nbytes() and storage.resizable():
            lending = torch.empty(0, dtype=torch.uint8, device=local.device)
            storages[memory_of(storage)] = lending.set_(storage)  # type: ignore[call-overload]
    reads.away = _INSIDE
    lent.hooks = lent.hooks or _refusing(module)
    try:
        copies = list(zip(storages.values(), lent.room([lending.numel() for lending in storages.values()], device)))
        for lending, values in copies:
            values.copy_(lending, non_blocking=True)
        _wait_for(device)
        for lending, values in copies:
            lent.copies.append((lending, values))
            lending.untyped_storage().resize_(0)
        del copies
        if runtime.queues(device):
            torch.get_device_module(device).empty_cache()
        yield
    finally:
        reads.away = _AGAIN
        _take_back(lent.copies)
        _wait_for(device)
        while lent.hooks:
            lent.hooks.pop().remove()
        reads.away = ""


def _refusing(module: nn.Module) -> list[RemovableHandle]:
    """Return the hooks that refuse what would use the module's parameters, or a part's, on any plan."""
    reads, parameters = reads_of(module), {id(parameter) for parameter in module.parameters()}

    def before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"]):
            reads.check("the optimizer's step()")

    hooks: list[RemovableHandle] = [register_optimizer_step_pre_hook(before_step)]
    for part in module.modules():
        hooks += [
            part.register_load_state_dict_pre_hook(lambda *_: reads.check("load_state_dict()")),
            part.register_state_dict_pre_hook(lambda *_: reads.check("state_dict()")),
            part.register_forward_pre_hook(lambda *_: reads.check("the module"), prepend=True),
        ]
    return hooks


def _take_back(copies: list[tuple[Tensor, Tensor]]) -> None:
    """Give each storage its memory and bytes again, and let go of the host's copy when it has them."""
    try:
        while copies:
            lent, values = copies[-1]
            lent.untyped_storage().resize_(values.numel())
            lent.copy_(values, non_blocking=True)
            copies.pop()
    except RuntimeError as error:
        raise MeshparError(
            f"par.offloaded() cannot take its memory back, and {sum(values.numel() for _, values in copies):,} bytes "
            f"stay in host memory ({error}); free the device's memory, then run `with par.offloaded(): pass`, which "
            "tries again"
        ) from error


def _wait_for(device: torch.device) -> None:
    if runtime.queues(device):
        torch.get_device_module(device).synchronize()
