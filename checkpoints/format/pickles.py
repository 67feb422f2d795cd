"""Read torch's pickles without running code: every global is looked up in an allow-list of plain stand-ins.

DCP's ``.metadata`` and the ``data.pkl`` of each saved tensor are pickles, and a pickle can name any function to be
called. These readers build inert records instead; a name that is not listed raises.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch

from meshpar.core.errors import CheckpointError

T = TypeVar("T")


class PickledObject:
    """The attributes of one pickled object, without its class."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments


class _WithState(PickledObject):
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
_PART_CLASSES = {
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "MetadataIndex"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
"""Of which a ``.metadata`` has one for each part. Pickle sets their attributes itself, faster than a method would."""
_METADATA_CLASSES = {
    (_METADATA, "Metadata"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}


def _dtype(module: str, name: str) -> torch.dtype | None:
    found = getattr(torch, name, None) if module == "torch" and "." not in name else None
    return found if isinstance(found, torch.dtype) else None


class _Reader(pickle.Unpickler):
    """An unpickler that replaces every global by its stand-in in ``known``."""

    def __init__(self, stream: io.BytesIO, known: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(stream)
        self._known = known

    def find_class(self, module: str, name: str) -> object:
        if (module, name) in self._known:
            return self._known[module, name]
        if (dtype := _dtype(module, name)) is not None:
            return dtype
        raise CheckpointError(
            f"it refers to {module}.{name}, which no checkpoint needs; it may be an attack and was not run"
        )


@final
class _ItemReader(_Reader):
    def persistent_load(self, pid: tuple[object, ...]) -> tuple[object, str]:
        kind, storage, key, _device, _count = pid
        if kind != "storage":
            raise CheckpointError(f"it refers to {kind!r} instead of a storage")
        return storage, str(key)


def read_metadata(data: bytes, path: object) -> PickledObject:
    """Return DCP's ``.metadata`` as records; raises CheckpointError for anything else."""
    known: dict[tuple[str, str], Any] = dict.fromkeys(_METADATA_CLASSES, _WithState)
    known |= dict.fromkeys(_PART_CLASSES, PickledObject)
    known["torch", "Size"] = lambda sizes=(): tuple(sizes)
    known["collections", "OrderedDict"] = dict
    loaded = _guarded(lambda: _Reader(io.BytesIO(data), known).load(), path)
    if not isinstance(loaded, PickledObject):
        raise CheckpointError(f"{path} is not the metadata of a distributed checkpoint, but a {type(loaded).__name__}")
    return loaded


def read_tensor_pickle(data: bytes, path: object) -> SavedTensor:
    """Read the ``data.pkl`` of one tensor saved by ``torch.save``; raises CheckpointError for anything else."""
    storages = {("torch", name): dtype for name, dtype in _STORAGES.items()}
    known: dict[tuple[str, str], Any] = {
        ("torch._utils", "_rebuild_tensor_v2"): _rebuild_v2,
        ("torch._utils", "_rebuild_tensor_v3"): _rebuild_v3,
        ("torch.storage", "UntypedStorage"): None,
        ("collections", "OrderedDict"): dict,
        **storages,
    }
    loaded = _guarded(lambda: _ItemReader(io.BytesIO(data), known).load(), path)
    if not isinstance(loaded, SavedTensor):
        raise CheckpointError(f"{path} is not a tensor, but a {type(loaded).__name__}")
    return loaded


_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}


_STORAGE_NAMES = {dtype: name for name, dtype in _STORAGES.items()}


def tensor_pickle(shape: tuple[int, ...], dtype: torch.dtype) -> bytes:
    """Return the ``data.pkl`` that ``torch.save`` writes for a contiguous tensor whose storage is ``data/0``."""
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    legacy = _STORAGE_NAMES.get(dtype)
    count = math.prod(shape) * (1 if legacy else dtype.itemsize)
    kind = f"ctorch\n{legacy}\n" if legacy else "ctorch.storage\nUntypedStorage\n"
    storage = b"(" + _pickled("storage") + kind.encode() + _pickled("0") + _pickled("cpu") + _pickled(count) + b"tQ"
    hooks = b"\x89ccollections\nOrderedDict\n)R"
    more = b"" if legacy else f"ctorch\n{str(dtype).removeprefix('torch.')}\n".encode()
    rebuild = f"ctorch._utils\n_rebuild_tensor_{'v2' if legacy else 'v3'}\n".encode()
    return (
        b"\x80\x02"
        + rebuild
        + b"("
        + storage
        + _pickled(0)
        + _pickled(shape)
        + _pickled(strides)
        + hooks
        + more
        + b"tR."
    )


def _pickled(value: object) -> bytes:
    """Return the opcodes that push a value (the pickle of protocol 2 without its frame)."""
    return pickle.dumps(value, 2)[2:-1]


def _rebuild_v2(
    storage: tuple[torch.dtype, str], offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: object
) -> SavedTensor:
    return SavedTensor(storage[0], storage[1], offset, tuple(size), tuple(stride))


def _rebuild_v3(
    storage: tuple[None, str],
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    _grad: bool,
    _hooks: object,
    dtype: torch.dtype,
    *_: object,
) -> SavedTensor:
    return SavedTensor(dtype, storage[1], offset, tuple(size), tuple(stride))


def _guarded(load: Callable[[], T], path: object) -> T:
    try:
        return load()
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{path} cannot be trusted: {error}") from error
