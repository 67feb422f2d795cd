"""Kinds of samples: examples padded to the longest of each batch, and samples of several sources, each with its share."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch

from meshpar.errors import RecipeError
from meshpar.imports import need
from meshpar.loss import IGNORE_INDEX
from meshpar.training.data import FILLER, Documents, PackedSamples, TensorBatch
from meshpar.training.examples import ExampleFile
from meshpar.training.order import Interleave

if TYPE_CHECKING:
    import numpy as np

_MULTIPLE = 8
"""Rows are padded to a multiple of this length, so that few shapes occur."""


@final
class _Rows:
    """The ids of a file's inputs or outputs, truncated to a length."""

    def __init__(self, file: ExampleFile, name: str, length: int) -> None:
        if length < 1:
            raise RecipeError(f"length is {length}; expected at least 1 token in a text")
        self.file, self.name, self.length = file, name, length
        self._mapped: tuple[np.ndarray, np.ndarray] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_mapped": None}  # a worker maps the files itself

    def ids(self, index: int) -> np.ndarray:
        """Return a row; a filler has none."""
        if self._mapped is None:
            self._mapped = self.file.column(self.name)
        ids, ends = self._mapped
        if index == FILLER:
            return ids[:0]
        start = int(ends[index - 1]) if index else 0
        return ids[start : min(int(ends[index]), start + self.length)]


def padded(rows: Sequence[np.ndarray], fill: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids (B, L) padded with ``fill``, and their attention mask (B, L), both int64. L is the longest row, rounded up.

    An empty row has one attended position, because attention over no position is NaN.
    """
    numpy = need("numpy")
    longest = max(1, *(row.size for row in rows))
    width = min(length, -(-longest // _MULTIPLE) * _MULTIPLE)
    ids = numpy.full((len(rows), width), fill, dtype=numpy.int64)
    real = numpy.zeros((len(rows), width), dtype=numpy.int64)
    for place, row in enumerate(rows):
        ids[place, : row.size] = row
        real[place, : max(1, row.size)] = 1
    return torch.from_numpy(ids), torch.from_numpy(real)


@final
class PairedExamples:
    """Batch input and target texts for an encoder and a decoder, for :class:`meshpar.training.Seq2Seq`."""

    def __init__(self, file: ExampleFile, *, length: int, target_length: int, start_id: int) -> None:
        """Use the examples of ``file``.

        Args:
            file: examples with target texts.
            length: largest length of an input in tokens; longer inputs are truncated.
            target_length: largest length of a target in tokens, including its end; longer targets are truncated.
            start_id: first id of the decoder's input.
        """
        self.file, self.start_id = file, start_id
        self._inputs, self._targets = _Rows(file, "input", length), _Rows(file, "output", target_length)
        self.fingerprint = f"{file.fingerprint}/{length}/{target_length}"

    def __len__(self) -> int:
        return self.file.count

    def __str__(self) -> str:
        return f"{len(self):,} pairs"

    def __getitems__(self, indices: Sequence[int]) -> TensorBatch:
        fill = self.file.pad_id
        inputs, real = padded([self._inputs.ids(index) for index in indices], fill, self._inputs.length)
        targets = [self._targets.ids(index) for index in indices]
        labels, _ = padded(targets, IGNORE_INDEX, self._targets.length)
        behind = torch.full_like(labels, fill)
        behind[:, 0] = self.start_id
        behind[:, 1:] = torch.where(labels[:, :-1] == IGNORE_INDEX, fill, labels[:, :-1])
        return {"input_ids": inputs, "attention_mask": real, "decoder_input_ids": behind, "labels": labels}


@final
class LabelledExamples:
    """Batch texts with a class, for :class:`meshpar.training.SequenceClassification`."""

    def __init__(self, file: ExampleFile, *, length: int) -> None:
        """Use the examples of ``file``.

        Args:
            file: examples with labels.
            length: largest length of an input in tokens; longer inputs are truncated.
        """
        self.file = file
        self._inputs, self._labels = _Rows(file, "input", length), _Rows(file, "output", 1)
        self.fingerprint = f"{file.fingerprint}/{length}"

    def __len__(self) -> int:
        return self.file.count

    def __str__(self) -> str:
        return f"{len(self):,} examples of {len(self.file.classes)} classes"

    def __getitems__(self, indices: Sequence[int]) -> TensorBatch:
        inputs, real = padded([self._inputs.ids(index) for index in indices], self.file.pad_id, self._inputs.length)
        labels = [int(self._labels.ids(index)[0]) if index != FILLER else IGNORE_INDEX for index in indices]
        return {"input_ids": inputs, "attention_mask": real, "labels": torch.tensor(labels)}


@final
class MixedSamples:
    """Mix packed samples of several sources, interleaved by weight (:class:`meshpar.training.order.Interleave`).

    ``len()`` is the number of samples until all sources are used up, or of one epoch of each if a source repeats without end.

    Args:
        sources: name -> samples, all of one length.
        weights: the share of each source in the samples; only their ratios count.
        epochs: largest number of passes over each source; None: no limit.

    Raises:
        RecipeError: samples of different lengths or vocabularies, or wrong weights or epochs.
    """

    def __init__(self, sources: Mapping[str, PackedSamples], weights: Sequence[float], epochs: Sequence[int | None]) -> None:
        if len(lengths := {each.length for each in sources.values()}) != 1:
            raise RecipeError(f"the sources of a mix have samples of {sorted(lengths)} tokens; expected one length")
        if problem := tokenizers_problem({name: (each.vocab_size, each.eos_id) for name, each in sources.items()}):
            raise RecipeError(problem)
        self.sources = sources
        self.mix = Interleave(sizes=tuple(len(each) for each in sources.values()), weights=tuple(weights), epochs=tuple(epochs))
        self.length = lengths.pop()
        self.vocab_size = next(each.vocab_size for each in sources.values())
        self.separates = any(each.separates for each in sources.values())
        parts = [(name, each.fingerprint) for name, each in sources.items()]
        self.fingerprint = self._hash(parts)

    def fingerprint_of(self, documents: Documents) -> str:
        """Return the fingerprint that the same samples have with this choice of ``documents``."""
        return self._hash([(name, each.fingerprint_of(documents)) for name, each in self.sources.items()])

    def _hash(self, parts: Sequence[tuple[str, str]]) -> str:
        return hashlib.sha256(repr((parts, self.mix.weights, self.mix.epochs)).encode()).hexdigest()

    def __len__(self) -> int:
        return sum(self.mix.sizes) if self.mix.total is None else self.mix.total

    def __str__(self) -> str:
        shares = (weight / sum(self.mix.weights) for weight in self.mix.weights)
        return "; ".join(f"{share:.0%} {name}: {each}" for (name, each), share in zip(self.sources.items(), shares))

    def __getitems__(self, indices: Sequence[int]) -> TensorBatch:
        samples = list(self.sources.values())
        batches: list[TensorBatch] = []
        for index in indices:
            source, row = 0, index
            while row != FILLER and row >= len(samples[source]):
                row -= len(samples[source])
                source += 1
            batches.append(samples[source].__getitems__([row]) | {"source": torch.tensor([source])})
        if any("position_ids" in each for each in batches):
            whole = torch.arange(self.length)[None]
            batches = [{"position_ids": whole} | each for each in batches]
        return {name: torch.cat([each[name] for each in batches]) for name in batches[0]}


def tokenizers_problem(kinds: Mapping[str, tuple[int, int]]) -> str:
    """Return what is wrong if sources, each with its ``vocab_size`` and ``eos_id``, are not of one tokenizer; else nothing."""
    if len({*kinds.values()}) <= 1:
        return ""
    told = ", ".join(f"{name} has vocab_size {size} and eos_id {eos}" for name, (size, eos) in kinds.items())
    return f"the sources of a mix are of different tokenizers: {told}; tokenize them with one"
