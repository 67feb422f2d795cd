"""Files and folders of a disk, with the verbs of :class:`meshpar.checkpoints.storage.place.Place`."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path, PosixPath
from typing import Any, ClassVar, TypeVar, final

from meshpar.checkpoints.storage.files import PAGE_BYTES, Readable, write_all
from meshpar.core.errors import CheckpointError
from meshpar.process.leftovers import fsync, untouched_s, write_durably

T = TypeVar("T")
_COPY_FILES = "copy the checkpoint with its files, such as by cp -L"  # where a link is
# MADV_POPULATE_READ of Linux 5.14, without a name in Python 3.11: an error for a page that cannot be read, where an
# access is a signal.
_POPULATE_READ = 22
# written before the disk is asked to take them; more at once would make single turns of a copy look dear
_BEHIND_BYTES = 8 << 20
_SYNC_FILE_RANGE_WRITE = 2


@final
class WrittenBehind:
    """Write a new file from front to back; the disk takes bytes while later ones are written."""

    def __init__(self, descriptor: int, expected_bytes: int = 0) -> None:
        self._descriptor, self._written, self._begun = descriptor, 0, 0
        if expected_bytes > 0:  # finding room page by page is a sixth of the CPU time (ext4)
            reserve(descriptor, expected_bytes)

    def write(self, data: Any) -> None:  # noqa: ANN401 - bytes, or memory
        write_all(self._descriptor, memoryview(data))
        self._written += len(data)
        if self._written - self._begun >= _BEHIND_BYTES:
            end = self._written // PAGE_BYTES * PAGE_BYTES  # the last page will be written to again
            begin_write_back(self._descriptor, self._begun, end - self._begun)
            self._begun = end

    def finish(self) -> None:
        if os.fstat(self._descriptor).st_size > (end := os.lseek(self._descriptor, 0, os.SEEK_CUR)):
            os.ftruncate(self._descriptor, end)
        os.fsync(self._descriptor)


def reserve(descriptor: int, count: int) -> None:
    """Reserve the first ``count`` bytes of a file, where the file system can; raises OSError if the disk is full."""
    fallocate = _of_linux("fallocate")  # os.posix_fallocate writes to every block where the file system cannot
    if fallocate is not None and fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(count)) != 0:
        number = ctypes.get_errno()
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise OSError(number, os.strerror(number))


def begin_write_back(descriptor: int, start: int, count: int) -> None:
    """Ask the kernel to begin to write pages of a file to the disk. A hint: errors of the disk are raised by fsync."""
    if (begin := _of_linux("sync_file_range")) is not None:
        begin(descriptor, ctypes.c_int64(start), ctypes.c_int64(count), _SYNC_FILE_RANGE_WRITE)


@lru_cache(maxsize=2)
def _of_linux(name: str) -> Any:  # noqa: ANN401 - a function of the C library
    return getattr(ctypes.CDLL(None, use_errno=True), name, None) if sys.platform == "linux" else None


@final
class ReadFile(Readable):
    """A regular file open for ranged reads; raises CheckpointError if it is not there, or is something else."""

    least_run_bytes, most_waste_bytes = 1024, 8192  # a call costs as much as reading 8 KiB

    def __init__(self, path: Path, *, links: bool = True) -> None:
        self.path = path
        try:  # without O_NONBLOCK, opening a named pipe waits for a writer
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)
            self._descriptor = os.open(path, flags)
        except OSError as error:
            reason = f"it is a link; {_COPY_FILES}" if error.errno == errno.ELOOP else error.strerror
            if not path.parent.is_dir():
                reason = (
                    f"{error.strerror}; its folder does not exist: retention or prune deletes steps that are not "
                    "pinned (meshpar checkpoints pin)"
                )
            raise CheckpointError(f"cannot open {path}: {reason}") from error
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise CheckpointError(f"cannot open {path}: it is not a regular file")
        self.size, self._written_ns = status.st_size, status.st_mtime_ns

    def fill(self, view: memoryview, position: int) -> None:
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done : done + (1 << 30)]], position + done)
            if count == 0:
                raise CheckpointError(
                    f"{self.path} is truncated: expected bytes up to {position + len(view)}, the file has {self.size}"
                )
            done += count

    def mapped(self, position: int, count: int) -> memoryview | None:
        if sys.platform != "linux" or count == 0:
            return None
        start = position // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        try:
            how = {"flags": mmap.MAP_PRIVATE, "prot": mmap.PROT_READ | mmap.PROT_WRITE, "offset": start}
            pages = mmap.mmap(self._descriptor, position + count - start, **how)
            pages.madvise(mmap.MADV_SEQUENTIAL)
            pages.madvise(_POPULATE_READ)
        except (OSError, ValueError):  # an older kernel, a file system without it, a shorter file, a disk that fails
            return None
        return memoryview(pages)[position - start :]

    def check_unchanged(self) -> None:
        if os.fstat(self._descriptor).st_mtime_ns != self._written_ns:
            raise CheckpointError(
                f"{self.path} was written while it was read; run this again when no other process writes it"
            )

    def expect(self, spans: Iterable[tuple[int, int]]) -> None:
        """Do nothing: small reads cost little here."""

    def run(self, start: int, stop: int) -> ReadFile:
        """Return itself: the kernel reads ahead."""
        return self

    def each(self, act: Callable[[T], object], items: Iterable[T]) -> None:
        for item in items:
            act(item)

    def forget(self, start: int, stop: int) -> None:
        """Drop the cached pages of bytes, and one page on either side."""
        # single pages in the cache keep the kernel from reading ahead in large folios: 1.15 times as long
        if hasattr(os, "posix_fadvise"):
            first, end = start // PAGE_BYTES - 1, -(-stop // PAGE_BYTES) + 1
            start, count = max(0, first) * PAGE_BYTES, (end - first) * PAGE_BYTES
            os.posix_fadvise(self._descriptor, start, count, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            self.close()


class DiskPath(PosixPath):
    """A path of a file system; those made from it, by ``/``, ``parent`` or ``glob``, are of this class, too."""

    __slots__ = ()
    mounted: ClassVar[bool] = True

    def reader(self, *, links: bool = True) -> ReadFile:
        return ReadFile(self, links=links)

    def size(self) -> int:
        status = self.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"expected a file, found a link or a device; {_COPY_FILES}")
        return status.st_size

    def read_small(self) -> bytes | None:
        if not self.exists():
            return None
        file = ReadFile(self, links=False)
        return file.bytes(0, file.size)

    def read_version(self) -> tuple[bytes, bytes] | None:
        """Return the bytes of a small file twice, because they are its version, too."""
        try:
            data = self.read_bytes()
        except FileNotFoundError:
            return None
        return data, data

    def untouched_s(self) -> float:
        return untouched_s(self)

    def free_bytes(self) -> float:
        return shutil.disk_usage(self).free

    @contextmanager
    def writing(self, expected_bytes: int = 0) -> Iterator[Callable[[Any], object]]:
        with self.open("wb", buffering=0) as file:
            behind = WrittenBehind(file.fileno(), expected_bytes)
            yield behind.write
            behind.finish()

    def write_durably(self, data: bytes) -> None:
        write_durably(self, data)

    def create(self, data: bytes, *, replaces: bytes | None = None) -> bool:
        """Write a small file in place; of two that replace it in the same moment, the last one has it."""
        # over NFS, who opens a file sees what was written before it was closed, but may miss that it was replaced
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
        absent = not self.exists()
        self.mkdir(parents=True, exist_ok=True)
        return absent

    def flush(self) -> None:
        fsync(self)

    def delete(self) -> None:
        if self.is_dir():
            shutil.rmtree(self)
        else:
            self.unlink(missing_ok=True)
