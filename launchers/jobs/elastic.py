"""Fit a recipe to an elastic job: to the remaining ranks, or as one of several replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import final

from meshpar.core import runtime
from meshpar.core.errors import LaunchError, MeshError
from meshpar.core.mesh import MeshSpec
from meshpar.launchers.recipes.recipe import Recipe
from meshpar.launchers.recipes.sections import DataSection
from meshpar.training.elastic import Replicas
from meshpar.training.metrics import Ended, Metrics, Reporter


def fitted(recipe: Recipe, world_size: int, whole: int) -> Recipe:
    """Return the recipe on ``world_size`` of ``whole`` ranks (0: not elastic), with the nearest global batch."""
    if whole in (0, world_size):
        return recipe
    before, now = _meshes(recipe.mesh, whole, world_size)
    data = _divided(recipe.data, _data_ranks(before), _data_ranks(now))
    batch, kept = (
        settings.micro_batch * settings.accumulate * _data_ranks(mesh)
        for settings, mesh in ((recipe.data, before), (data, now))
    )
    steps = (
        f"a step of {data.accumulate} x {data.micro_batch} a data rank instead of {recipe.data.accumulate} x "
        f"{recipe.data.micro_batch}"
    )
    changed = f"{kept} in all instead of {batch}, which {_data_ranks(now)} ranks do not divide"
    what = f"{batch} in all as before" if kept == batch else changed
    note = f"{world_size} of {whole} ranks are left: mesh {now}, {steps}: {what}"
    teacher = recipe.teacher
    if teacher is not None:
        teacher = teacher.model_copy(update={"mesh": str(_meshes(teacher.mesh, whole, world_size)[1])})
    return recipe.model_copy(update={"mesh": str(now), "data": data, "teacher": teacher}).noting([*recipe.notes, note])


def _meshes(text: str, whole: int, left: int) -> tuple[MeshSpec, MeshSpec]:
    """Return the mesh of ``text`` on all ranks of the job, and on the remaining ranks."""
    spec = MeshSpec.placed(text, whole, runtime.ranks_per_node() or left)
    try:
        return spec, spec.shrunk(left)
    except MeshError as error:
        raise LaunchError(f"{left} of the job's {whole} ranks are left: {error}") from error


def _divided(data: DataSection, before: int, now: int) -> DataSection:
    """Return the micro-batches of ``now`` ranks with a batch nearest to that of ``before``, none larger."""
    samples = max(1, round(data.micro_batch * data.accumulate * before / now))
    micro_batch = max(size for size in range(1, data.micro_batch + 1) if samples % size == 0)
    return data.model_copy(update={"micro_batch": micro_batch, "accumulate": samples // micro_batch})


def _data_ranks(spec: MeshSpec) -> int:
    return math.prod(spec.axes.get(name, 1) for name in ("dp_replicate", "dp_shard"))


def replica_problems(recipe: Recipe) -> Iterator[str]:
    """Yield what ``--elastic=replicas`` does not support in a recipe; plan and data have checks of their own."""
    if recipe.teacher is not None:
        yield f"{recipe.where('teacher')}: --elastic=replicas does not support a teacher; remove one of the two"
    if recipe.training.balance_rate or recipe.training.balance_loss:
        yield (
            f"{recipe.where('training')}: --elastic=replicas sums gradients over replicas, but not the counts of "
            "chosen experts; set balance_rate and balance_loss to 0"
        )
    if recipe.kept != recipe.folder:
        yield (
            f"{recipe.where('output')}: --elastic=replicas requires an output folder that every node sees, got "
            f"{recipe.output}"
        )
    if recipe.averages:
        yield (
            f"{recipe.where('averages')}: --elastic=replicas sends weights and optimizer to a replica that joins, and "
            "no averages; remove averages"
        )
    if recipe.profile:
        yield f"{recipe.where('profile')}: --elastic=replicas writes no profile; set profile: false"
    if recipe.data.workers:
        yield (
            f"{recipe.where('data.workers')}: --elastic=replicas reads data in the training process; set "
            "data.workers: 0"
        )


@final
class Elected:
    """Reporters of this replica while it leads; another one's write to the same files before and after."""

    def __init__(self, replicas: Replicas, make: Callable[[int], Sequence[Reporter]]) -> None:
        """``make``: returns the reporters of a run that has made so many steps."""
        self._replicas, self._make = replicas, make
        self._reporters: Sequence[Reporter] = ()
        self._term = 0

    def report(self, record: Metrics) -> None:
        """Pass a record on if this replica leads."""
        for reporter in self._leading():
            reporter.report(record)

    def note(self, text: str) -> None:
        """Pass a line of text on if this replica leads."""
        for reporter in self._leading():
            reporter.note(text)

    def close(self, ended: Ended = "stopped") -> None:
        """Close what is open."""
        for reporter in self._reporters:
            reporter.close(ended)
        self._reporters = ()

    def _leading(self) -> Sequence[Reporter]:
        if not self._replicas.leads or self._term != self._replicas.term:
            self.close()  # what was open before another one wrote is no longer the run's file
        if self._replicas.leads and not self._reporters:
            self._term = self._replicas.term
            self._reporters = self._make(self._replicas.step - bool(self._replicas.counted))
        return self._reporters
