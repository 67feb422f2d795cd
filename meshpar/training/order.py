"""A seeded permutation without memory: every rank computes the places that it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshpar.extras import need

if TYPE_CHECKING:
    import numpy as np

_ROUNDS = 8


def permuted(places: np.ndarray, count: int, key: int) -> np.ndarray:
    """Return the sample of each of ``places`` in a permutation of ``count`` samples.

    A Feistel network over the next power of four, walked until the value falls in range (Black and Rogaway, "Ciphers with
    arbitrary finite domains", 2002). Integer arithmetic alone: the same on every machine and in every version of numpy.

    Args:
        places: int64 positions, each in ``range(count)``.
        count: number of samples.
        key: selects the permutation.
    """
    numpy = need("numpy")
    half = max(1, (max(count - 1, 1).bit_length() + 1) // 2)
    keys = _mixed(numpy.arange(1, _ROUNDS + 1, dtype=numpy.uint64) + _mixed(numpy.array([key], dtype=numpy.uint64))[0])
    values = places.astype(numpy.uint64)
    outside = numpy.ones(values.shape, dtype=bool)
    while outside.any():
        values[outside] = _feistel(values[outside], half, keys)
        outside = values >= count
    return values.astype(numpy.int64)


def _feistel(values: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    bits, mask = values.dtype.type(half), values.dtype.type((1 << half) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right + key) & mask)
    return (left << bits) | right


def _mixed(values: np.ndarray) -> np.ndarray:
    """Return splitmix64's finalizer (Steele, Lea and Flood, 2014) of every value; overflow is intended."""
    kind = values.dtype.type
    values = values * kind(0x9E3779B97F4A7C15)
    values = (values ^ (values >> kind(30))) * kind(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> kind(27))) * kind(0x94D049BB133111EB)
    return values ^ (values >> kind(31))


def held_out(count: int, fraction: float, seed: int) -> np.ndarray:
    """Return which of ``count`` things are kept for validation: bool, at least one of them and not all, chosen by ``seed``."""
    numpy = need("numpy")
    chosen = numpy.zeros(count, dtype=bool)
    order = numpy.argsort(numpy.random.Philox(seed).random_raw(count), kind="stable")
    chosen[order[: min(count - 1, max(1, round(count * fraction)))]] = True
    return chosen
