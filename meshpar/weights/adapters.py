"""LoRA's adapters as weights: the layers that have them, and weights with their adapters merged, slice by slice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn

from meshpar.weights.maps import TypedSource
from meshpar.weights.rules import spans_of

NAME = "default"  # the adapter's name in peft, which is part of the names of its parameters


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers with adapters by name."""
    modules = model.named_modules()
    return {name: child for name, child in modules if hasattr(child, "base_layer") and hasattr(child, "lora_A")}


def base_name(name: str) -> str:
    """Return a parameter's name in the model without adapters."""
    return name.replace(".base_layer", "")


@runtime_checkable
class PackedAdapterLayer(Protocol):
    """A layer whose adapters belong to one packed weight (experts, rows, columns) of the module below it."""

    base_layer: nn.Module
    leaf: str
    scale: float

    def factors(self, a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
        """Return the factors (experts, rows, rank) and (experts, rank, columns) of peft's A and B."""
        ...


class AdapterFactors(NamedTuple):
    """How to read A and B of one weight as peft has them, ``alpha / rank``, and the layer of a packed weight."""

    read: Callable[[], tuple[Tensor, Tensor]]
    scale: float
    packed: PackedAdapterLayer | None = None


@final
class MergedAdapters:
    """A model's weights with adapters added, read slice by slice, as peft's ``merge_and_unload``."""

    def __init__(self, base: TypedSource, factors: Mapping[str, AdapterFactors]) -> None:
        self.shapes, self.dtypes, self._base, self._factors = base.shapes, base.dtypes, base, factors
        self._last: tuple[str, Tensor, Tensor] | None = None

    def read(self, name: str, index: tuple[slice, ...], out: Tensor) -> None:
        if name not in self._factors:
            self._base.read(name, index, out)
            return
        *outer, rows, columns = (slice(*span) for span in spans_of(index, self.shapes()[name]))
        a, b = (factor[tuple(outer)].float() for factor in self._pair(name))
        whole = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        self._base.read(name, index, whole)
        out.copy_(whole + a[..., rows, :] @ b[..., columns] * self._factors[name].scale)

    def _pair(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the left factor (..., rows, rank) and the right one (..., rank, columns)."""
        if self._last is None or self._last[0] != name:
            factors, shape = self._factors[name], self.shapes()[name]
            a, b = factors.read()
            if factors.packed is not None:
                a, b = factors.packed.factors(a, b, shape[0])
            else:  # GPT-2's Conv1D stores its weight transposed
                a, b = (b, a) if (b.shape[0], a.shape[1]) == shape else (a.T, b.T)
            self._last = (name, a, b)
        return self._last[1:]
