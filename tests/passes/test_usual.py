"""The passes that a mesh usually wants."""

import pytest
import torch

from meshpar import MeshError, MeshSpec, Plan, passes_for
from meshpar.models import PRESETS, Transformer

USUAL = {
    "": [],
    "dp_replicate=2": ["Replicate"],
    "dp_shard=-1": ["FullyShard"],
    "tp=2": ["TensorParallel"],
    "dp_replicate=2,dp_shard=2,tp=2": ["TensorParallel", "HybridShard"],
    "pp=2,dp_shard=2": ["PipelineParallel", "FullyShard"],
    "dp_shard=2,cp=2,tp=2": ["ContextParallel", "TensorParallel", "FullyShard"],
    "auto": ["HybridShard"],
    "auto, tp=2": ["TensorParallel", "HybridShard"],
}


@pytest.mark.parametrize("mesh", USUAL)
def test_a_mesh_has_a_pass_for_each_of_its_axes(mesh):
    assert [pass_.name for pass_ in passes_for(mesh)] == USUAL[mesh]
    if not mesh.startswith("auto"):
        assert passes_for(MeshSpec(mesh)) == passes_for(mesh)


@pytest.mark.parametrize("mesh", ["dp_shard=2,tp=2", "pp=2,dp_replicate=2,dp_shard=2", "dp_shard=2,cp=2,tp=2"])
def test_the_usual_passes_fit_a_model(mesh):
    with torch.device("meta"):
        model = Transformer(PRESETS["tiny"])
    Plan(mesh, passes_for(mesh)).check(model, world_size=MeshSpec(mesh).size)


def test_a_text_that_is_no_mesh_is_refused():
    with pytest.raises(MeshError):
        passes_for("dp_shard")
