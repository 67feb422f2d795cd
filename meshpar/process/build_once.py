"""Build a folder once, even if several processes request it at the same time."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from meshpar.core.errors import RecipeError, brief
from meshpar.process.leftovers import leftover, on_the_way
from meshpar.process.waiting import EVERY_S, Waiting

_SILENT_S = 600.0  # without a sign of life, after which nobody waits for the process that builds
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def build_once(folder: Path, build: Callable[[Path], object]) -> Path:
    """Return ``folder``, which ``build`` fills at a temporary name if it does not exist; one process builds for all."""
    try:
        if folder.is_dir():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(folder.name + ".lock")):
            if folder.is_dir():
                return folder
            for path in folder.parent.iterdir():
                if (name := leftover(path)) is not None and name.abandoned():
                    shutil.rmtree(path, ignore_errors=True)
            temporary = on_the_way(folder, "tmp")
            temporary.mkdir()
            try:
                try:
                    build(temporary)
                except Exception as error:
                    number = error.errno if isinstance(error, OSError) else None
                    # A library in Rust has no number, and says it.
                    if number in _NO_ROOM or any(str(error).endswith(f"(os error {code})") for code in _NO_ROOM):
                        raise _unwritable(temporary, error) from error
                    raise
                try:
                    os.rename(temporary, folder)
                except OSError as error:
                    if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                        raise  # else a process without locks was faster, with the same contents
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        if error.filename is None or not Path(str(error.filename)).is_relative_to(folder.parent):
            raise  # of what build reads
        raise _unwritable(folder, error) from error
    return folder


def _unwritable(folder: Path, error: Exception) -> RecipeError:
    free = ""
    with suppress(OSError):  # the folder is closed, or does not exist
        free = f" ({shutil.disk_usage(folder.parent).free / 1e6:,.0f} MB free)"
    return RecipeError(
        f"cannot write to {folder.parent}{free}: {brief(error)}; free some space or correct the folder's mode, or "
        "name another folder, in a recipe by data.cache"
    )


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a file's lock, and renew its time as a sign of life; wait in Python, which a signal interrupts."""
    waiting, seen = Waiting(_SILENT_S), 0.0
    with path.open("a+", encoding="utf-8") as file:
        while not _locked(file):
            file.seek(0)
            whom = f"{file.read() or 'another process'}, which builds {path.with_suffix('')}"
            if (now := os.stat(file.fileno()).st_mtime) != seen:
                seen = now
                waiting.renew()
            if not waiting.more(whom):
                raise RecipeError(
                    f"{whom}, has given no sign of life for {_SILENT_S:.0f} s; end that process, or name another "
                    "folder, in a recipe by data.cache"
                )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        ends = threading.Event()
        beats = threading.Thread(target=_beat, args=(path, ends), name="meshpar-build", daemon=True)
        beats.start()
        try:
            yield
        finally:
            ends.set()
            beats.join()


def _locked(file: TextIO) -> bool:
    """Try to take a lock, and return whether this process builds: it has the lock, or there are no locks here."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EWOULDBLOCK):
            raise
        return error.errno != errno.EWOULDBLOCK
    return True


def _beat(path: Path, ends: threading.Event) -> None:
    while not ends.wait(EVERY_S):
        with suppress(OSError):
            os.utime(path)
