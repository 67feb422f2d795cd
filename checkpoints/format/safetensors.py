"""Read safetensors files piece by piece as a WeightSource, and make the header of a new file.

The format (huggingface/safetensors, "Format"): 8 bytes little-endian header length, a JSON header, the tensors' bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch

from meshpar.checkpoints.format.dcp import DistributedCheckpoint, check_cover
from meshpar.checkpoints.format.foreign import TorchWeights, is_pickled, remedy, sharded_by_accelerate
from meshpar.checkpoints.format.manifest import MODEL
from meshpar.checkpoints.storage.files import ALIGNMENT, Box, Readable, inside, read_json
from meshpar.checkpoints.storage.place import Place, PlaceLike, entries, place
from meshpar.core.errors import CheckpointError, StoreError, brief
from meshpar.core.patterns import suggestion
from meshpar.weights.rules import overlap, spans_of, within

INDEX_NAME = "model.safetensors.index.json"
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_SHARDING_INFO = "DCP_SHARDING_INFO"  # of torch's HuggingFaceStorageWriter: name -> {"saved_offsets": [...]}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_COPY = "; copy it again from its source"
_AGAIN = "copy the folder again from its source, or remove the index to read the files that are there"
_LONGEST_HEADER = 100_000_000  # the bound of the reference implementation


@final
class Safetensors:
    """Read the tensors of a safetensors file, or of all in a folder, as a WeightSource. Tensors are read on request.

    >>> par.materialize(weights=Safetensors("llama"))  # doctest: +SKIP

    Args:
        path: a ``.safetensors`` file, an index (``*.safetensors.index.json``), or a folder with either.

    Raises:
        CheckpointError: a file is missing, truncated or damaged, or two files have a tensor of the same name.
    """

    def __init__(self, path: PlaceLike) -> None:
        self._pieces: dict[str, list[Box]] = {}
        self._path = place(path)
        for file, expected in _files(self._path).items():
            boxes, shards = read_header(file.reader())
            if absent := [name for name in expected if name not in boxes]:
                raise CheckpointError(
                    f"{file} lacks {len(absent)} tensors of the index: {', '.join(absent[:5])}; {_AGAIN}"
                )
            if twice := [name for name in boxes if name in self._pieces and name not in shards]:
                raise CheckpointError(
                    f"{self._pieces[twice[0]][0].file.path} and {file} both have {', '.join(twice[:5])}; remove "
                    "one of the files"
                )
            for name, box in boxes.items():
                self._pieces.setdefault(name, []).append(box)
        self._shapes = {name: _whole_shape(name, pieces) for name, pieces in self._pieces.items()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return every tensor's name and shape."""
        return self._shapes

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Return every tensor's name and dtype."""
        return {name: pieces[0].dtype for name, pieces in self._pieces.items()}

    def pieces(self, name: str) -> Sequence[Box]:
        """Return the pieces of a tensor: one, unless torch's HuggingFaceStorageWriter saved the shards of several
        ranks.
        """
        return self._pieces[name]

    def read(self, name: str, index: tuple[slice, ...], out: torch.Tensor) -> None:
        """Copy ``tensor[index]`` into ``out`` (the slice's shape; cast to its dtype)."""
        if name not in self._pieces:
            raise CheckpointError(f"{self._path} has no tensor {name!r}; {suggestion(name, self._pieces)}")
        spans = spans_of(index, self._shapes[name])
        for piece in self._pieces[name]:
            if (here := overlap(spans, piece.spans)) is not None:
                piece.read(here, out[within(here, spans)])


def weights_in(path: PlaceLike) -> Safetensors | TorchWeights | DistributedCheckpoint:
    """Return the weights of safetensors, ``torch.save`` or accelerate's FSDP, in a file or folder; errors as for
    their class.
    """
    if (folder := sharded_by_accelerate(place(path))) is not None:
        return DistributedCheckpoint(folder, prefix=MODEL)
    return TorchWeights(path) if is_pickled(place(path)) else Safetensors(path)


def _whole_shape(name: str, pieces: Sequence[Box]) -> tuple[int, ...]:
    """Return the shape that pieces cover; raises CheckpointError for holes, overlaps and other dtypes."""
    shape = tuple(max(stop for _, stop in spans) for spans in zip(*(piece.spans for piece in pieces)))
    if len({piece.dtype for piece in pieces}) > 1:
        raise CheckpointError(f"the shards of {name!r} have different dtypes")
    check_cover(name, shape, [piece.spans for piece in pieces])
    return shape


def _files(path: Place) -> dict[Place, list[str]]:
    """Return the files to read and the names that the index, if there is one, lists for each."""
    if path.is_dir():
        indices = entries(path, "*.safetensors.index.json")
        if len(indices) == 1:
            return _files(indices[0])
        files = entries(path, "*.safetensors")
        if indices or not files:
            raise CheckpointError(
                f"expected one safetensors index or some .safetensors files in {path}, found {len(indices)} "
                f"indices{remedy(path)}"
            )
        return {file: [] for file in files}
    if not path.exists():
        raise CheckpointError(f"there is no file or folder {path}")
    if path.name.endswith(".json"):
        return _indexed(path)
    return {path: []}


def _indexed(path: Place) -> dict[Place, list[str]]:
    try:
        places = read_json(path.reader())["weight_map"]
        files: dict[Place, list[str]] = {}
        for name, file in sorted(places.items()):
            files.setdefault(path.parent / inside(file), []).append(name)
    except StoreError:
        raise
    except (CheckpointError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a safetensors index: {brief(error)}") from error
    if gone := [file for file in files if not file.exists()]:
        examples = ", ".join(file.name for file in gone[:5])
        raise CheckpointError(
            f"{path} lists {len(files)} files, and {len(gone)} of them are missing: {examples}; {_AGAIN}"
        )
    return files


def read_header(file: Readable) -> tuple[dict[str, Box], Collection[str]]:
    """Return the position of each tensor of a safetensors file, and the names of those that are shards of larger ones.

    Raises:
        CheckpointError: the file is truncated or damaged.
    """
    try:
        length = struct.unpack("<Q", file.bytes(0, 8))[0]
        if length > min(_LONGEST_HEADER, file.size - 8):
            raise CheckpointError(f"its header has a length of {length} bytes in a file of {file.size}")
        header = json.loads(file.bytes(8, length))
        boxes = {name: _box(file, 8 + length, entry) for name, entry in header.items() if name != "__metadata__"}
        end = 8 + length
        for name, box in sorted(boxes.items(), key=lambda named: (named[1].position, named[1].nbytes)):
            if box.position != end:
                raise CheckpointError(
                    f"{name!r} begins at byte {box.position}; expected {end}, where the tensor before it ends"
                )
            end += box.nbytes
        if end != file.size:
            raise CheckpointError(f"its tensors end at byte {end}, and the file ends at {file.size}")
        shards = json.loads((header.get("__metadata__") or {}).get(_SHARDING_INFO, "{}"))
        offsets = {name: tuple(entry["saved_offsets"]) for name, entry in shards.items() if name in boxes}
        if odd := [
            name
            for name, offset in offsets.items()
            if len(offset) != len(boxes[name].shape) or not all(type(o) is int for o in offset)
        ]:
            raise CheckpointError(
                f"the shard of {odd[0]!r} is at {offsets[odd[0]]} of a tensor of {len(boxes[odd[0]].shape)} dims"
            )
    except StoreError:
        raise
    except (CheckpointError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        other = remedy(file.path) if file.path.suffix != ".safetensors" else ""
        raise CheckpointError(f"{file.path} is not a complete safetensors file: {error}{other or _COPY}") from error
    placed = {name: replace(box, offsets=offsets.get(name, (0,) * len(box.shape))) for name, box in boxes.items()}
    return placed, offsets.keys()


def _box(file: Readable, base: int, entry: Mapping[str, Any]) -> Box:
    start, stop = entry["data_offsets"]
    if entry["dtype"] not in DTYPES:
        raise CheckpointError(f"it has the dtype {entry['dtype']!r}; this version reads {', '.join(DTYPES)}")
    box = Box(file, base + start, tuple(entry["shape"]), DTYPES[entry["dtype"]])
    if start < 0 or any(size < 0 for size in box.shape) or stop - start != math.prod(box.shape) * box.dtype.itemsize:
        raise CheckpointError(
            f"a tensor of shape {box.shape} and dtype {entry['dtype']} does not fit bytes {start} to {stop}"
        )
    return box


def write_header(
    shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file of these tensors in this order, and each tensor's position in the file, in bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    offsets: dict[str, int] = {}
    for name, shape in shapes.items():
        if dtypes[name] not in _NAMES:
            way = (
                "export with dtype=torch.bfloat16 (--dtype bfloat16)"
                if dtypes[name].is_floating_point
                else "convert it in the module, such as to torch.complex64, and save the step again"
            )
            raise CheckpointError(f"safetensors does not support {dtypes[name]} ({name!r}); {way}")
        offsets[name] = offset
        end = offset + math.prod(shape) * dtypes[name].itemsize
        entries[name] = {"dtype": _NAMES[dtypes[name]], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    return header, {name: len(header) + start for name, start in offsets.items()}
