"""CheckpointManager: save, commit, retain, restore."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch

from meshpar.checkpoints.job import Job
from meshpar.checkpoints.manifest import Verify
from meshpar.checkpoints.ranks import Ranks
from meshpar.checkpoints.restoring import RestoredState, Restoring
from meshpar.checkpoints.saving import Saving
from meshpar.checkpoints.state import plain
from meshpar.checkpoints.steps import Steps
from meshpar.errors import CheckpointError


@final
class CheckpointManager:
    """The checkpoints of one run, in one folder that all ranks share.

    Args:
        root: the folder; made at the first save.
        keep: how many of the newest committed steps to keep; None: all.
        every: how many steps lie between two saves, for :meth:`due`; None: never due.
        best: a metric's name; the step where it is lowest is kept as well. A leading ``+`` means highest (``"+accuracy"``).
        timeout_s: how long a rank waits for the others within one step of a save, in seconds.
    """

    def __init__(
        self, root: str | Path, keep: int | None = 3, every: int | None = None, *, best: str | None = None, timeout_s: float = 600.0
    ) -> None:
        for name, value in (("keep", keep), ("every", every)):
            if value is not None and value < 1:
                raise CheckpointError(f"{name} must be at least 1, or None, got {value}")
        self._steps = Steps(Path(root))
        self._keep, self._every, self._best, self._timeout_s = keep, every, best, timeout_s
        self._made_ranks: Ranks | None = None

    @property
    def root(self) -> Path:
        """The folder."""
        return self._steps.root

    def due(self, step: int) -> bool:
        """Tell whether ``step`` is one to save, by ``every``."""
        return self._every is not None and step % self._every == 0

    def steps(self) -> list[int]:
        """Return the committed steps, oldest first."""
        return self._steps.committed()

    def latest(self) -> int | None:
        """Return the newest committed step; None where there is none."""
        return next(reversed(self.steps()), None)

    def ignored(self) -> dict[Path, str]:
        """Return the folders that look like steps but are not committed, and why."""
        return self._steps.ignored()

    def best(self) -> int | None:
        """Return the step with the best metric; None where no step has it."""
        if self._best is None:
            raise CheckpointError("this manager was given no metric; pass best='validation_loss', or another name given to save(metrics=)")
        return self._steps.best(self._best.removeprefix("+"), largest=self._best.startswith("+"))

    def save(
        self,
        step: int,
        par: Job,
        optimizer: torch.optim.Optimizer | None = None,
        extra: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        *,
        rank_extra: Any = None,
        replace: bool = False,
    ) -> Path:
        """Save and commit one step; on return it is whole and on the disk.

        Collective: every rank calls it.

        Args:
            step: its number.
            par: the module and its mesh.
            optimizer: built from ``par.module.parameters()``.
            extra: plain data, the same on every rank (rank 0's is stored): the schedule's state, the data position.
            metrics: values by which the best step is told.
            rank_extra: plain data of this rank's own, given back to the same rank of the same mesh.
            replace: whether to save over a step that is there.

        Returns:
            The step's folder.

        Raises:
            CheckpointError: on every rank, when any of them fails; what was committed before is untouched.
        """
        ranks = self._ranks()
        noted = {"step": step, "extra": extra or {}, "metrics": metrics or {}}
        folder = ranks.share(f"beginning step {step}", lambda: self._begin(noted, replace))
        try:
            path = Saving(ranks, folder, par, optimizer, noted, rank_extra).run(self._steps)
        except BaseException:
            if ranks.rank == 0:
                self._steps.abandon(folder)
            raise
        if ranks.rank == 0:
            best = self.best() if self._best else None
            self._steps.retain(self._keep, () if best is None else {best})
        return path

    def restore(
        self,
        par: Job,
        optimizer: torch.optim.Optimizer | None = None,
        step: int | None = None,
        *,
        verify: Verify = "size",
        cast: bool = False,
        partial: bool = False,
        random: bool = True,
    ) -> RestoredState:
        """Read a committed step into a module and its optimizer, on any mesh, whatever the mesh that saved it.

        Collective: every rank calls it. Each rank reads its own bytes only, into place.

        Args:
            par: the module and its mesh; its parameters have memory (``materialize`` was called).
            optimizer: whose state and options are replaced by the checkpoint's; None: leave the checkpoint's aside.
            step: which step; None: the newest committed one.
            verify: ``"size"``: every file is there in its size; ``"full"``: and has its checksum (read twice); ``"none"``.
            cast: accept tensors of another dtype, and convert them.
            partial: accept missing and unexpected tensors and parameter groups that differ; what is missing stays as it is.
            random: restore the generators too.

        Returns:
            What was saved beside the tensors.

        Raises:
            CheckpointError: on every rank, before anything is changed: no such step, a damaged file, or a list of every missing,
                unexpected, wrong-shape and wrong-dtype tensor.
        """
        ranks = self._ranks()
        folder = ranks.share("finding the step", lambda: self._find(step))
        return Restoring(ranks, folder, par, optimizer).run(verify, cast=cast, partial=partial, random=random)

    def _ranks(self) -> Ranks:
        if self._made_ranks is None:
            self._made_ranks = Ranks(self._timeout_s)
        return self._made_ranks

    def _begin(self, noted: Mapping[str, Any], replace: bool) -> Path:
        for name in ("extra", "metrics"):
            plain(noted[name], name)
        self._steps.reap()
        return self._steps.begin(noted["step"], replace=replace)

    def _find(self, step: int | None) -> Path:
        steps = self.steps()
        if not steps:
            reasons = [f"{path.name}: {reason}" for path, reason in self.ignored().items()]
            raise CheckpointError("\n  ".join([f"{self.root} holds no committed step", *reasons]))
        if step is not None and step not in steps:
            raise CheckpointError(f"{self.root} holds no committed step {step}; it holds {', '.join(map(str, steps))}")
        return self._steps.path(steps[-1] if step is None else step)
