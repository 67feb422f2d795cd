"""Objectives: compute a loss from a model and a batch, summed over the counted labels.

Objectives are plugins (entry-point group ``meshpar.objectives``): an object with the two methods of :class:`Objective`, or a class that
makes one (a dataclass if it has options, which a recipe then sets). Two members are optional: ``examples``, the kind of a batch's examples
(:data:`EXAMPLES`; default: packed text), and ``unit``, the counted unit on the console.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, final

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from meshpar.chunked import chunk_for, chunked_token_loss
from meshpar.errors import MeshparError
from meshpar.loss import IGNORE_INDEX, token_loss

SummedLoss = tuple[torch.Tensor, int | torch.Tensor, Mapping[str, torch.Tensor]]

EXAMPLES = ("tokens", "pairs", "labels")
"""Kinds of examples: packed text; texts with target texts; texts with labels."""


class Objective(Protocol):
    """Define the loss of a training, as a protocol. Losses are sums, so they can be added over micro-batches and ranks."""

    def tokens(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Return the number of tokens (or examples) of this batch that the loss counts, without computing it. The batch may be on a CPU."""
        ...

    def loss(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> SummedLoss:
        """Return the summed loss (a scalar), the number of counted tokens or examples, and further sums to report by name.

        Every reported sum is divided by the count over all ranks and micro-batches.
        """
        ...


@final
@dataclass(frozen=True, slots=True)
class CausalLM:
    """Predict the next token: ``labels`` (B, L) are the tokens after each of ``input_ids`` (B, L); -100 is not counted.

    Attributes:
        chunk: positions whose logits are held at once (:func:`meshpar.chunked_token_loss`); 0: all, in one piece; None: by
            :func:`meshpar.chunked.chunk_for`, which takes chunks where the logits are large and the layout names the head.
    """

    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.chunk is not None and self.chunk < 0:
            raise MeshparError(f"CausalLM(chunk={self.chunk}) must be 0 (all logits at once), a number of positions, or None")

    def tokens(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Return the number of counted labels."""
        return counted(batch)

    def loss(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> SummedLoss:
        """Return the summed cross entropy in float32, of plain or vocabulary-sharded logits."""
        labels, inputs = batch["labels"], {name: value for name, value in batch.items() if name != "labels"}
        chunk = chunk_for(model, batch) if self.chunk is None else self.chunk
        if chunk:
            loss = chunked_token_loss(model, inputs, labels, chunk=chunk, reduction="sum")
        else:
            loss = token_loss(logits_of(self, model, model(**inputs), "(B, L, V)"), labels, reduction="sum")
        return loss, (labels != IGNORE_INDEX).sum(), {}


@final
@dataclass(frozen=True, slots=True)
class Seq2Seq:
    """Predict a target text from an input text, with an encoder and a decoder.

    A batch: ``input_ids`` and ``attention_mask`` (B, S) for the encoder; ``decoder_input_ids`` (B, T), the target behind the start
    token; ``labels`` (B, T), the target, -100 where none counts.
    """

    examples: ClassVar[str] = "pairs"

    def tokens(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Return the number of counted labels."""
        return counted(batch)

    def loss(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> SummedLoss:
        """Return the cross entropy summed over the targets' tokens, in float32."""
        labels = batch["labels"]
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "decoder_input_ids")}
        logits = logits_of(self, model, model(**inputs), "(B, T, V)")
        return token_loss(logits, labels, reduction="sum"), (labels != IGNORE_INDEX).sum(), {}


@final
@dataclass(frozen=True, slots=True)
class SequenceClassification:
    """Predict a text's class: ``input_ids`` and ``attention_mask`` (B, L), ``labels`` (B) in the number of classes, -100: not counted."""

    examples: ClassVar[str] = "labels"
    unit: ClassVar[str] = "examples"

    def tokens(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Return the number of counted examples."""
        return counted(batch)

    def loss(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> SummedLoss:
        """Return the cross entropy summed over the examples, in float32, and the number of correct ones as ``accuracy``."""
        labels = batch["labels"]
        output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        logits = whole_logits(logits_of(self, model, output, "(B, classes)")).float()
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
        return loss, (labels != IGNORE_INDEX).sum(), {"accuracy": (logits.detach().argmax(-1) == labels).sum()}


def counted(batch: Mapping[str, torch.Tensor]) -> int:
    """Return the number of counted labels of a batch."""
    return int((batch["labels"] != IGNORE_INDEX).sum())


def logits_of(objective: object, model: nn.Module, output: object, shape: str) -> torch.Tensor:
    """Return ``output.logits``; raises MeshparError for a model without them."""
    logits = getattr(output, "logits", None)
    if logits is None:
        raise MeshparError(
            f"{type(objective).__name__} requires a model whose output has .logits {shape}; "
            f"{type(model).__name__} returned {type(output).__name__}"
        )
    return logits


def whole_logits(logits: torch.Tensor) -> torch.Tensor:
    """Return whole logits. Collective over the axis of the vocabulary if they are sharded over it."""
    return logits.full_tensor() if isinstance(logits, DTensor) else logits
