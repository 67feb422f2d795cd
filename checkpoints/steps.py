"""The folder of a run's checkpoints: which steps are committed, how one becomes so, and which go.

A step is written in ``step-00000012.tmp-<host>-<pid>-<id>`` and renamed to ``step-00000012`` when it is whole and on the disk, so that
at every instant each ``step-N`` is a whole checkpoint. A step that is replaced lies in ``step-00000012.old-...`` until the new one has its
name, and is found there. ``LATEST`` names the newest; ``latest`` is a link to it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import final

from meshpar.checkpoints.files import local
from meshpar.checkpoints.leftovers import Leftover, leftover, on_the_way, remove, told_only
from meshpar.checkpoints.manifest import MANIFEST_NAME, Manifest, fsync, read_manifest, step_name, step_of, write_durably
from meshpar.errors import CheckpointError

LATEST_FILE, LATEST_LINK = "LATEST", "latest"
PIN_FILE = "PINNED"


@final
class Steps:
    """The committed steps in ``root``, and the only code that adds and removes any."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int) -> Path:
        """Return the place of a step, which it may be about to take."""
        return self.root / step_name(step)

    def folder(self, step: int) -> Path:
        """Return where a committed step is read: in its place, or aside where whoever replaces it has not come to its end."""
        return self._found().get(step, self.path(step))

    def committed(self) -> list[int]:
        """Return the committed steps, oldest first."""
        return sorted(self._found())

    def ignored(self) -> dict[Path, str]:
        """Return the folders that look like steps but are none, and why."""
        found = set(self._found().values())
        reasons = {
            each.path: "of a save or a removal that goes on or did not finish" for _, each in self._leftovers() if each.path not in found
        }
        for each in self._folders():
            if step_of(each.name) is not None and not (each / MANIFEST_NAME).is_file():
                reasons[each] = f"it has no {MANIFEST_NAME}, so it was never committed"
        return reasons

    def begin(self, step: int, *, replace: bool) -> Path:
        """Make the temporary folder of a new step; raises CheckpointError where the step is saved already, unless ``replace``."""
        if (self.path(step).exists() or step in self.committed()) and not replace:
            what = "is saved already" if step in self.committed() else "cannot be saved: something that is no checkpoint is"
            raise CheckpointError(f"step {step} {what} in {self.folder(step)}; save another step, or pass replace=True")
        self.root.mkdir(parents=True, exist_ok=True)
        temporary = on_the_way(self.path(step), "tmp")
        temporary.mkdir()
        return temporary

    def commit(self, temporary: Path, manifest: Manifest) -> Path:
        """Make a whole step out of a temporary folder whose files are on the disk; what fails after the step is there is only told."""
        write_durably(temporary / MANIFEST_NAME, manifest.to_json())
        final = self.path(manifest.step)
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
        with told_only(f"step {manifest.step} is committed, but the folder around it is not in order"):
            fsync(self.root)
            if replaced:
                remove(replaced)
            self._mark_latest(self.committed()[-1])
        return final

    def abandon(self, temporary: Path) -> None:
        """Remove a temporary folder after a failed save."""
        if temporary.exists():
            remove(temporary)

    def pin(self, step: int, *, pinned: bool = True) -> None:
        """Protect a step from retention, or no more; raises CheckpointError where it is not committed."""
        if step not in self.committed():
            raise CheckpointError(f"{self.root} holds no committed step {step}; it holds {self.committed()}")
        if pinned:
            write_durably(self.folder(step) / PIN_FILE, "")
        else:
            (self.folder(step) / PIN_FILE).unlink(missing_ok=True)

    def pinned(self) -> set[int]:
        """Return the steps that are protected from retention."""
        return {step for step, folder in self._found().items() if (folder / PIN_FILE).exists()}

    def retain(self, keep: int | None, protected: Collection[int] = (), *, saved: int | None = None) -> list[int]:
        """Remove all committed steps but the newest ``keep``, the pinned and the protected ones; return those removed.

        Steps after the one that was ``saved`` just now, from which somebody went back, neither count nor go, and those that cannot be
        read do not count.
        """
        steps, kept = self.committed(), self.pinned() | set(protected)
        steps = [step for step in steps if saved is None or step <= saved]
        if self.root.is_dir():
            fsync(self.root)  # or, after a crash, an older step might be gone and a newer one not be there yet
        if keep is None or len(steps) <= keep:
            return []
        kept |= set(islice(filter(self._is_readable, reversed(steps)), keep))
        doomed = [step for step in steps if step not in kept and self.path(step).exists()]
        for step in doomed:
            folder = on_the_way(self.path(step), "tmp")
            self.path(step).rename(folder)
            remove(folder)
        return doomed

    def _is_readable(self, step: int) -> bool:
        try:
            read_manifest(self.folder(step))
        except CheckpointError:
            return False
        return True

    def reap(self, *, sole_writer: bool = False) -> None:
        """Remove what dead processes left; a step that was being replaced when its process died comes back.

        Args:
            sole_writer: whether this is the run's one writer, rank 0, so that what another host left is dead; otherwise that is left alone
                until it has not changed for hours.
        """
        for step, each in self._leftovers():
            if not each.abandoned(sole_writer=sole_writer):
                continue
            if each.kind == "old" and not self.path(step).exists() and (each.path / MANIFEST_NAME).is_file():
                each.path.rename(self.path(step))
            else:
                remove(each.path)

    def best(self, best: str) -> int | None:
        """Return the committed step with the least ``metric``, or the largest of ``+metric``; None where none has it.

        A damaged manifest is told and passed over.
        """
        return _best(self._scores(best.removeprefix("+")), largest=best.startswith("+"))

    def best_or_unknown(self, best: str) -> set[int]:
        """Return the best step, and those whose manifest cannot be read, since one of them may be the best."""
        scores = self._scores(best.removeprefix("+"))
        found = _best(scores, largest=best.startswith("+"))
        return set(self.committed()) - set(scores) | (set() if found is None else {found})

    def _scores(self, metric: str) -> dict[int, float | None]:
        scores: dict[int, float | None] = {}
        for step in self.committed():
            with told_only(f"step {step} is not compared by {metric}"):
                scores[step] = read_manifest(self.folder(step)).metrics.get(metric)
        return scores

    def _folders(self) -> Sequence[Path]:
        if not self.root.is_dir():
            return []
        return sorted(each for each in self.root.iterdir() if each.is_dir() and not each.is_symlink())

    def _found(self) -> dict[int, Path]:
        """Return the committed steps and where each is read."""
        aside = {step: each.path for step, each in self._leftovers() if each.kind == "old"}
        placed = {step: each for each in self._folders() if (step := step_of(each.name)) is not None}
        return {step: each for step, each in {**aside, **placed}.items() if (each / MANIFEST_NAME).is_file()}

    def _leftovers(self) -> list[tuple[int, Leftover]]:
        """Return the folders that are on their way to a step, or were one, with its number."""
        found = [each for folder in self._folders() if (each := leftover(folder))]
        return [(step, each) for each in found if (step := step_of(each.of)) is not None]

    def _mark_latest(self, step: int) -> None:
        name = self.path(step).name
        write_durably(self.root / LATEST_FILE, name + "\n")
        link, fresh = self.root / LATEST_LINK, self.root / f".{LATEST_LINK}.new"
        if link.exists() and not link.is_symlink():
            return  # a file system that ignores case: LATEST is all there can be, and open_step reads it
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(name, target_is_directory=True)
        fresh.replace(link)
        fsync(self.root)


def _best(scores: Mapping[int, float | None], *, largest: bool) -> int | None:
    known = {step: score for step, score in scores.items() if score is not None and score == score}
    return (max if largest else min)(known, key=lambda step: (known[step], -step if largest else step)) if known else None


def open_step(path: str | Path) -> Path:
    """Return the folder of the step that ``path`` means: a step, ``.../latest``, or a folder of steps (its newest).

    Raises:
        CheckpointError: there is no committed step.
    """
    path = local(path)
    if (path / MANIFEST_NAME).is_file():
        return path.resolve()
    steps = Steps(path.parent if path.name == LATEST_LINK and not path.is_dir() else path)
    if committed := steps.committed():
        return steps.folder(committed[-1])
    if (step := step_of(path.name)) is not None and step in (around := Steps(path.parent)).committed():
        return around.folder(step)
    read_manifest(path)
    raise CheckpointError(f"{path} holds no committed step")
