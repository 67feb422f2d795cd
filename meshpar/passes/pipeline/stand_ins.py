"""Stand-ins: modules without parameters in the places of those that other stages compute."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn


@final
class Carried:
    """The form of the value that passes from block to block: the same for all stand-ins of a model.

    Attributes:
        width: number of further values that a block returns beside it, in a tuple; -1: it returns the value alone.
        dtype: of the value.
    """

    def __init__(self) -> None:
        self.width, self.dtype = -1, torch.get_default_dtype()


@final
class BlockStandIn(nn.Module):
    """Return the value that a block is called with, in the form in which blocks return it."""

    stands_in = True

    def __init__(self, carried: Carried) -> None:
        super().__init__()
        self._carried = carried

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        width = self._carried.width
        return hidden if width < 0 else (hidden, *(None,) * width)


@final
class EmbeddingStandIn(nn.Module):
    """Return zeros of an embedding's shape, without memory for them.

    Attributes:
        weight: the embedding's parameter, where another module of this stage has it, too.
    """

    stands_in = True

    def __init__(self, old: nn.Embedding, carried: Carried, *, keeps: bool) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = old.num_embeddings, old.embedding_dim
        self.padding_idx, self._carried = old.padding_idx, carried
        if keeps:
            self.weight = old.weight

    def forward(self, ids: Tensor) -> Tensor:
        return torch.zeros((), dtype=self._carried.dtype, device=ids.device).expand(*ids.shape, self.embedding_dim)


@final
class TailStandIn(nn.Module):
    """Return what it is called with, in the place of a norm or a head behind the last block.

    Attributes:
        weight: the module's parameter, where another module of this stage has it, too.
    """

    stands_in = True

    def __init__(self, old: nn.Module, kept: dict[str, nn.Parameter]) -> None:
        super().__init__()
        for name, parameter in kept.items():
            self.register_parameter(name, parameter)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden
