"""One tensor in the format of ``torch.save``, an uncompressed zip archive: write it block by block and
sum its bytes, find it without reading its payload.

A ``.distcp`` file is a sequence of such archives. The length of ours is a multiple of ``ALIGNMENT``, so that every
payload is aligned in the file, too. Sections of APPNOTE.TXT, the format's description, are in brackets.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import final

import torch

from meshpar.checkpoints.format.pickles import read_tensor_pickle, tensor_pickle
from meshpar.checkpoints.storage.checksums import crc32, joined
from meshpar.checkpoints.storage.files import ALIGNMENT, Box, Readable, aligned
from meshpar.core.errors import CheckpointError, StoreError

_LARGE = 0xFFFFFFFF
_STREAMED = 0x0808  # flags: sizes and checksum follow the payload; names are UTF-8


@final
@dataclass(frozen=True, slots=True)
class _Member:
    name: bytes
    position: int
    size: int
    crc32: int


def write_tensor(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    blocks: Iterable[memoryview],
    write: Callable[[bytes | bytearray | memoryview], object],
    position: int = 0,
) -> tuple[int, int]:
    """Write one contiguous tensor.

    Args:
        shape, dtype: the tensor's.
        blocks: the tensor's bytes, in order.
        write: receives the archive's bytes, in order.
        position: position of the archive in its file.

    Returns:
        Length and CRC-32 of the archive.
    """
    head = bytearray()
    members = [
        _add(head, "data.pkl", tensor_pickle(shape, dtype)),
        _add(head, ".format_version", b"1"),
        _add(head, ".storage_alignment", str(ALIGNMENT).encode()),
        _add(head, "byteorder", b"little"),
    ]
    start, size = len(head), math.prod(shape) * dtype.itemsize
    head += _local_header(b"archive/data/0", start)
    write(head)
    written = checksum = 0
    for memory in blocks:
        for begin, stop in aligned(len(memory), position + len(head) + written):
            checksum = crc32(memory[begin:stop], checksum)
            write(memory[begin:stop])
        written += len(memory)
    assert written == size, f"{written} bytes were given of a tensor of {size}"
    members.append(_Member(b"archive/data/0", start, size, checksum))
    tail = _tail(members, len(head) + size)
    write(tail)
    whole = joined(joined(crc32(head), checksum, size), crc32(tail), len(tail))
    return len(head) + size + len(tail), whole


def _tail(members: list[_Member], offset: int, padding: int = 0) -> bytes:
    """Return the archive's end behind a payload that ends at ``offset``, padded to an aligned length."""
    tail = bytearray(_descriptor(members[-1].size, members[-1].crc32))
    version = _add(tail, "version", b"3\n", offset, padding)
    tail += _directory_of([*members, version], offset + len(tail))
    over = -(offset + len(tail)) % ALIGNMENT
    return _tail(members, offset, padding + over) if over else bytes(tail)


def _add(out: bytearray, name: str, data: bytes, offset: int = 0, more: int = 0) -> _Member:
    """Append a small member to ``out``, which begins at ``offset`` of the archive, its data ``more`` bytes late."""
    path, start = f"archive/{name}".encode(), offset + len(out)
    out += _local_header(path, start, more) + data + _descriptor(len(data), crc32(data))
    return _Member(path, start, len(data), crc32(data))


def _local_header(name: bytes, start: int, more: int = 0) -> bytes:
    """[4.3.7], padded by an extra field so that the payload is aligned, or ``more`` bytes after that."""
    bare = start + 30 + len(name) + 4
    padding = -bare % ALIGNMENT + more
    fields = struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", 0, _STREAMED, 0, 0, 0, 0, 0, 0, len(name), 4 + padding)
    return fields + name + b"FB" + struct.pack("<H", padding) + b"Z" * padding


def _descriptor(size: int, checksum: int) -> bytes:
    """[4.3.9]"""
    return struct.pack("<4sIQQ" if size >= _LARGE else "<4sIII", b"PK\x07\x08", checksum, size, size)


def _directory_of(members: list[_Member], start: int) -> bytes:
    """[4.3.12 to 4.3.16] The central directory, which begins at ``start`` of the archive, and its end records."""
    entries = bytearray()
    for member in members:
        large = [value for value in (member.size, member.size, member.position) if value >= _LARGE]
        extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
        size, position = min(member.size, _LARGE), min(member.position, _LARGE)
        entries += struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\x01\x02", 0, 0, _STREAMED, 0, 0, 0, member.crc32, size, size,
                               len(member.name), len(extra), 0, 0, 0, 0, position)  # fmt: skip
        entries += member.name + extra
    end = b""
    if start >= _LARGE:
        end = struct.pack(
            "<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, len(members), len(members), len(entries), start
        )
        end += struct.pack("<4sIQI", b"PK\x06\x07", 0, start + len(entries), 1)
    end += struct.pack(
        "<4sHHHHIIH", b"PK\x05\x06", 0, 0, len(members), len(members), len(entries), min(start, _LARGE), 0
    )
    return bytes(entries) + end


def find_tensor(file: Readable, position: int, length: int, shape: tuple[int, ...]) -> tuple[Box, int | None]:
    """Find the payload of the archive at ``position`` without reading it.

    Returns:
        The position of the tensor, and the CRC-32 of its bytes in the archive; None if torch was told to compute none.

    Raises:
        CheckpointError: this is not a complete archive of one contiguous little-endian tensor of ``shape``.
    """
    try:
        if position < 0 or position + length > file.size:
            raise CheckpointError(f"it ends at byte {position + length}, and the file ends at {file.size}")
        members = dict(_members(file, position, length))
        start, size, checksum = members["data.pkl"]
        text = file.bytes(start, size)
        summed = checksum != 0  # torch.serialization.set_crc32_options(False) leaves zeros
        if summed and crc32(text) != checksum:
            raise CheckpointError("the description of the tensor does not match its checksum")
        if "byteorder" in members and file.bytes(*members["byteorder"][:2]) != b"little":
            raise CheckpointError("it was written on a big-endian machine, which this version does not read")
        saved = read_tensor_pickle(text, "data.pkl")
        payload, size, checksum = members[f"data/{saved.storage}"]
        if saved.shape != shape or not _contiguous(saved.shape, saved.stride):
            raise CheckpointError(
                f"expected a contiguous tensor of shape {shape}, found {saved.shape} with strides {saved.stride}"
            )
        if saved.offset or math.prod(shape) * saved.dtype.itemsize != size:
            raise CheckpointError(
                f"its storage has {size} bytes, and the tensor begins at element {saved.offset} of them"
            )
        if payload + size > position + length:
            raise CheckpointError("its payload exceeds the archive")
    except StoreError:
        raise
    except (CheckpointError, KeyError, struct.error, UnicodeDecodeError, IndexError) as error:
        raise CheckpointError(str(error) if isinstance(error, CheckpointError) else repr(error)) from error
    return Box(file, payload, saved.shape, saved.dtype), checksum if summed else None


def _members(file: Readable, base: int, length: int) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Yield the name and (position, size, CRC-32) of each member of the archive at ``base``."""
    tail = file.bytes(base + max(0, length - 4096), min(length, 4096))
    end = tail.rfind(b"PK\x05\x06")
    if end < 0:
        raise CheckpointError("it does not end as an archive")
    (count,) = struct.unpack_from("<H", tail, end + 10)
    size, start = struct.unpack_from("<II", tail, end + 12)
    if _LARGE in (size, start) or count == 0xFFFF:
        end = tail.rfind(b"PK\x06\x06")
        if end < 0:
            raise CheckpointError("it does not end as a large archive")
        (count,) = struct.unpack_from("<Q", tail, end + 32)
        size, start = struct.unpack_from("<QQ", tail, end + 40)
    if start + size > length:
        raise CheckpointError("its directory exceeds the archive")
    directory = file.bytes(base + start, size)
    cursor = 0
    for _ in range(count):
        name, (position, size, checksum), cursor = _member(directory, cursor)
        if position + 30 > length:
            raise CheckpointError("a member is outside of the archive")
        skip = sum(struct.unpack_from("<HH", file.bytes(base + position, 30), 26))
        yield name.partition("/")[2], (base + position + 30 + skip, size, checksum)


def _member(directory: bytes, cursor: int) -> tuple[str, tuple[int, int, int], int]:
    if directory[cursor : cursor + 4] != b"PK\x01\x02":
        raise CheckpointError("its directory is damaged")
    (method,) = struct.unpack_from("<H", directory, cursor + 10)
    checksum, packed, size, name_length, extra_length, comment_length = struct.unpack_from(
        "<IIIHHH", directory, cursor + 16
    )
    (position,) = struct.unpack_from("<I", directory, cursor + 42)
    if method != 0:
        raise CheckpointError("it is compressed")
    name = directory[cursor + 46 : cursor + 46 + name_length].decode()
    extra = directory[cursor + 46 + name_length : cursor + 46 + name_length + extra_length]
    size, _, position = _large(extra, [size, packed, position])
    return name, (position, size, checksum), cursor + 46 + name_length + extra_length + comment_length


def _large(extra: bytes, values: list[int]) -> list[int]:
    """Replace the values that do not fit in 32 bits by those of the ZIP64 field [4.5.3]."""
    cursor = 0
    while cursor + 4 <= len(extra):
        tag, length = struct.unpack_from("<HH", extra, cursor)
        cursor += 4
        if tag == 1:
            large = iter(struct.unpack_from(f"<{length // 8}Q", extra, cursor))
            return [next(large) if value == _LARGE else value for value in values]
        cursor += length
    return values


def _contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True
