"""How a step comes into being and goes: on a disk a folder gets its name, in a store a manifest is created.

On a disk a step is written to ``step-00000012.tmp-<host>-<pid>-<id>`` and renamed to ``step-00000012`` once it is
complete and on the disk, so that every ``step-N`` is a complete checkpoint at all times. A step that is being replaced
is called ``step-00000012.old-...`` until the new one has its name, and is read from there. ``latest`` is a link to the
newest step.

An object store renames nothing. There the files of a save stay in a folder of its own,
``step-00000012/step-00000012.tmp-...``, and ``step-00000012/meshpar.json``, created last and only if it is absent (or
is still the one to be replaced), names that folder.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, final

from meshpar.checkpoints.format.manifest import MANIFEST_NAME, Manifest, read_manifest, step_name, step_of
from meshpar.checkpoints.storage.disk import DiskPath
from meshpar.checkpoints.storage.objects import ObjectPath, Version
from meshpar.checkpoints.storage.place import Place, either, entries
from meshpar.core.errors import CheckpointError, StoreError
from meshpar.process.leftovers import NOBODY, Leftover, leftover, on_the_way

LATEST_LINK = "latest"
PIN_FILE = "PINNED"
_PARTS = re.compile(rb'^"parts": "([^"/]+)",$', re.MULTILINE)  # in a manifest that may be damaged
_log = logging.getLogger("meshpar.checkpoints")


def remove(path: Place) -> None:
    """Remove a folder, or a file in the place of one. If this fails, log it, and leave the folder for any process to
    remove later.
    """
    with warn_only(f"cannot remove {path}"):
        try:
            if path.is_dir():
                (path / MANIFEST_NAME).unlink(missing_ok=True)  # first, so that half of an old step is not taken for it
            path.delete()
        except OSError:
            either(path, disk=_leave_to_others, store=lambda _: None)
            raise


def _leave_to_others(path: DiskPath) -> None:
    if (parsed := leftover(path)) and parsed.ours:
        path.rename(on_the_way(path.with_name(parsed.of), "tmp", process=NOBODY))


def left_behind(path: Place) -> Leftover | None:
    """Parse the name of a temporary or replaced folder, wherever it is; return None for a name of another kind."""
    return leftover(path, path.untouched_s)


@contextmanager
def warn_only(what: str) -> Iterator[None]:
    """Log an error as a warning that begins with ``what``, because it must not fail work that is already done."""
    try:
        yield
    except (CheckpointError, OSError) as error:
        _log.warning("%s: %s", what, error)


@final
class Renaming:
    """Commit by a new name: on a disk. :class:`Conditional` has the same verbs."""

    def __init__(self, root: DiskPath) -> None:
        self._root = root

    def begin(self, step: DiskPath) -> DiskPath:
        """Return the temporary folder of a new step, whose path is ``step``."""
        self._root.make()
        temporary = on_the_way(step, "tmp")
        temporary.mkdir()
        return temporary

    def commit(self, temporary: DiskPath, manifest: Manifest) -> tuple[DiskPath, DiskPath | None]:
        """Let the step exist; return its folder, and what is to be removed now. Raises CheckpointError if another
        writer was first.
        """
        (temporary / MANIFEST_NAME).write_durably(manifest.to_json().encode())
        final = temporary.with_name(step_name(manifest.step))
        replaced = on_the_way(final, "old") if final.exists() else None
        if replaced:
            if (final / PIN_FILE).exists():
                (temporary / PIN_FILE).write_durably(b"")
            final.rename(replaced)
        try:
            temporary.rename(final)
        except OSError:
            if replaced:
                replaced.rename(final)
            raise
        return final, replaced

    def amend(self, step: DiskPath, **entries: Any) -> None:
        """Replace entries in the manifest of a committed step; raises CheckpointError if another writer was first."""
        manifest = dataclasses.replace(read_manifest(step), **entries)
        (step / MANIFEST_NAME).write_durably(manifest.to_json().encode())

    def abandon(self, temporary: DiskPath) -> None:
        """Delete a temporary folder after a failed save."""
        if temporary.exists():
            remove(temporary)

    def delete(self, step: DiskPath) -> None:
        """Delete a committed step."""
        remove(step.rename(on_the_way(step, "tmp")))

    def clean(self, dead: Leftover, step: DiskPath) -> None:
        """Remove a leftover of a dead process, unless the step is in it."""
        if dead.kind == "old" and not step.exists() and (dead.path / MANIFEST_NAME).is_file():
            dead.path.rename(step)
        else:
            remove(dead.path)

    def folders(self, having: str) -> dict[int, DiskPath]:
        """Return the steps whose folder has a file, and the folder."""
        folders = self._folders()
        aside = {
            step: replaced.path
            for folder in folders
            if (replaced := leftover(folder)) and replaced.kind == "old" and (step := step_of(replaced.of)) is not None
        }
        placed = {step: folder for folder in folders if (step := step_of(folder.name)) is not None}
        return {step: folder for step, folder in {**aside, **placed}.items() if (folder / having).is_file()}

    def unfinished(self) -> list[Leftover]:
        """Return temporary and replaced folders."""
        return [each for folder in self._folders() if (each := left_behind(folder))]

    def link(self, name: str) -> None:
        """Let ``latest`` be a link to the step of this name, where there are links."""
        link, fresh = self._root / LATEST_LINK, self._root / f".{LATEST_LINK}.new"
        if link.exists() and not link.is_symlink():
            return  # a file system that ignores case: LATEST is all there can be, and open_step reads it
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(name, target_is_directory=True)
        fresh.replace(link)
        self._root.flush()

    def _folders(self) -> list[DiskPath]:
        paths = sorted(self._root.iterdir()) if self._root.is_dir() else []
        return [path for path in paths if path.is_dir() and not path.is_symlink()]


@final
class Conditional:
    """Commit by a manifest that is created on a condition: in a store."""

    def __init__(self, root: ObjectPath) -> None:
        self._root = root
        # version and folder of what a save replaces, by its own folder
        self._replaced: dict[ObjectPath, tuple[Version | None, str]] = {}

    def begin(self, step: ObjectPath) -> ObjectPath:
        attempt = step / on_the_way(step, "tmp").name
        self._replaced[attempt] = _version_and_parts(step)
        return attempt

    def commit(self, temporary: ObjectPath, manifest: Manifest) -> tuple[ObjectPath, ObjectPath | None]:
        """Create the manifest. Two writers of a step have two folders, and one of them this manifest."""
        final = temporary.parent
        replaces, old = self._replaced.pop(temporary)
        text = dataclasses.replace(manifest, parts=temporary.name).to_json()
        if not (final / MANIFEST_NAME).create(text.encode(), replaces=replaces):
            with warn_only(f"the files of a save that lost against another stay in {temporary}"):
                temporary.remove_all()
            raise CheckpointError(
                f"another writer committed step {manifest.step} in {final} during this save; it stays, end one of the "
                "jobs"
            )
        return final, final / old if old else None

    def amend(self, step: ObjectPath, **entries: Any) -> None:
        version, _ = _version_and_parts(step)
        manifest = dataclasses.replace(read_manifest(step), **entries)
        if not (step / MANIFEST_NAME).create(manifest.to_json().encode(), replaces=version):
            raise CheckpointError(f"another writer changed {step / MANIFEST_NAME}; end one of the jobs")

    def abandon(self, temporary: ObjectPath) -> None:
        if temporary not in self._replaced:
            return  # a commit whose answer was lost may still come to be: the next reap knows
        del self._replaced[temporary]
        if temporary.exists():
            remove(temporary)

    def delete(self, step: ObjectPath) -> None:
        """Delete a committed step. Files of other saves of it stay: their writers may live, and commit them."""
        _, parts = _version_and_parts(step)
        (step / MANIFEST_NAME).unlink()  # now the step is gone, or this raises
        with warn_only(f"step {step_of(step.name)} is deleted, but files of it stay in {step}"):
            for entry in entries(step):
                if entry.name == parts or leftover(entry) is None:
                    entry.delete()

    def clean(self, dead: Leftover, step: ObjectPath) -> None:
        del step
        remove(dead.path)

    def folders(self, having: str) -> dict[int, ObjectPath]:
        """Return the steps whose folder has a file, and the folder: by one listing, and no question for each step."""
        keys = (key.partition("/") for key in self._root.names())
        folders = ((step_of(folder), folder) for folder, _, name in keys if name == having)
        return {step: self._root / folder for step, folder in folders if step is not None}

    def unfinished(self) -> list[Leftover]:
        entries_of: dict[str, set[str]] = {}
        for folder, _, rest in (key.partition("/") for key in self._root.names()):
            entries_of.setdefault(folder, set()).add(rest.partition("/")[0])
        steps = [(self._root / name, names) for name, names in sorted(entries_of.items()) if step_of(name) is not None]
        saves = [path for step, names in steps for path in _uncommitted(step, names)]
        return [each for path in saves if (each := left_behind(path))]

    def link(self, name: str) -> None:
        """Do nothing: ``LATEST`` names the newest step."""


def _version_and_parts(folder: ObjectPath) -> tuple[Version | None, str]:
    """Return the version of the manifest in a store's step, None without one, and the folder that it names."""
    text, version = (folder / MANIFEST_NAME).read_version() or (b"", None)
    named = _PARTS.search(text)
    return version, named[1].decode() if named else ""


def _uncommitted(folder: Place, names: Collection[str]) -> list[Place]:
    """Return the folders of saves with ``names`` in a store's step, but for the one of its manifest."""
    saves = [folder / name for name in sorted(names) if leftover(folder / name)]
    committed = MANIFEST_NAME in names
    if committed and len(saves) < 2:
        return []
    try:
        named = read_manifest(folder).parts if committed else ""
    except StoreError:
        raise
    except CheckpointError:
        return []  # damaged: it may be any of them
    return [save for save in saves if save.name != named]
