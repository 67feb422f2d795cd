"""Export: write a checkpoint's model as safetensors under its published names, streamed from file to file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from meshpar.checkpoints.export.published import dtype_text, in_files, nbytes, published_model
from meshpar.checkpoints.export.quantizing import Quantization, Quantized, scheme_for
from meshpar.checkpoints.export.target import apart, free_target, make_whole
from meshpar.checkpoints.format.copying import ByteCount, Copier, Progress, StoredSource, are_copied, read_tiles
from meshpar.checkpoints.format.verify import Verify
from meshpar.checkpoints.format.weights import INDEX_NAME, write_header
from meshpar.checkpoints.steps.steps import open_step
from meshpar.checkpoints.storage.files import Dtypes, aligned, element_at, memory_of, tiles
from meshpar.checkpoints.storage.place import Place, PlaceLike, copy_file, entries, place
from meshpar.core.errors import CheckpointError
from meshpar.weights import TypedSource, WeightMap
from meshpar.weights.rules import Spans

TILE_BYTES = 8 << 20
MAX_SHARD_BYTES = 5 << 30
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".distcp", ".h5", ".msgpack", ".gguf")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """How a model is exported: the arguments of :func:`export_safetensors` and :func:`export_gguf`."""

    dtype: torch.dtype | None = None
    max_shard_size: int = MAX_SHARD_BYTES
    tokenizer: PlaceLike | None = None
    progress: Progress | None = None
    config: Mapping[str, Any] | None = None
    generation: Mapping[str, Any] | None = None
    beside: Sequence[PlaceLike] = ()
    weights: WeightMap | None = None
    verify: Verify = "size"
    quantize: str | None = None
    high: Sequence[str] = ()
    averaged: str = "trained"
    overwrite: bool = False


def export_safetensors(
    src: PlaceLike | TypedSource,
    dst: PlaceLike,
    dtype: torch.dtype | None = None,
    max_shard_size: int = MAX_SHARD_BYTES,
    tokenizer: PlaceLike | None = None,
    progress: Progress | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
    beside: Sequence[PlaceLike] = (),
    weights: WeightMap | None = None,
    verify: Verify = "size",
    quantize: Quantization | None = None,
    high: Sequence[str] = (),
    averaged: str = "trained",
    overwrite: bool = False,
) -> Place:
    """Export the model of a checkpoint to ``dst``: safetensors (with an index for several files), config and tokenizer.

    Runs in one process, without a process group, in a few MiB of memory.

    >>> export_safetensors("run/checkpoints/latest", "run/hf", dtype=torch.bfloat16)  # doctest: +SKIP

    Args:
        src: a step's folder, ``run/checkpoints/latest``, the folder of all steps (the newest), or a source of weights.
        dst: the folder to write; it appears once it is complete.
        dtype: dtype of the floating-point tensors; None: as saved.
        max_shard_size: largest size of one file in bytes, unless one tensor alone is larger.
        tokenizer: a folder whose files (except weights and ``config.json``) are copied beside the model.
        progress: called after each tile with the bytes written so far and the bytes to write.
        config: contents of ``config.json``; None: the config that was saved with the checkpoint.
        generation: contents of ``generation_config.json``; None: the tokenizer's folder may have one.
        beside: files to copy beside the model, such as ``generation_config.json``; they replace the tokenizer's.
        weights: rules from our names to the published ones; None: those of the checkpoint, or none for a source.
        verify: checks of a checkpoint: ``"none"``; ``"size"``: the size of every file, and the checksum of each part
            that is copied; ``"full"``: also of the parts that are rearranged, which are then read twice.
        quantize: format of the linear weights, in the layouts of compressed-tensors: ``"fp8"`` (a scale for each row),
            ``"fp8-block"`` (for 128 x 128), ``"int8"`` (for each row), ``"int4"`` (for 128 values of a row).
            Embeddings, heads, routers and norms stay.
        high: patterns of modules whose weights stay, too, with ``*`` for a part of the name: ``model.layers.0.mlp.*``.
        averaged: which weights: ``"trained"``, an average's name, or ``"averaged"`` for the only one.
        overwrite: whether to replace an existing file or folder.

    Returns:
        ``dst``.

    Raises:
        CheckpointError: no checkpoint, adapters, damage, different values of tied tensors, a taken folder, a full disk.
        LayoutError: the weight map does not fit the tensors, or gives two tensors the same name.
    """
    options = ExportOptions(dtype=dtype, max_shard_size=max_shard_size, quantize=quantize, high=high, averaged=averaged)
    options = replace(options, tokenizer=tokenizer, config=config, generation=generation, beside=beside)
    options = replace(options, weights=weights, progress=progress, verify=verify, overwrite=overwrite)
    return write_safetensors(src, dst, options)


def write_safetensors(src: PlaceLike | TypedSource, dst: PlaceLike, options: ExportOptions) -> Place:
    """Export a model to the folder ``dst``, as :func:`export_safetensors`."""
    target = free_target(dst, overwrite=options.overwrite)
    if not isinstance(src, TypedSource):
        apart(target, open_step(src))
    source, config = open_model(src, options)
    source, dtypes = convert(source, options, config)
    if isinstance(source, Quantized):
        config = {**(config or {}), "quantization_config": source.config()}
    tokenizer_files = files_beside_weights(options.tokenizer) if options.tokenizer is not None else []
    with make_whole(target, overwrite=options.overwrite) as folder:
        files = divide_into_files(source, dtypes, options)
        total = sum(nbytes(shape, dtypes[name]) for name, shape in source.shapes().items())
        count = ByteCount(total, options.progress)
        for file_name, names in files.items():
            _write_file(folder / file_name, source, names, dtypes, count)
        if len(files) > 1:
            weight_map = {name: file_name for file_name, names in files.items() for name in names}
            _write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
        for file in (*tokenizer_files, *map(place, options.beside)):
            copy_file(file, folder / file.name)
        if options.generation:
            _write_json(folder / "generation_config.json", options.generation)
        if config:  # last: where nothing can be renamed, an export without it is not complete
            kinds = {dtype for dtype in dtypes.values() if dtype.is_floating_point and dtype.itemsize > 1}
            if len(kinds) == 1:
                key = "torch_dtype" if "torch_dtype" in config else "dtype"
                config = {**config, key: dtype_text(kinds.pop())}
            _write_json(folder / "config.json", config)
    return place(dst)


def open_model(src: PlaceLike | TypedSource, options: ExportOptions) -> tuple[TypedSource, Mapping[str, Any] | None]:
    """Return the model of a checkpoint, or of a source of weights, under its published names, and its config."""
    if isinstance(src, TypedSource):
        return (src if options.weights is None else options.weights.publish(src)), options.config
    published = published_model(src, options.weights, options.verify, options.averaged)
    if adapters := [name for name in published.shapes() if ".lora_A." in name]:
        raise CheckpointError(
            f"{src} has adapters ({adapters[0]}, ...), and a step does not have the scale that merges them; write "
            "the tensors that par.published() yields, of a model that restored the step"
        )
    return published, published.config if options.config is None else options.config


def convert(
    source: TypedSource, options: ExportOptions, config: Mapping[str, Any] | None
) -> tuple[TypedSource, Dtypes]:
    """Return the tensors of a published model as they are written, and the dtype of each."""
    dtype = options.dtype
    if dtype is not None and (not dtype.is_floating_point or dtype.itemsize < 2):
        raise CheckpointError(
            f"dtype is {dtype}; expected a floating-point dtype of 16 bits or more, such as torch.bfloat16: float8 "
            'weights need scales; quantize them (--quantize fp8, in Python quantize="fp8")'
        )
    if options.quantize is not None:
        scheme, checked = scheme_for(options.quantize, config), options.verify != "none"
        scaled = Quantized(source, scheme, dtype, options.high, checked=checked)
        return scaled, scaled.dtypes()
    if options.high:
        raise CheckpointError("high names weights that are not quantised; pass quantize as well")
    return source, {
        name: stored_dtype if dtype is None or not stored_dtype.is_floating_point else dtype
        for name, stored_dtype in source.dtypes().items()
    }


def tiles_of(source: TypedSource, name: str, dtype: torch.dtype, limit: int | None = None) -> Iterable[Spans]:
    """Return the pieces in which a tensor is gathered, in the order of its bytes, of at most ``limit`` bytes."""
    if isinstance(source, Quantized):
        return source.tiles(name)
    return tiles(tuple(source.shapes()[name]), dtype.itemsize, TILE_BYTES if limit is None else min(limit, TILE_BYTES))


def divide_into_files(source: TypedSource, dtypes: Dtypes, options: ExportOptions) -> dict[str, list[str]]:
    """Return the names of the tensors in each file, in order."""
    return in_files(source.shapes(), dtypes, options.max_shard_size, scaled=isinstance(source, Quantized))


def _write_file(path: Place, source: TypedSource, names: Sequence[str], dtypes: Dtypes, count: ByteCount) -> None:
    whole, stored = source.shapes(), source if isinstance(source, StoredSource) else None
    shapes = {name: whole[name] for name in names}
    header, positions = write_header(shapes, dtypes)
    end = max((at + nbytes(shapes[name], dtypes[name]) for name, at in positions.items()), default=0)
    with path.writing(end) as write, _one_thread():
        write(header)
        copier = Copier(write, count.add)
        for name, shape in shapes.items():
            pieces = stored.pieces(name) if stored is not None else ()
            if are_copied(pieces, shape):
                for piece in sorted(pieces, key=lambda piece: piece.offsets):  # in the order of the file
                    start = positions[name] + element_at(piece.offsets, shape) * dtypes[name].itemsize
                    copier.copy(piece, dtypes[name], start)
            else:
                position = positions[name]
                for tile in read_tiles(source, name, dtypes[name], tiles_of(source, name, dtypes[name])):
                    memory = memory_of(tile)
                    for start, stop in aligned(len(memory), position):
                        write(memory[start:stop])
                    position += tile.nbytes
                    count.add(tile.nbytes)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch from waking its threads for each block, which costs more than they save."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _write_json(path: Place, data: Mapping[str, Any]) -> None:
    path.write_durably((json.dumps(data, indent=2) + "\n").encode())


def files_beside_weights(folder: PlaceLike) -> list[Place]:
    """Return the files of a published model's folder that are neither weights nor ``config.json``."""
    folder = place(folder)
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}; expected a folder with tokenizer files")
    files = [entry for entry in entries(folder) if entry.is_file() and not entry.name.endswith(_WEIGHTS)]
    return [file for file in files if file.name != "config.json"]
