"""Batches of examples, padded to the longest of each batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import torch

from meshpar.errors import RecipeError
from meshpar.extras import need
from meshpar.loss import IGNORE_INDEX
from meshpar.training.data import FILLER, TensorBatch
from meshpar.training.examples import ExampleFile

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
