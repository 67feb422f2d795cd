"""Copy stored tensors from file to file, block by block.

``copy_file_range`` was measured and not used: between positions that differ within a page, as they do here, the kernel
handles each page twice, which costs 1.6 times ``cp``. Blocks that end with a page, written from the page cache of the
source, cost as much as ``cp``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, final, runtime_checkable

import torch

from meshpar.checkpoints.format.pace import TURN_BYTES, Pace, Way
from meshpar.checkpoints.storage.checksums import crc32
from meshpar.checkpoints.storage.files import BLOCK_BYTES, Box, aligned, memory_of
from meshpar.weights import TypedSource

Progress = Callable[[int, int], None]
"""Called with the bytes written so far and the bytes to write."""


@runtime_checkable
class StoredSource(TypedSource, Protocol):
    """A source whose tensors are stored in files unchanged."""

    def pieces(self, name: str) -> Sequence[Box]:
        """Return the pieces of a tensor, which cover it exactly once; none if the tensor is not stored unchanged."""
        ...


def are_copied(pieces: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Return whether the bytes of each piece are contiguous in the whole tensor, too."""
    return bool(pieces) and all(_lies_in_one_run(piece.shape, shape) for piece in pieces)


def _lies_in_one_run(own: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    first = next((dim for dim, size in enumerate(own) if size != 1), len(own))
    return own[first + 1 :] == shape[first + 1 :]


def position_of(piece: Box, shape: tuple[int, ...]) -> int:
    """Return the element of the whole tensor at which a piece begins."""
    position = 0
    for offset, size in zip(piece.offsets, shape):
        position = position * size + offset
    return position


@final
class ByteCount:
    """Count the bytes written so far."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def add(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)


@final
class Copier:
    """Copy pieces into one file: ``write`` receives blocks in the order of the file, ``advance`` the number of bytes of
    each.
    """

    def __init__(self, write: Callable[[memoryview], object], advance: Callable[[int], None]) -> None:
        self._write, self._advance = write, advance
        self._paces = {cast: Pace() for cast in (False, True)}  # a byte that is cast costs more
        # Two blocks in, for a cast to half the width: one read, one cast and one write each time.
        self._out, self._in = (torch.empty(count * BLOCK_BYTES, dtype=torch.uint8) for count in (1, 2))
        self._out_memory, self._in_memory = memory_of(self._out), memory_of(self._in)

    def copy(self, piece: Box, dtype: torch.dtype, position: int) -> None:
        """Write a piece, in ``dtype``, at ``position`` of the file; raises CheckpointError if its checksum differs,
        or its file changes.
        """
        self._run = piece.file.run(piece.position, piece.position + piece.nbytes)
        checksum, pace = 0, self._paces[dtype != piece.dtype]
        for start, stop in aligned(math.prod(piece.shape) * dtype.itemsize, position, TURN_BYTES):
            with pace.turn(stop - start) as way:
                checksum = self._copy(piece, dtype, position, (start, stop), way, checksum)
        if piece.crc32 is not None:
            piece.check(checksum)
        self._run.check_unchanged()

    def _copy(self, box: Box, dtype: torch.dtype, position: int, span: tuple[int, int], way: Way, checksum: int) -> int:
        """Write ``span``, which counts in ``dtype``, in one way; return the CRC-32, ``checksum`` continued."""
        wide, narrow = box.dtype.itemsize, dtype.itemsize
        first, last = (box.position + place // narrow * wide for place in span)
        view = self._run.mapped(first, last - first) if way.mapped and first % wide == 0 else None
        for start, stop in aligned(
            span[1] - span[0], position + span[0], min(way.block_bytes, len(self._in_memory) * narrow // wide)
        ):
            at, count = start // narrow * wide, (stop - start) // narrow * wide
            if view is not None:
                read = view[at : at + count]
            else:
                read = self._in_memory[:count]
                self._run.fill(read, first + at)
            self._write(read if dtype == box.dtype else self._cast(read, box.dtype, dtype))
            checksum = checksum if box.crc32 is None else crc32(read, checksum)
            self._advance(stop - start)
        return checksum

    def _cast(self, memory: memoryview, own: torch.dtype, dtype: torch.dtype) -> memoryview:
        values = torch.frombuffer(memory, dtype=torch.uint8).view(own)
        self._out.view(dtype)[: values.numel()].copy_(values)
        return self._out_memory[: values.numel() * dtype.itemsize]


def check_piece(piece: Box) -> None:
    """Read a piece only to verify it."""
    if piece.crc32 is None:
        return
    checksum, room = 0, memoryview(bytearray(min(BLOCK_BYTES, piece.nbytes)))
    run = piece.file.run(piece.position, piece.position + piece.nbytes)
    for start in range(0, piece.nbytes, BLOCK_BYTES):
        block = room[: min(BLOCK_BYTES, piece.nbytes - start)]
        run.fill(block, piece.position + start)
        checksum = crc32(block, checksum)
    piece.check(checksum)
