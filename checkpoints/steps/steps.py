"""The folder of a run's checkpoints: commit, find, retain and delete steps.

A step is written to ``step-00000012.tmp-<host>-<pid>-<id>`` and renamed to ``step-00000012`` once it is complete and on the disk, so
that every ``step-N`` is a complete checkpoint at all times. A step that is being replaced is called ``step-00000012.old-...`` until the new
one has its name, and is read from there. ``LATEST`` names the newest step; ``latest`` is a link to it.

An object store renames nothing. There the files of a save stay in a folder of its own, ``step-00000012/step-00000012.tmp-...``, and
``step-00000012/meshpar.json``, created last and only if it is absent (or is still the one to be replaced), names that folder.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import final

from meshpar.checkpoints.format.manifest import MANIFEST_NAME, Manifest, read_manifest, step_name, step_of
from meshpar.checkpoints.steps.leftovers import remove, told_only
from meshpar.checkpoints.storage.objects import ObjectPath, Version
from meshpar.checkpoints.storage.place import Place, delete, entries, fsync, place, write_durably
from meshpar.errors import CheckpointError, StoreError
from meshpar.leftovers import Leftover, leftover, on_the_way

CHECKPOINTS = "checkpoints"
"""The folder of steps in a run's folder."""
LATEST_FILE, LATEST_LINK = "LATEST", "latest"
PIN_FILE = "PINNED"
_PARTS = re.compile(rb'^"parts": "([^"/]+)",$', re.MULTILINE)  # in a manifest that may be damaged


@final
class Steps:
    """The committed steps in ``root``. Only this class adds and deletes steps."""

    def __init__(self, root: str | Place) -> None:
        self.root = place(root)
        # In a store: version and folder of what a save replaces, by its own folder.
        self._replaced: dict[Place, tuple[Version | None, str]] = {}

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
        found = set(self.folders().values())
        reasons = {
            each.path: "of a save or a removal that is running or did not finish" for _, each in self._leftovers() if each.path not in found
        }
        for each in self._folders():
            if step_of(each.name) is not None and each not in found and not (each / MANIFEST_NAME).is_file():
                reasons[each] = f"it has no {MANIFEST_NAME}, so it was never committed"
        return reasons

    def begin(self, step: int, *, replace: bool) -> Place:
        """Create the temporary folder of a new step; raises CheckpointError if the step exists, unless ``replace``."""
        stored = isinstance(self.root, ObjectPath)  # what lies there without a manifest is of other saves, and in no one's way
        if not replace and (step in self.committed() or (not stored and self.path(step).exists())):
            what = "is already saved" if step in self.committed() else "cannot be saved: something that is not a checkpoint is"
            raise CheckpointError(f"step {step} {what} in {self.folder(step)}; save another step, or pass replace=True")
        final = self.path(step)
        if isinstance(final, ObjectPath):
            attempt = final / on_the_way(final, "tmp").name
            self._replaced[attempt] = _version_and_parts(final)
            return attempt
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = on_the_way(final, "tmp")
        temporary.mkdir()
        return temporary

    def commit(self, temporary: Place, manifest: Manifest) -> Place:
        """Commit a temporary folder whose files are on the disk. Errors after the commit are logged as warnings only."""
        if isinstance(temporary, ObjectPath):
            return self._commit_object(temporary, dataclasses.replace(manifest, parts=temporary.name))
        write_durably(temporary / MANIFEST_NAME, manifest.to_json())
        final = temporary.with_name(step_name(manifest.step))
        replaced = on_the_way(final, "old") if final.exists() else None
        if replaced:
            if (final / PIN_FILE).exists():
                write_durably(temporary / PIN_FILE, "")
            final.rename(replaced)
        try:
            temporary.rename(final)
        except OSError:
            if replaced:
                replaced.rename(final)
            raise
        with told_only(f"step {manifest.step} is committed, but cleaning its folder up failed"):
            fsync(self.root)
            if replaced:
                remove(replaced)
            self._mark_latest(self.committed()[-1])
        return final

    def _commit_object(self, attempt: ObjectPath, manifest: Manifest) -> ObjectPath:
        """Create the manifest. Two writers of a step have two folders, and one of them this manifest."""
        final = attempt.parent
        replaces, old = self._replaced.pop(attempt)
        if not (final / MANIFEST_NAME).create(manifest.to_json().encode(), replaces=replaces):
            with told_only(f"the files of a save that lost against another stay in {attempt}"):
                attempt.remove_all()
            raise CheckpointError(
                f"another writer committed step {manifest.step} in {final} during this save; it stays, end one of the jobs"
            )
        with told_only(f"step {manifest.step} is committed, but cleaning its folder up failed"):
            if old:
                remove(final / old)
            self._mark_latest(self.committed()[-1])
        return final

    def abandon(self, temporary: Place) -> None:
        """Delete a temporary folder after a failed save."""
        if isinstance(temporary, ObjectPath) and temporary not in self._replaced:
            return  # a commit whose answer was lost may still come to be: the next reap knows
        self._replaced.pop(temporary, None)
        if temporary.exists():
            remove(temporary)

    def pin(self, step: int, *, pinned: bool = True) -> None:
        """Protect a step from deletion, or end the protection; raises CheckpointError if it is not committed."""
        if step not in self.committed():
            raise CheckpointError(f"{self.root} holds no committed step {step}; it holds {self.committed()}")
        if pinned:
            write_durably(self.folder(step) / PIN_FILE, "")
        else:
            (self.folder(step) / PIN_FILE).unlink(missing_ok=True)

    def pinned(self) -> set[int]:
        """Return the steps that are protected from deletion."""
        return set(self.folders()) & set(self.folders(PIN_FILE))

    def retain(self, keep: int | None, protected: Collection[int] = (), *, saved: int | None = None) -> list[int]:
        """Delete all committed steps except the newest ``keep``, the pinned and the protected ones; return the deleted steps.

        Steps later than the one just ``saved`` exist after a resume from an earlier step: they are neither counted nor deleted. Steps that
        cannot be read are not counted.
        """
        steps, kept = self.committed(), self.pinned() | set(protected)
        steps = [step for step in steps if saved is None or step <= saved]
        if isinstance(self.root, Path) and self.root.is_dir():
            fsync(self.root)  # otherwise a crash might lose an older step before a newer one is on the disk
        if keep is None or len(steps) <= keep:
            return []
        kept |= set(islice(filter(self._is_readable, reversed(steps)), keep))
        doomed = [step for step in steps if step not in kept and self.path(step).exists()]
        for step in doomed:
            self.delete(step)
        return doomed

    def delete(self, step: int) -> None:
        """Delete a committed step. In a store, files of other saves of it stay: their writers may live, and commit them."""
        folder = self.path(step)
        if isinstance(folder, Path):
            remove(folder.rename(on_the_way(folder, "tmp")))
            return
        _, parts = _version_and_parts(folder)
        (folder / MANIFEST_NAME).unlink()  # now the step is gone, or this raises
        with told_only(f"step {step} is deleted, but files of it stay in {folder}"):
            for each in entries(folder):
                if each.name == parts or leftover(each) is None:
                    delete(each)

    def _is_readable(self, step: int) -> bool:
        try:
            read_manifest(self.folder(step))
        except StoreError:
            raise  # a step is not unreadable because the store does not answer now
        except CheckpointError:
            return False
        return True

    def reap(self, *, sole_writer: bool = False) -> None:
        """Delete leftovers of dead processes. A step whose process died while replacing it gets its name back.

        Args:
            sole_writer: whether this process is the run's only writer, rank 0, so that leftovers of other hosts are dead. Otherwise they
                stay until they have not changed for six hours.
        """
        for step, each in self._leftovers():
            final = self.path(step)
            # A writer in a store that only seemed dead could commit what was deleted: on another host its files stay for longer.
            if not each.abandoned(sole_writer=sole_writer and isinstance(final, Path)):
                continue
            if isinstance(each.path, Path) and each.kind == "old" and not final.exists() and (each.path / MANIFEST_NAME).is_file():
                each.path.rename(each.path.with_name(final.name))
            else:
                remove(each.path)

    def best(self, best: str) -> int | None:
        """Return the committed step with the lowest ``metric``, or the highest of ``+metric``; None if no step has it.

        A step with a damaged manifest is skipped with a warning.
        """
        return _best(self._scores(best.removeprefix("+")), largest=best.startswith("+"))

    def best_or_unknown(self, best: str) -> set[int]:
        """Return the best step and the steps whose manifest cannot be read, because one of these may be the best."""
        scores = self._scores(best.removeprefix("+"))
        found = _best(scores, largest=best.startswith("+"))
        return set(self.committed()) - set(scores) | (set() if found is None else {found})

    def _scores(self, metric: str) -> dict[int, float | None]:
        scores: dict[int, float | None] = {}
        for step in self.committed():
            with told_only(f"step {step} is left out of the comparison by {metric}"):
                scores[step] = read_manifest(self.folder(step)).metrics.get(metric)
        return scores

    def _folders(self) -> Sequence[Place]:
        if isinstance(self.root, Path) and not self.root.is_dir():
            return []
        return [each for each in entries(self.root) if each.is_dir() and not each.is_symlink()]

    def folders(self, having: str = MANIFEST_NAME) -> dict[int, Place]:
        """Return the steps whose folder has a file, and the folder: with a manifest, the committed ones."""
        if isinstance(self.root, ObjectPath):  # one listing, and no question for each step
            found = ((step_of(folder), folder) for folder, _, name in (key.partition("/") for key in self.root.names()) if name == having)
            return {step: self.root / folder for step, folder in found if step is not None}
        folders = self._folders()
        aside = {
            step: left.path
            for each in folders
            if (left := leftover(each)) and left.kind == "old" and (step := step_of(left.of)) is not None
        }
        placed = {step: each for each in folders if (step := step_of(each.name)) is not None}
        return {step: each for step, each in {**aside, **placed}.items() if (each / having).is_file()}

    def _leftovers(self) -> list[tuple[int, Leftover]]:
        """Return temporary and replaced folders, with the number of their step."""
        folders: Iterable[Place]
        if not isinstance(self.root, ObjectPath):
            folders = self._folders()
        else:
            inside: dict[str, set[str]] = {}
            for folder, _, rest in (key.partition("/") for key in self.root.names()):
                inside.setdefault(folder, set()).add(rest.partition("/")[0])
            folders = [
                each
                for name, names in sorted(inside.items())
                if step_of(name) is not None
                for each in _uncommitted(self.root / name, names)
            ]
        found = [each for folder in folders if (each := leftover(folder))]
        return [(step, each) for each in found if (step := step_of(each.of)) is not None]

    def _mark_latest(self, step: int) -> None:
        name = self.path(step).name
        write_durably(self.root / LATEST_FILE, name + "\n")
        if isinstance(self.root, ObjectPath):
            return
        link, fresh = self.root / LATEST_LINK, self.root / f".{LATEST_LINK}.new"
        if link.exists() and not link.is_symlink():
            return  # a file system that ignores case: LATEST is all there can be, and open_step reads it
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(name, target_is_directory=True)
        fresh.replace(link)
        fsync(self.root)


def _version_and_parts(folder: ObjectPath) -> tuple[Version | None, str]:
    """Return the version of the manifest in a step's folder of a store, None without one, and the folder that it names."""
    text, version = (folder / MANIFEST_NAME).read() or (b"", None)
    named = _PARTS.search(text)
    return version, named[1].decode() if named else ""


def _uncommitted(folder: Place, names: Collection[str]) -> list[Place]:
    """Return the folders of saves in a step's folder of a store, in which there are ``names``, but for the one that its manifest names."""
    saves = [folder / each for each in sorted(names) if leftover(folder / each)]
    committed = MANIFEST_NAME in names
    if committed and len(saves) < 2:
        return []
    try:
        named = read_manifest(folder).parts if committed else ""
    except StoreError:
        raise
    except CheckpointError:
        return []  # damaged: it may be any of them
    return [each for each in saves if each.name != named]


def _best(scores: Mapping[int, float | None], *, largest: bool) -> int | None:
    known = {step: score for step, score in scores.items() if score is not None and score == score}
    return (max if largest else min)(known, key=lambda step: (known[step], -step if largest else step)) if known else None


def checkpoints_in(run: str | Place) -> Place:
    """Return the folder of steps of a run; any other path as it is."""
    run = place(run)
    return run / CHECKPOINTS if (run / CHECKPOINTS).is_dir() else run


def open_step(path: str | Place) -> Place:
    """Return the folder of a step. ``path`` is a step, ``.../latest``, or a folder of steps (its newest step).

    Raises:
        CheckpointError: there is no committed step.
    """
    path = place(path)
    if (path / MANIFEST_NAME).is_file():
        return path.resolve()
    steps = Steps(path.parent if path.name == LATEST_LINK and not path.is_dir() else path)
    if committed := steps.committed():
        return steps.folder(committed[-1])
    if (step := step_of(path.name)) is not None and step in (around := Steps(path.parent)).committed():
        return around.folder(step)
    read_manifest(path)
    raise CheckpointError(f"{path} holds no committed step; give a step's folder, or a folder with steps")
