"""Where checkpoints are kept: a folder of a file system, or keys of an object store. The one place that asks which of the two it is.

The verbs: list (``iterdir``), read a range (:func:`open_file`), write a stream (:func:`writing`), create if absent (:func:`create`),
delete (:func:`delete`).
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import operator
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from meshpar.checkpoints.storage.files import Readable, ReadFile
from meshpar.checkpoints.storage.objects import SCHEMES, ObjectPath, ReadObject
from meshpar.checkpoints.storage.writeback import WrittenBehind
from meshpar.errors import CheckpointError
from meshpar.once import build_once

Place = Path | ObjectPath
"""A path of a file system, or of an object store: both have the members that checkpoints use."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/{1,2}([^/]*)/*(.*?)/*", re.DOTALL)


def place(path: str | Place) -> Place:
    """Return the place that a path or a URL names. ``Path`` shortens ``s3://`` to ``s3:/``, which is a URL, too.

    Raises:
        CheckpointError: a URL of a scheme that is not supported, without a bucket, with credentials, or with a key that stores change.
    """
    if isinstance(path, ObjectPath) or (found := _URL.fullmatch(str(path))) is None:
        return path if isinstance(path, ObjectPath) else Path(path)
    scheme, bucket, key = found[1].lower(), found[2], found[3]
    if scheme == "file":
        return Path("/", unquote(f"{bucket}/{key}"))
    if scheme not in SCHEMES or not bucket:
        known = ", ".join(f"{each}://bucket/key" for each in SCHEMES)
        raise CheckpointError(f"{scheme}://{bucket}/{key} is a URL that is not supported; expected a folder, file:///folder, or {known}")
    if not re.fullmatch(r"[\w.$-]+", bucket) or "?" in key:  # not repeated: it may be a secret
        raise CheckpointError(
            f"a URL of {scheme}:// has more than a bucket and a key; expected {scheme}://bucket/key without user, port and query: "
            "credentials come from the store's usual environment"
        )
    if key and (not key.isprintable() or "\\" in key or {"", ".", ".."} & {*key.split("/")}):
        raise CheckpointError(
            f"{str(path)!r} is not a key that all stores keep; expected no '//', '.', '..', backslash or control character"
        )
    return ObjectPath(f"{scheme}://{bucket}", key)


def on_disk(path: str | Place, *, why: str) -> Path:
    """Return a path of a file system; raises CheckpointError that ends with ``why`` for an object store."""
    found = place(path)
    if isinstance(found, ObjectPath):
        raise CheckpointError(f"{found} is a URL; expected a path of a file system: {why}")
    return found


def entries(folder: Place, pattern: str = "*") -> list[Place]:
    """Return what is directly in a folder and matches, by name."""
    return sorted(folder.glob(pattern), key=lambda each: each.name)


def open_file(path: Place, *, links: bool = True) -> Readable:
    """Open a file or an object for reads of ranges; raises CheckpointError if it does not exist. ``links``: as for :class:`ReadFile`."""
    return ReadObject(path) if isinstance(path, ObjectPath) else ReadFile(path, links=links)


def size_of(path: Place) -> int:
    """Return the size of a regular file, or of an object, in bytes.

    Raises:
        OSError: there is none.
        CheckpointError: it is a link or a device.
    """
    if isinstance(path, ObjectPath):
        size = path.size()
        if size is None:
            raise FileNotFoundError(2, os.strerror(2), str(path))
        return size
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError("expected a file, found a link or a device; copy the checkpoint with its files, such as by cp -L")
    return found.st_size


def read_small(path: Place) -> bytes | None:
    """Return all bytes of a small file that is no link, or of an object; None: there is none. Raises OSError as reads do."""
    if isinstance(path, ObjectPath):
        found = path.read()
        return None if found is None else found[0]
    if not path.exists():
        return None
    file = ReadFile(path, links=False)
    return file.bytes(0, file.size)


def free_bytes(folder: Place) -> float:
    """Return the free space; stores have no bound."""
    return float("inf") if isinstance(folder, ObjectPath) else shutil.disk_usage(folder).free


@contextmanager
def writing(path: Place, expected_bytes: int = 0) -> Iterator[Callable[[Any], object]]:
    """Yield a function that writes the next bytes of a new file, which is on the disk, or in the store, when the block ends."""
    if isinstance(path, ObjectPath):
        with path.writing(expected_bytes) as write:
            yield write
        return
    with path.open("wb", buffering=0) as file:
        behind = WrittenBehind(file.fileno(), expected_bytes)
        yield behind.write
        behind.finish()


def write_durably(path: Place, text: str) -> None:
    """Write a small file atomically, and flush it to the disk."""
    if isinstance(path, ObjectPath):
        path.write(text.encode())
        return
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    fsync(path.parent)


def copy_file(source: Place, target: Place) -> None:
    """Copy a file; from and to a store block by block."""
    if isinstance(source, Path) and isinstance(target, Path):
        shutil.copyfile(source, target)
        fsync(target)
        return
    file = open_file(source)
    run, block = file.run(0, file.size), memoryview(bytearray(min(file.size, 4 << 20)))
    with writing(target, file.size) as write:
        for start in range(0, file.size, 4 << 20):
            piece = block[: min(len(block), file.size - start)]
            run.fill(piece, start)
            write(piece)
    file.close()


def carried(sources: Iterable[Path], folder: Place) -> None:
    """Copy files and folders that exist into a folder of a store, unless that is where they are."""
    if isinstance(folder, ObjectPath):
        for each in sources:
            inside = sorted(file for file in each.rglob("*") if file.is_file()) if each.is_dir() else [each] if each.is_file() else []
            for file in inside:
                upload(file, functools.reduce(operator.truediv, file.relative_to(each.parent).parts, folder))


def upload(source: Path, target: Place, told: Callable[[], object] = lambda: None) -> None:
    """Copy a large file from the disk, block by block; ``told`` is called after each."""
    with source.open("rb") as file, writing(target, source.stat().st_size) as write:
        while block := file.read(4 << 20):
            write(block)
            told()


def fetched(source: Place, cache: Path | None = None, beside: Sequence[str] = ()) -> Path:
    """Return a file or folder on this machine's disk: itself, or a copy of what a store has now, made once in ``cache``.

    Args:
        source: a file or a folder.
        cache: the folder of copies; None: one that goes with this process.
        beside: suffixes of files beside ``source`` that belong to it, where they exist.

    Raises:
        CheckpointError: the store has no such key.
        RecipeError: the copy cannot be written, as on a full disk.
    """
    if isinstance(source, Path):
        return source
    found = {source / key if key else source: facts for key, facts in source.below().items()}
    if not found:
        raise CheckpointError(f"there is no {source}{'; write a folder: a URL is no pattern' if set('*?[') & set(source.key) else ''}")
    others = [source.with_name(source.name.removesuffix(source.suffix) + suffix) for suffix in beside]
    found |= {each: facts for each in others if (facts := each.below().get(""))}
    if cache is None:
        cache = Path(tempfile.mkdtemp(prefix="meshpar-"))
        atexit.register(shutil.rmtree, cache, ignore_errors=True)
    folder = cache / hashlib.sha256(f"{source} {sorted((str(each), facts) for each, facts in found.items())}".encode()).hexdigest()[:16]

    def copy(fresh: Path) -> None:
        for each, (_, _, written) in found.items():
            target = fresh / str(each)[len(str(source.parent)) :].strip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            copy_file(each, target)
            os.utime(target, (written, written))

    return build_once(folder, copy) / source.name


def delete(path: Place) -> None:
    """Delete a file, or a folder with all that is in it."""
    if isinstance(path, ObjectPath):
        if path.listed is not False:
            path.remove_all()
        if not path.listed:
            path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def fsync(path: Place) -> None:
    """Flush a file or a folder to the disk; what a store has taken is kept."""
    if isinstance(path, ObjectPath):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
