"""What is trained: an objective turns a model and a batch into a loss, summed over what it counts.

Objectives are plugins (entry-point group ``meshpar.objectives``): an object with the two methods of :class:`Objective`, or a class (a
dataclass where it has options, which a recipe then writes) that makes one. Two more members are asked for where they exist: ``examples``,
what a batch is made of (:data:`EXAMPLES`; packed text where it is absent), and ``unit``, what is counted, for the console.
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
"""Packed text; texts with target texts; texts with labels."""


class Objective(Protocol):
    """The training signal. Losses are sums, so that they add up over micro-batches and ranks before one division."""

    def tokens(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Return how many tokens (or examples) of this batch the loss counts; it may be on the CPU, and nothing is computed."""
        ...

    def loss(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> SummedLoss:
        """Return the loss summed over what counts (a scalar), its number, and more sums to report by name.

        Every reported sum is divided by the number of all ranks and micro-batches.
        """
        ...


@final
@dataclass(frozen=True, slots=True)
class CausalLM:
    """Predict the next token: ``labels`` (B, L) holds the token after each of ``input_ids`` (B, L), -100 where none counts.

    Attributes:
        chunk: positions whose logits are held at once (:func:`meshpar.chunked_token_loss`); 0: all, in one piece; None: by
            :func:`meshpar.chunked.chunk_for`, which takes chunks where the logits are large and the layout names the head.
    """

    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.chunk is not None and self.chunk < 0:
            raise MeshparError(f"CausalLM(chunk={self.chunk}) must be 0 (all logits at once), a number of positions, or None")

    def tokens(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Return how many labels count."""
        return counted(batch)

    def loss(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> SummedLoss:
        """Return the summed cross entropy in float32, of plain or vocabulary-sharded logits."""
        labels, inputs = batch["labels"], {"input_ids": batch["input_ids"]}
        chunk = chunk_for(model, batch) if self.chunk is None else self.chunk
        if chunk:
            loss = chunked_token_loss(model, inputs, labels, chunk=chunk, reduction="sum")
        else:
            loss = token_loss(logits_of(self, model, model(**inputs), "(B, L, V)"), labels, reduction="sum")
        return loss, (labels != IGNORE_INDEX).sum(), {}


@final
@dataclass(frozen=True, slots=True)
class Seq2Seq:
    """Write a target text for an input text, with an encoder and a decoder.

    A batch: ``input_ids`` and ``attention_mask`` (B, S) for the encoder; ``decoder_input_ids`` (B, T), the target behind the start
    token; ``labels`` (B, T), the target, -100 where none counts.
    """

    examples: ClassVar[str] = "pairs"

    def tokens(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Return how many labels count."""
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
    """Choose a text's class: ``input_ids`` and ``attention_mask`` (B, L), ``labels`` (B) in the number of classes, -100: not counted."""

    examples: ClassVar[str] = "labels"
    unit: ClassVar[str] = "examples"

    def tokens(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Return how many examples count."""
        return counted(batch)

    def loss(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> SummedLoss:
        """Return the cross entropy summed over the examples, in float32, and how many are right as ``accuracy``."""
        labels = batch["labels"]
        output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        logits = whole_logits(logits_of(self, model, output, "(B, classes)")).float()
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
        return loss, (labels != IGNORE_INDEX).sum(), {"accuracy": (logits.detach().argmax(-1) == labels).sum()}


def counted(batch: Mapping[str, torch.Tensor]) -> int:
    """Return how many labels of a batch count."""
    return int((batch["labels"] != IGNORE_INDEX).sum())


def logits_of(objective: object, model: nn.Module, output: object, shape: str) -> torch.Tensor:
    """Return ``output.logits``; raises MeshparError for a model that gives none."""
    logits = getattr(output, "logits", None)
    if logits is None:
        raise MeshparError(
            f"{type(objective).__name__} needs a model whose output has .logits {shape}; "
            f"{type(model).__name__} gave {type(output).__name__}"
        )
    return logits


def whole_logits(logits: torch.Tensor) -> torch.Tensor:
    """Return logits that every rank of the vocabulary's axis has whole. Collective over that axis where they are sharded."""
    return logits.full_tensor() if isinstance(logits, DTensor) else logits
