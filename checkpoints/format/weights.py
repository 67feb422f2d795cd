"""Published weights as a WeightSource: safetensors, files of ``torch.save``; and the header of a safetensors file."""

from __future__ import annotations

import json
import math
import pickle
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch

from meshpar.checkpoints.format.dcp import METADATA_NAME, DistributedCheckpoint, check_cover
from meshpar.checkpoints.format.manifest import ACCELERATE, MODEL, PICKLED, remedy
from meshpar.checkpoints.storage.files import ALIGNMENT, Box, Dtypes, Readable, Shapes, inside, read_json
from meshpar.checkpoints.storage.place import Place, PlaceLike, entries, fetched, place
from meshpar.core.errors import CheckpointError, StoreError, brief
from meshpar.core.patterns import suggestion
from meshpar.weights.rules import overlap, spans_of, within

# huggingface/safetensors, "Format": 8 bytes little-endian header length, a JSON header, the tensors' bytes
INDEX_NAME = "model.safetensors.index.json"
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
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
                other = self._pieces[twice[0]][0].file.path
                raise CheckpointError(f"{other} and {file} both have {', '.join(twice[:5])}; remove one of the files")
            for name, box in boxes.items():
                self._pieces.setdefault(name, []).append(box)
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name, pieces in self._pieces.items():
            shape = tuple(max(stop for _, stop in spans) for spans in zip(*(piece.spans for piece in pieces)))
            if len({piece.dtype for piece in pieces}) > 1:
                raise CheckpointError(f"the shards of {name!r} have different dtypes")
            check_cover(name, shape, [piece.spans for piece in pieces])
            self._shapes[name] = shape

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return every tensor's name and shape."""
        return self._shapes

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Return every tensor's name and dtype."""
        return {name: pieces[0].dtype for name, pieces in self._pieces.items()}

    def pieces(self, name: str) -> Sequence[Box]:
        """Return the pieces of a tensor: one, unless HuggingFaceStorageWriter saved the shards of several ranks."""
        return self._pieces[name]

    def read(self, name: str, index: tuple[slice, ...], out: torch.Tensor) -> None:
        """Copy ``tensor[index]`` into ``out`` (the slice's shape; cast to its dtype)."""
        if name not in self._pieces:
            raise CheckpointError(f"{self._path} has no tensor {name!r}; {suggestion(name, self._pieces)}")
        spans = spans_of(index, self._shapes[name])
        for piece in self._pieces[name]:
            if (here := overlap(spans, piece.spans)) is not None:
                piece.read(here, out[within(here, spans)])


@final
class TorchWeights:
    """Read files of ``torch.save`` as a WeightSource, by torch's weights-only loader, which runs no code.

    >>> par.materialize(weights=TorchWeights("model.pt", prefix="model."))  # doctest: +SKIP

    Args:
        path: a file (``.pt``, ``.pth``, ``.bin``, ``.ckpt``), or a folder of these. Those of a store are copied to a
            temporary folder of this process, because torch maps them.
        prefix: only tensors whose name begins with it, without it. Nested dicts have dotted names.

    Raises:
        CheckpointError: a file is damaged, contains other objects than plain data and tensors, or no such tensor.
    """

    def __init__(self, path: PlaceLike, *, prefix: str = "") -> None:
        self._path, self._tensors = place(path), dict[str, torch.Tensor]()
        if self._path.is_dir() and (other := remedy(self._path)) and TorchWeights.__name__ not in other:
            raise CheckpointError(f"{self._path} is not a folder of torch.save{other}")
        for file in _pickled_files(self._path) if self._path.is_dir() else [self._path]:
            tensors = _flat(_loaded(fetched(file)))
            if twice := tensors.keys() & self._tensors.keys():
                raise CheckpointError(
                    f"{min(twice)!r} is in {file} and in another file of {self._path}; remove one of them"
                )
            self._tensors |= tensors
        named = self._tensors.items()
        self._tensors = {name.removeprefix(prefix): tensor for name, tensor in named if name.startswith(prefix)}
        if not self._tensors:
            which = f" whose names begin with {prefix!r}" if prefix else ""
            raise CheckpointError(f"{self._path} has no tensors{which}")

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return every tensor's name and shape."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Return every tensor's name and dtype."""
        return {name: tensor.dtype for name, tensor in self._tensors.items()}

    def read(self, name: str, index: tuple[slice, ...], out: torch.Tensor) -> None:
        """Copy ``tensor[index]`` into ``out`` (the slice's shape; cast to its dtype)."""
        if name not in self._tensors:
            raise CheckpointError(f"{self._path} has no tensor {name!r}; {suggestion(name, self._tensors)}")
        out.copy_(self._tensors[name][index])


def _pickled_files(folder: Place) -> list[Place]:
    """Return the files with weights: those that transformers writes, otherwise all."""
    return entries(folder, "pytorch_model*.bin") or [entry for entry in entries(folder) if entry.suffix in PICKLED]


def _loaded(file: Path) -> object:
    if not file.is_file():
        raise CheckpointError(f"there is no file {file}")
    try:
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # torch's format before 1.6 cannot be mapped
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} contains other objects than tensors and plain data, which could run code, or is damaged; load "
            f"the file where you trust it, and save the state_dict alone: {brief(error)}"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(f"{file} is not a complete file of torch.save: {brief(error)}") from error


def _flat(value: object, name: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {name: value}
    entries = value.items() if isinstance(value, Mapping) else ()
    return {
        key: tensor
        for outer_key, inner in entries
        for key, tensor in _flat(inner, f"{name}.{outer_key}" if name else str(outer_key)).items()
    }


def weights_in(path: PlaceLike) -> Safetensors | TorchWeights | DistributedCheckpoint:
    """Return the weights of safetensors, ``torch.save`` or accelerate's FSDP, in a file or folder."""
    path = place(path)
    folder = path if path.name == ACCELERATE else path / ACCELERATE
    if (folder / METADATA_NAME).is_file():
        return DistributedCheckpoint(folder, prefix=MODEL)
    pickled = path.is_dir() and not any(path.glob("*.safetensors*")) and _pickled_files(path)
    return TorchWeights(path) if path.suffix in PICKLED or pickled else Safetensors(path)


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
    if not path.name.endswith(".json"):
        return {path: []}
    try:
        listed: dict[Place, list[str]] = {}
        for name, file in sorted(read_json(path.reader())["weight_map"].items()):
            listed.setdefault(path.parent / inside(file), []).append(name)
    except StoreError:
        raise
    except (CheckpointError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a safetensors index: {brief(error)}") from error
    if gone := [file for file in listed if not file.exists()]:
        examples = ", ".join(file.name for file in gone[:5])
        raise CheckpointError(
            f"{path} lists {len(listed)} files, and {len(gone)} of them are missing: {examples}; {_AGAIN}"
        )
    return listed


def read_header(file: Readable) -> tuple[dict[str, Box], Collection[str]]:
    """Return the position of each tensor of a safetensors file, and the names of those that are shards of others."""
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
        for name, offset in offsets.items():
            dims = len(boxes[name].shape)
            if len(offset) != dims or not all(type(start) is int for start in offset):
                raise CheckpointError(f"the shard of {name!r} is at {offset} of a tensor of {dims} dims")
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
    if start < 0 or any(size < 0 for size in box.shape) or stop - start != box.nbytes:
        raise CheckpointError(
            f"a tensor of shape {box.shape} and dtype {entry['dtype']} does not fit bytes {start} to {stop}"
        )
    return box


def write_header(shapes: Shapes, dtypes: Dtypes) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file of these tensors in this order, and each tensor's position in the file, in bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset, offsets = 0, dict[str, int]()
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
