"""The class in which a distributed checkpoint's ``.metadata`` names each part's place.

Stock ``dcp.load`` looks for it; private without a public form.
"""

from __future__ import annotations

from typing import Any


def stored_at(file: str, position: int, length: int) -> Any:
    """Return a part's place in a distributed checkpoint, in bytes, as ``.metadata`` has it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # loads all of torch's checkpoints, which few need

    return _StorageInfo(file, position, length)
