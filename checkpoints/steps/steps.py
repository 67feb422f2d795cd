"""The folder of a run's checkpoints: commit, find, retain and delete steps; ``LATEST`` names the newest."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, final

from meshpar.checkpoints.format.manifest import MANIFEST_NAME, Manifest, read_manifest, step_name, step_of
from meshpar.checkpoints.storage.disk import DiskPath
from meshpar.checkpoints.storage.objects import ObjectPath, Version
from meshpar.checkpoints.storage.place import Place, PlaceLike, by_storage, entries, place
from meshpar.core.errors import CheckpointError, StoreError
from meshpar.process.leftovers import NOBODY, Leftover, leftover, on_the_way

CHECKPOINTS = "checkpoints"  # the folder of steps in a run's folder
LATEST_FILE = "LATEST"
LATEST_LINK = "latest"
PIN_FILE = "PINNED"
_PARTS = re.compile(rb'^"parts": "([^"/]+)",$', re.MULTILINE)  # in a manifest that may be damaged
_log = logging.getLogger("meshpar.checkpoints")


def remove(path: Place) -> None:
    """Remove a folder, or a file in its place; log an error, and leave the folder for any process to remove later."""

    def leave_to_others(folder: DiskPath) -> None:
        if (parsed := leftover(folder)) and parsed.ours:
            folder.rename(on_the_way(folder.with_name(parsed.of), "tmp", process=NOBODY))

    with warn_only(f"cannot remove {path}"):
        try:
            if path.is_dir():
                (path / MANIFEST_NAME).unlink(missing_ok=True)  # first, so that half of an old step is not taken for it
            path.delete()
        except OSError:
            by_storage(path, disk=leave_to_others, store=lambda _: None)
            raise


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


# A step is written to ``step-00000012.tmp-<host>-<pid>-<id>`` and renamed to ``step-00000012`` once it is on the disk.
# One that is being replaced is ``step-00000012.old-...``, and is read from there, until the new one has its name.
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
        """Let the step exist; return its folder, and what is to be removed now."""
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
        manifest = dataclasses.replace(read_manifest(step), **entries)
        (step / MANIFEST_NAME).write_durably(manifest.to_json().encode())

    def abandon(self, temporary: DiskPath) -> None:
        if temporary.exists():
            remove(temporary)

    def delete(self, step: DiskPath) -> None:
        remove(step.rename(on_the_way(step, "tmp")))

    def clean(self, dead: Leftover, step: DiskPath) -> None:
        """Remove a leftover of a dead process, unless the step is in it."""
        if dead.kind == "old" and not step.exists() and (dead.path / MANIFEST_NAME).is_file():
            dead.path.rename(step)
        else:
            remove(dead.path)

    def folders(self, having: str) -> dict[int, DiskPath]:
        folders = self._folders()
        aside = {
            step: replaced.path
            for folder in folders
            if (replaced := leftover(folder)) and replaced.kind == "old" and (step := step_of(replaced.of)) is not None
        }
        placed = {step: folder for folder in folders if (step := step_of(folder.name)) is not None}
        return {step: folder for step, folder in {**aside, **placed}.items() if (folder / having).is_file()}

    def unfinished(self) -> list[Leftover]:
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


# The files of a save stay in ``step-00000012/step-00000012.tmp-...``; ``step-00000012/meshpar.json``, created last and
# only if it is absent, or still the one to be replaced, names them.
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
        """Delete a step, but not files of other saves of it: their writers may live, and commit them."""
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
        """Return them by one listing, and no question for each step."""
        keys = (key.partition("/") for key in self._root.names())
        folders = ((step_of(folder), folder) for folder, _, name in keys if name == having)
        return {step: self._root / folder for step, folder in folders if step is not None}

    def unfinished(self) -> list[Leftover]:
        entries_of: dict[str, set[str]] = {}
        for folder, _, rest in (key.partition("/") for key in self._root.names()):
            entries_of.setdefault(folder, set()).add(rest.partition("/")[0])
        steps = [(self._root / name, names) for name, names in sorted(entries_of.items()) if step_of(name) is not None]
        return [each for step, names in steps for path in _uncommitted(step, names) if (each := left_behind(path))]

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
    if MANIFEST_NAME not in names:
        return saves
    if len(saves) < 2:
        return []
    try:
        committed = read_manifest(folder).parts
    except StoreError:
        raise
    except CheckpointError:
        return []  # damaged: it may be any of them
    return [save for save in saves if save.name != committed]


@final
class Steps:
    """The committed steps in ``root``. Only this class adds and deletes steps."""

    def __init__(self, root: PlaceLike) -> None:
        self.root = place(root)
        self._way: Any = by_storage(self.root, disk=Renaming, store=Conditional)

    def path(self, step: int) -> Place:
        """Return the path of a step, which may not exist yet."""
        return self.root / step_name(step)

    def folder(self, step: int) -> Place:
        """Return the folder of a committed step: its path, or its ``.old-`` folder if a replacement did not finish."""
        return self.folders().get(step, self.path(step))

    def committed(self) -> list[int]:
        """Return the committed steps, oldest first."""
        return sorted(self.folders())

    def ignored(self) -> dict[Place, str]:
        """Return the folders that look like steps but are not committed, and why."""
        committed = set(self.folders().values())
        unfinished = [folder.path for _, folder in self._leftovers() if folder.path not in committed]
        reasons = dict.fromkeys(unfinished, "of a save or a removal that is running or did not finish")
        for entry in entries(self.root):
            folder = entry.is_dir() and not entry.is_symlink() and entry not in committed
            if folder and step_of(entry.name) is not None and not (entry / MANIFEST_NAME).is_file():
                reasons[entry] = f"it has no {MANIFEST_NAME}, so it was never committed"
        return reasons

    def begin(self, step: int, *, replace: bool) -> Place:
        """Create the temporary folder of a new step; raises CheckpointError if the step exists, unless ``replace``."""
        # files in a store without a manifest belong to other saves, which this one does not disturb
        taken = self.root.mounted and self.path(step).exists()
        if not replace and ((committed := step in self.committed()) or taken):
            what = "is already saved" if committed else "cannot be saved: something that is not a checkpoint is"
            raise CheckpointError(f"step {step} {what} in {self.folder(step)}; save another step, or pass replace=True")
        return self._way.begin(self.path(step))

    def commit(self, temporary: Place, manifest: Manifest) -> Place:
        """Commit a temporary folder whose files are on the disk; later errors are only logged as warnings."""
        final, replaced = self._way.commit(temporary, manifest)
        with warn_only(f"step {manifest.step} is committed, but cleaning its folder up failed"):
            self.root.flush()
            if replaced:
                remove(replaced)
            self._mark_latest(self.committed()[-1])
        return final

    def amend(self, step: int, **entries: Any) -> None:
        """Replace entries in the manifest of a committed step; raises CheckpointError if another writer was first."""
        self._way.amend(self.folder(step), **entries)

    def abandon(self, temporary: Place) -> None:
        """Delete a temporary folder after a failed save."""
        self._way.abandon(temporary)

    def pin(self, step: int, *, pinned: bool = True) -> None:
        """Protect a step from deletion, or end the protection; raises CheckpointError if it is not committed."""
        if step not in self.committed():
            raise CheckpointError(f"{self.root} holds no committed step {step}; it holds {self.committed()}")
        if pinned:
            (self.folder(step) / PIN_FILE).write_durably(b"")
        else:
            (self.folder(step) / PIN_FILE).unlink(missing_ok=True)

    def pinned(self) -> set[int]:
        """Return the steps that are protected from deletion."""
        return set(self.folders()) & set(self.folders(PIN_FILE))

    def retain(self, keep: int | None, protected: Collection[int] = (), *, saved: int | None = None) -> list[int]:
        """Delete all steps but the newest ``keep``, the pinned and the protected ones; return the deleted ones."""
        # Later steps than the one just saved exist after a resume from an earlier step: they are neither counted nor
        # deleted. Steps that cannot be read are not counted.
        steps, staying = self.committed(), self.pinned() | set(protected)
        steps = [step for step in steps if saved is None or step <= saved]
        if self.root.mounted and self.root.is_dir():
            self.root.flush()  # otherwise a crash might lose an older step before a newer one is on the disk
        if keep is None or len(steps) <= keep:
            return []
        staying |= set(islice(filter(self._is_readable, reversed(steps)), keep))
        doomed = [step for step in steps if step not in staying and self.path(step).exists()]
        for step in doomed:
            self.delete(step)
        return doomed

    def delete(self, step: int) -> None:
        self._way.delete(self.path(step))

    def _is_readable(self, step: int) -> bool:
        try:
            read_manifest(self.folder(step))
        except StoreError:
            raise  # a step is not unreadable because the store does not answer now
        except CheckpointError:
            return False
        return True

    def reap(self, *, sole_writer: bool = False) -> None:
        """Delete leftovers of dead processes, of other hosts for the ``sole_writer``, or after six hours at rest."""
        for step, dead in self._leftovers():
            # A writer in a store that only seemed dead could commit what was deleted: on another host its files stay
            # for longer.
            if dead.abandoned(sole_writer=sole_writer and self.root.mounted):
                self._way.clean(dead, self.path(step))

    def best(self, best: str) -> int | None:
        """Return the step with the lowest ``metric``, or the highest of ``+metric``; None if no step has it."""
        return self._best_and_unknown(best)[0]

    def best_or_unknown(self, best: str) -> set[int]:
        """Return the best step and the steps whose manifest cannot be read, because one of these may be the best."""
        step, unknown = self._best_and_unknown(best)
        return unknown if step is None else {step, *unknown}

    def _best_and_unknown(self, best: str) -> tuple[int | None, set[int]]:
        metrics, unknown = dict[int, Mapping[str, float | None]](), set(self.committed())
        for step in self.committed():
            with warn_only(f"step {step} is left out of the comparison by {best.removeprefix('+')}"):
                metrics[step] = read_manifest(self.folder(step)).metrics
                unknown.discard(step)
        return best_of(metrics, best), unknown

    def folders(self, having: str = MANIFEST_NAME) -> dict[int, Place]:
        """Return the steps whose folder has a file, and the folder: with a manifest, the committed ones."""
        return self._way.folders(having)

    def _leftovers(self) -> list[tuple[int, Leftover]]:
        return [(step, folder) for folder in self._way.unfinished() if (step := step_of(folder.of)) is not None]

    def _mark_latest(self, step: int) -> None:
        name = self.path(step).name
        (self.root / LATEST_FILE).write_durably(f"{name}\n".encode())
        self._way.link(name)


def best_of(metrics: Mapping[int, Mapping[str, float | None]], best: str) -> int | None:
    """Return the step with the lowest ``metric``, or the highest of ``+metric``; None if no step has it."""
    sign = -1 if best.startswith("+") else 1
    scores = {step: values.get(best.removeprefix("+")) for step, values in metrics.items()}
    comparable = {step: sign * score for step, score in scores.items() if score is not None and score == score}
    return min(comparable, key=lambda step: (comparable[step], step), default=None)


def checkpoints_in(run: PlaceLike) -> Place:
    """Return the folder of steps of a run; any other path as it is."""
    run = place(run)
    return run / CHECKPOINTS if (run / CHECKPOINTS).is_dir() else run


def open_step(path: PlaceLike) -> Place:
    """Return the folder of a step: ``path``, ``.../latest``, or the newest step in the folder of a run or of its steps.

    Raises:
        CheckpointError: there is no committed step.
    """
    path = checkpoints_in(path)
    if (path / MANIFEST_NAME).is_file():
        return path.resolve()
    steps = Steps(path.parent if path.name == LATEST_LINK and not path.is_dir() else path)
    if committed := steps.committed():
        return steps.folder(committed[-1])
    if (step := step_of(path.name)) is not None and step in (around := Steps(path.parent)).committed():
        return around.folder(step)
    read_manifest(path)  # which says what is wrong with it
    return path.resolve()
