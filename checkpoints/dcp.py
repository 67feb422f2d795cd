"""The tensors of a distributed checkpoint (torch.distributed.checkpoint's format), read piece by piece, without a process group.

A ``.distcp`` file is one ``torch.save`` archive (an uncompressed zip) after another; ``.metadata`` says which tensor's which part each
holds. Only the bytes asked for are read, straight into place.
"""

from __future__ import annotations

import itertools
import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from meshpar.checkpoints.files import Box, ReadFile
from meshpar.checkpoints.pickles import Record, read_metadata, read_tensor_pickle
from meshpar.errors import CheckpointError
from meshpar.patterns import nearest
from meshpar.views import Spans, spans_of

METADATA_NAME = ".metadata"


@final
@dataclass(frozen=True, slots=True)
class Chunk:
    """One saved part of a tensor: the box at ``offsets`` and the archive that holds it (position and length in bytes)."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    position: int
    length: int


@final
@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the checkpoint and its parts, which cover it exactly once."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


@final
class DistributedCheckpoint:
    """The tensors of a DCP folder as a WeightSource, under the names they were saved with.

    Raises:
        CheckpointError: the folder holds no whole distributed checkpoint, or its metadata leaves a part of a tensor out.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        metadata = ReadFile(self.folder / METADATA_NAME)
        self.tensors: Mapping[str, Stored] = _tensors(read_metadata(metadata.bytes(0, metadata.size), metadata.path), metadata.path)
        self._files: dict[str, ReadFile] = {}
        self._boxes: dict[Chunk, Box] = {}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return every tensor's name and shape."""
        return {name: each.shape for name, each in self.tensors.items()}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Return every tensor's name and dtype."""
        return {name: each.dtype for name, each in self.tensors.items()}

    def read(self, name: str, index: tuple[slice, ...], out: torch.Tensor) -> None:
        """Copy ``tensor[index]`` into ``out`` (the slice's shape; cast to its dtype)."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder} holds no tensor {name!r}; the nearest are {nearest(name, self.tensors)}")
        stored = self.tensors[name]
        spans = spans_of(index, stored.shape)
        for chunk in stored.chunks:
            here = _overlap(spans, chunk)
            if here is not None:
                target = out[tuple(slice(a - s, b - s) for (a, b), (s, _) in zip(here, spans))]
                self._box(name, stored, chunk).read(tuple((a - o, b - o) for (a, b), o in zip(here, chunk.offsets)), target)

    def _box(self, name: str, stored: Stored, chunk: Chunk) -> Box:
        if chunk not in self._boxes:
            if chunk.file not in self._files:
                self._files[chunk.file] = ReadFile(self.folder / chunk.file)
            box = _locate(self._files[chunk.file], chunk, name)
            if box.dtype != stored.dtype:
                raise CheckpointError(f"{box.file.path}: {name!r} is {box.dtype} in the file and {stored.dtype} in {METADATA_NAME}")
            self._boxes[chunk] = box
        return self._boxes[chunk]


def _overlap(spans: Spans, chunk: Chunk) -> Spans | None:
    both = tuple((max(a, o), min(b, o + n)) for (a, b), o, n in zip(spans, chunk.offsets, chunk.shape))
    return both if all(a < b for a, b in both) else None


def _tensors(metadata: Record, path: Path) -> dict[str, Stored]:
    try:
        places = {
            (index.fqn, tuple(index.offset) if index.__dict__.get("offset") is not None else None): place
            for index, place in (metadata.storage_data or {}).items()  # type: ignore[attr-defined]
        }
        entries = metadata.state_dict_metadata.items()  # type: ignore[attr-defined]
        return {name: _stored(name, entry, places) for name, entry in entries if "chunks" in entry.__dict__}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} does not hold the metadata of a whole distributed checkpoint: {error!r}") from error


def _stored(name: str, entry: Record, places: Mapping[tuple[str, tuple[int, ...] | None], Record]) -> Stored:
    shape = tuple(entry.size)  # type: ignore[attr-defined]
    chunks = []
    for each in entry.chunks:  # type: ignore[attr-defined]
        offsets, sizes = tuple(each.offsets), tuple(each.sizes)
        if math.prod(sizes) == 0:
            continue
        place = places.get((name, offsets))
        if place is None:
            raise CheckpointError(f"no file is named for the part of {name!r} at {offsets}")
        if place.__dict__.get("transform_descriptors"):
            raise CheckpointError(f"{name!r} was saved through a stream transform, which this version does not read")
        file = place.relative_path  # type: ignore[attr-defined]
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise CheckpointError(f"{name!r} lies in {file!r}, outside of the checkpoint's folder; refused")
        chunks.append(Chunk(offsets, sizes, file, place.offset, place.length))  # type: ignore[attr-defined]
    _check_cover(name, shape, chunks)
    return Stored(shape, entry.properties.state[0], tuple(chunks))  # type: ignore[attr-defined]


def _check_cover(name: str, shape: tuple[int, ...], chunks: list[Chunk]) -> None:
    if any(o < 0 or o + n > size for chunk in chunks for o, n, size in zip(chunk.offsets, chunk.shape, shape)):
        raise CheckpointError(f"a part of {name!r} reaches out of its shape {shape}")
    volume = sum(math.prod(chunk.shape) for chunk in chunks)
    pairs = itertools.combinations(chunks, 2) if len(chunks) <= 64 else ()
    clash = any(_overlap(tuple((o, o + n) for o, n in zip(a.offsets, a.shape)), b) for a, b in pairs)
    if volume != math.prod(shape) or clash:
        raise CheckpointError(f"the parts of {name!r} hold {volume} elements of {math.prod(shape)}{', some twice' if clash else ''}")


def _locate(file: ReadFile, chunk: Chunk, name: str) -> Box:
    """Find the payload of one saved part by its archive's central directory, reading none of the payload."""
    try:
        if chunk.position < 0 or chunk.position + chunk.length > file.size:
            raise CheckpointError(f"it ends at byte {chunk.position + chunk.length} and the file at {file.size}")
        members = _directory(file, chunk.position, chunk.length)
        start, size, checksum = members["data.pkl"]
        text = file.bytes(start, size)
        if zlib.crc32(text) != checksum:
            raise CheckpointError("the description of the tensor does not fit its checksum")
        if "byteorder" in members and file.bytes(*members["byteorder"][:2]) != b"little":
            raise CheckpointError("it was written on a big-endian machine, which this version does not read")
        saved = read_tensor_pickle(text, "data.pkl")
        payload, size, _ = members[f"data/{saved.storage}"]
        if saved.shape != chunk.shape or not _contiguous(saved.shape, saved.stride):
            raise CheckpointError(f"expected a contiguous tensor of shape {chunk.shape}, found {saved.shape} with strides {saved.stride}")
        if (saved.offset + math.prod(saved.shape)) * saved.dtype.itemsize > size:
            raise CheckpointError(f"its storage holds {size} bytes only")
    except (CheckpointError, KeyError, struct.error, UnicodeDecodeError, IndexError) as error:
        raise CheckpointError(f"{file.path}: the part of {name!r} at byte {chunk.position} is damaged: {error}") from error
    return Box(file, payload + saved.offset * saved.dtype.itemsize, saved.shape, saved.dtype)


def _directory(file: ReadFile, base: int, length: int) -> dict[str, tuple[int, int, int]]:
    """Return (position, size, CRC-32) of the members of the zip archive at ``base`` (APPNOTE.TXT 4.3.12 to 4.3.16)."""
    tail = file.bytes(base + max(0, length - 4096), min(length, 4096))
    end = tail.rfind(b"PK\x05\x06")
    if end < 0:
        raise CheckpointError("it does not end as an archive")
    (count,) = struct.unpack_from("<H", tail, end + 10)
    size, start = struct.unpack_from("<II", tail, end + 12)
    if 0xFFFFFFFF in (size, start) or count == 0xFFFF:
        end = tail.rfind(b"PK\x06\x06")
        if end < 0:
            raise CheckpointError("it does not end as a large archive")
        (count,) = struct.unpack_from("<Q", tail, end + 32)
        size, start = struct.unpack_from("<QQ", tail, end + 40)
    if start + size > length:
        raise CheckpointError("its directory reaches out of it")
    directory = file.bytes(base + start, size)
    members: dict[str, tuple[int, int, int]] = {}
    cursor = 0
    for _ in range(count):
        name, member, cursor = _member(directory, cursor)
        position, size, checksum = member
        local = file.bytes(base + position, 30)
        skip = sum(struct.unpack_from("<HH", local, 26))
        members[name.partition("/")[2]] = (base + position + 30 + skip, size, checksum)
    return members


def _member(directory: bytes, cursor: int) -> tuple[str, tuple[int, int, int], int]:
    if directory[cursor : cursor + 4] != b"PK\x01\x02":
        raise CheckpointError("its directory is damaged")
    (method,) = struct.unpack_from("<H", directory, cursor + 10)
    checksum, packed, size, name_length, extra_length, comment_length = struct.unpack_from("<IIIHHH", directory, cursor + 16)
    (position,) = struct.unpack_from("<I", directory, cursor + 42)
    if method != 0:
        raise CheckpointError("it is compressed")
    name = directory[cursor + 46 : cursor + 46 + name_length].decode()
    extra = directory[cursor + 46 + name_length : cursor + 46 + name_length + extra_length]
    size, _, position = _large(extra, [size, packed, position])
    return name, (position, size, checksum), cursor + 46 + name_length + extra_length + comment_length


def _large(extra: bytes, values: list[int]) -> list[int]:
    """Replace the values that did not fit in 32 bits by those of the ZIP64 field."""
    cursor = 0
    while cursor + 4 <= len(extra):
        tag, length = struct.unpack_from("<HH", extra, cursor)
        cursor += 4
        if tag == 1:
            large = iter(struct.unpack_from(f"<{length // 8}Q", extra, cursor))
            return [next(large) if value == 0xFFFFFFFF else value for value in values]
        cursor += length
    return values


def _contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True
