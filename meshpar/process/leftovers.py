"""Names of temporary and replaced files and folders: host, PID and start of the process tell leftovers of the dead; and
folders that are built once, even if several processes request them at the same time.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar, final
from zlib import crc32

from meshpar.core.errors import RecipeError, brief
from meshpar.process.waiting import EVERY_S, Waiting

P = TypeVar("P", bound=Any)  # a path, or a place in a store
ABANDONED_S = 6 * 3600.0  # seconds without a change in a folder after which another host's process counts as dead
LEASE_S = 120.0  # seconds since a change in a folder in which another host's process counts as writing it
NOBODY = 0  # the process in the name of a folder that its own process could not remove
_NAME = re.compile(r"(.+)\.(tmp|old)-(.+)-(\d+)-([0-9a-f]+)")
_ID = uuid.uuid4().hex[:8]  # of this process, where the system does not tell when a process began
_HOSTS_OWN = "pid:[4026531836]"  # linux/proc_ns.h: PROC_PID_INIT_INO


@final
@dataclass(frozen=True, slots=True)
class Leftover:
    """The parsed name of such a folder; ``tmp``: it will become ``of``, or is to be removed; ``old``: it was ``of``."""

    path: Any
    of: str
    kind: str
    host: str
    process: int
    id: str
    age_s: Callable[[], float] = field(compare=False, repr=False)

    @property
    def ours(self) -> bool:
        """This process works on it: another one may have had its number before."""
        return self.host == host_name() and self.process == os.getpid() and self.id.startswith(process_id(self.process))

    @property
    def held(self) -> bool:
        """Another process is writing it, as far as can be told."""
        if self.host != host_name():
            return self.age_s() <= LEASE_S
        return not self.ours and not self.abandoned()

    def abandoned(self, *, sole_writer: bool = False) -> bool:
        """Return whether no live process uses this folder; a ``sole_writer`` knows that other hosts' are dead."""
        if self.host != host_name():
            return sole_writer or self.age_s() > ABANDONED_S
        if self.ours:
            return False
        if self.process in (NOBODY, os.getpid()) or not is_running(self.process, self.id):
            return True
        return _identity(self.process) is None and self.age_s() > ABANDONED_S


# a path, or a place in a store
def leftover(path: Any, age_s: Callable[[], float] | None = None) -> Leftover | None:  # noqa: ANN401
    """Parse a folder's name; None for one of another kind. ``age_s`` returns the seconds since a change."""
    if (parts := _NAME.fullmatch(path.name)) is None:
        return None
    of, kind, host, process, id_ = parts.groups()
    return Leftover(path, of, kind, host, int(process), id_, age_s or partial(untouched_s, path))


def on_the_way(target: P, kind: Literal["tmp", "old"], *, process: int | None = None) -> P:
    """Return a new name beside ``target`` for a folder of this process, or of another; its maker removes the folder."""
    process = os.getpid() if process is None else process
    return target.with_name(f"{target.name}.{kind}-{host_name()}-{process}-{process_id(process)}{uuid.uuid4().hex[:8]}")


def write_durably(path: Path, data: bytes | str) -> None:
    """Write a small file, whole or not at all, and flush it to the disk: a full disk leaves the one that was there."""
    temporary, data = on_the_way(path, "tmp"), data.encode() if isinstance(data, str) else data
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def untouched_s(path: Path) -> float:
    """Return the seconds since a file, or anything in a folder, last changed; 0 if it is changing now."""
    try:
        return time.time() - max(inner.stat().st_mtime for inner in (path, *(path.iterdir() if path.is_dir() else ())))
    except FileNotFoundError:
        return 0.0


def host_name() -> str:
    """Return the host's name, in a container with what tells it from others whose processes this one cannot see."""
    try:
        processes = os.readlink("/proc/self/ns/pid")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        processes = _HOSTS_OWN
    name = socket.gethostname()
    return name if processes == _HOSTS_OWN else f"{name}_{crc32(f'{boot} {processes}'.encode()):08x}"


def process_id(process: int) -> str:
    """Return 8 digits that tell a process of this host from others that have its number at other times."""
    return _identity(process) or _ID


def this_process() -> dict[str, str | int]:
    """Return host, number and :func:`process_id` of this process, as files name their holder."""
    return {"host": host_name(), "process": os.getpid(), "id": process_id(os.getpid())}


def is_running(process: int, id_: str) -> bool:
    """Return whether a process of this host runs and is the one whose ``id_`` begins with its :func:`process_id`."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it runs, as another user
    return id_.startswith(_identity(process) or "")


def _identity(process: int) -> str | None:
    """Return 8 digits of the boot and the time at which a process began; None where the system does not tell."""
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return None
    return f"{crc32(f'{boot} {fields[18]}'.encode()):08x}" if state not in "ZX" else "ended"


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
