"""WeightMap (a model's names <-> its published names) and WeightSource (where weights are read from)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, final

import torch


class WeightSource(Protocol):
    """Named tensors that can be read piece by piece; what ``materialize(weights=)`` asks for."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return every tensor's name and shape, without reading any."""

    def read(self, name: str, index: tuple[slice, ...], out: torch.Tensor) -> None:
        """Copy ``tensor[index]`` into ``out`` (the slice's shape; cast to its dtype)."""


@final
@dataclass(frozen=True, slots=True)
class WeightMap:
    """Placeholder until the rules land."""
