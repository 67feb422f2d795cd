"""CRC-32 of bytes, by the fastest installed implementation, and of bytes that were summed piece by piece.

Payloads are summed in ``format/archive.py`` while they are written.

All implementations give the same sums. isal multiplies without carries (Intel and Arm have an instruction for it) and
is as fast as reading the memory, over ten times as fast as zlib. With isal, verification costs little compared with
copying.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache

try:
    from isal.isal_zlib import crc32
except ImportError:  # optional, in the extra "train"
    from zlib import crc32

__all__ = ["combine_sums", "crc32", "sums_in", "table_of"]

_POLYNOMIAL = 0xEDB88320


def combine_sums(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32 of two pieces from the CRC-32 of each and the length of the second (zlib,
    ``crc32_combine``).
    """
    return _multiply(_shift(second_bytes), first) ^ second


def table_of(sums: Iterable[int]) -> bytes:
    """Return checksums as bytes: 4 a checksum, the lowest first."""
    table = array("I", sums)
    if sys.byteorder == "big":
        table.byteswap()
    return table.tobytes()


def sums_in(table: bytes) -> Sequence[int]:
    """Return the checksums of which :func:`table_of` made bytes."""
    sums = array("I", table)
    if sys.byteorder == "big":
        sums.byteswap()
    return sums


def _multiply(a: int, b: int) -> int:
    """Multiply two polynomials modulo the CRC's; the highest bit is x^0."""
    product, bit = 0, 1 << 31
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@lru_cache(maxsize=4096)
def _shift(count: int) -> int:
    """Return x^(8 * count) modulo the CRC's polynomial."""
    power, square = 1 << 31, 1 << 23  # x^0 and x^8
    while count:
        if count & 1:
            power = _multiply(square, power)
        square = _multiply(square, square)
        count >>= 1
    return power
