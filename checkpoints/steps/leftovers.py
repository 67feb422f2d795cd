"""Remove temporary and replaced folders of checkpoints and exports; :mod:`meshpar.process.leftovers` names them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from meshpar.checkpoints.format.manifest import MANIFEST_NAME
from meshpar.checkpoints.storage.disk import DiskPath
from meshpar.checkpoints.storage.place import Place, either
from meshpar.core.errors import CheckpointError
from meshpar.process.leftovers import NOBODY, Leftover, leftover, on_the_way

_log = logging.getLogger("meshpar.checkpoints")


def remove(path: Place) -> None:
    """Remove a folder, or a file in the place of one. If this fails, log it, and leave the folder for any process to
    remove later.
    """
    with told_only(f"cannot remove {path}"):
        try:
            if path.is_dir():
                (path / MANIFEST_NAME).unlink(missing_ok=True)  # first, so that half of an old step is not taken for it
            path.delete()
        except OSError:
            either(path, disk=_leave_to_others, store=lambda _: None)
            raise


def _leave_to_others(path: DiskPath) -> None:
    if (left := leftover(path)) and left.ours:
        path.rename(on_the_way(path.with_name(left.of), "tmp", process=NOBODY))


def left_behind(path: Place) -> Leftover | None:
    """Parse the name of a temporary or replaced folder, wherever it is; return None for a name of another kind."""
    return leftover(path, path.untouched_s)


@contextmanager
def told_only(what: str) -> Iterator[None]:
    """Log an error as a warning that begins with ``what``, because it must not fail work that is already done."""
    try:
        yield
    except (CheckpointError, OSError) as error:
        _log.warning("%s: %s", what, error)
