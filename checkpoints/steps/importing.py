"""Import: convert published safetensors to a committed step that any mesh restores, streamed from file to file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from meshpar.checkpoints.format.copying import ByteCount, Progress, StoredSource, read_tiles
from meshpar.checkpoints.format.manifest import MODEL
from meshpar.checkpoints.format.weights import weights_in
from meshpar.checkpoints.format.writing import Checksum, TensorPart, make_manifest, whole, write_file
from meshpar.checkpoints.steps.steps import Steps
from meshpar.checkpoints.storage.files import TILE_BYTES, Dtypes, failing_as, memory_of, read_blocks, read_json, tiles
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
    """Convert a model's safetensors to a committed step with the model alone, without a process group.

    Args:
        src: safetensors, as for :class:`Safetensors`; files of ``torch.save``; or a checkpoint of accelerate's FSDP.
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
    steps, rules = Steps(root), WeightMap() if weights is None else weights
    stored = weights_in(src)
    source = rules.view(stored)
    dtypes = {
        name: stored_dtype if dtype is None or not stored_dtype.is_floating_point else dtype
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
            parts = _parts(source, stored, dtypes, ByteCount(total, progress))
            file = write_file(folder / "__0_0.distcp", parts, checksum, expected_bytes=total)
            groups = whole((MODEL + name, shape, dtypes[name]) for name, shape in source.shapes().items())
            about = {"step": step, "mesh": {}, "world_size": 1, "device": "cpu", "plan": f"imported from {src}"}
            about |= {"weights": rules.to_json(), "config": published}
            return steps.commit(folder, make_manifest(folder, groups, [file], about))
        finally:
            steps.abandon(folder)


def _parts(
    source: Mapped, stored: TypedSource, dtypes: Dtypes, count: ByteCount
) -> Iterator[tuple[TensorPart, Iterator[memoryview]]]:
    """Yield the tensors in the order of their files, with their bytes."""
    for name, shape in source.shapes().items():
        origin, dtype = source.origin(name), dtypes[name]
        same = origin is not None and source.dtypes()[name] == dtype
        pieces = stored.pieces(origin) if same and origin and isinstance(stored, StoredSource) else ()
        if len(pieces) == 1:
            blocks = read_blocks(pieces[0].file, pieces[0].position, pieces[0].position + pieces[0].nbytes)
        else:
            blocks = map(memory_of, read_tiles(source, name, dtype, tiles(shape, dtype.itemsize, TILE_BYTES)))
        part = TensorPart(MODEL + name, (0,) * len(shape), torch.empty(shape, dtype=dtype, device="meta"))
        yield part, count.through(blocks)


def config_beside(src: PlaceLike) -> dict[str, Any]:
    """Return the ``config.json`` next to published weights, or {}; raises CheckpointError if it is damaged."""
    src = place(src)
    path = (src if src.is_dir() else src.parent) / "config.json"
    config = read_json(path.reader()) if path.is_file() else {}
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a model's config: expected a JSON object, got {type(config).__name__}")
    return config
