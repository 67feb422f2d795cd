"""The CRC-32 of stored bytes.

``format/archive.py`` computes it of each block of a tensor that it writes, ``format/writing.py`` of a whole file, with
its SHA-256; ``format/verify.py``, ``dcp.py`` and ``copying.py`` compare.
"""

from __future__ import annotations

from functools import lru_cache

try:  # multiplies without carries, by an instruction of Intel and Arm: as fast as reading the memory
    from isal.isal_zlib import crc32 as crc32
except ImportError:  # optional, in the extra "train"
    from zlib import crc32 as crc32

_POLYNOMIAL = 0xEDB88320


def combine_sums(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32 of two pieces from that of each and the second's length (zlib, ``crc32_combine``)."""
    return _multiply(_shift(second_bytes), first) ^ second


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
