"""Files of torch: where a checkpoint's ``.metadata`` places a part, and the history of a GPU's memory.

The first is private; torch documents the second (https://docs.pytorch.org/docs/stable/torch_cuda_memory.html)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


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
