"""A recipe on the ranks that an elastic job has left."""

from __future__ import annotations

import math
import os

from meshpar.errors import LaunchError, MeshError
from meshpar.launchers.recipes.recipe import Recipe
from meshpar.mesh import MeshSpec


def fitted(recipe: Recipe, world_size: int) -> Recipe:
    """Return the recipe on the mesh that ``world_size`` ranks make, with the same global batch; as it is outside an elastic job.

    Raises:
        LaunchError: no legal mesh fits, with the reason.
    """
    if os.environ.get("MESHPAR_ELASTIC") != "1" or not recipe.mesh or recipe.mesh.startswith("auto"):
        return recipe
    spec = MeshSpec(recipe.mesh)
    if -1 in spec.axes.values() or spec.size == world_size:
        return recipe
    try:
        smaller = spec.shrunk(world_size)
    except MeshError as error:
        raise LaunchError(f"{world_size} of the job's {spec.size} ranks are left: {error}") from error
    before, now = _data_ranks(spec), _data_ranks(smaller)
    sequences = recipe.data.accumulate * before
    accumulate = max(1, round(sequences / now))
    data = recipe.data.model_copy(update={"accumulate": accumulate})
    steps = f"{accumulate} micro-batches a step instead of {recipe.data.accumulate}"
    note = f"{world_size} of {spec.size} ranks are left: mesh {smaller}, {steps}"
    return recipe.model_copy(update={"mesh": str(smaller), "data": data}).noting([*recipe.notes, note])


def _data_ranks(spec: MeshSpec) -> int:
    return math.prod(spec.axes.get(name, 1) for name in ("dp_replicate", "dp_shard"))
