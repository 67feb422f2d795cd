"""Element-wise neighbours as a compiler joins them: what they read from outside is read once, what outlives them is written once."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, final

from torch import Tensor
from torch.utils._pytree import tree_leaves

from meshpar.forecasting.operators import stored_bytes


@final
class Fusion:
    """A run of operators between two matrix products."""

    def __init__(self) -> None:
        self._read: dict[int, int] = {}
        self._made: dict[int, tuple[Any, int]] = {}

    @property
    def open(self) -> bool:
        """Whether operators wait to be joined."""
        return bool(self._made or self._read)

    def add(self, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Tensor]) -> None:
        """Join one more operator."""
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Tensor):
                key = each.untyped_storage()._cdata
                if key not in self._made:
                    self._read[key] = max(self._read.get(key, 0), stored_bytes(each))
        for each in outputs:
            storage = each.untyped_storage()
            self._made.setdefault(storage._cdata, (weakref.ref(storage), stored_bytes(each)))

    def close(self) -> int:
        """Return the bytes that the joined operators move together, and start anew."""
        moved = sum(self._read.values()) + sum(size for made, size in self._made.values() if made() is not None)
        self._read, self._made = {}, {}
        return moved
