"""Plan.check finds every fault, says what to do, and touches nothing."""

import logging
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from meshpar import (
    ActivationCheckpoint,
    Compile,
    ContextParallel,
    FullyShard,
    HybridShard,
    LayoutError,
    MeshSpec,
    ModelLayout,
    Pass,
    Plan,
    PlanError,
    Replicate,
    Role,
    Stage,
    TensorParallel,
    covers,
    matches,
)
from meshpar.checkpoints.export.quantizing import fitting
from meshpar.core import registry, runtime
from meshpar.core.passes import find_blocks
from tests.support import plans
from tests.support.plans import TwoLayers, transformer


def problems(mesh, passes, module=None, layout=None, world_size=8):
    return plans.problems(mesh, passes, module, layout, ranks=world_size)


def only(*args, **kwargs):
    found = problems(*args, **kwargs)
    assert len(found) == 1, found
    return found[0]


class Chain(nn.ModuleList):
    """A list with a forward is called, unlike a ModuleList."""

    def forward(self, x):
        for block in self:
            x = block(x)
        return x


def linear():
    return nn.Linear(4, 4)


FOUND_LAYOUTS = {
    "a list": (lambda: nn.ModuleList(linear() for _ in range(2)), ("layers.*",)),
    "norms that may be left out, a block and a residual without parameters (x-transformers)": (
        lambda: nn.ModuleList(
            nn.ModuleList([nn.ModuleList([nn.LayerNorm(4), None]), linear(), nn.Identity()]) for _ in range(2)
        ),
        ("layers.*.1",),
    ),
    "pairs": (
        lambda: nn.ModuleList(nn.ModuleList([linear(), nn.Sequential(linear())]) for _ in range(2)),
        ("layers.*.*",),
    ),
    "a dict in a list": (
        lambda: nn.ModuleList(
            nn.ModuleDict({"attn": linear(), "norm": nn.LayerNorm(4), "mlp": linear()}) for _ in range(2)
        ),
        ("layers.*.attn", "layers.*.mlp"),
    ),
    "lists three deep": (
        lambda: nn.ModuleList(nn.ModuleList([linear(), nn.ModuleList([linear(), linear()])]) for _ in range(2)),
        ("layers.*.0", "layers.*.*.*"),
    ),
    "lists that end at different depths": (
        lambda: nn.ModuleList(
            [nn.ModuleList([linear(), linear()]), nn.ModuleList([nn.ModuleList([linear()]), linear()])]
        ),
        ("layers.0.*", "layers.*.*.*", "layers.*.1"),
    ),
    "a list with a forward": (lambda: nn.ModuleList(Chain([linear(), linear()]) for _ in range(2)), ("layers.*",)),
    "norms alone": (lambda: nn.ModuleList(nn.LayerNorm(4) for _ in range(2)), ()),
    "dicts of nothing": (lambda: nn.ModuleList(nn.ModuleDict() for _ in range(2)), ()),
}


@pytest.mark.parametrize("case", FOUND_LAYOUTS)
def test_a_layout_that_meshpar_finds_names_what_is_called_and_passes_its_own_plan(case):
    build, blocks = FOUND_LAYOUTS[case]
    module = nn.Module()
    module.layers, module.head = build(), linear()
    assert registry.layout_for(module).blocks == blocks
    for plan in (Plan("dp_shard=2", [FullyShard()]), Plan("dp_replicate=2", [Replicate()])):
        plan.check(module, world_size=2)
    named = [name for name, _ in find_blocks(module, registry.layout_for(module))]
    assert len(set(named)) == len(named)


def test_a_right_plan_passes_and_resolves():
    plan = Plan("dp_replicate=2,dp_shard=-1,tp=2", [TensorParallel(), ActivationCheckpoint(), Compile(), HybridShard()])
    assert dict(plan.check(transformer(), world_size=8).axes) == {"dp_replicate": 2, "dp_shard": 2, "tp": 2}


def test_passes_out_of_order():
    text = only("dp_shard=4,tp=2", [FullyShard(), Compile(), ActivationCheckpoint(), TensorParallel()])
    assert text.endswith("write TensorParallel -> ActivationCheckpoint -> Compile -> FullyShard")


def test_a_modules_name_stands_for_all_that_is_in_it():
    inside = "layers.0.mlp.up.weight"
    for pattern in f"layers.0 layers.* layers.0.mlp layers.*.mlp.* {inside} layers.** **.mlp **.weight".split():
        assert covers(pattern, inside), pattern
    for pattern in ("layer", "layers.1", "mlp", "layers.0.mlp.up.weight.x", "**.attn", "layers.*.up"):
        assert not covers(pattern, inside), pattern
    assert matches("layers.**.up", "layers.0.mlp.up") and not matches("layers.**", "layers")

    module = transformer()
    layout = registry.layout_for(module)
    everything = {name for name, _ in module.named_parameters() if name.startswith("layers.")}
    for pattern in ("layers", "layers.*", "layers.**"):
        assert not {*FullyShard(whole=(pattern,)).shards(module, layout)} & everything, pattern
    assert fitting(["layers.*.mlp"], ["layers.0.mlp.up", "head"]) == {"layers.0.mlp.up"}


def test_an_override_that_matches_nothing():
    text = only("dp_shard=4,tp=2", [TensorParallel(styles={"layers.*.mlp.upp": "colwise"}), FullyShard()])
    assert "'layers.*.mlp.upp' matches no module; use a name of the model; nearest: layers.*.mlp.up" in text


def test_an_unknown_style():
    assert "no tensor-parallel style 'columnwise'; there are colwise" in only(
        "tp=8", [TensorParallel(styles={"head": "columnwise"})], transformer(heads=8, kv_heads=8)
    )


def test_a_large_parameter_that_nothing_splits():
    module = transformer(vocab_size=1 << 20)
    text = only("tp=2", [TensorParallel(styles={"embed": None})], module, world_size=2)
    assert "embed.weight (1048576 x 32, 128 MiB) is split by no pass" in text
    module.embed.requires_grad_(False)
    Plan("dp_shard=2", [FullyShard(whole="frozen")]).check(module, world_size=2)
    Plan("dp_shard=1,cp=2", [ContextParallel(), FullyShard()]).check(module, world_size=2)  # cp is a part of dp_shard


def test_an_override_replaces_what_the_table_says_of_its_modules():
    module = transformer()
    left = TensorParallel(styles=dict.fromkeys(f"layers.0.mlp{part}" for part in ("", ".gate", ".up", ".down")))
    split = left.shards(module, module.meshpar_layout())
    assert not [name for name in split if name.startswith("layers.0.mlp")] and "layers.1.mlp.up.weight" in split
    Plan("tp=2", [left]).check(module, world_size=2)
    text = only("tp=2", [TensorParallel(styles={"layers.*.mlp.upp": None})], world_size=2)
    assert "'layers.*.mlp.upp': None}) matches no entry of the table; nearest: layers.*.mlp.up" in text


def test_a_part_of_torchs_multihead_attention_is_refused():
    module = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2)})
    text = only("tp=2", [TensorParallel()], module, ModelLayout(tensor={"attn.out_proj": "rowwise"}), world_size=2)
    assert "attn.out_proj is a part of attn, a nn.MultiheadAttention, which reads its weights itself" in text


class Positions(Pass):
    name, stage, roles = "Positions", 1, {"cp": Role.POSITIONS}

    def apply(self, module, layout, mesh):
        pass


class OwnBatchNorm(nn.BatchNorm1d):
    def forward(self, x):
        return x


def test_a_data_axis_of_one_rank_holds_parameters_over_positions_too():
    passes, net = [Positions(), FullyShard()], nn.Sequential(OwnBatchNorm(4))
    text = only("dp_shard=1,cp=2", passes, net, layout=ModelLayout(), world_size=2)
    assert "is a batch norm with a forward of its own" in text


def test_describe_takes_the_ranks_of_the_mesh():
    with torch.device("meta"):
        assert Plan("dp_shard=2", [FullyShard()]).describe(transformer()).title.endswith("dp_shard=2 [FullyShard]")


def test_heads_that_the_axis_does_not_divide():
    found = problems("tp=8", [TensorParallel()])
    assert "layers.*.attn.q has 4 heads, which tp=8 does not divide; use tp=2 or 4" in found
    assert not any("attn.k has" in text for text in found), "ranks may share a head of keys"
    uneven = problems("tp=3", [TensorParallel()], world_size=3)
    assert "layers.*.attn.k has 2 heads, which tp=3 does not divide; use tp=2" in uneven


def test_splits_that_leave_ranks_with_nothing():
    found = problems("tp=4", [TensorParallel()], transformer(kv_heads=4, hidden=5, vocab_size=9), world_size=4)
    assert found[0] == "embed has 9 rows, which tp=4 splits so that some ranks would hold none; use tp=3 or 9"
    parts = {f"layers.0.mlp.{name}" for name in ("gate", "up", "down")}
    assert {text.split()[0] for text in found} == {"embed", "head"} | parts
    assert all(text.endswith("(and 1 more like it)") for text in found if text.startswith("layers"))


def test_a_mesh_that_does_not_fit_is_one_of_the_problems():
    found = problems("dp_shard=3,tp=2", [FullyShard(), TensorParallel()])
    assert found[0].startswith("mesh dp_shard=3,tp=2 needs 6 ranks, got 8")
    assert "out of order" in found[1]


def test_every_problem_at_once_in_one_error():
    wrong = FullyShard(reshard_after_forward=3, prefetch_forward=-1)
    passes = [wrong, TensorParallel(styles={"nothing.here": "colwise"})]
    found = problems("dp_replicate=1,dp_shard=1,tp=8", passes)
    kinds = ["out of order", "reshard_after_forward=3", "prefetch depths", "matches no module", "q has 4 heads"]
    assert [any(kind in text for text in found) for kind in kinds] == [True] * len(kinds)
    with pytest.raises(PlanError, match=f"{len(found)} problems in this plan"):
        Plan("dp_replicate=1,dp_shard=1,tp=8", passes).check(transformer(), world_size=8)


def test_check_is_the_same_on_every_rank_and_touches_nothing():
    module = transformer()
    before = {name: id(parameter) for name, parameter in module.named_parameters()}
    assert problems("tp=8", [TensorParallel()], module) == problems("tp=8", [TensorParallel()], module)
    assert {name: id(parameter) for name, parameter in module.named_parameters()} == before
    assert all(parameter.is_meta for parameter in module.parameters())


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_parameter_whose_place_a_shard_takes_is_refused(register):
    module = linear()
    getattr(module.weight, register)(lambda gradient: None)
    assert "weight has a hook on its gradient" in only("dp_shard=8", [FullyShard()], module)
    Plan("dp_replicate=8", [Replicate()]).check(module, None, 8)


def test_a_wrong_number_of_blocks_between_recomputed_ones():
    assert "must be 1 or more" in only("dp_shard=8", [ActivationCheckpoint(every=0), FullyShard()])


def test_passes_that_are_no_list():
    for passes, message in ((FullyShard, "<class .*; expected a list of passes: write Plan"), (None, "None; expected")):
        with pytest.raises(PlanError, match=f"passes are {message}"):
            Plan("dp_shard=8", passes)


def test_a_module_that_nobody_describes_is_read_from_its_structure():
    assert registry.layout_for(TwoLayers()).blocks == ("layers.*",)
    assert registry.layout_for(nn.Linear(2, 2)).blocks == ()
    assert Plan("dp_shard=8", [FullyShard()]).check(nn.Linear(2, 2), world_size=8)


def test_a_layout_method_of_the_wrong_kind():
    class Odd(nn.Linear):
        def meshpar_layout(self):
            return {"blocks": []}

    with pytest.raises(PlanError, match="expected a ModelLayout"):
        Plan("dp_shard=8", [FullyShard()]).check(Odd(2, 2), world_size=8)
    assert issubclass(LayoutError, Exception)


def test_an_axis_across_nodes_is_a_warning_with_its_cost(caplog):
    with runtime.simulated(8), caplog.at_level(logging.WARNING, logger="meshpar"):
        Plan(MeshSpec("dp_shard=4,tp=2", ranks_per_node=1), [TensorParallel(), FullyShard()]).apply(transformer())
    assert "axis 'tp' (size 2) spans nodes of 1 ranks" in caplog.text and "four times a step" in caplog.text
    caplog.clear()
    with runtime.simulated(8, as_rank=1):
        Plan(MeshSpec("dp_shard=4,tp=2", ranks_per_node=1), [TensorParallel(), FullyShard()]).apply(transformer())
    assert not caplog.records, "one rank warns for all"


@dataclass
class Renames(Pass):
    name, stage, roles = "Renames", Stage.TENSOR, {"tp": Role.FEATURES}

    def apply(self, module, layout, mesh):
        module.layers[0].attn.extra = nn.Linear(1, 1, device="meta")


def test_a_pass_that_changes_names_is_caught():
    with runtime.simulated(2), pytest.raises(Exception, match=r"Renames changed the names of parameters.*extra"):
        Plan("tp=2", [Renames()]).apply(transformer())


def test_passes_and_plans_print_themselves():
    plan = Plan("dp_shard=4,tp=2", [TensorParallel(), FullyShard()])
    assert str(plan) == "dp_shard=4,tp=2 [TensorParallel -> FullyShard]"


def test_auto_puts_replicas_across_the_launchers_nodes(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for mesh, passes, placed in (
        ("auto", [HybridShard()], "dp_replicate=2,dp_shard=4"),
        ("auto,tp=2", [TensorParallel(), HybridShard()], "dp_replicate=2,dp_shard=2,tp=2"),
    ):
        assert str(Plan(mesh, passes).check(transformer(), world_size=8)) == placed
