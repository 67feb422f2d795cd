"""Read the tensors of a distributed checkpoint (torch.distributed.checkpoint's format), without a process group.

``.metadata`` has the file and position of each part of each tensor; every part is an archive. Only the requested bytes
are read, directly into the destination.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, final

import torch

from meshpar.checkpoints.format.archive import find_tensor
from meshpar.checkpoints.format.foreign import remedy
from meshpar.checkpoints.format.manifest import MANIFEST_NAME, Chunk, read_manifest
from meshpar.checkpoints.format.pickles import PickledObject, read_metadata
from meshpar.checkpoints.storage.checksums import crc32, joined
from meshpar.checkpoints.storage.files import Box, Readable, inside
from meshpar.checkpoints.storage.place import PlaceLike, place
from meshpar.core.errors import CheckpointError, StoreError, brief
from meshpar.core.patterns import suggestion
from meshpar.weights.rules import Spans, spans_of

T = TypeVar("T")
METADATA_NAME = ".metadata"
_inside = functools.lru_cache(1 << 12)(inside)  # a file has many parts
_HEAD_BYTES, _TAIL_BYTES, _SMALL_BYTES = 1024, 4096, 64 << 10


@final
@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the checkpoint and its parts, which cover it exactly once."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


@final
class DistributedCheckpoint:
    """Read the tensors of a DCP folder as a WeightSource, under their saved names.

    >>> par.materialize(weights=DistributedCheckpoint("run/dcp"))  # doctest: +SKIP

    Args:
        folder: the checkpoint's folder.
        checked: compare the bytes of each part that is read as a whole with the CRC-32 in its archive.
        sums: returns the CRC-32 of a part's archive in a file, which is compared when the part is located.
        prefix: only tensors whose name begins with it, without it: ``"model."`` for a checkpoint of ``{"model": ...,
            "optimizer": ...}``.

    Raises:
        CheckpointError: the folder has no complete distributed checkpoint, or its metadata lacks a part of a tensor.
    """

    def __init__(
        self,
        folder: PlaceLike,
        *,
        checked: bool = True,
        sums: Callable[[Readable, Chunk], int | None] = lambda *_: None,
        prefix: str = "",
    ) -> None:
        self.folder, self._checked, self._sums = place(folder), checked, sums
        data = (self.folder / METADATA_NAME).read_small()
        if data is None and (self.folder / MANIFEST_NAME).is_file():
            self.folder = read_manifest(self.folder).files_in(self.folder)
            data = (self.folder / METADATA_NAME).read_small()
        path = self.folder / METADATA_NAME
        if data is None:
            what = f"cannot open {path}: no such file"
            if self.folder.is_dir():
                what = f"{self.folder} is not a distributed checkpoint: it has no {METADATA_NAME}"
            raise CheckpointError(what + remedy(self.folder))
        found = tensors_in(data, path)
        self.tensors: Mapping[str, Stored] = {
            name.removeprefix(prefix): entry for name, entry in found.items() if name.startswith(prefix)
        }
        if prefix and found and not self.tensors:
            raise CheckpointError(
                f"{self.folder} has no tensors whose names begin with {prefix!r}; {suggestion(prefix, found)}"
            )
        self._files: dict[str, Readable] = {}
        self._boxes: dict[Chunk, Box] = {}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return every tensor's name and shape."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Return every tensor's name and dtype."""
        return {name: tensor.dtype for name, tensor in self.tensors.items()}

    def read(self, name: str, index: tuple[slice, ...], out: torch.Tensor) -> None:
        """Copy ``tensor[index]`` into ``out`` (the slice's shape; cast to its dtype)."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder} has no tensor {name!r}; {suggestion(name, self.tensors)}")
        stored = self.tensors[name]
        spans = spans_of(index, stored.shape)
        for chunk in stored.chunks:
            here = overlap(spans, chunk)
            if here is not None:
                target = out[tuple(slice(a - s, b - s) for (a, b), (s, _) in zip(here, spans))]
                self.box(name, chunk).read(tuple((a - o, b - o) for (a, b), o in zip(here, chunk.offsets)), target)

    def place(self, name: str) -> tuple[str, int]:
        """Return the file and the byte at which a tensor begins; read many tensors in this order."""
        first = min(self.tensors[name].chunks, key=lambda chunk: chunk.offsets, default=None)
        return ("", 0) if first is None else (first.file, first.position)

    def locate(self, wanted: Mapping[str, tuple[slice, ...]]) -> None:
        """Find the archives that ``read`` will need; raises CheckpointError that names file and tensor if one is
        damaged.
        """
        found = [
            (name, chunk)
            for name, index in wanted.items()
            for chunk in self.tensors[name].chunks
            if overlap(spans_of(index, self.tensors[name].shape), chunk) is not None and chunk not in self._boxes
        ]
        ends: dict[str, list[tuple[int, int]]] = {}
        for _, chunk in found:
            ends.setdefault(chunk.file, []).extend(_ends(chunk))
        for file, spans in ends.items():
            self._file(file).expect(spans)
        for name, chunk in found:
            self.box(name, chunk)

    def each(self, act: Callable[[T], object], items: Iterable[T]) -> None:
        """Run ``act``, which reads a tensor, for each item; several at once where that is faster."""
        if self._files:
            next(iter(self._files.values())).each(act, items)

    def sum_of(self, chunk: Chunk) -> int | None:
        """Return the saved CRC-32 of a part's archive; None if none is known."""
        return self._sums(self._file(chunk.file), chunk)

    def _file(self, name: str) -> Readable:
        if name not in self._files:
            self._files[name] = (self.folder / name).reader(links=False)
        return self._files[name]

    def box(self, name: str, chunk: Chunk) -> Box:
        """Return the position of one part of the tensor ``name``; raises CheckpointError if its archive is damaged."""
        if chunk not in self._boxes:
            file = self._file(chunk.file)
            file.expect(_ends(chunk))
            try:
                found, payload = find_tensor(file, chunk.position, chunk.length, chunk.shape)
                box = replace(found, offsets=chunk.offsets)
                if box.dtype != self.tensors[name].dtype:
                    raise CheckpointError(
                        f"its dtype is {box.dtype}; expected {self.tensors[name].dtype} from {METADATA_NAME}"
                    )
                if self._checked:
                    _check_around(box, payload or 0, chunk, self._sums(file, chunk))
                    box = replace(box, name=name, crc32=payload)
            except StoreError:
                raise  # no damage
            except CheckpointError as error:
                other = "it was saved with SerializationFormat.SAFETENSORS, which is not read: save it as TORCH_SAVE"
                why = other if _is_safetensors(file) else error
                raise CheckpointError(
                    f"{file.path}: the part of {name!r} at byte {chunk.position} is damaged: {why}"
                ) from error
            file.forget(chunk.position, box.position)
            file.forget(box.position + box.nbytes, chunk.position + chunk.length)
            self._boxes[chunk] = box
        return self._boxes[chunk]


def _ends(chunk: Chunk) -> list[tuple[int, int]]:
    """Return the bytes of an archive that are read to find its payload; all of a small one."""
    stop = chunk.position + chunk.length
    if chunk.length <= _SMALL_BYTES:
        return [(chunk.position, stop)]
    return [(chunk.position, chunk.position + _HEAD_BYTES), (stop - _TAIL_BYTES, stop)]


def _is_safetensors(file: Readable) -> bool:
    return file.size > 10 and file.bytes(8, 2) == b'{"'


def _check_around(box: Box, payload: int, chunk: Chunk, expected: int | None) -> None:
    """Compare an archive with its CRC-32 without reading its payload, whose own is in the archive."""
    end = box.position + box.nbytes
    head, tail = (
        box.file.bytes(chunk.position, box.position - chunk.position),
        box.file.bytes(end, chunk.position + chunk.length - end),
    )
    found = joined(joined(crc32(head), payload, box.nbytes), crc32(tail), len(tail))
    if expected not in (None, found):
        raise CheckpointError(
            f"expected the CRC-32 {expected:08x} of the manifest, its archive says {found:08x}: it is of another "
            "step, or changed"
        )


def overlap(spans: Spans, chunk: Chunk | Box) -> Spans | None:
    """Return the part of ``spans`` that a part of the tensor has; None if it has none."""
    both = tuple((max(a, o), min(b, o + n)) for (a, b), o, n in zip(spans, chunk.offsets, chunk.shape))
    return both if all(a < b for a, b in both) else None


def tensors_in(data: bytes, path: object) -> dict[str, Stored]:
    """Return the tensors of a ``.metadata``; raises CheckpointError, that names ``path``, if parts are missing."""
    metadata = read_metadata(data, path)
    try:
        places = {
            (index.fqn, tuple(index.offset) if index.__dict__.get("offset") is not None else None): place
            for index, place in (metadata.storage_data or {}).items()  # type: ignore[attr-defined]
        }
        entries = metadata.state_dict_metadata.items()  # type: ignore[attr-defined]
        return {name: _stored(name, entry, places) for name, entry in entries if "chunks" in entry.__dict__}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not the metadata of a complete distributed checkpoint: {brief(error)}"
        ) from error


def _stored(
    name: str, entry: PickledObject, places: Mapping[tuple[str, tuple[int, ...] | None], PickledObject]
) -> Stored:
    shape = tuple(entry.size)  # type: ignore[attr-defined]
    chunks = []
    for chunk in entry.chunks:  # type: ignore[attr-defined]
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        if math.prod(sizes) == 0:
            continue
        place = places.get((name, offsets))
        if place is None:
            raise CheckpointError(f"the metadata names no file for the part of {name!r} at {offsets}")
        if place.__dict__.get("transform_descriptors"):
            raise CheckpointError(f"{name!r} was saved through a stream transform, which this version does not read")
        try:
            file = _inside(place.relative_path)  # type: ignore[attr-defined]
        except CheckpointError as error:
            raise CheckpointError(
                f"the file of {name!r} is outside of the checkpoint's folder, which is not allowed: {error}"
            ) from error
        chunks.append(Chunk(offsets, sizes, file, place.offset, place.length))  # type: ignore[attr-defined]
    check_cover(name, shape, chunks)
    return Stored(shape, entry.properties.state[0], tuple(chunks))  # type: ignore[attr-defined]


def check_cover(name: str, shape: tuple[int, ...], chunks: Sequence[Chunk | Box]) -> None:
    """Raise CheckpointError unless the parts cover a tensor exactly once."""
    if any(o < 0 or o + n > size for chunk in chunks for o, n, size in zip(chunk.offsets, chunk.shape, shape)):
        raise CheckpointError(f"a part of {name!r} exceeds its shape {shape}")
    volume = sum(math.prod(chunk.shape) for chunk in chunks)
    twice = not _is_grid(shape, chunks) and _any_overlap(chunks)
    if volume != math.prod(shape) or twice:
        raise CheckpointError(
            f"the parts of {name!r} have {volume} elements of {math.prod(shape)}{', some twice' if twice else ''}"
        )


def _is_grid(shape: tuple[int, ...], chunks: Sequence[Chunk | Box]) -> bool:
    """Return whether the parts are the cells of a grid, each once, as after any even or uneven sharding by dims."""
    starts = [sorted({chunk.offsets[dim] for chunk in chunks}) for dim in range(len(shape))]
    ends = [dict(zip(start, [*start[1:], size])) for start, size in zip(starts, shape)]
    cells = all(o + n == end[o] for chunk in chunks for o, n, end in zip(chunk.offsets, chunk.shape, ends))
    return cells and len({chunk.offsets for chunk in chunks}) == len(chunks)


def _any_overlap(chunks: Sequence[Chunk | Box]) -> bool:
    """Return whether any two parts overlap, by a sweep along the first dim."""
    open_: list[Chunk | Box] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets):
        open_ = [
            other for other in open_ if other.offsets[:1] == () or other.offsets[0] + other.shape[0] > chunk.offsets[0]
        ]
        spans = tuple((o, o + n) for o, n in zip(chunk.offsets, chunk.shape))
        if any(overlap(spans, other) for other in open_):
            return True
        open_.append(chunk)
    return False
