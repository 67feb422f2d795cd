"""Import: convert published safetensors to a committed step that any mesh restores, streamed from file to file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from meshpar.checkpoints.format.copying import ByteCount, Progress, StoredSource
from meshpar.checkpoints.format.manifest import MODEL
from meshpar.checkpoints.format.safetensors import weights_in
from meshpar.checkpoints.format.writing import Checksum, Item, whole, write_file
from meshpar.checkpoints.steps.recording import make_manifest
from meshpar.checkpoints.steps.steps import Steps
from meshpar.checkpoints.storage.files import BLOCK_BYTES, TILE_BYTES, Box, failing_as, memory_of, read_json, tiles
from meshpar.checkpoints.storage.place import Place, PlaceLike, place
from meshpar.core.errors import CheckpointError
from meshpar.weights import Mapped, TypedSource, WeightMap


def import_safetensors(
    src: PlaceLike,
    root: PlaceLike,
    *,
    weights: WeightMap | None = None,
    dtype: torch.dtype | None = None,
    step: int = 0,
    config: Mapping[str, Any] | None = None,
    checksum: Checksum = "crc32",
    progress: Progress | None = None,
) -> Place:
    """Convert a model's safetensors to a committed step that contains only the model.

    An import runs without a process group and without building the model.

    Args:
        src: a safetensors file, an index, or a folder of these; files of ``torch.save``, as for :class:`TorchWeights`;
            or a checkpoint of accelerate's FSDP.
        root: the folder of steps in which to write the step.
        weights: rules from our names to those in ``src``; None: they are the same.
        dtype: dtype of the floating-point tensors; None: unchanged.
        step: number of the step.
        config: the published ``config.json``; None: the ``config.json`` next to ``src``, if there is one.
        checksum: see :class:`CheckpointManager`.
        progress: called with the bytes written so far and the bytes to write.

    Returns:
        The step's folder; ``CheckpointManager(root).restore(par)`` reads it on any mesh.

    Raises:
        CheckpointError: damaged files, files that do not fit their index, an existing step, or too little space.
        LayoutError: the weight map does not fit the tensors.
    """
    steps, rules = Steps(root), weights if weights is not None else WeightMap()
    stored = weights_in(src)
    source = rules.view(stored)
    dtypes = {
        name: dtype if dtype is not None and stored_dtype.is_floating_point else stored_dtype
        for name, stored_dtype in source.dtypes().items()
    }
    total = sum(math.prod(shape) * dtypes[name].itemsize for name, shape in source.shapes().items())
    published = config_beside(src) if config is None else dict(config)
    with failing_as(f"importing to {root}"):
        steps.reap()
        folder = steps.begin(step, replace=False)
        try:
            if (free := folder.free_bytes()) < total:
                raise CheckpointError(
                    f"{root} has {free / 1e9:.2f} GB free; this import needs {total / 1e9:.2f} GB: free some space"
                )
            file = write_file(
                folder / "__0_0.distcp",
                _items(source, stored, dtypes, ByteCount(total, progress).add),
                checksum,
                expected_bytes=total,
            )
            groups = whole((MODEL + name, shape, dtypes[name]) for name, shape in source.shapes().items())
            about = {"step": step, "mesh": {}, "world_size": 1, "device": "cpu", "plan": f"imported from {src}"}
            return steps.commit(
                folder,
                make_manifest(folder, groups, [file], {**about, "weights": rules.to_json(), "config": published}),
            )
        finally:
            steps.abandon(folder)


def _items(
    source: Mapped, stored: TypedSource, dtypes: Mapping[str, torch.dtype], advance: Callable[[int], None]
) -> Iterator[Item]:
    """Yield the tensors in the order of their files."""
    space = torch.empty(TILE_BYTES, dtype=torch.uint8)
    for name, shape in source.shapes().items():
        origin = source.origin(name)
        same = origin is not None and source.dtypes()[name] == dtypes[name]
        pieces = stored.pieces(origin) if same and origin and isinstance(stored, StoredSource) else ()
        blocks = (
            _copied(pieces[0], space, advance)
            if len(pieces) == 1
            else _built(source, name, shape, dtypes[name], space, advance)
        )
        yield Item(MODEL + name, (0,) * len(shape), shape, dtypes[name], blocks)


def _copied(piece: Box, space: torch.Tensor, advance: Callable[[int], None]) -> Iterator[memoryview]:
    run = piece.file.run(piece.position, piece.position + piece.nbytes)
    for start in range(0, piece.nbytes, BLOCK_BYTES):
        block = memory_of(space)[: min(BLOCK_BYTES, piece.nbytes - start)]
        run.fill(block, piece.position + start)
        yield block
        advance(len(block))


def _built(
    source: Mapped,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    space: torch.Tensor,
    advance: Callable[[int], None],
) -> Iterator[memoryview]:
    for spans in tiles(shape, dtype.itemsize, TILE_BYTES):
        sizes = [b - a for a, b in spans]
        tile = space[: math.prod(sizes) * dtype.itemsize].view(dtype).view(sizes)
        source.read(name, tuple(slice(*span) for span in spans), tile)
        yield memory_of(tile)
        advance(tile.nbytes)


def config_beside(src: PlaceLike) -> dict[str, Any]:
    """Return the contents of the ``config.json`` beside published weights, or {}; raises CheckpointError if it is
    damaged.
    """
    src = place(src)
    path = (src if src.is_dir() else src.parent) / "config.json"
    found = read_json(path.reader()) if path.is_file() else {}
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is not a model's config: expected a JSON object, got {type(found).__name__}")
    return found
