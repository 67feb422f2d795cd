"""Fit a recipe to the remaining ranks of an elastic job."""

from __future__ import annotations

import math
import os

from meshpar import runtime
from meshpar.errors import LaunchError, MeshError
from meshpar.launchers.recipes.recipe import Recipe
from meshpar.launchers.recipes.sections import DataSection
from meshpar.mesh import MeshSpec

WHOLE = "MESHPAR_ELASTIC"
"""Environment variable with the number of ranks of an elastic job without lost nodes; 0 in any other job."""


def fitted(recipe: Recipe, world_size: int) -> Recipe:
    """Return the recipe on a mesh of ``world_size`` ranks, with the same global batch; unchanged outside of an elastic job.

    More, or smaller, micro-batches compensate for lost data ranks. If the remaining data ranks do not divide the batch, the nearest batch
    that they divide is used, and a note reports the change.

    Raises:
        LaunchError: no legal mesh fits; the message has the reason.
    """
    whole = int(os.environ.get(WHOLE, "0"))
    if whole in (0, world_size):
        return recipe
    before, now = _meshes(recipe.mesh, whole, world_size)
    data = _divided(recipe.data, _data_ranks(before), _data_ranks(now))
    batch, kept = (each.micro_batch * each.accumulate * _data_ranks(mesh) for each, mesh in ((recipe.data, before), (data, now)))
    steps = f"a step of {data.accumulate} x {data.micro_batch} a data rank instead of {recipe.data.accumulate} x {recipe.data.micro_batch}"
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
    """Return the micro-batches of ``now`` data ranks whose batch equals that of ``before``, or is nearest; none is larger than before."""
    each = max(1, round(data.micro_batch * data.accumulate * before / now))
    micro_batch = max(size for size in range(1, data.micro_batch + 1) if each % size == 0)
    return data.model_copy(update={"micro_batch": micro_batch, "accumulate": each // micro_batch})


def _data_ranks(spec: MeshSpec) -> int:
    return math.prod(spec.axes.get(name, 1) for name in ("dp_replicate", "dp_shard"))
