"""The output of the reference models, and the leaf modules that they share."""

from __future__ import annotations

from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshpar.loss import IGNORE_INDEX, token_loss


@final
class ModelOutput(NamedTuple):
    """Return the loss and the logits of a forward pass.

    A named tuple, because FSDP2 finds the tensors of an output through pytree, which supports named tuples without registration.

    Attributes:
        loss: mean over the counted tokens, 0-dim float32; None without labels.
        logits: (B, L, V); under a loss-parallel head a DTensor of that shape, sharded over V.
    """

    loss: Tensor | None
    logits: Tensor


def next_token_loss(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    """Return the mean loss of predicting ``labels[:, i + 1]`` at position ``i`` (transformers' convention; -100 is not counted)."""
    # Moving the labels rather than the logits saves a copy of the largest tensor of the model.
    next_BL = F.pad(labels_BL[:, 1:], (0, 1), value=IGNORE_INDEX)
    return token_loss(logits_BLV, next_BL, reduction="mean")


class Linear(nn.Linear):
    """``nn.Linear`` whose weight is initialised from a normal distribution of standard deviation ``std``, and its bias to zero."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, std: float = 0.02) -> None:
        self.std = std
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """Initialise the weight from a normal distribution and the bias to zero."""
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """``nn.Embedding`` whose rows are initialised from a normal distribution of standard deviation ``std``."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *, std: float = 0.02) -> None:
        self.std = std
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        """Initialise the rows from a normal distribution."""
        nn.init.normal_(self.weight, std=self.std)


def positions_of(input_ids_BL: Tensor, limit: int) -> Tensor:
    """Return the positions 0 .. L-1 as (1, L) int64.

    Raises:
        ValueError: L is larger than ``limit``.
    """
    length = input_ids_BL.shape[1]
    if length > limit:
        raise ValueError(
            f"the sequence has {length} positions; expected at most {limit}: shorten it, or raise the limit in the model's config"
        )
    return torch.arange(length, device=input_ids_BL.device)[None]
