"""Kinds of samples: packed tokens, padded examples, a user's own, and a mix of several sources."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, final

import torch

from meshpar.core.errors import RecipeError
from meshpar.losses.token_loss import IGNORE_INDEX
from meshpar.process.imports import need
from meshpar.training.data import FILLER, TensorBatch
from meshpar.training.examples import ExampleFile
from meshpar.training.order import Interleave, best_fit, held_out
from meshpar.training.tokens import BEGINS, COUNTS, TokenFile

if TYPE_CHECKING:
    import numpy as np

_MULTIPLE = 8
"""Rows are padded to a multiple of this length, so that few shapes occur."""


Documents = Literal["separate", "joined"]
"""How the documents of a packed sample attend to each other: not at all, or as one text."""

Packing = Literal["cut", "best_fit"]
"""How documents fill samples: cut where a sample ends, or put where they fit whole."""


@final
class PackedTokens:
    """Pack a token file into sequences of ``length`` tokens.

    >>> PackedTokens(TokenFile.open("text.bin"), 1024, packing="best_fit")  # doctest: +SKIP

    If the file marks the tokens that count, the others are no labels. Empty positions have label -100.

    Args:
        tokens: the token file.
        length: tokens of a sample.
        documents: ``"separate"``: the documents of a sample do not attend to each other; every token except the first
            of each is a label. A batch in which a sample has several documents gets ``position_ids`` (B, L), which
            restart at 0 with each. ``"joined"``: a sample is one text, of which every token but the first is a label.
        packing: ``"cut"``: sample i predicts tokens ``i*length+1`` to ``(i+1)*length``, and cuts documents there.
            ``"best_fit"``: no document that fits a sample is cut (:func:`meshpar.training.order.best_fit`); ``padding``
            is the share of empty positions.

    Raises:
        RecipeError: wrong options, or no token of the file counts as a label.
    """

    def __init__(
        self, tokens: TokenFile, length: int, *, documents: Documents = "separate", packing: Packing = "cut"
    ) -> None:
        if length < 1:
            raise RecipeError(f"length is {length}; expected at least 1 token in a sequence")
        if documents not in ("separate", "joined") or packing not in ("cut", "best_fit"):
            raise RecipeError(
                f"got {documents=} and {packing=}; expected documents 'separate' or 'joined', packing 'cut' or "
                "'best_fit'"
            )
        if documents == "joined" and packing == "best_fit":
            raise RecipeError(
                "packing='best_fit' keeps documents whole, and documents='joined' makes one text of them; use one of "
                "the two"
            )
        self.tokens, self.length, self.documents, self.vocab_size = tokens, length, documents, tokens.vocab_size
        tokens.check_labels()
        self.eos_id = tokens.eos_id
        # a batch may have ``position_ids`` that restart
        self.separates = documents == "separate" and tokens.has_several_documents()
        self._fitted = best_fit(tokens.document_ends(), length) if packing == "best_fit" else None
        self.fingerprint = self.fingerprint_of(documents)
        self._mapped: tuple[np.ndarray, np.ndarray | None] | None = None

    def fingerprint_of(self, documents: Documents) -> str:
        """Return the fingerprint that the same samples have with this choice of ``documents``."""
        separate = f"/separate{self.tokens.eos_id}" if documents == "separate" else ""
        kinds = separate + ("" if self._fitted is None else "/best_fit") + ("/marked" if self.tokens.marked else "")
        return f"{self.tokens.fingerprint or self.tokens.tokens}/{self.length}{kinds}"

    @property
    def padding(self) -> float:
        """The share of positions that stay empty."""
        used = max(0, self.tokens.tokens - 1) if self._fitted is None else int(self._fitted.counts.sum())
        return 1 - used / (len(self) * self.length) if len(self) else 0.0

    def __len__(self) -> int:
        return max(0, -(-(self.tokens.tokens - 1) // self.length)) if self._fitted is None else len(self._fitted)

    def __str__(self) -> str:
        return f"{self.tokens.tokens:,} tokens{'' if self._fitted is None else f', {self.padding:.1%} padding'}"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_mapped": None}  # a worker maps the file itself

    def __getitem__(self, index: int) -> TensorBatch:
        return {name: tensor[0] for name, tensor in self.__getitems__([index]).items()}

    def __getitems__(self, indices: Sequence[int]) -> TensorBatch:
        numpy = need("numpy")
        if self._mapped is None:
            self._mapped = self.tokens.ids(), self.tokens.marks()
        ids, marks = self._mapped
        inputs = numpy.full((len(indices), self.length), self.tokens.eos_id, dtype=numpy.int64)
        labels = numpy.full((len(indices), self.length), IGNORE_INDEX, dtype=numpy.int64)
        begins = numpy.zeros((len(indices), self.length + 1), dtype=bool)
        for row, index in enumerate(indices):
            at = 0
            for start, count in self._parts(index):
                window = ids[start : start + count + 1]
                self.tokens.check_ids(window)
                to = at + window.size - 1
                inputs[row, at:to], labels[row, at:to] = window[:-1], window[1:]
                begins[row, at] = at > 0
                if marks is None:
                    begins[row, at + 1 : to + 1] = window[:-1] == self.tokens.eos_id
                else:
                    mark = marks[start + 1 : start + count + 1]
                    begins[row, at + 1 : to + 1] = mark & BEGINS
                    labels[row, at:to][(mark & COUNTS) == 0] = IGNORE_INDEX
                at = to
        batch = {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}
        if self.separates:
            if self._fitted is None:
                labels[begins[:, 1:]] = IGNORE_INDEX
            if begins[:, :-1].any():
                positions = numpy.arange(self.length, dtype=numpy.int64)[None]
                starts = numpy.maximum.accumulate(numpy.where(begins[:, :-1], positions, 0), axis=1)
                batch["position_ids"] = torch.from_numpy(positions - starts)
        return batch

    def _parts(self, index: int) -> Sequence[tuple[int, int]]:
        """Return where the parts of a sample begin in the file, and how many inputs each has."""
        if index == FILLER:
            return ()
        return ((index * self.length, self.length),) if self._fitted is None else self._fitted.parts(index)


def pad_rows(rows: Sequence[np.ndarray], fill: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids (B, L) and their mask, int64; an empty row has one attended position, else attention is NaN."""
    numpy = need("numpy")
    longest = max(1, *(row.size for row in rows))
    width = min(length, -(-longest // _MULTIPLE) * _MULTIPLE)
    ids = numpy.full((len(rows), width), fill, dtype=numpy.int64)
    real = numpy.zeros((len(rows), width), dtype=numpy.int64)
    for number, row in enumerate(rows):
        ids[number, : row.size] = row
        real[number, : max(1, row.size)] = 1
    return torch.from_numpy(ids), torch.from_numpy(real)


class _Examples:
    """Examples of a file, whose inputs and outputs are truncated to ``lengths``."""

    def __init__(self, file: ExampleFile, **lengths: int) -> None:
        if (length := min(lengths.values())) < 1:
            raise RecipeError(f"length is {length}; expected at least 1 token in a text")
        self.file, self._lengths = file, lengths
        self.fingerprint = "/".join(map(str, (file.fingerprint, *lengths.values())))

    def __len__(self) -> int:
        return self.file.count

    def _padded(self, name: str, indices: Sequence[int], fill: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids of inputs or outputs and their mask; a filler has none."""
        file, length = self.file, self._lengths[name]
        rows = [file.row(name, index)[:length] if index != FILLER else file.row(name, 0)[:0] for index in indices]
        return pad_rows(rows, fill, length)


@final
class PairedExamples(_Examples):
    """Batch input and target texts for an encoder and a decoder, for :class:`meshpar.training.Seq2Seq`."""

    def __init__(self, file: ExampleFile, *, length: int, target_length: int, start_id: int) -> None:
        """Use ``file``; inputs and targets are truncated to a length; ``start_id`` begins the decoder's input."""
        super().__init__(file, input=length, output=target_length)
        self.start_id = start_id

    def __str__(self) -> str:
        return f"{len(self):,} pairs"

    def __getitems__(self, indices: Sequence[int]) -> TensorBatch:
        fill = self.file.pad_id
        inputs, real = self._padded("input", indices, fill)
        labels, _ = self._padded("output", indices, IGNORE_INDEX)
        behind = torch.full_like(labels, fill)
        behind[:, 0] = self.start_id
        behind[:, 1:] = torch.where(labels[:, :-1] == IGNORE_INDEX, fill, labels[:, :-1])
        return {"input_ids": inputs, "attention_mask": real, "decoder_input_ids": behind, "labels": labels}


@final
class LabelledExamples(_Examples):
    """Batch texts with a class, for :class:`meshpar.training.SequenceClassification`."""

    def __init__(self, file: ExampleFile, *, length: int) -> None:
        """Use the examples of ``file``, which have labels; inputs are truncated to ``length``."""
        super().__init__(file, input=length)

    def __str__(self) -> str:
        return f"{len(self):,} examples of {len(self.file.classes)} classes"

    def __getitems__(self, indices: Sequence[int]) -> TensorBatch:
        inputs, real = self._padded("input", indices, self.file.pad_id)
        labels = [int(self.file.row("output", index)[0]) if index != FILLER else IGNORE_INDEX for index in indices]
        return {"input_ids": inputs, "attention_mask": real, "labels": torch.tensor(labels)}


@final
class MappedSamples:
    """A map-style dataset whose samples are dicts of tensors or numbers, of one shape, with ``labels``."""

    # a user's own
    def __init__(self, dataset: Any, name: str, places: np.ndarray | None = None) -> None:  # noqa: ANN401
        """Look at the first sample; datasets of one ``name`` and length are the same. ``places``: None: all samples."""
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise RecipeError(f"{name} has no length or no dataset[i]; expected a map-style torch.utils.data.Dataset")
        self.dataset, self.name, self._places = dataset, name, places
        self.vocab_size = int(getattr(dataset, "vocab_size", 0))
        self.fingerprint = f"{name}/{len(self)}/{getattr(dataset, 'fingerprint', '')}"
        if not len(self):
            raise RecipeError(f"{name} has no samples")
        first = self._rows([0])[0]
        if not isinstance(first, Mapping) or "labels" not in first:
            got = f"a dict of {sorted(first)}" if isinstance(first, Mapping) else type(first).__name__
            raise RecipeError(
                f"{name}: sample 0 is {got}; expected a dict of tensors with labels, {IGNORE_INDEX} where none counts"
            )
        self.first: Mapping[str, Any] = first

    def __len__(self) -> int:
        return len(self.dataset) if self._places is None else self._places.size

    def __str__(self) -> str:
        return f"{len(self):,} samples of {self.name}"

    def __getitems__(self, indices: Sequence[int]) -> TensorBatch:
        batch: TensorBatch = torch.utils.data.default_collate(list(self._rows([max(0, index) for index in indices])))
        for row, index in enumerate(indices):
            if index == FILLER:
                batch["labels"][row] = IGNORE_INDEX
        return batch

    def split(self, fraction: float, seed: int) -> tuple[MappedSamples, MappedSamples | None]:
        """Return the samples for training and, of a fraction above 0, those for validation, chosen by ``seed``."""
        if not fraction:
            return self, None
        is_held_out, name = held_out(len(self), fraction, seed), f"{self.name}/{fraction}/{seed}"
        train, validation = (chosen.nonzero()[0] for chosen in (~is_held_out, is_held_out))
        return MappedSamples(self.dataset, name, train), MappedSamples(self.dataset, name, validation)

    def _rows(self, indices: Sequence[int]) -> Sequence[Any]:
        places = [index if self._places is None else int(self._places[index]) for index in indices]
        several = getattr(self.dataset, "__getitems__", None)  # torch's name for many samples at once
        return several(places) if several is not None else [self.dataset[number] for number in places]


@final
class MixedSamples:
    """Mix packed samples of several sources, interleaved by weight (:class:`meshpar.training.order.Interleave`).

    ``len()`` is the number of samples until all sources are used up, or of one epoch of each if one repeats forever.

    Args:
        sources: name -> samples, all of one length and one tokenizer.
        weights: the share of each source in the samples; only their ratios count.
        epochs: largest number of passes over each source; None: no limit.
    """

    def __init__(
        self, sources: Mapping[str, PackedTokens], weights: Sequence[float], epochs: Sequence[int | None]
    ) -> None:
        if len(lengths := {source.length for source in sources.values()}) != 1:
            raise RecipeError(f"the sources of a mix have samples of {sorted(lengths)} tokens; expected one length")
        kinds = {name: (source.vocab_size, source.eos_id) for name, source in sources.items()}
        if problem := tokenizers_problem(kinds):
            raise RecipeError(problem)
        self.sources = sources
        self.mix = Interleave(
            sizes=tuple(len(source) for source in sources.values()), weights=tuple(weights), epochs=tuple(epochs)
        )
        self.length = lengths.pop()
        self.vocab_size = next(source.vocab_size for source in sources.values())
        self.separates = any(source.separates for source in sources.values())
        self.fingerprint = self._hash([(name, source.fingerprint) for name, source in sources.items()])

    def fingerprint_of(self, documents: Documents) -> str:
        """Return the fingerprint that the same samples have with this choice of ``documents``."""
        return self._hash([(name, source.fingerprint_of(documents)) for name, source in self.sources.items()])

    def _hash(self, parts: Sequence[tuple[str, str]]) -> str:
        return hashlib.sha256(repr((parts, self.mix.weights, self.mix.epochs)).encode()).hexdigest()

    def __len__(self) -> int:
        return sum(self.mix.sizes) if self.mix.total is None else self.mix.total

    def __str__(self) -> str:
        shares = (weight / sum(self.mix.weights) for weight in self.mix.weights)
        return "; ".join(f"{share:.0%} {name}: {source}" for (name, source), share in zip(self.sources.items(), shares))

    def __getitems__(self, indices: Sequence[int]) -> TensorBatch:
        samples, ends = list(self.sources.values()), [*accumulate(self.mix.sizes)]
        batches: list[TensorBatch] = []
        for index in indices:
            source = 0 if index == FILLER else bisect_right(ends, index)
            row = index - (ends[source - 1] if source else 0)
            batches.append(samples[source].__getitems__([row]) | {"source": torch.tensor([source])})
        if any("position_ids" in batch for batch in batches):
            whole = torch.arange(self.length)[None]
            batches = [{"position_ids": whole} | batch for batch in batches]
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def tokenizers_problem(kinds: Mapping[str, tuple[int, int]]) -> str:
    """Return what is wrong if sources (``vocab_size``, ``eos_id``) are not of one tokenizer; else nothing."""
    if len({*kinds.values()}) <= 1:
        return ""
    differences = ", ".join(f"{name} has vocab_size {size} and eos_id {eos}" for name, (size, eos) in kinds.items())
    return f"the sources of a mix are of different tokenizers: {differences}; tokenize them with one"
