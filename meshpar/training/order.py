"""The order of samples, computed on each rank: a permutation without memory, an interleave, a best-fit packing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from meshpar.core.errors import RecipeError
from meshpar.process.imports import need

if TYPE_CHECKING:
    import numpy as np

_ROUNDS = 8
_RATIO = 1e9
"""Of the largest weight of a mix to the smallest: the rest would never be read."""


def permute(places: np.ndarray, count: int, key: int) -> np.ndarray:
    """Return the sample of each of ``places`` (int64) in a permutation of ``count`` samples, which ``key`` selects."""
    # A Feistel network over the next power of four, walked until the value is in range (Black and Rogaway, 2002).
    numpy = need("numpy")
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    keys = _mix(numpy.arange(1, _ROUNDS + 1, dtype=numpy.uint64) + _mix(numpy.array([key], dtype=numpy.uint64))[0])
    bits, mask = numpy.uint64(half), numpy.uint64((1 << half) - 1)
    values = places.astype(numpy.uint64)
    outside = numpy.ones(values.shape, dtype=bool)
    while outside.any():
        high, low = values[outside] >> bits, values[outside] & mask
        for round_key in keys:
            high, low = low, high ^ (_mix(low + round_key) & mask)
        values[outside] = (high << bits) | low
        outside = values >= count
    return values.astype(numpy.int64)


def _mix(values: np.ndarray) -> np.ndarray:
    """Return splitmix64's finalizer (Steele, Lea and Flood, 2014) of every value; overflow is intended."""
    kind = values.dtype.type
    values = values * kind(0x9E3779B97F4A7C15)
    values = (values ^ (values >> kind(30))) * kind(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> kind(27))) * kind(0x94D049BB133111EB)
    return values ^ (values >> kind(31))


def held_out(count: int, fraction: float, seed: int) -> np.ndarray:
    """Return which of ``count`` things are for validation, chosen by ``seed``: bool, at least one, and not all."""
    numpy = need("numpy")
    chosen = numpy.zeros(count, dtype=bool)
    order = numpy.argsort(numpy.random.Philox(seed).random_raw(count), kind="stable")
    chosen[order[: min(count - 1, max(1, round(count * fraction)))]] = True
    return chosen


def key_of(seed: int, epoch: int, source: int = 0) -> int:
    """Return the key of the permutation of a source's epoch; epochs of one seed are far apart."""
    return (((seed + 0x9E3779B9 * source) & 0xFFFFFFFF) << 32) + (epoch & 0xFFFFFFFF)


def weights_problem(weights: Sequence[float]) -> str:
    """Return what is wrong with the weights of a mix; else nothing."""
    low, high = min(weights), max(weights)
    if 0 < low <= high < math.inf and not any(map(math.isnan, weights)) and high / _RATIO <= low:
        return ""
    bound = f"the largest at most {_RATIO:g} times the smallest"
    return f"expected weights above 0 and finite, {bound}, got {tuple(weights)}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Interleave:
    """The order of samples of several sources, taken by weight; ``epochs`` None: a source repeats without end."""

    # Sample k of a source is due at (k + 1/2) / weight (Webster and Sainte-Lague's method for seats): each of n
    # sources has its share at every place to within (n + 1) / 2 samples.

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    epochs: tuple[int | None, ...]

    def __post_init__(self) -> None:
        if not len(self.sizes) == len(self.weights) == len(self.epochs) or not self.sizes or min(self.sizes) < 1:
            raise RecipeError(f"expected a size of at least 1, a weight and epochs for each source, got {self}")
        if (problem := weights_problem(self.weights)) or any(epoch is not None and epoch < 1 for epoch in self.epochs):
            raise RecipeError(problem or f"expected epochs of at least 1, got {self.epochs}")

    @property
    def total(self) -> int | None:
        """Number of samples until every source is used up; None: without end."""
        ends = [None if epochs is None else size * epochs for size, epochs in zip(self.sizes, self.epochs)]
        return None if None in ends else sum(end or 0 for end in ends)

    def sources(self, counts: Sequence[int], number: int) -> np.ndarray:
        """Return the sources of the next ``number`` samples after ``counts`` of each, fewer at the end: int64."""
        numpy = need("numpy")
        due, sources = [], []
        for source, (size, weight, epochs) in enumerate(zip(self.sizes, self.weights, self.epochs)):
            remaining = number if epochs is None else min(number, size * epochs - counts[source])
            due.append((numpy.arange(counts[source], counts[source] + remaining) + 0.5) / weight)
            sources.append(numpy.full(remaining, source))
        order = numpy.argsort(numpy.concatenate(due), kind="stable")[:number]
        return numpy.concatenate(sources)[order]

    def after(self, counts: Sequence[int], sources: np.ndarray) -> tuple[int, ...]:
        """Return the counts after samples of ``sources``."""
        return tuple(count + int((sources == source).sum()) for source, count in enumerate(counts))

    def places(self, counts: Sequence[int], sources: np.ndarray, seed: int | None) -> np.ndarray:
        """Return the samples of ``sources`` after ``counts`` of each, numbered through all sources: int64."""
        numpy = need("numpy")
        samples, begin = numpy.zeros(sources.size, dtype=numpy.int64), 0
        for source, size in enumerate(self.sizes):
            (rows_here,) = numpy.nonzero(sources == source)
            epochs, rows = numpy.divmod(counts[source] + numpy.arange(rows_here.size, dtype=numpy.int64), size)
            for epoch in numpy.unique(epochs).tolist() if seed is not None else ():
                rows[epochs == epoch] = permute(rows[epochs == epoch], size, key_of(seed or 0, epoch, source))
            samples[rows_here] = begin + rows
            begin += size
        return samples


@final
@dataclass(frozen=True, slots=True)
class Fitted:
    """The parts of a token file that make each sample: first ids, numbers of inputs, and each sample's last part."""

    starts: np.ndarray
    counts: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return int(self.ends.size)

    def parts(self, index: int) -> list[tuple[int, int]]:
        """Return the start and the number of inputs of each part of a sample."""
        part = slice(int(self.ends[index - 1]) if index else 0, int(self.ends[index]))
        return list(zip(self.starts[part].tolist(), self.counts[part].tolist(), strict=True))


def best_fit(document_ends: np.ndarray, length: int) -> Fitted:
    """Pack documents into samples of ``length`` inputs, longest first, by best fit (Ding et al., arXiv 2404.10830)."""
    # Nothing follows the last id of a document, so m ids have m - 1 inputs. Longer ones are cut into full samples.
    numpy = need("numpy")
    begins = numpy.concatenate([[0], document_ends[:-1]]).astype(numpy.int64)
    inputs = document_ends - begins - 1
    full, rest = numpy.divmod(numpy.maximum(inputs, 0), length)
    whole = numpy.repeat(begins, full) + length * (
        numpy.arange(full.sum()) - numpy.repeat(numpy.cumsum(full) - full, full)
    )
    (rests,) = numpy.nonzero(rest)
    rests = rests[numpy.argsort(-rest[rests], kind="stable")]
    samples = numpy.zeros(rests.size, dtype=numpy.int64)
    rooms: list[list[int]] = [[] for _ in range(length + 1)]
    open_rooms, count = 0, 0  # bit r: there is a sample with room for r inputs
    for number, size in enumerate(rest[rests].tolist()):
        fitting = open_rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            sample = rooms[room].pop()
            if not rooms[room]:
                open_rooms &= ~(1 << room)
        else:
            room, sample, count = length, count, count + 1
        samples[number] = sample
        rooms[room - size].append(sample)
        open_rooms |= 1 << (room - size)
    order = numpy.argsort(samples, kind="stable")
    starts = numpy.concatenate([whole, (begins + length * full)[rests][order]])
    counts = numpy.concatenate([numpy.full(whole.size, length), rest[rests][order]])
    sizes = numpy.concatenate([numpy.ones(whole.size, dtype=numpy.int64), numpy.bincount(samples, minlength=count)])
    return Fitted(starts, counts, numpy.cumsum(sizes))
