"""Copy files from place to place: from and to a store block by block, and to this machine's disk once."""

from __future__ import annotations

import atexit
import functools
import hashlib
import operator
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from meshpar.checkpoints.storage.disk import DiskPath
from meshpar.checkpoints.storage.objects import ObjectPath
from meshpar.checkpoints.storage.place import Place, PlaceLike, either, place
from meshpar.core.errors import CheckpointError
from meshpar.process.build_once import build_once

_BLOCK_BYTES = 4 << 20


def copy_file(source: PlaceLike, target: PlaceLike) -> None:
    """Copy a file; from and to a store block by block."""
    source, target = place(source), place(target)
    if source.mounted and target.mounted:
        shutil.copyfile(str(source), str(target))
        target.flush()
        return
    file = source.reader()
    run, block = file.run(0, file.size), memoryview(bytearray(min(file.size, _BLOCK_BYTES)))
    with target.writing(file.size) as write:
        for start in range(0, file.size, _BLOCK_BYTES):
            piece = block[: min(len(block), file.size - start)]
            run.fill(piece, start)
            write(piece)
    file.close()


def carried(sources: Iterable[Path], folder: Place) -> None:
    """Copy files and folders that exist into a folder of a store, unless that is where they are."""
    for source in () if folder.mounted else sources:
        inside = (
            sorted(file for file in source.rglob("*") if file.is_file())
            if source.is_dir()
            else [source]
            if source.is_file()
            else []
        )
        for file in inside:
            upload(file, functools.reduce(operator.truediv, file.relative_to(source.parent).parts, folder))


def upload(source: Path, target: Place, on_write: Callable[[], object] = lambda: None) -> None:
    """Copy a large file from the disk, block by block; ``on_write`` is called after each."""
    with source.open("rb") as file, target.writing(source.stat().st_size) as write:
        while block := file.read(_BLOCK_BYTES):
            write(block)
            on_write()


def fetched(source: PlaceLike, cache: Path | None = None, beside: Sequence[str] = ()) -> DiskPath:
    """Return a file or folder on this machine's disk: itself, or a copy of what a store has now, made once in
    ``cache``.

    Args:
        source: a file or a folder.
        cache: the folder of copies; None: one that goes with this process.
        beside: suffixes of files beside ``source`` that belong to it, where they exist.

    Raises:
        CheckpointError: the store has no such key.
        RecipeError: the copy cannot be written, as on a full disk.
    """
    return either(source, disk=lambda here: here, store=lambda key: _fetched(key, cache, beside))


def _fetched(source: ObjectPath, cache: Path | None, beside: Sequence[str]) -> DiskPath:
    found = {source / key if key else source: facts for key, facts in source.below().items()}
    if not found:
        raise CheckpointError(
            f"there is no {source}{'; write a folder: a URL is no pattern' if set('*?[') & set(source.key) else ''}"
        )
    others = [source.with_name(source.name.removesuffix(source.suffix) + suffix) for suffix in beside]
    found |= {other: facts for other in others if (facts := other.below().get(""))}
    if cache is None:
        cache = Path(tempfile.mkdtemp(prefix="meshpar-"))
        atexit.register(shutil.rmtree, cache, ignore_errors=True)
    folder = (
        cache
        / hashlib.sha256(
            f"{source} {sorted((str(path), facts) for path, facts in found.items())}".encode()
        ).hexdigest()[:16]
    )

    def copy(fresh: Path) -> None:
        for path, (_, _, written) in found.items():
            target = fresh / str(path)[len(str(source.parent)) :].strip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            copy_file(path, target)
            os.utime(target, (written, written))

    return DiskPath(build_once(folder, copy) / source.name)
