"""Which parameters of a model decay, which are matrices, and where in a parameter each of its matrices is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn

from meshpar.core.errors import MeshparError, RecipeError
from meshpar.core.layout import ModelLayout
from meshpar.core.patterns import covers, matches
from meshpar.passes.data.whole_parameters import is_transposed
from meshpar.passes.tensor.parts import Experts, FeatureTable, Parts
from meshpar.passes.tensor.styles import Colwise, Vocabulary, parse

_HEADS = ("lm_head", "head", "output", "classifier", "score", "embed_out", "output_projection")
"""Names of the layers that make logits, outside of the blocks, where no layout names one."""
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Matrices:
    """The matrices of a parameter: ``parts`` fused along ``dim``; ``stacked``: some for each index of the first dim."""

    stacked: bool = False
    dim: int = 0
    parts: int | Sequence[int] = 1

    def problem(self, shape: Sequence[int]) -> str | None:
        """Return why a parameter of ``shape`` has no such matrices."""
        if len(shape) < 2 + self.stacked or self.dim not in (0, 1):
            return f"has {len(shape)} dims; expected {2 + self.stacked} or more, and dim to be 0 or 1"
        size, count = shape[self.stacked + self.dim], math.fsum(self._sizes)
        if not self._sizes or min(self._sizes) < 1 or size % count:
            return f"has {size} in dim {self.stacked + self.dim}, which parts={self.parts} do not divide"
        return None

    @property
    def _sizes(self) -> tuple[int, ...]:
        return (1,) * self.parts if isinstance(self.parts, int) else tuple(self.parts)

    def of(self, shape: Sequence[int]) -> Iterator[tuple[slice, ...]]:
        """Yield where each matrix is in a parameter of ``shape``."""
        whole = [slice(0, size) for size in shape]
        split = self.stacked + self.dim
        ends = [shape[split] * end // sum(self._sizes) for end in itertools.accumulate(self._sizes, initial=0)]
        for index in range(shape[0]) if self.stacked else (None,):
            for start, end in itertools.pairwise(ends):
                spans = list(whole)
                spans[split] = slice(start, end)
                if index is not None:
                    spans[0] = slice(index, index + 1)
                yield tuple(spans)

    def shape_of(self, place: Sequence[slice]) -> tuple[int, int]:
        """Return rows and columns of the matrix at ``place``; later dims are columns too."""
        rows, *columns = (span.stop - span.start for span in place[self.stacked :])
        return rows, math.prod(columns)


def matrices_of(
    name: str, parameter: Tensor, module: nn.Module, layout: ModelLayout, *, per_head: bool
) -> Matrices | None:
    """Return the matrices of a parameter; None: AdamW trains it. Raises MeshparError if nothing says what they are."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if parameter.ndim < 2 or isinstance(owner, nn.Embedding | nn.EmbeddingBag) or _is_head(path, layout):
        return None
    parts, dim = _find_fused(path, leaf, parameter.ndim, owner, layout)
    if any(matches(pattern, path) for pattern in layout.experts.modules) and parameter.ndim > 2:
        return Matrices(stacked=True, dim=dim, parts=parts)
    if isinstance(owner, _CONVOLUTIONS):
        return None if parameter.shape[1] == 1 else Matrices()  # depthwise: one filter a channel
    if math.prod(parameter.shape) == max(parameter.shape):
        return None  # a vector with dims of one
    if parameter.ndim > 2:
        raise MeshparError(
            f"{name} has the shape {tuple(parameter.shape)}, and no layout says what its matrices are; use "
            f'groups={{"{name}": {{"stacked": True}}}} if each index of the first dim is a matrix, '
            '{"stacked": False} if later dims are columns, or {"rule": "adamw"}'
        )
    if per_head:
        parts *= next((count for pattern, count in layout.tensor.heads.items() if matches(pattern, path)), 1)
        dim = 1 if is_transposed(owner) else dim
    return Matrices(dim=dim, parts=parts)


def parameter_groups(module: nn.Module, weight_decay: float | None) -> list[dict[str, Any]]:
    """Return the trainable parameters in groups: with two dims or more they decay. Raises RecipeError without any."""
    groups: dict[float, dict[str, Any]] = {}
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        decay = 0.0 if weight_decay is None or parameter.ndim < 2 else weight_decay
        group = groups.setdefault(decay, {"params": []} | ({} if weight_decay is None else {"weight_decay": decay}))
        group["params"].append(parameter)
    if not groups:
        raise RecipeError("no parameter of the model requires a gradient; there is nothing to train")
    return list(groups.values())


def _is_head(path: str, layout: ModelLayout) -> bool:
    """Tell a layer that makes logits, or a table over the vocabulary."""
    style = _style(path, layout)
    if isinstance(style, Vocabulary | FeatureTable) or (isinstance(style, Colwise) and style.gather == "loss"):
        return True
    in_block = any(covers(pattern, path) for pattern in layout.blocks)
    return path == layout.head if layout.head else path.rpartition(".")[2] in _HEADS and not in_block


def _find_fused(path: str, leaf: str, ndim: int, owner: nn.Module, layout: ModelLayout) -> tuple[int, int]:
    """Return how many equal projections a parameter fuses, and along which dim of a matrix."""
    style = _style(path, layout)
    if isinstance(style, Colwise):
        return style.parts, 1 if is_transposed(owner) and style.parts > 1 else 0
    style = style.otherwise if isinstance(style, Experts) else style
    if isinstance(style, Parts) and leaf in style.dims:
        dim, parts = style.dims[leaf]
        return (parts, dim % ndim - (ndim - 2)) if parts > 1 else (1, 0)
    return 1, 0


def _style(path: str, layout: ModelLayout) -> Any:  # noqa: ANN401 - a style, or None
    described = next((style for pattern, style in layout.tensor.styles.items() if matches(pattern, path)), None)
    return None if described is None else parse(described)
