"""Adapters merged into the weights that they adapt, slice by slice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, final

import torch
from torch import Tensor

from meshpar.training.lora import PackedAdapter
from meshpar.weights import TypedSource
from meshpar.weights.rules import spans_of


class Factors(NamedTuple):
    """The adapters of one weight.

    Attributes:
        read: returns A and B as peft has them.
        scale: ``alpha / rank``.
        packed: the module that adapts a packed weight (experts, rows, columns); None: a linear layer's.
    """

    read: Callable[[], tuple[Tensor, Tensor]]
    scale: float
    packed: PackedAdapter | None = None


@final
class Merged:
    """The weights of a model with its adapters added, read slice by slice: ``W + scale * left @ right``, as peft's
    ``merge_and_unload``.

    Args:
        base: the frozen weights.
        factors: the adapters of each adapted weight, by its name. They are read once for the slices of a weight.
    """

    def __init__(self, base: TypedSource, factors: Mapping[str, Factors]) -> None:
        self.shapes, self.dtypes, self._base = base.shapes, base.dtypes, base
        self._factors = factors
        self._last: tuple[str, Tensor, Tensor] | None = None

    def read(self, name: str, index: tuple[slice, ...], out: Tensor) -> None:
        """Copy ``tensor[index]`` into ``out``."""
        if name not in self._factors:
            self._base.read(name, index, out)
            return
        *outer, rows, columns = (slice(*span) for span in spans_of(index, self.shapes()[name]))
        left, right = (factor[tuple(outer)].float() for factor in self._pair(name))
        whole = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        self._base.read(name, index, whole)
        out.copy_(whole + left[..., rows, :] @ right[..., columns] * self._factors[name].scale)

    def _pair(self, name: str) -> tuple[Tensor, Tensor]:
        """Return left (..., rows, rank) and right (..., rank, columns)."""
        if self._last is None or self._last[0] != name:
            factors, shape = self._factors[name], self.shapes()[name]
            a, b = factors.read()
            if factors.packed is not None:
                a, b = factors.packed.factors(a, b, shape[0])
            else:  # GPT-2's Conv1D stores its weight transposed
                a, b = (b, a) if (b.shape[0], a.shape[1]) == shape else (a.T, b.T)
            self._last = (name, a, b)
        return self._last[1:]
