"""Passes and layouts from other packages come in by entry point, through the door that the project's own use."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshpar import (
    ActivationCheckpoint,
    FullyShard,
    HybridShard,
    MeshparError,
    Pass,
    Plan,
    PlanError,
    Replicate,
    TensorParallel,
    forecast,
)
from meshpar.core import registry
from meshpar.forecasting import Batch, Hardware
from meshpar.forecasting.search import search
from meshpar.testing import assert_parity, on_ranks, token_steps
from tests.support.models_for_parity import VOCAB, on_meta, transformer

BATCH = Batch(sequence=16, micro_batch=1)
STRANGER = Path(__file__).parents[1] / "support" / "stranger"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The stranger's package, built and installed by pip into a folder of its own."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("pyproject.toml", "stranger.py"):
        (source / name).write_text((STRANGER / name).read_text())
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target",
        str(target), str(source),
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return target


@pytest.fixture
def fresh_registry():
    registry._found.cache_clear()
    yield
    registry._found.cache_clear()


@pytest.fixture
def stranger(installed, monkeypatch, fresh_registry):
    monkeypatch.syspath_prepend(str(installed))


def test_it_is_short():
    source = (STRANGER / "stranger.py").read_text()
    assert all(len(part.splitlines()) < 30 for part in source.split("\nclass "))


def test_it_is_found_beside_the_projects_own(stranger):
    assert {"ExpertCopies", "FullyShard", "TensorParallel"} <= set(registry.names("meshpar.passes"))
    assert isinstance(registry.plugin("meshpar.passes", "ExpertCopies")(), Pass)


def test_it_takes_part_in_order_and_checks(stranger):
    copies = registry.plugin("meshpar.passes", "ExpertCopies")()
    with pytest.raises(PlanError) as caught:
        Plan("ep=5,dp_shard=2", [FullyShard(), copies]).check(transformer(), world_size=10)
    assert len(caught.value.problems) == 2
    assert "write ExpertCopies -> FullyShard" in str(caught.value) and "at most ep=4, got 5" in str(caught.value)
    with pytest.raises(PlanError, match=r"axis 'ep' .size 2. is claimed by no pass"):
        Plan("ep=2,dp_shard=2", [FullyShard()]).check(transformer(), world_size=4)
    with pytest.raises(PlanError, match="ExpertCopies needs axis 'ep', which the mesh"):
        Plan("dp_shard=4", [copies, FullyShard()]).check(transformer(), world_size=4)


@pytest.mark.usefixtures("stranger")
@on_ranks(2, fresh="imports a package that the test installs")
def test_it_runs():
    registry._found.cache_clear()
    assert_parity(
        transformer, "ep=2", [registry.plugin("meshpar.passes", "ExpertCopies")()], token_steps(VOCAB, parts=2)
    )


def gradient_norm(passes):
    """The norm of all gradients of one batch, on two data ranks."""
    torch.manual_seed(0)
    par = Plan("dp_shard=2", passes).apply(transformer())
    par.module(input_ids=torch.arange(4)[None]).logits.square().mean().backward()
    return par.clip_grad_norm_(float("inf"))


@pytest.mark.usefixtures("stranger")
@on_ranks(2, fresh="imports a package that the test installs")
def test_a_strangers_moment_comes_in_every_step_and_equals_one_process():
    registry._found.cache_clear()
    halves = registry.plugin("meshpar.passes", "HalfGradients")()
    assert_parity(transformer, "dp_shard=2", [halves, FullyShard()], token_steps(VOCAB, parts=2), alone=[halves])
    whole, half = (gradient_norm([*passes, FullyShard()]) for passes in ((), [halves]))
    torch.testing.assert_close(half, whole / 2)


@pytest.mark.usefixtures("stranger")
@on_ranks(4, fresh="imports a package that the test installs")
def test_a_strangers_tensor_and_offloading_passes_get_what_ours_get():
    registry._found.cache_clear()
    passes = [registry.plugin("meshpar.passes", name)() for name in ("SplitFeedForward", "HostShard")]
    assert_parity(transformer, "dp_shard=2,tp=2", passes, token_steps(VOCAB, parts=2))
    par = Plan("dp_shard=2,tp=2", passes).apply(transformer())
    assert (par.data_size, par.data_rank, par.home) == (2, dist.get_rank() // 2, torch.device("cpu"))
    par.manual_seed(1)
    drawn = whole_of(torch.rand(1))
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3], "data ranks draw differently, the ranks of tp alike"
    with pytest.raises(MeshparError, match="ranks of tp got different batches"):
        par.module(input_ids=torch.full((1, 4), dist.get_rank()))


@pytest.mark.parametrize(
    "ranks", [2, pytest.param(4, marks=pytest.mark.nightly), pytest.param(8, marks=pytest.mark.long)]
)
@pytest.mark.usefixtures("stranger")
@on_ranks("ranks", fresh="imports a package that the test installs")
def test_a_strangers_split_of_positions_equals_one_process(ranks):
    registry._found.cache_clear()
    positions, features = (registry.plugin("meshpar.passes", name)() for name in ("SplitPositions", "SplitFeedForward"))
    plans = {
        2: [
            ("dp_shard=1,cp=2", [positions, FullyShard()]),
            ("dp_replicate=1,cp=2", [positions, Replicate(whole=("norm.weight",))]),
        ],
        4: [
            ("dp_shard=2,cp=2", [positions, ActivationCheckpoint(), FullyShard()]),
            ("cp=2,dp_shard=1,tp=2", [positions, features, FullyShard()]),
        ],
        8: [
            ("dp_replicate=2,dp_shard=2,cp=2", [positions, HybridShard()]),
            ("dp_shard=2,cp=2,tp=2", [positions, TensorParallel(), FullyShard()]),
        ],
    }
    for mesh, passes in plans[dist.get_world_size()]:
        par = assert_parity(transformer, mesh, passes, token_steps(VOCAB, parts=max(2, dist.get_world_size() // 2)))
        par.check_replicas()
        par.manual_seed(1)
        drawn = whole_of(torch.rand(1))
        assert len(set(drawn)) == par.loss_size, (
            "ranks of other samples or positions draw differently, those of tp alike"
        )


@pytest.mark.usefixtures("stranger")
@on_ranks(2, fresh="imports a package that the test installs")
def test_what_splits_positions_is_told_what_it_needs():
    registry._found.cache_clear()
    positions = registry.plugin("meshpar.passes", "SplitPositions")()
    with pytest.raises(
        PlanError, match=r"nothing averages gradients over cp; add FullyShard\(\) to the passes and dp_shard=1"
    ):
        Plan("cp=2", [positions]).check(transformer())
    par = Plan("dp_shard=1,cp=2", [positions, FullyShard()]).apply(transformer())
    with pytest.raises(MeshparError, match="ranks of cp split different batches"):
        par.split(torch.full((1, 6), dist.get_rank()))
    whole = {"input_ids": torch.arange(12).view(2, 6), "weights": torch.ones(2)}
    part = par.split(whole)
    mine = slice(3 * dist.get_rank(), 3 * dist.get_rank() + 3)
    assert part["input_ids"].equal(whole["input_ids"][:, mine]) and part["weights"] is whole["weights"]
    assert part["position_ids"].equal(torch.arange(6)[mine].expand(2, -1))
    with pytest.raises(MeshparError, match="cp=2 does not divide 5 positions; pad"):
        par.split(torch.zeros(1, 5))
    with pytest.raises(MeshparError, match=r"one length along dim 1, got \[4, 6\]"):
        par.split([torch.zeros(1, 6), torch.zeros(1, 4)])
    with pytest.raises(MeshparError, match="a model that shifts labels loses one label at the end of each part"):
        par.module(**par.split({"input_ids": whole["input_ids"], "labels": whole["input_ids"]}))


def test_a_strangers_split_that_cannot_be_tried_is_said_to_be_untried(stranger, caplog):
    split = registry.plugin("meshpar.passes", "SplitFeedForward")()
    ids = torch.zeros(1, 4, dtype=torch.int64)
    verification = Plan("tp=2", [split]).prove(transformer(), {"input_ids": ids}, world_size=2)
    assert verification.modules == {} and "axis 'tp'" in verification.skipped[""]
    assert "the split of the model was not verified" in caplog.text


def whole_of(value):
    every = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(every, value)
    return [float(number) for number in every]


@pytest.mark.nightly
def test_a_strangers_passes_are_forecast(stranger):
    passes = [registry.plugin("meshpar.passes", name)() for name in ("SplitFeedForward", "HostShard")]
    model = on_meta(transformer)
    made_forecast = forecast(Plan("dp_shard=4,tp=2", passes), model, BATCH, hardware="h100")
    sent = [event.collective for _, event in made_forecast.trace.events() if event.collective]
    assert {collective.axis for collective in sent} >= {"dp_shard", "tp"}
    model = on_meta(transformer)
    positions = registry.plugin("meshpar.passes", "SplitPositions")()
    made_forecast = forecast(Plan("dp_shard=2,cp=2", [positions, FullyShard()]), model, BATCH, hardware="h100")
    sent = [event.collective for _, event in made_forecast.trace.events() if event.collective]
    assert {(collective.axis, collective.ranks) for collective in sent} == {("cp", 2), ("dp_shard", 4)}, (
        "what is sharded is gathered over positions, too"
    )
    assert made_forecast.trace.tokens * made_forecast.trace.data_size == 32


BOTH = {
    "dp_replicate=4,dp_shard=1,cp=2",
    "dp_replicate=2,dp_shard=2,cp=2",
    "dp_shard=4,cp=2",
    "dp_replicate=2,dp_shard=1,cp=2,tp=2",
    "dp_shard=2,cp=2,tp=2",
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "names", "expected"),
    [
        ("dp_shard=2,cp=2", ("SplitPositions",), BOTH),
        ("dp_shard=4,tp=2", ("SplitFeedForward", "HostShard"), {"dp_shard=8", "dp_shard=4,tp=2"}),
    ],
)
def test_a_search_keeps_a_strangers_passes(stranger, mesh, names, expected):
    passes = [registry.plugin("meshpar.passes", name)() for name in names]
    model = on_meta(lambda: transformer(layers=4))
    hardware = replace(Hardware.load("h100"), node=2)
    options = dict(plan=Plan(mesh, passes), recompute=["none"], micro_batches=[1], top=1)
    found = search(model, model.meshpar_layout(), BATCH, hardware, 8, **options)
    assert {str(candidate.settings.mesh()) for candidate in found.fitting} == expected
    for candidate in found.fitting:
        used = {axis for one in candidate.settings.passes() for axis in one.axes}
        assert used == set(candidate.settings.mesh().axes), f"{candidate.settings}: every axis has its pass"
        assert {one.name for one in candidate.settings.passes()} >= {one.name for one in passes if "tp" not in one.axes}


@pytest.mark.parametrize("mesh", ["dp_shard=1,cp=3", "dp_shard=2,cp=-1"])
def test_a_search_refuses_axes_that_do_not_divide_its_ranks(stranger, mesh):
    plan = Plan(mesh, [registry.plugin("meshpar.passes", "SplitPositions")()])
    model = on_meta(lambda: transformer(layers=4))
    with pytest.raises(MeshparError, match=r"the search keeps cp=(3|-1), which must be sizes that divide 8 ranks"):
        search(model, model.meshpar_layout(), BATCH, Hardware.load("h100"), 8, plan=plan)


def test_an_unknown_name_is_answered_with_the_nearest(fresh_registry):
    with pytest.raises(MeshparError, match=r"no plugin 'FullShard' in meshpar.passes; nearest: FullyShard"):
        registry.plugin("meshpar.passes", "FullShard")


def offer(folder, package, value):
    """A package's metadata, as an installer leaves it."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[meshpar.passes]\nTwice = {value}\n")


def test_a_clash_names_both_packages(tmp_path, monkeypatch, fresh_registry):
    offer(tmp_path, "first", "one:Twice")
    offer(tmp_path, "second", "two:Twice")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        MeshparError,
        match=r"'Twice' of meshpar.passes is offered twice: .*package (first|second).*package (first|second)",
    ):
        registry.names("meshpar.passes")


def test_a_plugin_that_cannot_be_imported_says_whose_it_is(tmp_path, monkeypatch, fresh_registry):
    offer(tmp_path, "broken", "nowhere_at_all:Twice")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        MeshparError, match=r"'Twice' of meshpar.passes \(nowhere_at_all:Twice, package broken\) cannot be imported"
    ):
        registry.plugin("meshpar.passes", "Twice")
