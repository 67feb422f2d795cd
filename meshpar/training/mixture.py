"""Samples of several sources, each with its share."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import final

import torch

from meshpar.errors import RecipeError
from meshpar.training.data import FILLER, Documents, PackedSamples, TensorBatch
from meshpar.training.order import Interleave


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
