"""MeshSpec: reading, order, sizes, topology."""

import pickle
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from meshpar import FullyShard, MeshError, MeshSpec, Plan, Replicate, TensorParallel
from meshpar._torch.groups import root_of
from meshpar.models import Transformer, TransformerConfig
from meshpar.testing import on_ranks

TP = TensorParallel()


@on_ranks(4)
def test_tensors_of_two_plans_with_equal_axes_stay_on_their_own_meshes():
    """DTensor keeps what it has planned by meshes, and an axis of one mesh equals that of another with its ranks."""
    specs = MeshSpec("dp_replicate=2,tp=2"), MeshSpec("dp_shard=2,tp=2")
    meshes = [spec.build("cpu") for spec in specs]
    parts = [DTensor.from_local(torch.ones(3), mesh["tp"], [Shard(0)]) for mesh in meshes]
    for mesh, part in zip(meshes, parts):
        assert root_of(part.detach().device_mesh) is mesh
        assert root_of((part + part).device_mesh) is mesh
    assert pickle.loads(pickle.dumps(meshes[0]["tp"])) == meshes[0]["tp"] != meshes[1]["tp"]
    for spec, passes in zip(specs, ([TP, Replicate()], [TP, FullyShard(whole=("norm.weight",))])):
        with torch.device("meta"):
            module = Transformer(TransformerConfig())
        par = Plan(spec, passes).apply(module).materialize(seed=0)
        assert {root_of(weight.device_mesh).mesh_dim_names for weight in par.module.parameters()} == {tuple(spec.axes)}


def test_text_and_keywords_are_the_same_mesh():
    text = MeshSpec("tp=4, dp_replicate=2,dp_shard=-1")
    assert text == MeshSpec(dp_shard=-1, tp=4, dp_replicate=2)
    assert str(text) == "dp_replicate=2,dp_shard=-1,tp=4"
    assert hash(text) == hash(MeshSpec(str(text)))
    assert pickle.loads(pickle.dumps(text)) == text


def test_the_open_axis_takes_what_is_left():
    axes = MeshSpec("dp_replicate=2,dp_shard=-1,tp=4").resolve(32).axes
    assert dict(axes) == {"dp_replicate": 2, "dp_shard": 4, "tp": 4}


@on_ranks(4, timeout_s=50, fresh="compares the time-out of its groups")
def test_every_axis_has_the_groups_time_out():
    mesh = MeshSpec("dp_shard=2,tp=2").build("cpu")
    groups = (dist.group.WORLD, mesh.get_group("dp_shard"), mesh.get_group("tp"))
    world, *axes = (group._get_backend(torch.device("cpu")).options._timeout for group in groups)
    assert axes == [world, world]
    assert timedelta(seconds=45) <= world < timedelta(minutes=10), (
        "with which on_ranks opens the group; torch gives a mesh's groups 30 minutes"
    )


def test_five_axes_and_strangers_outermost():
    spec = MeshSpec("tp=2,own=3,dp_shard=2,dp_replicate=2,pp=1")
    assert list(spec.axes) == ["own", "pp", "dp_replicate", "dp_shard", "tp"]
    assert spec.resolve(24).size == 24


def test_wrong_texts_are_refused():
    for text, message in {
        "dp_shard=x": "cannot read 'dp_shard=x'",
        "dp_shard=0": "size 0",
        "dp_shard=-2": "size -2",
    }.items():
        with pytest.raises(MeshError, match=message):
            MeshSpec(text)


@pytest.mark.parametrize(("mesh", "ranks", "left"), [
    ("dp_replicate=2,dp_shard=-1", 4, "dp_replicate=2,dp_shard=2"), ("dp_replicate=2,dp_shard=-1", 3, "dp_replicate=1,dp_shard=3"),
    ("dp_replicate=-1,dp_shard=2,tp=2", 12, "dp_replicate=3,dp_shard=2,tp=2"), ("dp_shard=-1", 3, "dp_shard=3"),
])  # fmt: skip
def test_an_open_axis_is_shrunk(mesh, ranks, left):
    assert str(MeshSpec(mesh).shrunk(ranks)) == left


def test_a_mesh_without_a_data_axis_is_not_shrunk():
    with pytest.raises(MeshError, match="cannot run on 4 ranks: tp=2 needs exactly 2"):
        MeshSpec("tp=2").shrunk(4)


def test_auto_keeps_shards_in_a_node_and_replicas_across():
    assert str(MeshSpec.auto(32, 8)) == "dp_replicate=4,dp_shard=8"
    assert str(MeshSpec.auto(32, 8, "auto,tp=4")) == "dp_replicate=4,dp_shard=2,tp=4"
    assert str(MeshSpec.auto(16, 8, "auto, cp=2,tp=2")) == "dp_replicate=2,dp_shard=2,cp=2,tp=2"
    with pytest.raises(MeshError, match="tp=4 does not divide the 2 ranks of a node that are left"):
        MeshSpec.auto(16, 8, "auto,cp=4,tp=4")
    with pytest.raises(MeshError, match="cannot read mesh 'auto,dp_shard=4'"):
        MeshSpec.auto(16, 8, "auto,dp_shard=4")


def test_which_axes_span_nodes():
    spec = MeshSpec("dp_replicate=2,dp_shard=4,tp=2", ranks_per_node=8)
    assert [axis for axis in spec.axes if spec.spans_nodes(axis)] == ["dp_replicate"]
    assert MeshSpec("dp_shard=2,tp=4", ranks_per_node=2).spans_nodes("tp")
    assert not MeshSpec("dp_shard=2,tp=4").spans_nodes("tp")


def test_coordinates_are_row_major():
    spec = MeshSpec("dp_replicate=2,dp_shard=3,tp=2")
    places = [tuple(spec.coordinates(rank).values()) for rank in range(12)]
    assert places == [(r, s, t) for r in range(2) for s in range(3) for t in range(2)]


def test_a_text_means_a_mesh_on_nodes() -> None:
    for text, mesh in {
        "auto": "dp_replicate=2,dp_shard=8",
        "auto, tp=4": "dp_replicate=2,dp_shard=2,tp=4",
        "": "dp_shard=16",
        "tp=2,dp_shard=-1": "dp_shard=8,tp=2",
    }.items():
        assert str(MeshSpec.placed(text, 16, 8)) == mesh
