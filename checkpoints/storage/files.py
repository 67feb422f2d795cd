"""Read stored tensors piece by piece from files directly into place, in bounded memory."""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, final

import torch

from meshpar.checkpoints.storage.checksums import crc32
from meshpar.core import runtime
from meshpar.core.errors import CheckpointError, brief
from meshpar.weights.rules import Spans, overlap, within

TILE_BYTES = 4 << 20  # of tensors that are rearranged
# Of bytes that go through as they are: stays in a core's cache. The kernel looks for memory in one piece for larger
# writes, which cost several times as much where that is short, or was given back to a virtual machine's host.
BLOCK_BYTES = 512 << 10
PAGE_BYTES = 4096  # of the page cache
# Of payloads in files, as torch.save has it: unlike places in a cache line make copies half as slow again.
ALIGNMENT = 64

Shapes = Mapping[str, tuple[int, ...]]  # of tensors by their names
Dtypes = Mapping[str, torch.dtype]
_LONGEST_NAME = 255  # bytes, of all usual file systems
_LEVELS = 100  # of a JSON file
_Into = Callable[[torch.Tensor, int], None]  # fills a tensor from a position of a file
T = TypeVar("T")


class OrderedBytes(Protocol):
    """Bytes that are read in order."""

    def fill(self, view: memoryview, position: int) -> None: ...
    def summed(self, view: memoryview, position: int, before: int = 0) -> int:
        """Fill, and return the CRC-32 of ``before`` continued by the bytes while they are in a core's cache."""
        for start, stop in aligned(len(view), position):
            self.fill(view[start:stop], position + start)
            before = crc32(view[start:stop], before)
        return before

    def mapped(self, position: int, count: int) -> memoryview | None:
        """Return some bytes without a copy of them; None where that is not possible."""
        return None

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the file was written since it was opened."""
        return


class Readable(OrderedBytes, Protocol):
    """A file or an object open for reads of ranges; ``path`` names it, ``size`` is in bytes."""

    path: Any
    size: int
    least_run_bytes: int
    most_waste_bytes: int
    """Runs shorter than the one are read with the bytes between them, if these are fewer than the other."""

    def bytes(self, position: int, count: int) -> bytes:
        """Return ``count`` bytes from ``position``."""
        buffer = bytearray(count)
        self.fill(memoryview(buffer), position)
        return bytes(buffer)

    def into(self, out: torch.Tensor, position: int) -> None:
        if out.nbytes:
            self.fill(memory_of(out), position)

    def expect(self, spans: Iterable[tuple[int, int]]) -> None: ...
    def forget(self, start: int, stop: int) -> None: ...
    def run(self, start: int, stop: int) -> OrderedBytes: ...
    def each(self, act: Callable[[T], object], items: Iterable[T]) -> None: ...
    def close(self) -> None: ...


def read_json(file: Readable) -> Any:  # noqa: ANN401 - plain data
    """Return what a JSON file of anybody says; raises CheckpointError, also for more than a hundred levels."""
    try:
        data = json.loads(file.bytes(0, file.size))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file.path} cannot be read as JSON: {brief(error)}") from error
    finally:
        file.close()
    level = [data]
    for _ in range(_LEVELS + 1):
        nested = [node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list)]
        if not nested:
            return data
        level = [child for children in nested for child in children]
    raise CheckpointError(f"{file.path} cannot be read as JSON: its lists and objects have more than {_LEVELS} levels")


@final
@dataclass(frozen=True, slots=True)
class Box:
    """A contiguous row-major tensor, or a part of one, in an open file."""

    file: Readable
    position: int  # in bytes
    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str = ""  # of the tensor, for messages
    crc32: int | None = None  # of its bytes; compared whenever all of them are read. None: not known
    offsets: tuple[int, ...] = ()  # where it begins in the whole tensor

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def spans(self) -> Spans:
        """Its place in the whole tensor."""
        offsets = self.offsets or (0,) * len(self.shape)
        return tuple((offset, offset + size) for offset, size in zip(offsets, self.shape))

    def read(self, spans: Spans, out: torch.Tensor) -> None:
        """Copy a piece of the whole tensor into ``out`` (any strides, dtype, device), compared with ``crc32``."""
        if out.numel() == 0:
            return
        spans = tuple((start - first, stop - first) for (start, stop), (first, _) in zip(spans, self.spans))
        if self.crc32 is None or any(span != (0, size) for span, size in zip(spans, self.shape)):
            self._read(self.file.into, spans, out)
            return
        run, checksum = self.file.run(self.position, self.position + self.nbytes), 0

        def sum_into(tile: torch.Tensor, position: int) -> None:
            nonlocal checksum
            checksum = run.summed(memory_of(tile), position, checksum)

        self._read(sum_into, spans, out)
        self.check(checksum)

    def check(self, checksum: int) -> None:
        """Raise CheckpointError if the CRC-32 of the bytes as read is not the saved one."""
        if checksum != self.crc32:
            raise CheckpointError(
                f"{self.file.path} is damaged: {self.name}, bytes {self.position} to {self.position + self.nbytes}: "
                f"expected the CRC-32 {self.crc32:08x}, found {checksum:08x}; use an earlier step"
            )

    def _read(self, into: _Into, spans: Spans, out: torch.Tensor) -> None:
        if out.is_cpu:
            self._read_here(into, spans, out)
            return
        turns = Turns(out.device)
        for piece in tiles(tuple(out.shape), out.itemsize, TILE_BYTES):
            target = out[tuple(slice(*span) for span in piece)]
            tile = turns.tile(target)
            piece_spans = tuple((start + low, start + high) for (start, _), (low, high) in zip(spans, piece))
            self._read_here(into, piece_spans, tile)
            turns.send(tile, target)
        turns.wait()

    def _read_here(self, into: _Into, spans: Spans, out: torch.Tensor) -> None:
        partial = [dim for dim, (span, size) in enumerate(zip(spans, self.shape)) if span != (0, size)]
        first = partial[-1] if partial else 0  # all dims after this one are whole: pieces of it are contiguous runs
        if first:
            row_bytes = math.prod(self.shape[first:]) * self.dtype.itemsize
            run_bytes = row_bytes // self.shape[first] * (spans[first][1] - spans[first][0])
            if run_bytes < self.file.least_run_bytes and row_bytes - run_bytes < self.file.most_waste_bytes:
                first -= 1

        def read(prefix: tuple[int, ...]) -> None:
            self._read_rows(into, prefix, spans, out[tuple(index - span[0] for index, span in zip(prefix, spans))])

        if first:
            self.file.each(read, itertools.product(*(range(*span) for span in spans[:first])))
        else:
            read(())

    def _read_rows(self, into: _Into, prefix: tuple[int, ...], spans: Spans, out: torch.Tensor) -> None:
        """Read below ``prefix``: rows of the next dim, which are contiguous; ``out`` may need only a part of each."""
        needed, shape, start = spans[len(prefix) :], self.shape[len(prefix) :], prefix
        if needed:
            (row, stop), *columns = needed
            needed, shape, start = ((0, stop - row), *columns), (stop - row, *shape[1:]), (*prefix, row)
        position = self.position + self.dtype.itemsize * element_at(start, self.shape)
        whole = all(span == (0, size) for span, size in zip(needed, shape))
        if whole and out.dtype == self.dtype and lies_in_memory(out):
            into(out, position)
            return
        space = torch.empty(min(TILE_BYTES, math.prod(shape) * self.dtype.itemsize), dtype=torch.uint8)
        for box in tiles(shape, self.dtype.itemsize, TILE_BYTES):
            if (shared := overlap(box, needed)) is not None:
                sizes = [stop - start for start, stop in box]
                tile = space[: math.prod(sizes) * self.dtype.itemsize].view(self.dtype).view(sizes)
                into(tile, position + self.dtype.itemsize * element_at([first for first, _ in box], shape))
                out[within(shared, needed)].copy_(tile[within(shared, box)])


@final
class Turns:
    """Two tiles of pinned host memory on the way to a device: one is filled from the file while the other is copied."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tiles: list[tuple[torch.Tensor, torch.Event]] = []
        self._sent = 0

    def tile(self, like: torch.Tensor) -> torch.Tensor:
        """Return host memory like ``like``, of at most :data:`TILE_BYTES`, that no copy reads any more."""
        if len(self._tiles) < 2:
            runtime.make_current(self._device)  # of this thread, which pins memory by it
            memory = torch.empty(TILE_BYTES, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            self._tiles.insert(self._sent, (memory, torch.Event(self._device)))
        else:
            self._tiles[self._sent % 2][1].synchronize()
        return self._tiles[self._sent % 2][0][: like.nbytes].view(like.dtype).view(like.shape)

    def send(self, tile: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(tile, non_blocking=True)
        self._tiles[self._sent % 2][1].record()
        self._sent += 1

    def wait(self) -> None:
        for _, copied in self._tiles:
            copied.synchronize()


@contextmanager
def failing_as(what: str) -> Iterator[None]:
    """Raise CheckpointError that begins with ``what`` instead of an OSError, with the remedy if a disk is full."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "; free some space there, or write to another disk" if full else ""
        raise CheckpointError(f"{what} failed: {error}{remedy}") from error


def inside(file: str, *, of: object = None) -> str:
    """Return a file name that stays in its folder; raises CheckpointError for any other."""
    allowed = isinstance(file, str) and Path(file).name == file and file not in ("", ".", "..") and "\0" not in file
    if not allowed or len(file.encode(errors="replace")) > _LONGEST_NAME:
        where = f"{of} names a file outside of its folder" if of else "the file name is not allowed"
        raise CheckpointError(f"{where}: got {repr(file)[:100]}, expected the name of a file in the same folder")
    return file


def lies_in_memory(tensor: torch.Tensor) -> bool:
    """Return whether the bytes at a tensor's address are its values in row-major order."""
    # not of views that torch conjugates or negates on reading, nor of zeros without memory
    lazy = tensor.is_conj() or tensor.is_neg() or (tensor.numel() > 0 and tensor.data_ptr() == 0)
    return tensor.is_cpu and tensor.is_contiguous() and not lazy


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor for which :func:`lies_in_memory` is true; valid while the tensor exists."""
    assert lies_in_memory(tensor)
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def write_all(descriptor: int, data: memoryview) -> None:
    """Write all of ``data``; a system call may write less."""
    while data:
        data = data[os.write(descriptor, data) :]


def element_at(index: Sequence[int], shape: Sequence[int]) -> int:
    """Return the position of an element in the row-major order of a tensor; missing indices are 0."""
    return sum(at * math.prod(shape[dim + 1 :]) for dim, at in enumerate(index))


def read_blocks(file: Readable, start: int, stop: int, block_bytes: int = BLOCK_BYTES) -> Iterator[memoryview]:
    """Yield the bytes from ``start`` to ``stop`` in blocks, each of which is valid until the next one."""
    run, room = file.run(start, stop), memoryview(bytearray(min(block_bytes, stop - start)))
    for position in range(start, stop, block_bytes):
        block = room[: min(block_bytes, stop - position)]
        run.fill(block, position)
        yield block


def aligned(count: int, position: int, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
    """Cut ``count`` bytes, to be written at ``position`` of a file, into blocks that end with a page of the file."""
    start = 0
    while start < count:
        stop = min(count, start + block_bytes - (position + start) % block_bytes)
        yield start, stop
        start = stop


def tiles(shape: tuple[int, ...], itemsize: int, limit_bytes: int) -> Iterator[Spans]:
    """Cut a row-major tensor into contiguous pieces of at most ``limit_bytes``, in the order of its bytes."""
    if math.prod(shape) == 0:
        return
    dim, inner = len(shape), itemsize
    while dim > 0 and inner * shape[dim - 1] <= limit_bytes:
        dim -= 1
        inner *= shape[dim]
    if dim == 0:
        yield tuple((0, size) for size in shape)
        return
    step = max(1, limit_bytes // inner)
    rest = tuple((0, size) for size in shape[dim:])
    for prefix in itertools.product(*(range(size) for size in shape[: dim - 1])):
        for row in range(0, shape[dim - 1], step):
            yield (*((index, index + 1) for index in prefix), (row, min(shape[dim - 1], row + step)), *rest)
