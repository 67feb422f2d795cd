"""What every model of this room returns, and the leaf modules that they share."""

from __future__ import annotations

from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshpar.loss import IGNORE_INDEX, token_loss


@final
class ModelOutput(NamedTuple):
    """The result of a forward pass.

    A named tuple, because FSDP2 finds the tensors of an output through pytree, which knows named tuples without being told.

    Attributes:
        loss: mean over the counted tokens, 0-dim float32; None without labels.
        logits: (B, L, V), or a DTensor of that shape, sharded over V, under a loss-parallel head.
    """

    loss: Tensor | None
    logits: Tensor


def next_token_loss(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    """Return the mean loss of predicting ``labels[:, i + 1]`` at position ``i`` (transformers' convention; -100 is not counted)."""
    # Moving the labels rather than the logits saves a copy of the largest tensor of the model.
    next_BL = F.pad(labels_BL[:, 1:], (0, 1), value=IGNORE_INDEX)
    return token_loss(logits_BLV, next_BL, reduction="mean")


class Linear(nn.Linear):
    """``nn.Linear`` whose weight starts normal with standard deviation ``std``, its bias zero."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, std: float = 0.02) -> None:
        self.std = std
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """Draw the weight, zero the bias."""
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """``nn.Embedding`` whose rows start normal with standard deviation ``std``."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *, std: float = 0.02) -> None:
        self.std = std
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        """Draw the rows."""
        nn.init.normal_(self.weight, std=self.std)


def positions_of(input_ids_BL: Tensor, limit: int) -> Tensor:
    """Return the positions 0 .. L-1 as (1, L) int64, refusing a sequence longer than ``limit``.

    Raises:
        ValueError: L is above ``limit``.
    """
    length = input_ids_BL.shape[1]
    if length > limit:
        raise ValueError(f"the sequence has {length} positions, the model is made for {limit}; shorten it or raise the limit in the config")
    return torch.arange(length, device=input_ids_BL.device)[None]
