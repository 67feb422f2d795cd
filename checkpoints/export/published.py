"""The model in a checkpoint as a source of weights: under the module's names, and under its published ones."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from meshpar.checkpoints.format.copying import are_copied, check_piece, read_tiles
from meshpar.checkpoints.format.dcp import DistributedCheckpoint
from meshpar.checkpoints.format.manifest import AVERAGES, MODEL, in_order, read_manifest
from meshpar.checkpoints.format.verify import Verify, open_verified
from meshpar.checkpoints.steps.steps import open_step
from meshpar.checkpoints.storage.checksums import crc32
from meshpar.checkpoints.storage.files import TILE_BYTES, Box, Dtypes, Shapes, memory_of, tiles
from meshpar.checkpoints.storage.place import PlaceLike
from meshpar.core.errors import CheckpointError, MeshparError
from meshpar.weights import Mapped, TypedSource, WeightMap, average_called


@final
class Digest:
    """A SHA-256 of tensors in their order: of the name, dtype, shape and CRC-32 of each.

    >>> import torch
    >>> digest = Digest()
    >>> digest.add("weight", torch.zeros(2, 2))
    >>> digest.hexdigest()[:8]
    'b0d24dd2'
    """

    def __init__(self) -> None:
        self._sum = hashlib.sha256()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add the next tensor."""
        values = tensor.detach().cpu().contiguous()
        checksum = crc32(memory_of(values)) if values.numel() else 0
        self._sum.update(f"{name} {dtype_text(tensor.dtype)} {tuple(tensor.shape)} {checksum:08x}\n".encode())

    def hexdigest(self) -> str:
        """Return the digest of what was added."""
        return self._sum.hexdigest()


def dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}


@final
class StoredModel:
    """The model's tensors of a checkpoint by the module's names, with the values of an average where it has them."""

    def __init__(self, source: DistributedCheckpoint, tied: Sequence[Sequence[str]], averaged: str | None) -> None:
        self._source = source
        saved = in_order(name for name in source.tensors if name.startswith(MODEL))
        self._names = {clean_name(name.removeprefix(MODEL)): name for name in saved}
        if (count := len(self._names)) != len(saved):
            raise CheckpointError(f"{len(saved)} tensors have only {count} names without the parts of wrappers")
        if not saved:
            raise CheckpointError(f"{source.folder} has no tensors of a model (no name begins with {MODEL!r})")
        for group in tied:  # each under its first name
            owner, *other_names = [name for name in group if name in self._names] or [""]
            for other in other_names:
                first, second = (source.tensors[self._names[name]] for name in (owner, other))
                if first != second and not same_tensor(self, owner, other):
                    raise CheckpointError(
                        f"{owner} and {other} are tied but differ in the checkpoint; the export would lose one"
                    )
                del self._names[other]
        for clean, name in self._names.items() if averaged is not None else ():
            average = f"{AVERAGES}{averaged}.{name.removeprefix(MODEL)}"
            self._names[clean] = average if average in source.tensors else name

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: self._source.tensors[key].shape for name, key in self._names.items()}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {name: self._source.tensors[key].dtype for name, key in self._names.items()}

    def read(self, name: str, index: tuple[slice, ...], out: torch.Tensor) -> None:
        self._source.read(self._names[name], index, out)

    def pieces(self, name: str) -> list[Box]:
        stored = self._names[name]
        chunks = sorted(self._source.tensors[stored].chunks, key=lambda chunk: chunk.offsets)
        return [self._source.box(stored, chunk) for chunk in chunks]


def published_model(
    path: PlaceLike, weights: WeightMap | None = None, verify: Verify = "size", averaged: str = "trained"
) -> PublishedModel:
    """Return the model of a step by its published names; arguments as of ``export_safetensors``."""
    folder = open_step(path)
    manifest = read_manifest(folder)
    try:
        average = average_called(averaged, manifest.averages)
    except MeshparError as error:
        raise CheckpointError(f"step {manifest.step}: {error}") from error
    stored = StoredModel(open_verified(folder, manifest, verify, whole=False), manifest.tied, average)
    names = WeightMap.from_json(manifest.weights) if weights is None else weights
    published = PublishedModel(stored, names.publish(stored), manifest.config)
    if verify == "full":  # now of what is rearranged; the rest is checked while it is copied
        shapes = published.shapes().items()
        copied = {published.origin(name) for name, shape in shapes if are_copied(published.pieces(name), shape)}
        for name in stored.shapes():
            for piece in stored.pieces(name) if name not in copied else ():
                check_piece(piece)
    return published


@final
class PublishedModel:
    """The model's tensors under their published names, and its config."""

    def __init__(self, model: StoredModel, mapped: Mapped, config: Mapping[str, Any] | None) -> None:
        self._model, self.config = model, config
        self.shapes, self.dtypes, self.read, self.origin = mapped.shapes, mapped.dtypes, mapped.read, mapped.origin

    def pieces(self, name: str) -> list[Box]:
        origin = self.origin(name)
        return [] if origin is None else self._model.pieces(origin)


def in_files(shapes: Shapes, dtypes: Dtypes, limit: int, *, scaled: bool = False) -> dict[str, list[str]]:
    """Divide the tensors of a published model among files of ``limit`` bytes, unless one tensor alone is larger."""
    if limit < 1:
        raise CheckpointError(f"max_shard_size is {limit}; expected at least 1 byte")
    groups: list[list[str]] = [[]]
    size = 0
    for name in shapes:
        size += nbytes(shapes[name], dtypes[name])
        if groups[-1] and size > limit:
            groups.append([])
            size = nbytes(shapes[name], dtypes[name])
        groups[-1].append(name)
    # Larger items come first, so that every tensor begins at a multiple of its item's size, as readers that map the
    # file require. ``scaled``: scales follow their weights where tensors are aligned all the same.
    for group in groups:
        if not scaled or any(nbytes(shapes[name], dtypes[name]) % 8 for name in group):
            group.sort(key=lambda name: -dtypes[name].itemsize)
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, 1)}


def nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def clean_name(name: str) -> str:
    """Return a parameter's name without the parts that ``torch.compile``, ``checkpoint_wrapper`` and FSDP1 add."""
    wrappers = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
    return ".".join(part for part in name.split(".") if part not in wrappers)


def same_tensor(source: TypedSource, one: str, other: str) -> bool:
    """Return whether two tensors of a source have the same shape, dtype and bits."""
    shape, dtype = source.shapes()[one], source.dtypes()[one]
    if (shape, dtype) != (source.shapes()[other], source.dtypes()[other]):
        return False
    boxes = list(tiles(shape, dtype.itemsize, TILE_BYTES))
    pairs = zip(*(read_tiles(source, name, dtype, boxes) for name in (one, other)))
    return all(memory_of(first) == memory_of(second) for first, second in pairs)


def bytes_of(text: str | int) -> int:
    """Return the number of bytes of ``5GB``, ``1.5 GiB`` or ``1000``."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]I?)?B?\s*", str(text).upper())
    if match is None:
        raise CheckpointError(f"the size is {text!r}; expected a size such as 500MB, 5GB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2] or ""])
