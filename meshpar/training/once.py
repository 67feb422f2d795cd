"""Build a folder once, even if several processes request it at the same time."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def build_once(folder: Path, build: Callable[[Path], object]) -> Path:
    """Return ``folder``, built by ``build`` if it does not exist yet.

    Every process of a machine (or of a shared file system) may call this with the same folder: one builds, the others wait. ``build``
    fills a temporary folder, which is renamed to its final name once it is complete. A process that dies leaves no folder that looks
    complete. On a file system without locks several processes may build, and the first rename wins.

    Args:
        folder: the folder's final path.
        build: fills the (existing, empty) folder that it receives.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_name(folder.name + ".lock")):
        if folder.is_dir():
            return folder
        temporary = folder.with_name(f"{folder.name}.tmp-{uuid.uuid4().hex[:12]}")
        temporary.mkdir()
        try:
            build(temporary)
            _rename(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _rename(temporary: Path, folder: Path) -> None:
    try:
        os.rename(temporary, folder)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise  # else a process without locks was faster, with the same contents


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
        yield
