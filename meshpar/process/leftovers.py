"""Names of temporary and replaced files and folders: host, PID and start of the process tell leftovers of the dead."""

from __future__ import annotations

import os
import re
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, final
from zlib import crc32

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
