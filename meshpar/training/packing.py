"""Best-fit packing: no document is cut that fits a sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from meshpar.imports import need

if TYPE_CHECKING:
    import numpy as np


@final
@dataclass(frozen=True, slots=True)
class Fitted:
    """Which parts of a token file make each sample.

    Attributes:
        starts: first id of each part in the file, int64, ordered by sample.
        counts: number of inputs of each part; its labels are the ids behind them.
        ends: end of each sample's parts in the two others.
    """

    starts: np.ndarray
    counts: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return int(self.ends.size)

    @property
    def used(self) -> int:
        """Number of positions that are not empty."""
        return int(self.counts.sum())

    def parts(self, index: int) -> list[tuple[int, int]]:
        """Return the start and the number of inputs of each part of a sample."""
        part = slice(int(self.ends[index - 1]) if index else 0, int(self.ends[index]))
        return list(zip(self.starts[part].tolist(), self.counts[part].tolist(), strict=True))


def best_fit(document_ends: np.ndarray, length: int) -> Fitted:
    """Pack documents into samples of ``length`` inputs: the longest first, each where the least room stays (best-fit decreasing).

    The idea is that of Ding et al., "Fewer Truncations Improve Language Modeling", arXiv 2404.10830. A document of m ids has m - 1 inputs,
    because nothing follows its last id. Longer ones are cut into full samples and a rest. The same file gives the same samples.

    Args:
        document_ends: place behind the last id of each document, int64.
        length: inputs of a sample.
    """
    numpy = need("numpy")
    begins = numpy.concatenate([[0], document_ends[:-1]]).astype(numpy.int64)
    inputs = document_ends - begins - 1
    full, rest = numpy.divmod(numpy.maximum(inputs, 0), length)
    whole = numpy.repeat(begins, full) + length * (numpy.arange(full.sum()) - numpy.repeat(numpy.cumsum(full) - full, full))
    (left,) = numpy.nonzero(rest)
    left = left[numpy.argsort(-rest[left], kind="stable")]
    samples = numpy.zeros(left.size, dtype=numpy.int64)
    rooms: list[list[int]] = [[] for _ in range(length + 1)]
    open_rooms, made = 0, 0  # bit r: there is a sample with room for r inputs
    for place, size in enumerate(rest[left].tolist()):
        fitting = open_rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            sample = rooms[room].pop()
            if not rooms[room]:
                open_rooms &= ~(1 << room)
        else:
            room, sample, made = length, made, made + 1
        samples[place] = sample
        rooms[room - size].append(sample)
        open_rooms |= 1 << (room - size)
    order = numpy.argsort(samples, kind="stable")
    starts = numpy.concatenate([whole, (begins + length * full)[left][order]])
    counts = numpy.concatenate([numpy.full(whole.size, length), rest[left][order]])
    sizes = numpy.concatenate([numpy.ones(whole.size, dtype=numpy.int64), numpy.bincount(samples, minlength=made)])
    return Fitted(starts, counts, numpy.cumsum(sizes))
