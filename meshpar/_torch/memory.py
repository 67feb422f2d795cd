"""The history of a GPU's memory, which torch documents and keeps private
(https://docs.pytorch.org/docs/stable/torch_cuda_memory.html).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_ENTRIES = 200_000


@contextmanager
def memory_history() -> Iterator[Callable[[Path], None]]:
    """Record allocations inside of the ``with`` block, which gets a function that writes them to a file."""
    torch.cuda.memory._record_memory_history(max_entries=_ENTRIES)
    yield lambda path: torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)
