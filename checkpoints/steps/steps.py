"""The folder of a run's checkpoints: commit, find, retain and delete steps; ``LATEST`` names the newest."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any, final

from meshpar.checkpoints.format.manifest import MANIFEST_NAME, Manifest, read_manifest, step_name, step_of
from meshpar.checkpoints.steps.commit import LATEST_LINK, PIN_FILE, Conditional, Renaming, remove, warn_only
from meshpar.checkpoints.storage.place import Place, PlaceLike, either, entries, place
from meshpar.core.errors import CheckpointError, StoreError
from meshpar.process.leftovers import Leftover

CHECKPOINTS = "checkpoints"
"""The folder of steps in a run's folder."""
LATEST_FILE = "LATEST"


@final
class Steps:
    """The committed steps in ``root``. Only this class adds and deletes steps."""

    def __init__(self, root: PlaceLike) -> None:
        self.root = place(root)
        self._way: Any = either(self.root, disk=Renaming, store=Conditional)

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
        reasons = {
            leftover.path: "of a save or a removal that is running or did not finish"
            for _, leftover in self._leftovers()
            if leftover.path not in committed
        }
        for entry in entries(self.root):
            folder = entry.is_dir() and not entry.is_symlink() and entry not in committed
            if folder and step_of(entry.name) is not None and not (entry / MANIFEST_NAME).is_file():
                reasons[entry] = f"it has no {MANIFEST_NAME}, so it was never committed"
        return reasons

    def begin(self, step: int, *, replace: bool) -> Place:
        """Create the temporary folder of a new step; raises CheckpointError if the step exists, unless ``replace``."""
        # files in a store without a manifest belong to other saves, which this one does not disturb
        taken = self.root.mounted and self.path(step).exists()
        if not replace and (step in self.committed() or taken):
            what = (
                "is already saved"
                if step in self.committed()
                else "cannot be saved: something that is not a checkpoint is"
            )
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
        """Replace entries in the manifest of a committed step; raises CheckpointError if it is not committed."""
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
        """Delete all committed steps except the newest ``keep``, the pinned and the protected ones; return the deleted
        steps.

        Steps later than the one just ``saved`` exist after a resume from an earlier step: they are neither counted nor
        deleted. Steps that cannot be read are not counted.
        """
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
        """Delete a committed step."""
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
        """Delete leftovers of dead processes. A step whose process died while replacing it gets its name back.

        Leftovers of other hosts are dead if this process is the ``sole_writer`` of the run, rank 0; otherwise they stay
        until they have not changed for six hours.
        """
        for step, leftover in self._leftovers():
            # A writer in a store that only seemed dead could commit what was deleted: on another host its files stay
            # for longer.
            if leftover.abandoned(sole_writer=sole_writer and self.root.mounted):
                self._way.clean(leftover, self.path(step))

    def best(self, best: str) -> int | None:
        """Return the committed step with the lowest ``metric``, or the highest of ``+metric``; None if no step has it.

        A step with a damaged manifest is skipped with a warning.
        """
        return _best(self._scores(best.removeprefix("+")), largest=best.startswith("+"))

    def best_or_unknown(self, best: str) -> set[int]:
        """Return the best step and the steps whose manifest cannot be read, because one of these may be the best."""
        scores = self._scores(best.removeprefix("+"))
        step = _best(scores, largest=best.startswith("+"))
        return set(self.committed()) - set(scores) | (set() if step is None else {step})

    def _scores(self, metric: str) -> dict[int, float | None]:
        scores: dict[int, float | None] = {}
        for step in self.committed():
            with warn_only(f"step {step} is left out of the comparison by {metric}"):
                scores[step] = read_manifest(self.folder(step)).metrics.get(metric)
        return scores

    def folders(self, having: str = MANIFEST_NAME) -> dict[int, Place]:
        """Return the steps whose folder has a file, and the folder: with a manifest, the committed ones."""
        return self._way.folders(having)

    def _leftovers(self) -> list[tuple[int, Leftover]]:
        """Return temporary and replaced folders, with the number of their step."""
        return [(step, leftover) for leftover in self._way.unfinished() if (step := step_of(leftover.of)) is not None]

    def _mark_latest(self, step: int) -> None:
        name = self.path(step).name
        (self.root / LATEST_FILE).write_durably(f"{name}\n".encode())
        self._way.link(name)


def _best(scores: Mapping[int, float | None], *, largest: bool) -> int | None:
    numbers = {step: score for step, score in scores.items() if score is not None and score == score}
    if not numbers:
        return None
    return (max if largest else min)(numbers, key=lambda step: (numbers[step], -step if largest else step))


def checkpoints_in(run: PlaceLike) -> Place:
    """Return the folder of steps of a run; any other path as it is."""
    run = place(run)
    return run / CHECKPOINTS if (run / CHECKPOINTS).is_dir() else run


def open_step(path: PlaceLike) -> Place:
    """Return the folder of a step. ``path`` is a step, ``.../latest``, or the folder of a run or of its steps (the
    newest step).

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
