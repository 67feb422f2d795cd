"""Copy stored tensors from file to file, block by block, in the way that is cheapest at the moment."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

import torch

from meshpar.checkpoints.storage.checksums import crc32
from meshpar.checkpoints.storage.files import BLOCK_BYTES, Box, aligned, memory_of, read_blocks
from meshpar.weights import TypedSource, WeightSource
from meshpar.weights.rules import Spans

TURN_BYTES = 4 << 20  # copied in one way before the next choice
_LEAST_BYTES = 1 << 20  # of a turn whose cost counts: less is mostly overhead
_KEPT = 0.997  # of a cost, at each turn of another way: so that each way is tried again


@final
@dataclass(frozen=True, slots=True)
class Way:
    """One way to copy: by writes of ``block_bytes``, from the page cache itself (``mapped``) or through a buffer."""

    block_bytes: int
    mapped: bool


WAYS = (Way(BLOCK_BYTES, mapped=True), Way(BLOCK_BYTES, mapped=False), Way(64 << 10, mapped=True))


# Measured on Linux 6.18: ``copy_file_range`` between positions that differ within a page costs 1.6 times ``cp``; blocks
# that end with a page as much as ``cp``, but where memory is fragmented 512 KiB two to four times as much as 64 KiB.
@final
class Pace:
    """Choose, at each turn, the way that took the least CPU time a byte when it was last used; untried ones first."""

    def __init__(self, ways: Sequence[Way] = WAYS, clock: Callable[[], float] = time.thread_time) -> None:
        self._costs, self._clock = dict.fromkeys(ways, 0.0), clock

    @contextmanager
    def turn(self, count: int) -> Iterator[Way]:
        """Yield the way in which to copy the next ``count`` bytes."""
        way = min(self._costs, key=lambda name: self._costs[name])
        began = self._clock()
        yield way
        if count >= _LEAST_BYTES:
            self._costs = {name: cost * _KEPT for name, cost in self._costs.items()}
            self._costs[way] = (self._clock() - began) / count


Progress = Callable[[int, int], None]  # called with the bytes written so far and the bytes to write


@runtime_checkable
class StoredSource(TypedSource, Protocol):
    """A source whose tensors are stored in files unchanged."""

    def pieces(self, name: str) -> Sequence[Box]:
        """Return the pieces of a tensor, which cover it exactly once; none if the tensor is not stored unchanged."""
        ...


def are_copied(pieces: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Return whether the bytes of each piece are contiguous in the whole tensor, too."""
    for part in (piece.shape for piece in pieces):
        first = next((dim for dim, size in enumerate(part) if size != 1), len(part))
        if part[first + 1 :] != shape[first + 1 :]:
            return False
    return bool(pieces)


@final
class ByteCount:
    """Count the bytes written so far."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def add(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)

    def through(self, blocks: Iterable[memoryview]) -> Iterator[memoryview]:
        """Yield blocks, and count each once the next one is wanted."""
        for block in blocks:
            yield block
            self.add(len(block))


@final
class Copier:
    """Copy pieces into one file: ``write`` receives blocks in the order of the file, ``advance`` their bytes."""

    def __init__(self, write: Callable[[memoryview], object], advance: Callable[[int], None]) -> None:
        self._write, self._advance = write, advance
        self._paces = {cast: Pace() for cast in (False, True)}  # a byte that is cast costs more
        # Two blocks in, for a cast to half the width: one read, one cast and one write each time.
        self._out, self._in = (torch.empty(count * BLOCK_BYTES, dtype=torch.uint8) for count in (1, 2))
        self._out_memory, self._in_memory = memory_of(self._out), memory_of(self._in)

    def copy(self, piece: Box, dtype: torch.dtype, position: int) -> None:
        """Write a piece in ``dtype`` at ``position``; raises CheckpointError if it is damaged or its file changes."""
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
        first, last = (box.position + at // narrow * wide for at in span)
        view = self._run.mapped(first, last - first) if way.mapped and first % wide == 0 else None
        block_bytes = min(way.block_bytes, len(self._in_memory) * narrow // wide)
        for start, stop in aligned(span[1] - span[0], position + span[0], block_bytes):
            at, count = start // narrow * wide, (stop - start) // narrow * wide
            if view is not None:
                read = view[at : at + count]
            else:
                read = self._in_memory[:count]
                self._run.fill(read, first + at)
            checksum = checksum if box.crc32 is None else crc32(read, checksum)
            if dtype != box.dtype:
                values = torch.frombuffer(read, dtype=torch.uint8).view(box.dtype)
                self._out.view(dtype)[: values.numel()].copy_(values)
                read = self._out_memory[: values.nbytes // wide * narrow]
            self._write(read)
            self._advance(stop - start)
        return checksum


def check_piece(piece: Box) -> None:
    """Read a piece only to verify it."""
    if piece.crc32 is not None:
        checksum = 0
        for block in read_blocks(piece.file, piece.position, piece.position + piece.nbytes):
            checksum = crc32(block, checksum)
        piece.check(checksum)


def read_tiles(source: WeightSource, name: str, dtype: torch.dtype, boxes: Iterable[Spans]) -> Iterator[torch.Tensor]:
    """Yield boxes of a tensor in ``dtype``, each of which is valid until the next one."""
    space = torch.empty(0, dtype=torch.uint8)
    for spans in boxes:
        sizes = [stop - start for start, stop in spans]
        count = math.prod(sizes) * dtype.itemsize
        if space.numel() < count:
            space = torch.empty(count, dtype=torch.uint8)
        tile = space[:count].view(dtype).view(sizes)
        source.read(name, tuple(slice(*span) for span in spans), tile)
        yield tile
