"""The folder that an export becomes: on a disk it appears once it is whole, in a store this process alone writes it."""

from __future__ import annotations

import errno
import glob
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from tempfile import TemporaryDirectory
from typing import Any, final

from meshpar.checkpoints.steps.lease import LEASE_NAME, Lease
from meshpar.checkpoints.steps.steps import left_behind, remove
from meshpar.checkpoints.storage.disk import DiskPath
from meshpar.checkpoints.storage.files import failing_as
from meshpar.checkpoints.storage.objects import ObjectPath
from meshpar.checkpoints.storage.place import Place, PlaceLike, by_storage, carried, contains, place
from meshpar.core.errors import CheckpointError
from meshpar.process.leftovers import LEASE_S, on_the_way

_OCCUPIED = (
    "already exists and is not empty; delete it, choose another folder, or replace it (--overwrite, in Python "
    "overwrite=True)"
)


def apart(target: Place, *sources: Place) -> None:
    """Raise CheckpointError if a source of an export is ``target``, is inside it, or contains it."""
    for source in sources:
        resolved = source.resolve()
        if contains(target, resolved) or contains(resolved, target):
            raise CheckpointError(
                f"{target} contains, or is inside, the source of the export ({source}); choose a folder beside it"
            )


def free_target(dst: PlaceLike, *, overwrite: bool) -> Place:
    """Return the absolute path of ``dst``, without leftovers of dead exports; raises CheckpointError if it is taken."""
    target = place(dst).resolve()
    if not target.name:
        raise CheckpointError(f"an export cannot replace {target}; choose a folder inside it")
    _way(target).free(overwrite=overwrite)
    return target


def make_whole(target: Place, *, overwrite: bool) -> AbstractContextManager[Place]:
    """Yield a new folder that becomes ``target`` if the block succeeds, of which every OSError is a CheckpointError."""
    return _way(target).whole(overwrite=overwrite)


@contextmanager
def make_on_disk(target: Place, *, overwrite: bool) -> Iterator[DiskPath]:
    """Yield a folder of a disk as :func:`make_whole`: to a store files are copied from a temporary folder."""
    with make_whole(target, overwrite=overwrite) as folder, TemporaryDirectory(prefix="meshpar-") as temporary:
        here = by_storage(folder, disk=lambda path: path, store=lambda _: DiskPath(temporary))
        yield here
        carried(sorted(here.iterdir()), folder)


def make_beside(target: Place) -> Place:
    """Create a folder for temporary files next to an export; a later one deletes those of killed processes."""
    return _way(target).beside()


def _way(target: Place) -> _OnDisk | _InStore:
    way: Any = by_storage(target, disk=_OnDisk, store=_InStore)
    return way


@final
class _OnDisk:
    """A folder that gets its name once it is whole."""

    def __init__(self, target: DiskPath) -> None:
        self._target, self._hidden = target, target.with_name(f".{target.name}")

    def free(self, *, overwrite: bool) -> None:
        target = self._target
        with failing_as(f"exporting to {target}"):
            for path in target.parent.glob(".*") if target.parent.is_dir() else ():
                leftover = left_behind(path)
                if leftover is None or leftover.of != self._hidden.name or not leftover.abandoned():
                    continue
                if leftover.kind == "old" and not target.exists():
                    path.rename(target)
                else:
                    remove(path)
            if target.exists() and not overwrite and (not target.is_dir() or any(target.iterdir())):
                raise CheckpointError(f"{target} {_OCCUPIED}")

    @contextmanager
    def whole(self, *, overwrite: bool) -> Iterator[Place]:
        target = self._target
        folder, replaced = on_the_way(self._hidden, "tmp"), on_the_way(self._hidden, "old")
        with failing_as(f"exporting to {target}"):
            try:
                target.parent.make()
                folder.mkdir()
                for path in target.parent.glob(f"{glob.escape(self._hidden.name)}.tmp-*"):
                    other = left_behind(path)
                    if other is not None and path != folder and other.held:
                        raise CheckpointError(
                            f"another export to {target} is running: process {other.process} on {other.host}; wait for "
                            f"it, or end it (it counts as dead {LEASE_S:.0f} s after its last write to {path})"
                        )
                yield folder
                folder.flush()
                if overwrite and target.exists():
                    target.rename(replaced)
                try:
                    folder.rename(target)
                except OSError as error:
                    if overwrite or error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                        raise
                    raise CheckpointError(f"{target} appeared during the export: it {_OCCUPIED}") from error
                target.parent.flush()
            finally:
                if replaced.exists() and not target.exists():
                    replaced.rename(target)
                for path in (folder, replaced):
                    if path.exists():
                        remove(path)

    def beside(self) -> Place:
        root = on_the_way(self._hidden, "tmp")
        root.mkdir(parents=True)
        return root


@final
class _InStore:
    """A folder whose files appear one by one; an export that fails leaves it empty."""

    def __init__(self, target: ObjectPath) -> None:
        self._target = target

    def free(self, *, overwrite: bool) -> None:
        if not overwrite and self._files():
            raise CheckpointError(f"{self._target} {_OCCUPIED}")

    @contextmanager
    def whole(self, *, overwrite: bool) -> Iterator[Place]:
        del overwrite  # what was there is gone before the first file
        lease = Lease(self._target)
        lease.take()
        try:
            self._clear()
            try:
                yield self._target
            except BaseException:
                self._clear()
                raise
        finally:
            lease.release()

    def beside(self) -> Place:
        # in a folder of its own: listing one asks for all that is below
        hidden = self._target.with_name(f".{self._target.name}") / "module"
        for path in hidden.parent.iterdir():
            if (leftover := left_behind(path)) and leftover.abandoned():
                remove(path)
        return on_the_way(hidden, "tmp")

    def _files(self) -> list[ObjectPath]:
        return [path for path in self._target.iterdir() if path.name != LEASE_NAME]

    def _clear(self) -> None:
        for path in sorted(self._files(), key=lambda path: path.name != "config.json"):  # readers ask for it first
            path.delete()
