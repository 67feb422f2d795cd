"""Files and folders of a disk, with the verbs of :class:`meshpar.checkpoints.storage.place.Place`."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PosixPath
from typing import Any, ClassVar

from meshpar.checkpoints.storage.files import COPY_FILES, ReadFile
from meshpar.checkpoints.storage.writeback import WrittenBehind
from meshpar.core.errors import CheckpointError
from meshpar.process.leftovers import fsync, untouched_s, write_durably


class DiskPath(PosixPath):
    """A path of a file system; those made from it, by ``/``, ``parent`` or ``glob``, are of this class, too."""

    __slots__ = ()
    mounted: ClassVar[bool] = True

    def reader(self, *, links: bool = True) -> ReadFile:
        """Open a file for reads of ranges; raises CheckpointError if there is none. ``links``: follow a symbolic
        link.
        """
        return ReadFile(self, links=links)

    def size(self) -> int:
        """Return the size of a regular file in bytes; raises OSError if there is none, CheckpointError for a link or
        a device.
        """
        found = self.lstat()
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"expected a file, found a link or a device; {COPY_FILES}")
        return found.st_size

    def read_small(self) -> bytes | None:
        """Return all bytes of a small file that is no link; None: there is none. Raises OSError as reads do."""
        if not self.exists():
            return None
        file = ReadFile(self, links=False)
        return file.bytes(0, file.size)

    def read_version(self) -> tuple[bytes, bytes] | None:
        """Return the bytes of a small file twice, because they are its version, too; None: there is none."""
        try:
            found = self.read_bytes()
        except FileNotFoundError:
            return None
        return found, found

    def untouched_s(self) -> float:
        """Return the seconds since a file, or anything in a folder, last changed; 0 if it is changing now."""
        return untouched_s(self)

    def free_bytes(self) -> float:
        """Return the free space of the disk."""
        return shutil.disk_usage(self).free

    @contextmanager
    def writing(self, expected_bytes: int = 0) -> Iterator[Callable[[Any], object]]:
        """Yield a function that writes the next bytes of a new file, which is on the disk when the block ends."""
        with self.open("wb", buffering=0) as file:
            behind = WrittenBehind(file.fileno(), expected_bytes)
            yield behind.write
            behind.finish()

    def write_durably(self, data: bytes) -> None:
        """Write a small file atomically, and flush it to the disk."""
        write_durably(self, data)

    def create(self, data: bytes, *, replaces: bytes | None = None) -> bool:
        """Write a small file if there is none, or if it has the bytes ``replaces``; return whether this call wrote it.

        A file is written in place: over NFS, who opens it sees what was written before it was closed, but may miss that
        it was replaced. Of two that replace it in the same moment, both may do so, and the last one has it.
        """
        if replaces is not None and self.read_version() != (replaces, replaces):
            return False
        try:
            with self.open("xb" if replaces is None else "rb+") as file:
                file.write(data)
                file.truncate()
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError:
            return False
        return True

    def make(self) -> bool:
        """Make a folder, and those above it; return whether there was none."""
        absent = not self.exists()
        self.mkdir(parents=True, exist_ok=True)
        return absent

    def flush(self) -> None:
        """Flush a file or a folder to the disk."""
        fsync(self)

    def delete(self) -> None:
        """Delete a file, or a folder with all that is in it."""
        if self.is_dir():
            shutil.rmtree(self)
        else:
            self.unlink(missing_ok=True)
