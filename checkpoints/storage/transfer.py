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
from meshpar.checkpoints.storage.files import read_blocks
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
    with target.writing(file.size) as write:
        for block in read_blocks(file, 0, file.size, _BLOCK_BYTES):
            write(block)
    file.close()


def carried(sources: Iterable[Path], folder: Place) -> None:
    """Copy files and folders that exist into a folder of a store, unless that is where they are."""
    for source in () if folder.mounted else sources:
        for file in sorted(path for path in (source, *source.rglob("*")) if path.is_file()):
            upload(file, functools.reduce(operator.truediv, file.relative_to(source.parent).parts, folder))


def upload(source: Path, target: Place, on_write: Callable[[], object] = lambda: None) -> None:
    """Copy a large file from the disk, block by block; ``on_write`` is called after each."""
    with source.open("rb") as file, target.writing(source.stat().st_size) as write:
        while block := file.read(_BLOCK_BYTES):
            write(block)
            on_write()


def fetched(source: PlaceLike, cache: Path | None = None, beside: Sequence[str] = ()) -> DiskPath:
    """Return a file or folder on this machine's disk: itself, or a copy of what a store has now, made once in
    ``cache``; None: in a folder that goes with this process. ``beside``: suffixes of files next to ``source`` to copy,
    where they exist. Raises CheckpointError without such a key, RecipeError where the copy cannot be written.
    """
    return either(source, disk=lambda here: here, store=lambda key: _fetched(key, cache, beside))


def _fetched(source: ObjectPath, cache: Path | None, beside: Sequence[str]) -> DiskPath:
    versions = {source / key if key else source: facts for key, facts in source.below().items()}
    if not versions:
        raise CheckpointError(
            f"there is no {source}{'; write a folder: a URL is no pattern' if set('*?[') & set(source.key) else ''}"
        )
    stem = source.name.removesuffix(source.suffix)
    siblings = [source.with_name(stem + suffix) for suffix in beside]
    versions |= {sibling: facts for sibling in siblings if (facts := sibling.below().get(""))}
    if cache is None:
        cache = Path(tempfile.mkdtemp(prefix="meshpar-"))
        atexit.register(shutil.rmtree, cache, ignore_errors=True)
    content = f"{source} {sorted((str(path), facts) for path, facts in versions.items())}"
    folder = cache / hashlib.sha256(content.encode()).hexdigest()[:16]

    def copy(fresh: Path) -> None:
        for path, (_, _, written) in versions.items():
            target = fresh / str(path)[len(str(source.parent)) :].strip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            copy_file(path, target)
            os.utime(target, (written, written))

    return DiskPath(build_once(folder, copy) / source.name)
