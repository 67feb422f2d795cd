"""Write a new file so that the kernel has less to do: its blocks are reserved first, and the disk takes bytes while
later ones are written.

Measured on Linux 6.18 and ext4: without a reservation, finding room on the disk page by page is a sixth of the CPU time
of a written file.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from functools import lru_cache
from typing import Any, final

from meshpar.checkpoints.storage.files import PAGE_BYTES, write_all

# written before the disk is asked to take them; more at once would make single turns of a copy look dear
_BEHIND_BYTES = 8 << 20
_SYNC_FILE_RANGE_WRITE = 2


@final
class WrittenBehind:
    """Write a new file from front to back.

    Args:
        descriptor: the open file.
        expected_bytes: room to reserve on the disk; what is not written of it is given back by :meth:`finish`.
    """

    def __init__(self, descriptor: int, expected_bytes: int = 0) -> None:
        self._descriptor, self._written, self._begun = descriptor, 0, 0
        if expected_bytes > 0:
            reserve(descriptor, expected_bytes)

    def write(self, data: Any) -> None:  # noqa: ANN401 - bytes, or memory
        """Write the next bytes."""
        write_all(self._descriptor, memoryview(data))
        self._written += len(data)
        if self._written - self._begun >= _BEHIND_BYTES:
            end = self._written // PAGE_BYTES * PAGE_BYTES  # the last page will be written to again
            begin_write_back(self._descriptor, self._begun, end - self._begun)
            self._begun = end

    def finish(self) -> None:
        """Bring the file to the disk."""
        if os.fstat(self._descriptor).st_size > (end := os.lseek(self._descriptor, 0, os.SEEK_CUR)):
            os.ftruncate(self._descriptor, end)
        os.fsync(self._descriptor)


def reserve(descriptor: int, count: int) -> None:
    """Reserve the first ``count`` bytes of a file, where the file system can; raises OSError where the disk has no
    room for them.
    """
    if (
        fallocate := _of_linux("fallocate")
    ) is None:  # os.posix_fallocate writes to every block where the file system cannot
        return
    if fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(count)) != 0:
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
