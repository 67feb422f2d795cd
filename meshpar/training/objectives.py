"""What is trained: an objective turns a model and a batch into a loss, summed over what it counts.

Objectives are plugins (entry-point group ``meshpar.objectives``): an object with the two methods of :class:`Objective`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import nn

from meshpar.errors import MeshparError
from meshpar.loss import IGNORE_INDEX, token_loss


class Objective(Protocol):
    """The training signal. Losses are sums, so that they add up over micro-batches and ranks before one division."""

    def tokens(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Return how many tokens of this batch the loss counts; the batch may still be on the CPU, and nothing is computed."""

    def loss(
        self, model: nn.Module, batch: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, int | torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return the loss summed over the counted tokens (a scalar), their number, and more sums to report by name.

        Every reported sum is divided by the number of tokens of all ranks and micro-batches.
        """


@final
@dataclass(frozen=True, slots=True)
class CausalLM:
    """Predict the next token: ``labels`` (B, L) holds the token after each of ``input_ids`` (B, L), -100 where none counts."""

    def tokens(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Return how many labels count."""
        return int((batch["labels"] != IGNORE_INDEX).sum())

    def loss(
        self, model: nn.Module, batch: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, int | torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return the summed cross entropy in float32, of plain or vocabulary-sharded logits."""
        output = model(input_ids=batch["input_ids"])
        logits = getattr(output, "logits", None)
        if logits is None:
            raise MeshparError(
                f"CausalLM needs a model whose output has .logits (B, L, V); {type(model).__name__} gave {type(output).__name__}"
            )
        labels = batch["labels"]
        return token_loss(logits, labels, reduction="sum"), (labels != IGNORE_INDEX).sum(), {}
