"""Places of checkpoints, a path of a disk or a key of a store, and copies; only this file asks which it is."""

from __future__ import annotations

import atexit
import functools
import hashlib
import operator
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, TypeVar
from urllib.parse import unquote

from meshpar.checkpoints.storage.disk import DiskPath
from meshpar.checkpoints.storage.files import Readable, read_blocks
from meshpar.checkpoints.storage.objects import SCHEMES, ObjectPath
from meshpar.core.errors import CheckpointError
from meshpar.process.leftovers import build_once
from meshpar.process.secrets import REMEDY, redact

T = TypeVar("T")
_BLOCK_BYTES = 4 << 20
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/{1,2}([^/]*)/*(.*?)/*", re.DOTALL)


class Place(Protocol):
    """A file or a folder, wherever it is, with the names of ``pathlib.Path`` and the verbs that checkpoints need."""

    mounted: ClassVar[bool]  # on a file system, where folders are renamed; in a store keys are created on a condition

    @property
    def name(self) -> str: ...
    @property
    def suffix(self) -> str: ...
    @property
    def parent(self) -> Self: ...
    def __truediv__(self, name: str, /) -> Self: ...
    def with_name(self, name: str) -> Self: ...
    def resolve(self) -> Self: ...
    def absolute(self) -> Self: ...
    def expanduser(self) -> Self: ...
    def exists(self) -> bool: ...
    def is_file(self) -> bool: ...
    def is_dir(self) -> bool: ...
    def is_symlink(self) -> bool: ...
    def iterdir(self) -> Iterator[Self]: ...
    def glob(self, pattern: str) -> Iterator[Self]: ...
    def read_text(self, encoding: str = "utf-8") -> str: ...
    def unlink(self, missing_ok: bool = False) -> None: ...
    def rmdir(self) -> None: ...
    # seconds since a file, or anything in a folder, last changed; 0: it is changing now
    def untouched_s(self) -> float: ...
    # of the disk; infinity in a store
    def free_bytes(self) -> float: ...
    # of a file; raises OSError if there is none
    def size(self) -> int: ...
    # open a file for reads of ranges; raises CheckpointError if there is none, or without ``links`` for a link
    def reader(self, *, links: bool = True) -> Readable: ...
    # all bytes of a small file that is no link; None: there is none
    def read_small(self) -> bytes | None: ...
    # all bytes of a small file, and its version for ``create``; None: there is none
    def read_version(self) -> tuple[bytes, Any] | None: ...
    # yields a function that writes the next bytes of a new file, which is stored when the block ends without an error
    def writing(self, expected_bytes: int = 0) -> AbstractContextManager[Callable[[Any], object]]: ...
    # write a small file, whole or not at all
    def write_durably(self, data: bytes) -> None: ...
    # write a small file if there is none, or it has the version ``replaces``; return whether ``data`` is there now
    def create(self, data: bytes, *, replaces: Any = None) -> bool: ...  # noqa: ANN401 - a version
    # make a folder, and those above it; return whether there was none
    def make(self) -> bool: ...
    # keep a file, or the names in a folder, from a crash
    def flush(self) -> None: ...
    # delete a file, or a folder with all that is in it
    def delete(self) -> None: ...


PlaceLike = str | Path | Place  # a path, or a URL


def place(path: PlaceLike) -> Place:
    """Return the place that a path or a URL names; raises CheckpointError for a URL that is not supported."""
    # Path shortens s3:// to s3:/, which is a URL, too
    if isinstance(path, DiskPath | ObjectPath):
        return path
    if (match := _URL.fullmatch(str(path))) is None:
        return DiskPath(str(path))
    scheme, bucket, key = match[1].lower(), match[2], match[3]
    if scheme == "file":
        return DiskPath("/", unquote(f"{bucket}/{key}"))
    if scheme not in SCHEMES or not bucket:
        urls = ", ".join(f"{supported}://bucket/key" for supported in SCHEMES)
        raise CheckpointError(
            f"{redact(f'{scheme}://{bucket}/{key}')} is a URL that is not supported; expected a folder, "
            f"file:///folder, or {urls}"
        )
    if not re.fullmatch(r"[\w.$-]+", bucket) or "?" in key:  # not repeated: it may be a secret
        raise CheckpointError(
            f"a URL of {scheme}:// has more than a bucket and a key; expected {scheme}://bucket/key without user, "
            f"port and query; {REMEDY}"
        )
    if key and (not key.isprintable() or "\\" in key or {"", ".", ".."} & {*key.split("/")}):
        raise CheckpointError(
            f"{str(path)!r} is not a key that all stores keep; expected no '//', '.', '..', backslash or control "
            "character"
        )
    return ObjectPath(f"{scheme}://{bucket}", key)


def by_storage(path: PlaceLike, *, disk: Callable[[DiskPath], T], store: Callable[[ObjectPath], T]) -> T:
    """Return what ``disk`` makes of a path of a file system, or ``store`` of a key: for work without a common verb."""
    path = place(path)
    if isinstance(path, DiskPath):
        return disk(path)
    assert isinstance(path, ObjectPath)
    return store(path)


def on_disk(path: PlaceLike, *, why: str) -> DiskPath:
    """Return a path of a file system; raises CheckpointError that ends with ``why`` for an object store."""

    def refused(key: ObjectPath) -> DiskPath:
        raise CheckpointError(f"{key} is a URL; expected a path of a file system: {why}")

    return by_storage(path, disk=lambda path: path, store=refused)


def contains(folder: Place, other: Place) -> bool:
    """Return whether ``other`` is a folder, or is inside it; both are absolute."""
    return f"{str(other).rstrip('/')}/".startswith(f"{str(folder).rstrip('/')}/")


def entries(folder: Place, pattern: str = "*") -> list[Place]:
    """Return what is directly in a folder and matches, by name."""
    return sorted(folder.glob(pattern), key=lambda path: path.name)


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
    """Return a path on this machine's disk: itself, or a copy of a store's in ``cache`` (None: of this process)."""
    return by_storage(source, disk=lambda here: here, store=lambda key: _fetched(key, cache, beside))


def _fetched(source: ObjectPath, cache: Path | None, beside: Sequence[str]) -> DiskPath:
    versions = {source / key if key else source: facts for key, facts in source.below().items()}
    if not versions:
        raise CheckpointError(
            f"there is no {source}{'; write a folder: a URL is no pattern' if set('*?[') & set(source.key) else ''}"
        )
    siblings = [source.with_name(source.name.removesuffix(source.suffix) + suffix) for suffix in beside]
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
