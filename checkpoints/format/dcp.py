"""Read the tensors of a distributed checkpoint (torch.distributed.checkpoint's format), without a process group."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, final

import torch

from meshpar.checkpoints.format.archive import PickledObject, find_tensor, read_metadata
from meshpar.checkpoints.format.manifest import MANIFEST_NAME, SavedPart, read_manifest, remedy
from meshpar.checkpoints.storage.checksums import combine_sums, crc32
from meshpar.checkpoints.storage.files import Box, Readable, inside
from meshpar.checkpoints.storage.place import PlaceLike, place
from meshpar.core.errors import CheckpointError, StoreError, brief
from meshpar.core.patterns import suggestion
from meshpar.weights.rules import Spans, overlap, spans_of, within

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
    chunks: tuple[SavedPart, ...]


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
        sums: Callable[[Readable, SavedPart], int | None] = lambda *_: None,
        prefix: str = "",
    ) -> None:
        self.folder, self._checked, self._sums = place(folder), checked, sums
        data = (self.folder / METADATA_NAME).read_small()
        if data is None and (self.folder / MANIFEST_NAME).is_file():
            self.folder = read_manifest(self.folder).files_in(self.folder)
            data = (self.folder / METADATA_NAME).read_small()
        path = self.folder / METADATA_NAME
        if data is None:
            text = f"cannot open {path}: no such file"
            if self.folder.is_dir():
                text = f"{self.folder} is not a distributed checkpoint: it has no {METADATA_NAME}"
            raise CheckpointError(text + remedy(self.folder))
        stored = tensors_in(data, path)
        named = {name.removeprefix(prefix): entry for name, entry in stored.items() if name.startswith(prefix)}
        self.tensors: Mapping[str, Stored] = named
        if prefix and stored and not named:
            raise CheckpointError(
                f"{self.folder} has no tensors whose names begin with {prefix!r}; {suggestion(prefix, stored)}"
            )
        self._files: dict[str, Readable] = {}
        self._boxes: dict[SavedPart, Box] = {}

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
            if (here := overlap(spans, chunk.spans)) is not None:
                self.box(name, chunk).read(here, out[within(here, spans)])

    def place(self, name: str) -> tuple[str, int]:
        """Return the file and the byte at which a tensor begins; read many tensors in this order."""
        first = min(self.tensors[name].chunks, key=lambda chunk: chunk.offsets, default=None)
        return ("", 0) if first is None else (first.file, first.position)

    def locate(self, wanted: Mapping[str, tuple[slice, ...]]) -> None:
        """Find the archives that ``read`` will need; raises CheckpointError that names a damaged one's tensor."""
        chunks = [
            (name, chunk)
            for name, index in wanted.items()
            for chunk in self.tensors[name].chunks
            if overlap(spans_of(index, self.tensors[name].shape), chunk.spans) is not None and chunk not in self._boxes
        ]
        ends: dict[str, list[tuple[int, int]]] = {}
        for _, chunk in chunks:
            ends.setdefault(chunk.file, []).extend(_ends(chunk))
        for file, spans in ends.items():
            self._file(file).expect(spans)
        for name, chunk in chunks:
            self.box(name, chunk)

    def each(self, act: Callable[[T], object], items: Iterable[T]) -> None:
        """Run ``act``, which reads a tensor, for each item; several at once where that is faster."""
        if self._files:
            next(iter(self._files.values())).each(act, items)

    def sum_of(self, chunk: SavedPart) -> int | None:
        """Return the saved CRC-32 of a part's archive, which ``diff_steps`` compares; None if none is known."""
        return self._sums(self._file(chunk.file), chunk)

    def _file(self, name: str) -> Readable:
        if name not in self._files:
            self._files[name] = (self.folder / name).reader(links=False)
        return self._files[name]

    def box(self, name: str, chunk: SavedPart) -> Box:
        """Return the position of one part of the tensor ``name``; raises CheckpointError if its archive is damaged."""
        if chunk not in self._boxes:
            file = self._file(chunk.file)
            file.expect(_ends(chunk))
            try:
                box, payload = find_tensor(file, chunk.position, chunk.length, chunk.shape)
                box = replace(box, offsets=chunk.offsets)
                if box.dtype != (dtype := self.tensors[name].dtype):
                    raise CheckpointError(f"its dtype is {box.dtype}; expected {dtype} from {METADATA_NAME}")
                if self._checked:
                    _check_around(box, payload or 0, chunk, self._sums(file, chunk))
                    box = replace(box, name=name, crc32=payload)
            except StoreError:
                raise  # no damage
            except CheckpointError as error:
                reason = str(error)
                if file.size > 10 and file.bytes(8, 2) == b'{"':
                    reason = (
                        "it was saved with SerializationFormat.SAFETENSORS, which is not read: save it as TORCH_SAVE"
                    )
                raise CheckpointError(
                    f"{file.path}: the part of {name!r} at byte {chunk.position} is damaged: {reason}"
                ) from error
            file.forget(chunk.position, box.position)
            file.forget(box.position + box.nbytes, chunk.position + chunk.length)
            self._boxes[chunk] = box
        return self._boxes[chunk]


def _ends(chunk: SavedPart) -> list[tuple[int, int]]:
    """Return the bytes of an archive that are read to find its payload; all of a small one."""
    stop = chunk.position + chunk.length
    if chunk.length <= _SMALL_BYTES:
        return [(chunk.position, stop)]
    return [(chunk.position, chunk.position + _HEAD_BYTES), (stop - _TAIL_BYTES, stop)]


def _check_around(box: Box, payload: int, chunk: SavedPart, expected: int | None) -> None:
    """Compare an archive with its CRC-32 without reading its payload, whose own is in the archive."""
    end = box.position + box.nbytes
    head = box.file.bytes(chunk.position, box.position - chunk.position)
    tail = box.file.bytes(end, chunk.position + chunk.length - end)
    actual = combine_sums(combine_sums(crc32(head), payload, box.nbytes), crc32(tail), len(tail))
    if expected not in (None, actual):
        raise CheckpointError(
            f"expected the CRC-32 {expected:08x} of the manifest, its archive says {actual:08x}: it is of another "
            "step, or changed"
        )


def tensors_in(data: bytes, path: object) -> dict[str, Stored]:
    """Return the tensors of a ``.metadata``; raises CheckpointError, that names ``path``, if parts are missing."""
    metadata = read_metadata(data, path)
    try:
        storages = {
            (index.fqn, tuple(index.offset) if index.__dict__.get("offset") is not None else None): storage
            for index, storage in (metadata.storage_data or {}).items()  # type: ignore[attr-defined]
        }
        entries = metadata.state_dict_metadata.items()  # type: ignore[attr-defined]
        return {name: _stored(name, entry, storages) for name, entry in entries if "chunks" in entry.__dict__}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not the metadata of a complete distributed checkpoint: {brief(error)}"
        ) from error


def _stored(
    name: str, entry: PickledObject, storages: Mapping[tuple[str, tuple[int, ...] | None], PickledObject]
) -> Stored:
    shape = tuple(entry.size)  # type: ignore[attr-defined]
    chunks = []
    for chunk in entry.chunks:  # type: ignore[attr-defined]
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        if math.prod(sizes) == 0:
            continue
        storage = storages.get((name, offsets))
        if storage is None:
            raise CheckpointError(f"the metadata names no file for the part of {name!r} at {offsets}")
        if storage.__dict__.get("transform_descriptors"):
            raise CheckpointError(f"{name!r} was saved through a stream transform, which this version does not read")
        try:
            file = _inside(storage.relative_path)  # type: ignore[attr-defined]
        except CheckpointError as error:
            raise CheckpointError(
                f"the file of {name!r} is outside of the checkpoint's folder, which is not allowed: {error}"
            ) from error
        chunks.append(SavedPart(offsets, sizes, file, storage.offset, storage.length))  # type: ignore[attr-defined]
    check_cover(name, shape, [chunk.spans for chunk in chunks])
    return Stored(shape, entry.properties.state[0], tuple(chunks))  # type: ignore[attr-defined]


def check_cover(name: str, shape: tuple[int, ...], boxes: Sequence[Spans]) -> None:
    """Raise CheckpointError unless the parts cover a tensor exactly once."""
    if any(start < 0 or stop > size for spans in boxes for (start, stop), size in zip(spans, shape)):
        raise CheckpointError(f"a part of {name!r} exceeds its shape {shape}")
    volume = sum(math.prod(stop - start for start, stop in spans) for spans in boxes)
    # the cells of a grid, each once, as after any even or uneven sharding by dims, do not overlap
    starts = [sorted({spans[dim][0] for spans in boxes}) for dim in range(len(shape))]
    ends = [dict(zip(start, [*start[1:], size])) for start, size in zip(starts, shape)]
    cells = all(stop == end[start] for spans in boxes for (start, stop), end in zip(spans, ends))
    is_grid = cells and len(set(boxes)) == len(boxes)
    twice = ", some twice" if not is_grid and _any_overlap(boxes) else ""
    if volume != math.prod(shape) or twice:
        raise CheckpointError(f"the parts of {name!r} have {volume} elements of {math.prod(shape)}{twice}")


def _any_overlap(boxes: Sequence[Spans]) -> bool:
    """Return whether any two parts overlap, by a sweep along the first dim."""
    open_boxes: list[Spans] = []
    for spans in sorted(boxes):
        open_boxes = [other for other in open_boxes if other == () or other[0][1] > spans[0][0]]
        if any(overlap(spans, other) is not None for other in open_boxes):
            return True
        open_boxes.append(spans)
    return False
