"""Write parts of tensors in torch.distributed.checkpoint's format; ranks report sizes and checksums, rank 0 records."""

from __future__ import annotations

import copyreg
import datetime
import functools
import gc
import hashlib
import io
import itertools
import json
import math
import pickle
import struct
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final

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

from meshpar import __version__
from meshpar._torch.tensors import stored_at
from meshpar.checkpoints.format.archive import write_tensor
from meshpar.checkpoints.format.dcp import METADATA_NAME, tensors_in
from meshpar.checkpoints.format.manifest import MODEL, Encoded, Manifest, SavedPart
from meshpar.checkpoints.storage.checksums import combine_sums, crc32
from meshpar.checkpoints.storage.files import TILE_BYTES, lies_in_memory, memory_of, tiles
from meshpar.checkpoints.storage.place import Place
from meshpar.core import runtime
from meshpar.core.errors import CheckpointError

try:
    from isal.isal_zlib import decompress
except ImportError:  # optional, in the extra "train"
    from zlib import decompress

Checksum = Literal["crc32", "sha256"]


@final
@dataclass(frozen=True, slots=True)
class TensorPart:
    """One rank's part of one tensor."""

    name: str
    offsets: tuple[int, ...]
    tensor: Tensor  # the box at ``offsets``; a meta tensor where the bytes come from elsewhere


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
        jobs = []
        for name, share, size in zip(names, shares, sizes):
            if share:
                parts_and_bytes = zip(share, map(_Room().blocks, [part.tensor for part in share]))
                write = functools.partial(write_file, folder / name, parts_and_bytes, checksum, on_write)
                jobs.append(pool.submit(write, expected_bytes=size))
    return [job.result() for job in jobs]


def metadata_bytes(groups: Iterable[Group], parts: Iterable[tuple[str, SavedPart]], tied: Mapping[str, str]) -> bytes:
    """Return ``.metadata``, from which torch reads a checkpoint, by each name of a tied tensor (``tied``: to saved)."""
    described: dict[str, Any] = {}
    for group in groups:
        chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in group.boxes]
        properties, size = TensorProperties(dtype=group.dtype), torch.Size(group.shape)
        # one list of parts for all that are divided alike
        described |= {name: TensorStorageMetadata(properties, size, chunks) for name in group.names}
    metadata = Metadata(described)
    names: dict[str, list[str]] = {}
    for other, saved in tied.items():
        names.setdefault(saved, [saved]).append(other)
        metadata.state_dict_metadata[other] = metadata.state_dict_metadata[saved]
    sizes: dict[tuple[int, ...], torch.Size] = {}
    metadata.storage_data = {}
    for saved, part in parts:
        offsets = sizes.setdefault(part.offsets, torch.Size(part.offsets))
        for name in names.get(saved, (saved,)):
            metadata.storage_data[_index(name, offsets)] = stored_at(part.file, part.position, part.length)
    metadata.version = CURRENT_DCP_VERSION

    def five_properties(value: TensorProperties) -> tuple[Any, ...]:  # as torch before 2.15 has
        return TensorProperties, (), value.__getstate__()[:5]

    stream = io.BytesIO()
    pickler = pickle.Pickler(stream)
    pickler.dispatch_table = {**copyreg.dispatch_table, TensorProperties: five_properties}
    pickler.dump(metadata)
    return stream.getvalue()


def _index(name: str, offsets: torch.Size) -> MetadataIndex:
    """Return the index of a part. ``MetadataIndex`` itself copies its offsets, and a pickle holds shared ones once."""
    index = MetadataIndex(name)
    object.__setattr__(index, "offset", offsets)
    return index


def whole(shapes: Iterable[tuple[str, tuple[int, ...], torch.dtype]]) -> list[Group]:
    """Return the groups of tensors, given as name, shape and dtype, of which one rank writes all."""
    return [Group((name,), shape, dtype, (((0,) * len(shape), shape),)) for name, shape, dtype in shapes]


def check_written(groups: Iterable[Group], parts: Sequence[tuple[str, SavedPart]]) -> None:
    """Raise CheckpointError unless every planned part was written once, with its shape and all its bytes."""
    written = {(name, part.offsets): part for name, part in parts}
    twice = [(name, part.offsets) for name, part in parts if written[name, part.offsets] is not part]
    problems = [f"{name} at {offsets} was written twice" for name, offsets in twice]
    for group in groups:
        for offsets, sizes in group.boxes:
            size = math.prod(sizes) * group.dtype.itemsize
            for name in group.names:
                part = written.pop((name, offsets), None)
                if part is None:
                    problems.append(f"{name} at {offsets} was not written")
                elif part.shape != sizes or part.length < size:
                    text = f"{part.shape} in {part.length} bytes were written, planned {sizes} in {size}"
                    problems.append(f"{name} at {offsets}: {text}")
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
    """Write parts and their bytes one after another, then the table of their checksums; flush the file to the disk."""
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
        table = struct.pack(f"<{len(sums)}I", *sums)
        write(table)
    position, whole = position + len(table), combine_sums(whole, crc32(table), len(table))
    sha256 = digest.hexdigest() if digest is not None else None
    return WrittenFile(path.name, position, whole, sha256, tuple(written), crc32(table))


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


class Layout(NamedTuple):
    """The files of one rank and their parts, one after another; short to send."""

    files: tuple[tuple[str, int], ...]  # name of each, and number of its parts
    names: bytes  # the tensor of each part, packed
    kinds: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]  # (offsets, shape, length in bytes) of parts
    kind: bytes  # position in `kinds` of each part, an array of "I"

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(tuple(self)).encode()).hexdigest()

    def report(self, files: Sequence[WrittenFile]) -> WriteReport:
        return WriteReport(self.digest, tuple((file.size, file.crc32, file.sums, file.sha256) for file in files))

    def parts(self) -> Iterator[tuple[str, SavedPart]]:
        """Yield the tensor of each part, and its place, in the order of the files."""
        parts = zip(map(sys.intern, unpack(self.names)), array("I", self.kind), strict=True)
        for file, count in self.files:
            position = 0
            for name, kind in itertools.islice(parts, count):
                offsets, shape, length = self.kinds[kind]
                yield name, SavedPart(offsets, shape, file, position, length)
                position += length


class WriteReport(NamedTuple):
    """Data that each rank sends in every save."""

    layout: str  # digest of the rank's layout
    # size, CRC-32, CRC-32 of the table of checksums, and SHA-256 of each file
    files: tuple[tuple[int, int, int | None, str | None], ...]


def layout_of(files: Sequence[WrittenFile]) -> Layout:
    parts = [part for file in files for part in file.parts]
    kinds: dict[tuple[tuple[int, ...], tuple[int, ...], int], int] = {}
    kind = array("I", (kinds.setdefault((part.offsets, part.shape, part.length), len(kinds)) for _, part in parts))
    names = pack([name for name, _ in parts])
    return Layout(tuple((file.name, len(file.parts)) for file in files), names, tuple(kinds), kind.tobytes())


@contextmanager
def _uncollected() -> Iterator[None]:
    """Let Python not look for cycles among millions of new objects that hold none."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@final
class Ledger:
    """All that ``.metadata`` and the manifest have of the parts, made once, and checked as a reader will read it."""

    @_uncollected()
    def __init__(self, groups: Sequence[Group], layouts: Sequence[Layout], tied: Sequence[Sequence[str]]) -> None:
        self._layouts = [layout.digest for layout in layouts]
        self._files = [name for layout in layouts for name, _ in layout.files]
        parts = [part for layout in layouts for part in layout.parts()]
        check_written(groups, parts)
        saved = {name for group in groups for name in group.names}
        names = {MODEL + other: MODEL + group[0] for group in tied for other in group[1:] if MODEL + other not in saved}
        metadata = metadata_bytes(groups, parts, names)
        read = tensors_in(metadata, METADATA_NAME)
        chunks: dict[str, list[str]] = {name: [] for name in read if name not in names}
        for name, part in parts:
            span_text = f"{_quoted(part.file)}, {part.position}, {part.length}"
            chunks[name].append(f"{_box(part.offsets, part.shape)}, {span_text}]")
        entries = (
            f'{_quoted(name)}: {{"dtype": {_quoted(str(read[name].dtype).removeprefix("torch."))}, '
            f'"shape": {json.dumps(read[name].shape)}, "chunks": [{", ".join(chunk)}]}}'
            for name, chunk in chunks.items()
        )
        self._metadata = zlib.compress(metadata, 1)
        self._tensors = zlib.compress(f"{{{', '.join(entries)}}}".encode(), 1)

    def fits(self, reports: Sequence[WriteReport]) -> bool:
        """Return whether the ranks' layouts are those of this ledger."""
        return self._layouts == [report.layout for report in reports]

    def write(self, folder: Place, reports: Sequence[WriteReport], entries: Mapping[str, Any]) -> Manifest:
        """Write torch's metadata into the folder and return the manifest of a save; ``entries`` are its plain data."""
        metadata = decompress(self._metadata)
        with (folder / METADATA_NAME).writing() as put:
            put(metadata)
        files = dict(zip(self._files, (file for report in reports for file in report.files), strict=True))
        files[METADATA_NAME] = (len(metadata), crc32(metadata), None, None)
        return Manifest(
            saved_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            files={
                name: {"size": size, "crc32": checksum}
                | ({"sums": sums} if sums is not None else {})
                | ({"sha256": sha256} if sha256 else {})
                for name, (size, checksum, sums, sha256) in sorted(files.items())
            },
            tensors=Encoded(decompress(self._tensors).decode()),
            versions={"torch": torch.__version__, "meshpar": __version__},
            **entries,
        )


def pack(names: Sequence[str]) -> bytes:
    return zlib.compress(json.dumps(list(names)).encode())


def unpack(packed: bytes) -> list[str]:
    """Return the names of which :func:`pack` made bytes."""
    return json.loads(zlib.decompress(packed))


def make_manifest(
    folder: Place, groups: Sequence[Group], files: Sequence[WrittenFile], entries: Mapping[str, Any]
) -> Manifest:
    """Write torch's metadata into the folder; return the manifest of files that this process wrote alone."""
    layout = layout_of(files)
    return Ledger(groups, [layout], entries.get("tied", ())).write(folder, [layout.report(files)], entries)


@functools.lru_cache(1 << 16)
def _box(offsets: tuple[int, ...], shape: tuple[int, ...]) -> str:
    return json.dumps([offsets, shape])[:-1]


@functools.lru_cache(1 << 16)
def _quoted(text: str) -> str:
    return json.dumps(text)
