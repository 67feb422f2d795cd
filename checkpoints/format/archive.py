"""One tensor as ``torch.save`` writes it, a zip archive: written, found, and read without running code of its pickles.

A ``.distcp`` file is a sequence of such archives, each of a multiple of ``ALIGNMENT``. [n]: sections of APPNOTE.TXT.
"""

from __future__ import annotations

import errno
import io
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch

from meshpar.checkpoints.storage.checksums import combine_sums, crc32
from meshpar.checkpoints.storage.files import ALIGNMENT, Box, Readable, aligned
from meshpar.core.errors import CheckpointError

T = TypeVar("T")
_LARGE = 0xFFFFFFFF
_STREAMED = 0x0808  # flags: sizes and checksum follow the payload; names are UTF-8
_LOCAL_HEADER_BYTES = 30  # [4.3.7], before the name and the extra field
_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128,
}  # fmt: skip
_STORAGE_NAMES = {dtype: name for name, dtype in _STORAGES.items()}


@final
@dataclass(frozen=True, slots=True)
class _ArchiveMember:
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
    """Write a contiguous tensor as an archive at ``position`` of a file; return the archive's length and CRC-32."""
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
    members.append(_ArchiveMember(b"archive/data/0", start, size, checksum))
    tail = _tail(members, len(head) + size)
    write(tail)
    whole = combine_sums(combine_sums(crc32(head), checksum, size), crc32(tail), len(tail))
    return len(head) + size + len(tail), whole


def _tail(members: list[_ArchiveMember], offset: int, padding: int = 0) -> bytes:
    """Return the archive's end after a payload that ends at ``offset``, padded to an aligned length."""
    tail = bytearray(_descriptor(members[-1].size, members[-1].crc32))
    version = _add(tail, "version", b"3\n", offset, padding)
    tail += _directory_of([*members, version], offset + len(tail))
    over = -(offset + len(tail)) % ALIGNMENT
    return _tail(members, offset, padding + over) if over else bytes(tail)


def _add(out: bytearray, name: str, data: bytes, offset: int = 0, more: int = 0) -> _ArchiveMember:
    """Append a small member to ``out``, which begins at ``offset`` of the archive, its data ``more`` bytes late."""
    path, start = f"archive/{name}".encode(), offset + len(out)
    out += _local_header(path, start, more) + data + _descriptor(len(data), crc32(data))
    return _ArchiveMember(path, start, len(data), crc32(data))


def _local_header(name: bytes, start: int, more: int = 0) -> bytes:
    """[4.3.7], padded by an extra field so that the payload is aligned, or ``more`` bytes after that."""
    bare = start + _LOCAL_HEADER_BYTES + len(name) + 4
    padding = -bare % ALIGNMENT + more
    fields = struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", 0, _STREAMED, 0, 0, 0, 0, 0, 0, len(name), 4 + padding)
    return fields + name + b"FB" + struct.pack("<H", padding) + b"Z" * padding


def _descriptor(size: int, checksum: int) -> bytes:
    """[4.3.9]"""
    return struct.pack("<4sIQQ" if size >= _LARGE else "<4sIII", b"PK\x07\x08", checksum, size, size)


def _directory_of(members: list[_ArchiveMember], start: int) -> bytes:
    """[4.3.12 to 4.3.16] The central directory, which begins at ``start`` of the archive, and its end records."""
    directory, count = bytearray(), len(members)
    for member in members:
        large = [value for value in (member.size, member.size, member.position) if value >= _LARGE]
        extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
        size, position = min(member.size, _LARGE), min(member.position, _LARGE)
        directory += struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\x01\x02", 0, 0, _STREAMED, 0, 0, 0, member.crc32, size,
                                 size, len(member.name), len(extra), 0, 0, 0, 0, position)  # fmt: skip
        directory += member.name + extra
    size, end = len(directory), b""
    if start >= _LARGE:
        end = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, start)
        end += struct.pack("<4sIQI", b"PK\x06\x07", 0, start + size, 1)
    end += struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, count, count, size, min(start, _LARGE), 0)
    return bytes(directory) + end


@final
class _Slice(io.RawIOBase):
    """A part of a file as a file of its own, for ``zipfile``."""

    def __init__(self, file: Readable, start: int, size: int) -> None:
        self._file, self._start, self._size, self._at = file, start, size, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if position < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = position
        return position

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - a buffer
        view = memoryview(buffer)[: max(0, self._size - self._at)]
        self._file.fill(view, self._start + self._at)
        self._at += len(view)
        return len(view)


def find_tensor(file: Readable, position: int, length: int, shape: tuple[int, ...]) -> tuple[Box, int | None]:
    """Find the payload of an archive without reading it; return it, and its CRC-32 (None if torch computed none)."""
    try:
        if position < 0 or position + length > file.size:
            raise CheckpointError(f"it ends at byte {position + length}, and the file ends at {file.size}")
        with zipfile.ZipFile(_Slice(file, position, length)) as archive:
            members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if any(info.compress_type != zipfile.ZIP_STORED for info in members.values()):
            raise CheckpointError("it is compressed")
        text = file.bytes(_payload(file, position, members["data.pkl"]), members["data.pkl"].file_size)
        # torch.serialization.set_crc32_options(False) leaves zeros
        if members["data.pkl"].CRC not in (0, crc32(text)):
            raise CheckpointError("the description of the tensor does not match its checksum")
        order = members.get("byteorder")
        if order is not None and file.bytes(_payload(file, position, order), order.file_size) != b"little":
            raise CheckpointError("it was written on a big-endian machine, which this version does not read")
        saved = _read_pickle(text, _IN_TENSOR, SavedTensor, "a tensor", "data.pkl")
        data = members[f"data/{saved.storage}"]
        strides = zip(saved.shape, saved.stride, _contiguous_strides(saved.shape))
        if saved.shape != shape or any(size != 1 and stride != expected for size, stride, expected in strides):
            raise CheckpointError(
                f"expected a contiguous tensor of shape {shape}, found {saved.shape} with strides {saved.stride}"
            )
        if saved.offset or math.prod(shape) * saved.dtype.itemsize != data.file_size:
            raise CheckpointError(
                f"its storage has {data.file_size} bytes, and the tensor begins at element {saved.offset} of them"
            )
        payload = _payload(file, position, data)
        if payload + data.file_size > position + length:
            raise CheckpointError("its payload exceeds the archive")
    except CheckpointError:
        raise
    except zipfile.BadZipFile as error:
        raise CheckpointError(str(error)) from error
    except (KeyError, struct.error, ValueError, OSError, NotImplementedError) as error:
        raise CheckpointError(repr(error)) from error
    return Box(file, payload, saved.shape, saved.dtype), data.CRC if members["data.pkl"].CRC != 0 else None


def _payload(file: Readable, base: int, info: zipfile.ZipInfo) -> int:
    """Return the position of a member's bytes: its local header may have another extra field than the directory."""
    start = base + info.header_offset
    if start < base:
        raise CheckpointError("a member is outside of the archive")
    sizes = struct.unpack_from("<HH", file.bytes(start, _LOCAL_HEADER_BYTES), _LOCAL_HEADER_BYTES - 4)
    return start + _LOCAL_HEADER_BYTES + sum(sizes)


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


class PickledObject:
    """The attributes of one pickled object, without its class."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments


class _PickledState(PickledObject):
    """Of a class whose pickles have other state than a dict of attributes."""

    def __setstate__(self, state: object) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


@final
@dataclass(frozen=True, slots=True)
class SavedTensor:
    """The content of a tensor's ``data.pkl``: sizes in elements, and the storage's key in the archive."""

    dtype: torch.dtype
    storage: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


_METADATA = "torch.distributed.checkpoint.metadata"
# Of each a .metadata has one for each part: pickle sets their attributes itself, faster than a method would.
_PART_CLASSES = (
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "MetadataIndex"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
)
_OTHER_CLASSES = (
    *((_METADATA, name) for name in ("Metadata", "StorageMeta", "TensorProperties", "TensorStorageMetadata")),
    *((_METADATA, name) for name in ("BytesStorageMetadata", "_MEM_FORMAT_ENCODING")),
    ("torch.serialization", "_get_layout"),
    *(("pathlib", name) for name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath")),
    *(("pathlib._local", name) for name in ("PosixPath", "WindowsPath")),
)
_IN_METADATA: Mapping[tuple[str, str], Any] = {
    **dict.fromkeys(_PART_CLASSES, PickledObject),
    **dict.fromkeys(_OTHER_CLASSES, _PickledState),
    ("torch", "Size"): lambda sizes=(): tuple(sizes),
    ("collections", "OrderedDict"): dict,
}


def _rebuild(storage: Any, offset: int, size: Any, stride: Any, *others: Any) -> SavedTensor:  # noqa: ANN401
    """Read a tensor of a typed storage (v2), or of an untyped one (v3), whose dtype follows requires_grad and hooks."""
    return SavedTensor(storage[0] or others[2], storage[1], offset, tuple(size), tuple(stride))


_IN_TENSOR: Mapping[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild,
    ("torch.storage", "UntypedStorage"): None,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
    ("collections", "OrderedDict"): dict,
}


@final
class _InertUnpickler(pickle.Unpickler):
    """Replace every global by its stand-in, and a storage by (dtype, key)."""

    def __init__(self, data: bytes, stand_ins: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._stand_ins = stand_ins

    def find_class(self, module: str, name: str) -> object:
        if (module, name) in self._stand_ins:
            return self._stand_ins[module, name]
        dtype = getattr(torch, name, None) if module == "torch" and "." not in name else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise CheckpointError(
            f"it refers to {module}.{name}, which no checkpoint needs; it may be an attack and was not run"
        )

    def persistent_load(self, pid: tuple[object, ...]) -> tuple[object, str]:
        kind, storage, key, _device, _count = pid
        if kind != "storage":
            raise CheckpointError(f"it refers to {kind!r} instead of a storage")
        return storage, str(key)


def read_metadata(data: bytes, path: object) -> PickledObject:
    """Return DCP's ``.metadata`` as records; raises CheckpointError for anything else."""
    return _read_pickle(data, _IN_METADATA, PickledObject, "the metadata of a distributed checkpoint", path)


def _read_pickle(data: bytes, stand_ins: Mapping[tuple[str, str], Any], kind: type[T], what: str, path: object) -> T:
    try:
        loaded = _InertUnpickler(data, stand_ins).load()
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{path} cannot be trusted: {error}") from error
    if not isinstance(loaded, kind):
        raise CheckpointError(f"{path} is not {what}, but a {type(loaded).__name__}")
    return loaded


def tensor_pickle(shape: tuple[int, ...], dtype: torch.dtype) -> bytes:
    """Return the ``data.pkl`` that ``torch.save`` writes for a contiguous tensor whose storage is ``data/0``."""

    def pickled(value: object) -> bytes:  # the opcodes that push it: protocol 2 without its frame
        return pickle.dumps(value, 2)[2:-1]

    legacy = _STORAGE_NAMES.get(dtype)
    count = math.prod(shape) * (1 if legacy else dtype.itemsize)
    kind = f"ctorch\n{legacy}\n" if legacy else "ctorch.storage\nUntypedStorage\n"
    storage = b"(" + pickled("storage") + kind.encode() + pickled("0") + pickled("cpu") + pickled(count) + b"tQ"
    rebuild = f"ctorch._utils\n_rebuild_tensor_{'v2' if legacy else 'v3'}\n".encode()
    more = b"" if legacy else f"ctorch\n{str(dtype).removeprefix('torch.')}\n".encode()
    arguments = storage + pickled(0) + pickled(shape) + pickled(_contiguous_strides(shape))
    return b"\x80\x02" + rebuild + b"(" + arguments + b"\x89ccollections\nOrderedDict\n)R" + more + b"tR."
