"""Remove temporary and replaced folders of checkpoints and exports; :mod:`meshpar.leftovers` names them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshpar.checkpoints.format.manifest import MANIFEST_NAME
from meshpar.checkpoints.storage.place import Place, delete
from meshpar.errors import CheckpointError
from meshpar.leftovers import NOBODY, leftover, on_the_way

_log = logging.getLogger("meshpar.checkpoints")


def remove(path: Place) -> None:
    """Remove a folder, or a file in the place of one. If this fails, log it, and leave the folder for any process to remove later."""
    with told_only(f"cannot remove {path}"):
        try:
            if path.is_dir():
                (path / MANIFEST_NAME).unlink(missing_ok=True)  # first, so that half of an old step is not taken for it
            delete(path)
        except OSError:
            if isinstance(path, Path) and (left := leftover(path)) and left.ours:
                path.rename(on_the_way(path.with_name(left.of), "tmp", process=NOBODY))
            raise


@contextmanager
def told_only(what: str) -> Iterator[None]:
    """Log an error as a warning that begins with ``what``, because it must not fail work that is already done."""
    try:
        yield
    except (CheckpointError, OSError) as error:
        _log.warning("%s: %s", what, error)
