"""Write parts of tensors in torch.distributed.checkpoint's format, by threads."""

from __future__ import annotations

import copyreg
import hashlib
import io
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from meshpar._torch.dcp import stored_at
from meshpar.checkpoints.format.archive import write_tensor
from meshpar.checkpoints.format.manifest import SavedPart
from meshpar.checkpoints.storage.checksums import combine_sums, crc32, table_of
from meshpar.checkpoints.storage.files import TILE_BYTES, lies_in_memory, memory_of, tiles
from meshpar.checkpoints.storage.place import Place
from meshpar.core import runtime
from meshpar.core.errors import CheckpointError

Checksum = Literal["crc32", "sha256"]


@final
@dataclass(frozen=True, slots=True)
class TensorPart:
    """One rank's part of one tensor: ``tensor`` is the box at ``offsets``; a meta tensor where the bytes come from
    elsewhere.
    """

    name: str
    offsets: tuple[int, ...]
    tensor: Tensor


@final
@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file on the disk: its parts, one after another, and at its end the table of their checksums."""

    name: str
    size: int  # in bytes, with the table
    crc32: int  # of the whole file
    sha256: str | None
    parts: tuple[tuple[str, SavedPart], ...]  # the tensor of each, and its place, in the order of the file
    sums: int  # CRC-32 of the table


@final
@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that are divided alike, and all parts of each: (offsets, sizes)."""

    names: Sequence[str]
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes of all its tensors."""
        return len(self.names) * math.prod(self.shape) * self.dtype.itemsize


def write_parts(
    folder: Place,
    rank: int,
    parts: Sequence[TensorPart],
    *,
    threads: int,
    checksum: Checksum,
    on_write: Callable[[], None] = lambda: None,
) -> list[WrittenFile]:
    """Write and flush one file per thread, whose first error is raised; ``on_write`` is called after every block."""
    shares: list[list[TensorPart]] = [[] for _ in range(threads)]
    sizes = [0] * threads
    for part in sorted(parts, key=lambda part: -part.tensor.nbytes):
        least = sizes.index(min(sizes))
        shares[least].append(part)
        sizes[least] += part.tensor.nbytes
    names = [f"__{rank}_{number}.distcp" for number in range(threads)]
    with ThreadPoolExecutor(threads, thread_name_prefix="meshpar-write") as pool:
        jobs = [
            pool.submit(write_file, folder / name, _with_bytes(share), checksum, on_write, expected_bytes=size)
            for name, share, size in zip(names, shares, sizes)
            if share
        ]
    return [job.result() for job in jobs]


def metadata_bytes(groups: Iterable[Group], parts: Iterable[tuple[str, SavedPart]], tied: Mapping[str, str]) -> bytes:
    """Return ``.metadata``, from which torch reads a checkpoint, by each name of a tied tensor (``tied``: to saved)."""
    metadata = _metadata_of(groups)
    names: dict[str, list[str]] = {}
    for other, saved in tied.items():
        names.setdefault(saved, [saved]).append(other)
        metadata.state_dict_metadata[other] = metadata.state_dict_metadata[saved]
    sizes: dict[tuple[int, ...], torch.Size] = {}
    metadata.storage_data = {
        _index(name, sizes.setdefault(part.offsets, torch.Size(part.offsets))): stored_at(
            part.file, part.position, part.length
        )
        for saved, part in parts
        for name in names.get(saved, (saved,))
    }
    metadata.version = CURRENT_DCP_VERSION
    return _pickled(metadata)


def _index(name: str, offsets: torch.Size) -> MetadataIndex:
    """Return the index of a part. ``MetadataIndex`` itself copies its offsets, and a pickle holds shared ones once."""
    index = MetadataIndex(name)
    object.__setattr__(index, "offset", offsets)
    return index


def _pickled(metadata: Metadata) -> bytes:
    """Return the pickle of ``metadata``, whose tensors have the five properties of torch before 2.15."""

    def properties(value: TensorProperties) -> tuple[Any, ...]:
        return TensorProperties, (), value.__getstate__()[:5]

    stream = io.BytesIO()
    pickler = pickle.Pickler(stream)
    pickler.dispatch_table = {**copyreg.dispatch_table, TensorProperties: properties}
    pickler.dump(metadata)
    return stream.getvalue()


def whole(shapes: Iterable[tuple[str, tuple[int, ...], torch.dtype]]) -> list[Group]:
    """Return the groups of tensors, given as name, shape and dtype, of which one rank writes all."""
    return [Group((name,), shape, dtype, (((0,) * len(shape), shape),)) for name, shape, dtype in shapes]


def _metadata_of(groups: Iterable[Group]) -> Metadata:
    """Return torch's description of the tensors; those that are divided alike share one list of parts."""
    described: dict[str, Any] = {}
    for group in groups:
        chunks = [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)) for offsets, sizes in group.boxes
        ]
        properties, size = TensorProperties(dtype=group.dtype), torch.Size(group.shape)
        described |= {
            name: TensorStorageMetadata(properties=properties, size=size, chunks=chunks) for name in group.names
        }
    return Metadata(described)


def check_written(groups: Iterable[Group], parts: Sequence[tuple[str, SavedPart]]) -> None:
    """Raise CheckpointError unless every planned part was written once, with its shape and all its bytes."""
    written = {(name, part.offsets): part for name, part in parts}
    problems = [
        f"{name} at {part.offsets} was written twice" for name, part in parts if written[name, part.offsets] is not part
    ]
    for group in groups:
        for offsets, sizes in group.boxes:
            size = math.prod(sizes) * group.dtype.itemsize
            for name in group.names:
                part = written.pop((name, offsets), None)
                if part is None:
                    problems.append(f"{name} at {offsets} was not written")
                elif part.shape != sizes or part.length < size:
                    problems.append(
                        f"{name} at {offsets}: {part.shape} in {part.length} bytes were written, planned {sizes} in "
                        f"{size}"
                    )
    problems += [f"{name} at {offsets} was written, and is not in the plan" for name, offsets in written]
    if problems:
        raise CheckpointError("\n  ".join(["the written parts differ from the plan; save again:", *problems[:20]]))


def write_file(
    path: Place,
    parts: Iterable[tuple[TensorPart, Iterable[memoryview]]],
    checksum: Checksum,
    on_write: Callable[[], None] = lambda: None,
    *,
    expected_bytes: int = 0,
) -> WrittenFile:
    """Write parts, each with its bytes in row-major order, one after another, then the table of their checksums, and
    flush the file to the disk; ``on_write`` is called after every block.
    """
    written, sums = list[tuple[str, SavedPart]](), list[int]()
    position = whole = 0
    digest = hashlib.sha256() if checksum == "sha256" else None
    with path.writing(expected_bytes) as put:

        def write(data: bytes | bytearray | memoryview) -> None:
            if digest is not None:
                digest.update(data)
            put(data)
            on_write()

        for part, blocks in parts:
            shape = tuple(part.tensor.shape)
            length, summed = write_tensor(shape, part.tensor.dtype, blocks, write, position)
            written.append((part.name, SavedPart(part.offsets, shape, path.name, position, length)))
            sums.append(summed)
            position, whole = position + length, combine_sums(whole, summed, length)
        table = table_of(sums)
        write(table)
    position, whole = position + len(table), combine_sums(whole, crc32(table), len(table))
    sha256 = digest.hexdigest() if digest is not None else None
    return WrittenFile(path.name, position, whole, sha256, tuple(written), crc32(table))


def _with_bytes(parts: Iterable[TensorPart]) -> Iterator[tuple[TensorPart, Iterator[memoryview]]]:
    room = _Room()
    for part in parts:
        yield part, room.blocks(part.tensor)


@final
class _Room:
    """A tile of host memory, through which tensors are copied that are not contiguous there."""

    def __init__(self) -> None:
        self._tile: Tensor | None = None
        self._stream: torch.Stream | None = None

    def blocks(self, tensor: Tensor) -> Iterator[memoryview]:
        """Yield a tensor's bytes in row-major order."""
        if lies_in_memory(tensor):
            yield memory_of(tensor)
            return
        if self._tile is None:
            runtime.make_current(tensor.device)  # of this thread, which pins memory by it
            self._tile = torch.empty(TILE_BYTES, dtype=torch.uint8, pin_memory=tensor.is_cuda)
        for spans in tiles(tuple(tensor.shape), tensor.dtype.itemsize, TILE_BYTES):
            piece = tensor[tuple(slice(*span) for span in spans)]
            tile = self._tile[: piece.nbytes].view(tensor.dtype).view(piece.shape)
            if tensor.is_cpu:
                tile.copy_(piece)
            else:  # at the same time as the next step's work, after which the device's first stream would run it
                self._stream = self._stream or torch.Stream(tensor.device)
                with self._stream:
                    tile.copy_(piece, non_blocking=True)
                self._stream.synchronize()
            yield memory_of(tile)
