"""CheckpointManager: save, commit, retain, restore."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, final

from meshpar.checkpoints.format.manifest import Manifest, remedy
from meshpar.checkpoints.format.verify import Verify
from meshpar.checkpoints.format.writing import Checksum
from meshpar.checkpoints.steps.background import Background, Stager
from meshpar.checkpoints.steps.lease import Lease
from meshpar.checkpoints.steps.planning import Planning
from meshpar.checkpoints.steps.ranks import SavingRanks
from meshpar.checkpoints.steps.restoring import RestoredState, Restoring, check_same_arguments
from meshpar.checkpoints.steps.saving import Noted, Saving, WriteSettings
from meshpar.checkpoints.steps.state import Checkpointable, Optimizers, plain
from meshpar.checkpoints.steps.steps import Steps, warn_only
from meshpar.checkpoints.storage.disk import DiskPath
from meshpar.checkpoints.storage.place import Place, PlaceLike, on_disk, place
from meshpar.core.errors import CheckpointError, StoreError
from meshpar.process.imports import expanded
from meshpar.process.waiting import reads_of
from meshpar.state.averaging import Averaged

_log = logging.getLogger("meshpar.checkpoints")


@final
class CheckpointManager:
    """Save and restore the checkpoints of one run, in one folder that all ranks share, or in an object store.

    >>> with CheckpointManager("run/checkpoints", keep=2) as checkpoints:  # doctest: +SKIP
    ...     checkpoints.save(step, par, optimizer)                         # doctest: +SKIP

    Args:
        root: the folder of checkpoints; the first save creates it. Or a URL in an object store: ``s3://bucket/run``,
            ``gs://``, ``az://`` (extra ``object-store``); credentials come from the store's usual environment.
        keep: number of newest committed steps to keep; None: all.
        every: number of steps between two saves, for :meth:`due`; None: never due.
        best: name of a metric. The step with its lowest value is also kept. A leading ``+`` means highest
            (``"+accuracy"``).
        async_: write in the background. The next step of any optimizer, and what loads, swaps or lends parameters,
            waits until the values are copied to the host; call :meth:`before_step` before you change parameters in
            another way. The step is committed later. Use the manager as a context, or ``close`` it.
        checksum: ``"crc32"``: a CRC-32 of every part of every tensor; ``"sha256"``: also a SHA-256 of every file.
        threads: number of files that each rank writes at once.
        timeout_s: seconds that a rank waits for the others within one step of a save.
        staging: a folder on each host's own disk, for ``async_`` and a URL: the next step of the optimizer waits until
            the files are there, and the upload continues during training. None: in host memory.
    """

    def __init__(
        self,
        root: PlaceLike,
        keep: int | None = 3,
        every: int | None = None,
        *,
        best: str | None = None,
        async_: bool = False,
        checksum: Checksum = "crc32",
        threads: int = 2,
        timeout_s: float = 600.0,
        staging: str | Path | None = None,
    ) -> None:
        for name, value, none in (("keep", keep, ", or None"), ("every", every, ", or None"), ("threads", threads, "")):
            if value is not None and value < 1:
                raise CheckpointError(f"{name} must be at least 1{none}, got {value}")
        if checksum not in ("crc32", "sha256"):
            raise CheckpointError(f"checksum must be 'crc32' or 'sha256', got {checksum!r}")
        self._steps = Steps(place(root).absolute())  # user code may change the working directory
        self._every, self._best, self._timeout_s = every, best, timeout_s
        self._writer = _StepWriter(self._steps, keep, best)
        folder = None if staging is None else _staging_folder(staging, self._steps.root, async_=async_)
        self._settings = WriteSettings(threads=threads, checksum=checksum, on_write=self._count_write, staging=folder)
        self._stager = Stager(threads) if async_ else None
        self._background = Background()
        self._planning = Planning()
        self._open_ranks: SavingRanks | None = None
        self.writes = 0

    @property
    def root(self) -> Place:
        """The folder of checkpoints."""
        return self._steps.root

    def due(self, step: int) -> bool:
        """Return whether ``step`` is due to be saved, according to ``every``."""
        return self._every is not None and step % self._every == 0

    def steps(self) -> list[int]:
        """Return the committed steps, oldest first."""
        return self._steps.committed()

    def latest(self) -> int | None:
        """Return the newest committed step; None if there is none."""
        return next(reversed(self.steps()), None)

    def ignored(self) -> dict[Place, str]:
        """Return the folders that look like steps but are not committed, and why."""
        return self._steps.ignored()

    def best(self) -> int | None:
        """Return the step with the best value of the metric ``best``; None if no step has that metric."""
        if self._best is None:
            raise CheckpointError(
                "this manager has no metric; pass best='validation_loss', or another name that save(metrics=) receives"
            )
        return self._steps.best(self._best)

    def own(self) -> None:
        """Take the folder for this job until :meth:`close`, so that no second job writes it.

        Collective: every rank calls it. Waits up to 30 seconds for a sign of a holder on another host.

        Raises:
            CheckpointError: on every rank, that names the holder: another job that owns the folder is running.
        """
        self._ranks().share(f"taking {self.root}", self._writer.own)

    def save(
        self,
        step: int,
        par: Checkpointable,
        optimizer: Optimizers | None = None,
        extra: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        *,
        rank_extra: object = None,
        averages: Mapping[str, Averaged] | None = None,
        replace: bool = False,
    ) -> Place:
        """Save one step. On return it is committed to the disk, or is being written in the background (``async_``).

        Collective: every rank calls it.

        Args:
            step: number of the step.
            par: the parallel module.
            optimizer: the optimizer to save; several: ``{"muon": muon, "adamw": adamw}``; None: save none.
            extra: plain data, the same on every rank: the schedule's state, the data position.
            metrics: values from which the best step is chosen.
            rank_extra: plain data of this rank, returned to the same rank of the same mesh.
            averages: averages of the parameters by name: ``{"ema": par.averaged()}``.
            replace: whether to replace an existing step.

        Returns:
            The step's folder; with ``async_`` it may not exist yet.

        Raises:
            CheckpointError: on every rank, if any rank fails, or an earlier save failed in the background.
        """
        self._background.wait()
        reads_of(par.module).check("save()")
        ranks = self._ranks()
        stager, extra, metrics, averages = self._stager, extra or {}, metrics or {}, averages or {}
        noted = Noted(step=step, extra=extra, metrics=metrics, rank_extra=rank_extra, averages=averages)
        with self._writer.abandoning_on_error():
            folder = ranks.share(f"beginning step {step}", lambda: self._writer.begin(noted, replace=replace))
            saving = Saving(ranks, folder, noted, self._planning, self._settings)
            saving.plan(par, optimizer, later=stager is not None)

        def finish() -> None:
            with self._writer.abandoning_on_error():
                saving.finish(lambda manifest: self._writer.commit(folder, manifest))

        if stager is None:
            finish()
        else:
            stage, what = functools.partial(saving.stage, stager), f"the save of step {step} in the background"
            self._background.start(stage, finish, trains=optimizer is not None, module=par.module, what=what)
        return self._steps.path(step)

    def amend(self, step: int, extra: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Replace ``extra`` and ``metrics`` of a saved step, once it is committed, by values known after the save.

        Rank 0 writes, and no rank waits. An error is logged as a warning, because the step itself is saved.
        """
        if self._ranks().rank == 0:
            self._background.then(lambda: self._writer.amend(step, extra, metrics))

    def before_step(self) -> None:
        """Wait until the save in flight has copied its values; every optimizer does this in its ``step``."""
        self._background.before_step()

    def wait(self) -> None:
        """Wait until the save in flight is committed; raises CheckpointError if it failed."""
        self._background.wait()

    def close(self) -> None:
        """Wait for the save in flight and close the connections; raises CheckpointError if the save failed."""
        try:
            self._background.close()
        finally:
            self._writer.release()
            if self._open_ranks is not None:
                self._open_ranks.close()
            self._open_ranks, self._stager = None, Stager(self._settings.threads) if self._stager is not None else None

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            _log.error("%s", failure)  # the error being raised has the cause

    def restore(
        self,
        par: Checkpointable,
        optimizer: Optimizers | None = None,
        step: int | None = None,
        *,
        averages: Mapping[str, Averaged] | None = None,
        verify: Verify = "size",
        cast: bool = False,
        partial: bool = False,
        random: bool = True,
        fallback: bool = False,
    ) -> RestoredState:
        """Restore a committed step into a module and its optimizer, on any mesh.

        Collective: every rank calls it. Each rank reads only its own bytes, directly into its tensors.

        Args:
            par: the parallel module; its parameters have memory (``materialize`` was called).
            optimizer: the optimizer whose state and options are replaced, or several by name, as for :meth:`save`.
            step: the step to restore; None: the newest committed one.
            averages: the averages whose values are replaced, by the names with which they were saved.
            verify: ``"size"``: check the size of every file, and the checksum of each part that this rank reads as a
                whole; ``"full"``: check every byte first (reads them twice); ``"none"``.
            cast: accept tensors of another dtype, and convert them.
            partial: accept missing tensors, which keep their values, unexpected ones, and other parameter groups.
            random: restore the random generators, too.
            fallback: if the step is damaged, log an error and restore the step before it; see ``passed_over``.

        Returns:
            The plain data that was saved with the tensors.

        Raises:
            CheckpointError: on every rank, before any tensor changes: no such step, a damaged file, or a list of every
                missing, unexpected, wrong-shape and wrong-dtype tensor.
        """
        self._background.wait()
        ranks = self._ranks()
        check_same_arguments(ranks, {"step": step, "verify": verify, "partial": partial, "fallback": fallback})
        folders = ranks.share("finding the step", lambda: self._find(step))
        damaged: list[str] = []
        for folder in folders if fallback else folders[:1]:
            restoring, fits = Restoring(ranks, folder, par, optimizer, averages or {}), True
            try:
                restoring.open(verify)
                fits = False
                restoring.compare(cast=cast, partial=partial)
                fits = True
                return restoring.read(random=random, passed_over=tuple(damaged))
            except CheckpointError as error:
                if not fallback or ranks.broken or not fits or isinstance(error, StoreError):
                    raise
                _log.error("%s", error)
                damaged.append(str(error))
        raise CheckpointError("\n  ".join([f"every step in {self.root} is damaged:", *damaged]))

    def _count_write(self) -> None:
        self.writes += 1  # two threads at once may count one: it is another number all the same

    def _ranks(self) -> SavingRanks:
        if self._open_ranks is None or self._open_ranks.broken:
            self._open_ranks = SavingRanks(self._timeout_s)
        return self._open_ranks

    def _find(self, step: int | None) -> list[Place]:
        """Return the folders to try, the first one first."""
        folders = self._steps.folders()
        steps = sorted(folders)
        if not steps:
            reasons = [f"{path.name}: {reason}" for path, reason in self.ignored().items()]
            raise CheckpointError("\n  ".join([f"{self.root} holds no committed step{remedy(self.root)}", *reasons]))
        if step is not None and step not in steps:
            raise CheckpointError(f"{self.root} holds no committed step {step}; it holds {', '.join(map(str, steps))}")
        return [folders[number] for number in reversed(steps) if step is None or number <= step]


def _staging_folder(staging: str | Path, root: Place, *, async_: bool) -> DiskPath:
    if root.mounted:
        raise CheckpointError(f"staging is for saves to a URL, got {root}, which is on a disk already; drop staging")
    if not async_:
        raise CheckpointError(
            "staging is for saves in the background; pass async_=True (recipe: checkpoint.background: true), or drop "
            "staging"
        )
    return expanded(on_disk(staging, why="files are staged before they are uploaded"))


@final
class _StepWriter:
    """The part of rank 0 in the saves of a folder: it begins, commits, amends and retains steps."""

    def __init__(self, steps: Steps, keep: int | None, best: str | None) -> None:
        self._steps, self._keep, self._best = steps, keep, best
        self._temporary: Place | None = None  # of the save that began last
        self._lease: Lease | None = None  # after own()

    def own(self) -> None:
        if self._lease is None:
            lease = Lease(self._steps.root)
            lease.take()
            self._lease = lease

    def release(self) -> None:
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def begin(self, noted: Noted, *, replace: bool) -> Place:
        """Return the temporary folder of a new step, after a check of what the caller adds to it."""
        if not isinstance(noted.step, int) or isinstance(noted.step, bool) or noted.step < 0:
            raise CheckpointError(f"step is {noted.step!r}; expected an integer of 0 or more")
        plain(noted.extra, "extra")
        for name, value in noted.metrics.items():
            if not isinstance(value, (int, float)):
                kind = type(value).__name__
                raise CheckpointError(f"metrics[{name!r}] is a {kind}; expected a number, such as loss.item()")
        self._check_owned()
        self._steps.reap(sole_writer=True)
        self._temporary = self._steps.begin(noted.step, replace=replace)
        return self._temporary

    def commit(self, folder: Place, manifest: Manifest) -> Place:
        """Commit a step, and delete those that are not kept."""
        self._check_owned()
        path = self._steps.commit(folder, manifest)
        self._retain(manifest.step)
        return path

    def amend(self, step: int, extra: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        with warn_only(f"step {step} is saved, but without the values that were computed after its save"):
            self._check_owned()
            self._steps.amend(step, extra=plain(extra, "extra"), metrics=plain(metrics, "metrics"))
            self._retain(step)

    @contextmanager
    def abandoning_on_error(self) -> Iterator[None]:
        """Delete the temporary folder if the block fails."""
        try:
            yield
        except BaseException:
            if self._temporary is not None:
                self._steps.abandon(self._temporary)
            raise

    def _check_owned(self) -> None:
        if self._lease is not None:
            self._lease.check()

    def _retain(self, saved: int) -> None:
        with warn_only(f"step {saved} is committed, but older steps could not be deleted"):
            self._steps.retain(self._keep, self._steps.best_or_unknown(self._best) if self._best else (), saved=saved)
