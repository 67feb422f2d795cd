"""Folders on their way to a name or from it: called after the process at work on them, so that what a dead one left can be told."""

from __future__ import annotations

import logging
import os
import re
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from meshpar.errors import CheckpointError

ABANDONED_S = 6 * 3600.0
"""How long nothing in a folder must have changed before another host's process counts as dead, in seconds."""
_NAME = re.compile(r"(.+)\.(tmp|old)-(.+)-(\d+)-[0-9a-f]+")
_OURS: set[str] = set()  # those of this process that are there still: another process may have had its number before
_log = logging.getLogger("meshpar.checkpoints")


@final
@dataclass(frozen=True, slots=True)
class Leftover:
    """What the name of such a folder tells: ``tmp``: on the way to being ``of``, or to be removed; ``old``: it was ``of``."""

    path: Path
    of: str
    kind: str
    host: str
    process: int

    def abandoned(self, *, sole_writer: bool = False) -> bool:
        """Tell whether nobody works on it any more.

        Args:
            sole_writer: whether only one process at a time makes such folders here, and it is this one: then another host's are dead.
        """
        if self.path.name in _OURS:
            return False
        if self.host != socket.gethostname():
            return sole_writer or _untouched_s(self.path) > ABANDONED_S
        return self.process == os.getpid() or not _runs(self.process)


def leftover(path: Path) -> Leftover | None:
    """Return what a folder's name tells; None where it is another kind of name."""
    found = _NAME.fullmatch(path.name)
    return Leftover(path, found[1], found[2], found[3], int(found[4])) if found else None


def on_the_way(target: Path, kind: Literal["tmp", "old"]) -> Path:
    """Return a new name beside ``target`` for a folder of this process; whoever removes the folder says so by :func:`forgotten`."""
    path = target.with_name(f"{target.name}.{kind}-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    _OURS.add(path.name)
    return path


def forgotten(path: Path) -> None:
    """Take note that a folder of this process is gone, or may be removed by any other."""
    _OURS.discard(path.name)


@contextmanager
def told_only(what: str) -> Iterator[None]:
    """Make a warning, which begins with ``what``, of an error that must not fail what is done already."""
    try:
        yield
    except (CheckpointError, OSError) as error:
        _log.warning("%s: %s", what, error)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _untouched_s(path: Path) -> float:
    """Return how many seconds ago a file, or anything in a folder, last changed; 0 where it is changing now."""
    try:
        return time.time() - max(each.stat().st_mtime for each in (path, *(path.iterdir() if path.is_dir() else ())))
    except FileNotFoundError:
        return 0.0
