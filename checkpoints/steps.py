"""The folder of a run's checkpoints: commit, find, retain and delete steps.

A step is written to ``step-00000012.tmp-<host>-<pid>-<id>`` and renamed to ``step-00000012`` once it is complete and on the disk, so
that every ``step-N`` is a complete checkpoint at all times. A step that is being replaced is called ``step-00000012.old-...`` until the new
one has its name, and is read from there. ``LATEST`` names the newest step; ``latest`` is a link to it.
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
    """The committed steps in ``root``. Only this class adds and deletes steps."""

    def __init__(self, root: str | Path) -> None:
        self.root = local(root)

    def path(self, step: int) -> Path:
        """Return the path of a step, which may not exist yet."""
        return self.root / step_name(step)

    def folder(self, step: int) -> Path:
        """Return the folder of a committed step: its path, or its ``.old-`` folder if a replacement did not finish."""
        return self._found().get(step, self.path(step))

    def committed(self) -> list[int]:
        """Return the committed steps, oldest first."""
        return sorted(self._found())

    def ignored(self) -> dict[Path, str]:
        """Return the folders that look like steps but are not committed, and why."""
        found = set(self._found().values())
        reasons = {
            each.path: "of a save or a removal that is running or did not finish" for _, each in self._leftovers() if each.path not in found
        }
        for each in self._folders():
            if step_of(each.name) is not None and not (each / MANIFEST_NAME).is_file():
                reasons[each] = f"it has no {MANIFEST_NAME}, so it was never committed"
        return reasons

    def begin(self, step: int, *, replace: bool) -> Path:
        """Create the temporary folder of a new step; raises CheckpointError if the step exists, unless ``replace``."""
        if (self.path(step).exists() or step in self.committed()) and not replace:
            what = "is already saved" if step in self.committed() else "cannot be saved: something that is not a checkpoint is"
            raise CheckpointError(f"step {step} {what} in {self.folder(step)}; save another step, or pass replace=True")
        self.root.mkdir(parents=True, exist_ok=True)
        temporary = on_the_way(self.path(step), "tmp")
        temporary.mkdir()
        return temporary

    def commit(self, temporary: Path, manifest: Manifest) -> Path:
        """Commit a temporary folder whose files are on the disk. Errors after the commit are logged as warnings only."""
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
        with told_only(f"step {manifest.step} is committed, but cleaning its folder up failed"):
            fsync(self.root)
            if replaced:
                remove(replaced)
            self._mark_latest(self.committed()[-1])
        return final

    def abandon(self, temporary: Path) -> None:
        """Delete a temporary folder after a failed save."""
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
        return {step for step, folder in self._found().items() if (folder / PIN_FILE).exists()}

    def retain(self, keep: int | None, protected: Collection[int] = (), *, saved: int | None = None) -> list[int]:
        """Delete all committed steps except the newest ``keep``, the pinned and the protected ones; return the deleted steps.

        Steps later than the one just ``saved`` exist after a resume from an earlier step: they are neither counted nor deleted. Steps that
        cannot be read are not counted.
        """
        steps, kept = self.committed(), self.pinned() | set(protected)
        steps = [step for step in steps if saved is None or step <= saved]
        if self.root.is_dir():
            fsync(self.root)  # otherwise a crash might lose an older step before a newer one is on the disk
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
        """Delete leftovers of dead processes. A step whose process died while replacing it gets its name back.

        Args:
            sole_writer: whether this process is the run's only writer, rank 0, so that leftovers of other hosts are dead. Otherwise they
                stay until they have not changed for six hours.
        """
        for step, each in self._leftovers():
            if not each.abandoned(sole_writer=sole_writer):
                continue
            if each.kind == "old" and not self.path(step).exists() and (each.path / MANIFEST_NAME).is_file():
                each.path.rename(self.path(step))
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

    def _folders(self) -> Sequence[Path]:
        if not self.root.is_dir():
            return []
        return sorted(each for each in self.root.iterdir() if each.is_dir() and not each.is_symlink())

    def _found(self) -> dict[int, Path]:
        """Return the committed steps and the folder of each."""
        aside = {step: each.path for step, each in self._leftovers() if each.kind == "old"}
        placed = {step: each for each in self._folders() if (step := step_of(each.name)) is not None}
        return {step: each for step, each in {**aside, **placed}.items() if (each / MANIFEST_NAME).is_file()}

    def _leftovers(self) -> list[tuple[int, Leftover]]:
        """Return temporary and replaced folders, with the number of their step."""
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
    """Return the folder of a step. ``path`` is a step, ``.../latest``, or a folder of steps (its newest step).

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
    raise CheckpointError(f"{path} holds no committed step; give a step's folder, or a folder with steps")
