"""A recipe on the ranks that an elastic job has left."""

from __future__ import annotations

import math
import os

from meshpar import runtime
from meshpar.errors import LaunchError, MeshError
from meshpar.launchers.recipes.recipe import Recipe
from meshpar.launchers.recipes.sections import DataSection
from meshpar.mesh import MeshSpec

WHOLE = "MESHPAR_ELASTIC"
"""The variable that tells an elastic job's ranks how many of them there are when no node is lost; 0 in another job."""


def fitted(recipe: Recipe, world_size: int) -> Recipe:
    """Return the recipe on the mesh that ``world_size`` ranks make, with the same global batch; as it is outside an elastic job.

    More, or smaller, micro-batches make up for data ranks that are lost; where these do not divide the batch, the nearest is taken and
    the note says so.

    Raises:
        LaunchError: no legal mesh fits, with the reason.
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
    """Return what a mesh's text means on all ranks of the job, and on those that are left."""
    spec = MeshSpec.placed(text, whole, runtime.ranks_per_node() or left)
    try:
        return spec, spec.shrunk(left)
    except MeshError as error:
        raise LaunchError(f"{left} of the job's {whole} ranks are left: {error}") from error


def _divided(data: DataSection, before: int, now: int) -> DataSection:
    """Return the micro-batches of ``now`` data ranks that make the batch of ``before``, or come nearest; none is larger than they were."""
    each = max(1, round(data.micro_batch * data.accumulate * before / now))
    micro_batch = max(size for size in range(1, data.micro_batch + 1) if each % size == 0)
    return data.model_copy(update={"micro_batch": micro_batch, "accumulate": each // micro_batch})


def _data_ranks(spec: MeshSpec) -> int:
    return math.prod(spec.axes.get(name, 1) for name in ("dp_replicate", "dp_shard"))
