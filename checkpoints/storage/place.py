"""Places of checkpoints: a path of a disk, or a key of an object store.

Two classes have the verbs of :class:`Place`: :class:`DiskPath` and :class:`ObjectPath`. Where the two must differ, work
is divided by :func:`either`, or asks :attr:`Place.mounted`; only this file asks for the class. Another kind of storage
is a subclass of one of the two with verbs of its own, and a branch of :func:`place`; :func:`either` also decides how a
step is committed (``steps/steps.py``) and an export is made (``export/target.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, TypeVar
from urllib.parse import unquote

from meshpar.checkpoints.storage.disk import DiskPath
from meshpar.checkpoints.storage.files import Readable
from meshpar.checkpoints.storage.objects import SCHEMES, ObjectPath
from meshpar.core.errors import CheckpointError
from meshpar.process.secrets import REMEDY, redact

T = TypeVar("T")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/{1,2}([^/]*)/*(.*?)/*", re.DOTALL)


class Place(Protocol):
    """A file or a folder, wherever it is: the names of ``pathlib.Path`` mean the same, and the verbs are those that
    checkpoints need.
    """

    mounted: ClassVar[bool]
    """True on a file system: folders are renamed, and files change in place. In a store a key is created, or replaced,
    only whole and on a condition that decides between two writers.
    """

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
    def untouched_s(self) -> float:
        """Return the seconds since a file, or anything in a folder, last changed."""
        ...

    def free_bytes(self) -> float:
        """Return the free space."""
        ...

    def size(self) -> int:
        """Return the size of a file in bytes; raises OSError if there is none."""
        ...

    def reader(self, *, links: bool = True) -> Readable:
        """Open a file for reads of ranges; raises CheckpointError if there is none. ``links``: follow a symbolic
        link.
        """
        ...

    def read_small(self) -> bytes | None:
        """Return all bytes of a small file; None: there is none."""
        ...

    def read_version(self) -> tuple[bytes, Any] | None:
        """Return the bytes of a small file, and its version, for :meth:`create`; None: there is none."""
        ...

    def read_text(self, encoding: str = "utf-8") -> str: ...
    def writing(self, expected_bytes: int = 0) -> AbstractContextManager[Callable[[Any], object]]:
        """Yield a function that writes the next bytes of a new file, which is stored when the block ends."""
        ...

    def write_durably(self, data: bytes) -> None:
        """Write a small file, whole or not at all."""

    def create(self, data: bytes, *, replaces: Any = None) -> bool:  # noqa: ANN401 - a version
        """Write a small file if there is none, or if it has the version ``replaces``; return whether ``data`` is
        there now.
        """
        ...

    def make(self) -> bool:
        """Make a folder, where there are folders; return whether there was none."""
        ...

    def flush(self) -> None:
        """Keep a file, or the names in a folder, from a crash."""

    def unlink(self, missing_ok: bool = False) -> None: ...
    def rmdir(self) -> None: ...
    def delete(self) -> None:
        """Delete a file, or a folder with all that is in it."""


PlaceLike = str | Path | Place
"""What names a place: a path, or a URL."""


def place(path: PlaceLike) -> Place:
    """Return the place that a path or a URL names. ``Path`` shortens ``s3://`` to ``s3:/``, which is a URL, too.

    Raises:
        CheckpointError: a URL of a scheme that is not supported, without a bucket, with credentials, or with a key that
            stores change.
    """
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


def either(path: PlaceLike, *, disk: Callable[[DiskPath], T], store: Callable[[ObjectPath], T]) -> T:
    """Return what ``disk`` makes of a path of a file system, or ``store`` of a key: for work without a common verb."""
    where = place(path)
    if isinstance(where, DiskPath):
        return disk(where)
    assert isinstance(where, ObjectPath)
    return store(where)


def on_disk(path: PlaceLike, *, why: str) -> DiskPath:
    """Return a path of a file system; raises CheckpointError that ends with ``why`` for an object store."""

    def refused(key: ObjectPath) -> DiskPath:
        raise CheckpointError(f"{key} is a URL; expected a path of a file system: {why}")

    return either(path, disk=lambda path: path, store=refused)


def contains(folder: Place, other: Place) -> bool:
    """Return whether ``other`` is a folder, or is inside it; both are absolute."""
    return f"{str(other).rstrip('/')}/".startswith(f"{str(folder).rstrip('/')}/")


def entries(folder: Place, pattern: str = "*") -> list[Place]:
    """Return what is directly in a folder and matches, by name."""
    return sorted(folder.glob(pattern), key=lambda path: path.name)
