"""Page-locked host memory, with which a device copies at its full speed."""

from __future__ import annotations

import itertools
import mmap
import weakref
from collections.abc import Iterable
from typing import final

import torch
from torch import Tensor

ALIGNMENT = 64


def starts(sizes: Iterable[int]) -> list[int]:
    """Return where parts of so many bytes begin in a slab, and the size of the slab."""
    return list(itertools.accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))


@final
class Slab:
    """Host memory of exactly ``nbytes``, given back unlike torch's; pinned, it is whole pages of its own."""

    def __init__(self, nbytes: int, *, pin: bool) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8) if not pin or not nbytes else _pinned(nbytes)
        if pin and nbytes:
            weakref.finalize(self, _unpin, self.memory).atexit = False


def _pinned(nbytes: int) -> Tensor:
    memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    if torch.cuda.is_available():  # other accelerators copy from and to memory that is not pinned
        registered = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), nbytes, 0)  # type: ignore[union-attr]
        torch.cuda.check_error(registered)
    return memory


def _unpin(memory: Tensor) -> None:
    if torch.cuda.is_available():
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[union-attr]
