"""Modules that come into a parallel module after plan.apply, and are adopted: exact, or refused."""

from __future__ import annotations

import copy
import re
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from meshpar import (
    ActivationCheckpoint,
    Compile,
    ContextParallel,
    ExpertParallel,
    FullyShard,
    HybridShard,
    MeshparError,
    ModelLayout,
    Parallelized,
    Pass,
    Plan,
    PlanError,
    Replicate,
    Stage,
    TensorParallel,
)
from meshpar.checkpoints import CheckpointManager, export_module
from meshpar.core.mesh import MeshSpec
from meshpar.core.registry import layout_for
from meshpar.core.resolved import resolve
from meshpar.models.transformer import Layer
from meshpar.testing import on_ranks, token_steps, whole
from meshpar.testing.parity import assert_records_match, train_steps
from tests.support.models_for_parity import VOCAB, transformer
from tests.support.tiers import daily

LAYOUT = ModelLayout(
    blocks=("blocks.*",),
    tensor={
        "embed": "vocab",
        "blocks.*": "region",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
        "head": "head",
    },
)
PLANS = {
    "fsdp": ("dp_shard=2", [FullyShard()]),
    "replicate": ("dp_replicate=2", [Replicate()]),
    "tp": ("tp=2", [TensorParallel()]),
    "hsdp": ("dp_replicate=2,dp_shard=2", [HybridShard()]),
    "world": ("dp_replicate=2,dp_shard=2", [HybridShard(optimizer="world")]),
    "fsdp-tp": ("dp_shard=2,tp=2", [TensorParallel(), FullyShard()]),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        hidden = torch.tanh(self.up(x))
        return self.down(hidden) + (self.side(x) if hasattr(self, "side") else 0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 12, bias=False)
        self.extra = nn.Linear(8, 8)
        self.double()

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        for name in ("extra", "probe"):
            x = x + getattr(self, name)(x) if hasattr(self, name) else x
        return self.head(x)


class Adapter(nn.Module):
    """A layer with a low-rank addition, as LoRA's."""

    def __init__(self, base):
        super().__init__()
        self.base, self.scale = base, nn.Parameter(torch.ones(()))
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.scale * self.b(self.a(x))


def grown(net):
    net.embed, net.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
    return ["embed", "head"]


def probe(net):
    net.probe = nn.Sequential(nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 8))
    return ["probe"]


def block(net):
    net.blocks[1] = Block()
    return ["blocks.1"]


def more_blocks(net):
    net.blocks.append(Block())
    return ["blocks.2"]


def tied(net):
    net.embed, net.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
    net.head.weight = net.embed.weight
    return ["embed", "head"]


def tied_to_placed(net):
    net.head = nn.Linear(8, 12, bias=False)
    net.head.weight = net.embed.weight
    return ["head"]


def removed(net):
    del net.extra
    return []


def nothing(net):
    net.extra = nn.Identity()
    return ["extra"]


def adapters(net):
    for layer in net.blocks:
        layer.down = Adapter(layer.down)
    return ["blocks"]


def sides(net):
    for layer in net.blocks:
        layer.side = nn.Linear(8, 8)
    return ["blocks.0.side", "blocks.1.side"]


def change(how, net, optimizer=None):
    """Change a net as ``how`` says, alike on every rank; return the names of the new modules."""
    torch.manual_seed(1)
    names = how(net)
    for name in names:
        net.get_submodule(name).double()
    if optimizer is not None:
        renew(optimizer, net)
    return names


def renew(optimizer, net):
    """Let an optimizer of one process train what the net has now."""
    kept = set(net.parameters())
    known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter in kept]
    optimizer.add_param_group({"params": [parameter for parameter in net.parameters() if parameter not in known]})


def step(par, net, optimizer, seed):
    """Train a step; return the mean loss and the gradients of all ranks."""
    ids = torch.randint(12, (8, 4), generator=torch.Generator().manual_seed(seed))
    part = ids if par is None else ids.chunk(par.data_size)[par.data_rank]
    loss = F.cross_entropy(net(part).flatten(0, 1), part.flatten())
    loss.backward()
    mean = loss.detach() if par is None else par.data_sum(loss.detach()) / par.loss_size
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5) if par is None else par.clip_grad_norm_(0.5)
    grads = {name: whole(parameter.grad) for name, parameter in net.named_parameters()}
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": mean, "norm": norm} | grads


def check(got, expected, *where):
    assert got.keys() == expected.keys(), where
    for name, value in expected.items():
        assert torch.allclose(got[name], value, atol=1e-9), (*where, name, got[name], value)


def check_changes(plans, chains):
    for plan in plans:
        for chain in (CHAINS[place] for place in chains):
            alone, par = Net(), Plan(*PLANS[plan]).apply(Net(), LAYOUT)
            one, ours = (torch.optim.AdamW(net.parameters(), 0.05, fused=True) for net in (alone, par.module))
            check(step(par, par.module, ours, 0), step(None, alone, one, 0), plan)
            for how in chain:
                if how in (adapters, sides) and "tp" in plan:
                    continue  # refused, below
                change(how, alone, one)
                ours.add_param_group({"params": par.adopt(*change(how, par.module), optimizer=ours)})
                for seed in range(2 if how is chain[-1] else 1):
                    check(step(par, par.module, ours, seed), step(None, alone, one, seed), plan, how.__name__, seed)
            with torch.no_grad():
                ids = torch.arange(12)[None]
                assert torch.allclose(par.module(ids), alone(ids), atol=1e-9)
            assert sum(parameter.numel() for parameter in alone.parameters()) == par.describe().parameters


CHAINS = (probe, block, more_blocks, removed, grown), (tied_to_placed, adapters, nothing, sides, tied)


TWO = [(plan, chain) for plan in ("fsdp", "replicate", "tp") for chain in (0, 1)]


@pytest.mark.parametrize(("plan", "chain"), daily(TWO, ("fsdp", 0), ("tp", 1)))
def test_adopted_modules_train_as_in_one_process_on_two_ranks(plan, chain):
    train_on_two(plan, chain)


@on_ranks(2)
def train_on_two(plan, chain):
    check_changes((plan,), (chain,))


FOUR = [(plan, chain) for plan in ("hsdp", "world", "fsdp-tp") for chain in (0, 1)]


@pytest.mark.parametrize(("plan", "chain"), daily(FOUR, ("world", 1)))
def test_adopted_modules_train_as_in_one_process_on_four_ranks(plan, chain):
    train_on_four(plan, chain)


@on_ranks(4)
def train_on_four(plan, chain):
    check_changes((plan,), (chain,))


def grown_before(plan):
    """Apply a plan to a net that had the larger vocabulary, and the probe, from before; return it with its
    optimizer.
    """
    net = Net()
    for how in (grown, probe):
        change(how, net)
    par = Plan(*PLANS[plan]).apply(net, LAYOUT)
    return par, torch.optim.AdamW(par.module.parameters(), 0.05, fused=True)


def grown_after(plan):
    par = Plan(*PLANS[plan]).apply(Net(), LAYOUT)
    optimizer = torch.optim.AdamW(par.module.parameters(), 0.05, fused=True)
    step(par, par.module, optimizer, 0)
    names = [name for how in (grown, probe) for name in change(how, par.module)]
    optimizer.add_param_group({"params": par.adopt(*names, optimizer=optimizer)})
    return par, optimizer


THERE_AND_BACK = ("fsdp-tp", "world"), ("world", "fsdp-tp")


@pytest.mark.parametrize(("plan", "other"), daily(THERE_AND_BACK, THERE_AND_BACK[0]))
def test_adopted_modules_are_described_saved_restored_on_other_meshes_and_exported_as_those_of_before_apply(
    plan, other
):
    saved_and_restored(plan, other)


@on_ranks(4)
def saved_and_restored(plan, other):
    root = [tempfile.mkdtemp(prefix="meshpar-adopt-")]
    dist.broadcast_object_list(root)
    (par, optimizer), folder = grown_after(plan), Path(root[0])
    step(par, par.module, optimizer, 1)
    with CheckpointManager(folder / "steps") as manager:
        manager.save(2, par, optimizer)
        restored, ours = grown_before(other)
        assert str(grown_before(plan)[0].describe()) == str(par.describe())
        manager.restore(restored, ours)
        again, late = grown_after(other)  # also into a module that adopted them
        manager.restore(again, late)
    export_module(par, folder / "exported")
    exported = {name: tensor.clone() for name, tensor in load_file(folder / "exported" / "model.safetensors").items()}
    for name, parameter in par.module.named_parameters():
        assert torch.equal(whole(parameter), exported[name])
    assert exported.keys() == par.state_dict(full=True, everywhere=True).keys()
    expected = step(par, par.module, optimizer, 2)
    check(step(restored, restored.module, ours, 2), expected, plan, other)
    check(step(again, again.module, late, 2), expected, plan, other)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(root[0])


def applied(plan="fsdp", net=None):
    par = Plan(*PLANS[plan]).apply(net or Net(), LAYOUT)
    return par, torch.optim.AdamW(par.module.parameters(), 0.05, fused=True)


def new_parameter(net):
    net.blocks[0].scale = nn.Parameter(torch.ones(8))


def on_meta(net):
    net.head = nn.Linear(8, 12, bias=False, device="meta")


def other_weights(net):
    torch.manual_seed(dist.get_rank())
    net.head = nn.Linear(8, 12, bias=False)


def other_modules(net):
    if dist.get_rank() == 0:
        net.probe = nn.Linear(8, 8)
    net.head = nn.Linear(8, 12, bias=False)


def tied_across_blocks(net):
    net.blocks[0].side = nn.Linear(8, 12, bias=False)
    net.blocks[0].side.weight = net.head.weight


def moved(net):
    net.extra = net.blocks[0].side = nn.Linear(8, 8)
    net.extra = net.blocks[0].up


def other_dtype(net):
    net.head = nn.Linear(8, 12, bias=False).bfloat16()


def hooked(net):
    net.head = nn.Linear(8, 12, bias=False)
    net.head.weight.register_hook(lambda grad: grad)


REFUSED = {
    ("heads", grown): r"no module 'heads'; .* nearest: .*head",
    ("head.weight", grown): r'head\.weight is a parameter; .* par\.adopt\("head"\)',
    ("blocks", grown): r"blocks is placed already",
    ("embed", grown): r'head\.weight came into the module, too; .* par\.adopt\("embed", "head"\)',
    ("blocks.0", new_parameter): r"blocks\.0 is placed already",
    ("", new_parameter): r"placed already",
    ("head", on_meta): r"head\.weight has no values",
    (
        "head",
        other_weights,
    ): r"handed to par\.adopt differ between ranks(.|\n)*head\.weight: rank 0 against ranks \[1\]",
    ("", other_modules): r"ranks adopt different modules",
    ("blocks.0.side", tied_across_blocks): r"blocks\.0\.side\.weight moved into another unit",
    ("extra", moved): r"blocks\.0\.up\.weight moved into another unit",
    ("head", other_dtype): r"mixes dtypes: .*float64 .*bfloat16",
    ("head", hooked): r"head\.weight has a hook on its gradient",
}


@on_ranks(2)
def test_modules_that_cannot_be_adopted_are_refused_and_nothing_changes():
    for (name, how), match in REFUSED.items():
        par, optimizer = applied()
        before = dict(par.module.named_modules())
        children = {child: dict(child._modules) for child in before.values()}
        parameters = {child: dict(child._parameters) for child in before.values()}
        how(par.module)
        if how is not other_dtype:
            par.module.head.double()
        with pytest.raises(MeshparError, match=match):
            par.adopt(name)
        for child in before.values():
            child._modules.clear(), child._parameters.clear()
            child._modules.update(children[child])
            child._parameters.update(parameters[child])
        alone = Net()
        one = torch.optim.AdamW(alone.parameters(), 0.05, fused=True)
        check(step(par, par.module, optimizer, 0), step(None, alone, one, 0), name, how.__name__)


@on_ranks(2)
def test_modules_that_tensor_parallelism_cannot_split_are_refused():
    par, _ = applied("tp")
    change(adapters, par.module)
    with pytest.raises(PlanError, match=r"blocks\.0\.down is a Adapter, and no linear layer to split"):
        par.adopt("blocks")
    par, _ = applied("tp")
    change(sides, par.module)
    with pytest.raises(PlanError, match=r"blocks\.0\.side\.weight .* in region blocks\.0 has no style"):
        par.adopt("blocks")
    par, _ = applied("tp")
    par.module.extra = nn.Sequential(nn.Linear(8, 8).double(), nn.Dropout(0.1))
    with pytest.raises(PlanError, match=r"extra\.1 draws random numbers, .* ModelLayout\(dropout=True\)"):
        par.adopt("extra")


class Late(Pass):
    name, stage = "Late", Stage.TENSOR

    def apply(self, module, layout, mesh):
        """Change nothing."""


@on_ranks(2)
def test_a_pass_that_places_modules_in_apply_alone_refuses_to_adopt():
    par = Plan("dp_shard=2", [Late(), FullyShard()]).apply(Net(), LAYOUT)
    change(grown, par.module)
    with pytest.raises(PlanError, match=r"Late places modules in plan\.apply alone"):
        par.adopt("embed", "head")


@on_ranks(2)
def test_adopt_is_refused_inside_of_a_step():
    for plan in ("fsdp", "tp"):
        par, _ = applied(plan)
        ids = torch.arange(12).view(2, 6)

        def late(*_, par=par):
            change(grown, par.module)
            par.adopt("embed", "head")

        handle = par.module.blocks[0].register_forward_pre_hook(late)
        with pytest.raises(MeshparError, match=r"inside of a forward or a backward; call it between two steps"):
            par.module(ids)
        handle.remove()
        par, _ = applied(plan)
        output = par.module(ids)
        output.register_hook(lambda grad: late())
        with pytest.raises(MeshparError, match=r"inside of a forward or a backward"):
            output.sum().backward()
    par, _ = applied()
    with pytest.raises(MeshparError, match=r"between the micro-batches of par\.accumulate"):
        for place, micro in enumerate(par.accumulate([ids, ids])):
            if place == 0:
                par.module(micro).sum().backward()
                change(grown, par.module)
                par.adopt("embed", "head")
    par, _ = applied()
    loss = par.module(ids).sum()
    change(grown, par.module)
    par.adopt("embed", "head")
    with pytest.raises(MeshparError, match=r"between a forward and its backward"):
        loss.backward()


def said(error):
    """Return the call that a message says."""
    (call,) = re.findall(r"par\.adopt\([^)]*\)", str(error))
    return call


@pytest.mark.parametrize("plan", daily(["fsdp", "replicate", "tp"], "fsdp"))
def test_the_calls_that_messages_say_are_exact(plan):
    call_as_said(plan)


@on_ranks(2)
def call_as_said(plan):
    for how in (grown, probe, removed, tied_to_placed):
        alone = Net()
        (par, optimizer), one = applied(plan), torch.optim.AdamW(alone.parameters(), 0.05, fused=True)
        check(step(par, par.module, optimizer, 0), step(None, alone, one, 0), plan)
        change(how, par.module)
        change(how, alone, one)
        with pytest.raises(MeshparError, match=r"after plan\.apply") as refused:
            par.module(torch.arange(12).view(2, 6))
        added = eval(said(refused.value), {"par": par})
        if how is not probe:
            with pytest.raises(
                MeshparError,
                match=r"holds \d parameters from before par\.adopt, .* par\.adopt\(\.\.\., optimizer=optimizer\)",
            ):
                optimizer.step()
        renew(optimizer, par.module)
        assert {id(parameter) for parameter in added} <= {
            id(parameter) for parameter in optimizer.param_groups[-1]["params"]
        }
        check(step(par, par.module, optimizer, 1), step(None, alone, one, 1), plan, how.__name__)


def scaled(net, place):
    """Give a module a forward of its own, as a wrapper does that patches instances."""
    module = net.get_submodule(place)
    inner = module.forward
    module.forward = lambda x: 1.5 * inner(x)
    return net


@on_ranks(2)
def test_the_styles_that_a_message_says_leave_modules_with_a_forward_of_their_own_whole_and_exact():
    without_region = ModelLayout(
        blocks=LAYOUT.blocks, tensor={key: style for key, style in LAYOUT.tensor.items() if style != "region"}
    )
    for layout, place in (
        (LAYOUT, "head"),
        (LAYOUT, "embed"),
        (LAYOUT, "blocks.0.up"),
        (without_region, "blocks.1.down"),
    ):
        with pytest.raises(PlanError, match="has a forward that was set on it") as refused:
            Plan("tp=2", [TensorParallel()]).check(scaled(Net(), place), layout)
        (said_pass,) = re.findall(r"TensorParallel\(styles=\{.*?\}\)", str(refused.value))
        remedy = eval(said_pass, {"TensorParallel": TensorParallel})
        alone, par = scaled(Net(), place), Plan("tp=2", [remedy]).apply(scaled(Net(), place), layout)
        one, ours = (torch.optim.AdamW(net.parameters(), 0.05, fused=True) for net in (alone, par.module))
        for seed in range(2):
            check(step(par, par.module, ours, seed), step(None, alone, one, seed), place)


COMBINED = {
    "recomputed": ("dp_shard=2", [ActivationCheckpoint(), FullyShard()]),
    "compiled": ("dp_shard=2", [Compile(backend="eager"), FullyShard()]),
    "compiled-tp": ("tp=2", [TensorParallel(), ActivationCheckpoint(), Compile(backend="eager")]),
    "prefetched": ("dp_shard=2", [FullyShard(prefetch_forward=1, prefetch_backward=2, reshard_after_forward=False)]),
    "whole": ("dp_shard=2", [FullyShard(whole=("probe",))]),
    "offloaded": ("dp_shard=2", [FullyShard(offload="cpu")]),
    "one unit": ("dp_shard=2", [FullyShard(blocks=())]),
    "replicate-whole": ("dp_replicate=2", [Replicate(whole=("head",))]),
}


@pytest.mark.parametrize(
    "plans",
    daily(
        [(tuple(COMBINED)[first::4],) for first in range(4)], (tuple(COMBINED)[::4],), ids=lambda case: ", ".join(*case)
    ),
)
def test_adopted_modules_are_exact_under_every_pass_in_micro_batches_and_in_averages(plans):
    in_micro_batches_and_averages(plans)


@on_ranks(2)
def in_micro_batches_and_averages(plans):
    for plan in plans:
        mesh, passes = COMBINED[plan]
        patterns = tuple(pattern for one in passes for pattern in getattr(one, "whole", ()))
        net, alone = Net(), Net()
        if "probe" in patterns:  # the pattern matches something from the start
            change(probe, net), change(probe, alone)
        par = Plan(mesh, passes).apply(net, LAYOUT)
        one, ours = (torch.optim.AdamW(module.parameters(), 0.05, fused=True) for module in (alone, par.module))
        average = par.averaged(0.5)
        expected = {name: parameter.detach().clone() for name, parameter in alone.named_parameters()}
        for place, how in enumerate((None, probe, block, adapters if "tp" not in plan else probe)):
            if how is not None:
                kept = dict(alone.named_parameters())
                change(how, alone, one)
                ours.add_param_group({"params": par.adopt(*change(how, par.module), optimizer=ours)})
                now = dict(alone.named_parameters())
                same = {id(parameter): name for name, parameter in kept.items()}
                expected = {
                    name: expected[same[id(tensor)]] if id(tensor) in same else tensor.detach().clone()
                    for name, tensor in now.items()
                }
            ids = torch.randint(12, (2, 8, 4), generator=torch.Generator().manual_seed(place))
            for row_ids in ids:
                (F.cross_entropy(alone(row_ids).flatten(0, 1), row_ids.flatten()) / 2).backward()
            for micro_batch in par.accumulate([row_ids.chunk(par.data_size)[par.data_rank] for row_ids in ids]):
                (F.cross_entropy(par.module(micro_batch).flatten(0, 1), micro_batch.flatten()) / 2).backward()
            for optimizer in (one, ours):
                optimizer.step()
                optimizer.zero_grad()
            for name, parameter in alone.named_parameters():
                expected[name] = (
                    parameter.detach().clone() if place == 0 else 0.5 * expected[name] + 0.5 * parameter.detach()
                )
            average.update()
            averages = average.state_dict()["averages"]
            assert averages.keys() == expected.keys()
            for name, parameter in alone.named_parameters():
                assert torch.allclose(whole(par.module.get_parameter(name)), parameter, atol=1e-8), (plan, how, name)
                assert torch.allclose(whole(averages[name]), expected[name], atol=1e-8), (plan, how, name)


class Normed(nn.Module):
    """A layer before a batch norm; it keeps the shape of what comes."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(self.layer(x.flatten(0, 1))).view_as(x)


def steps(net, mine, count=2):
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for ids in mine[:count]:
        F.cross_entropy(net(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.nightly
@on_ranks(2)
def test_adopted_batch_norms_are_one_processs_and_adopted_modules_in_bfloat16_are_those_of_before_apply():
    ids = torch.randint(12, (2, 8, 4), generator=torch.Generator().manual_seed(0))

    def normed(net):
        torch.manual_seed(3)
        net.blocks.append(Normed().double())
        return ("blocks.2",)

    for mesh, make in (("dp_shard=2", FullyShard), ("dp_replicate=2", Replicate)):
        alone, par = Net(), Plan(mesh, [make()]).apply(Net(), LAYOUT)
        normed(alone)
        par.adopt(*normed(par.module))
        steps(alone, ids)
        steps(par.module, ids.chunk(2, 1)[par.data_rank])
        for name, value in alone.state_dict().items():
            assert torch.allclose(whole(par.module.state_dict()[name]), value, atol=1e-8), (mesh, name)
    found = []
    for late in (False, True):
        net = Net()
        if not late:
            change(probe, net)
        par = Plan("dp_shard=2", [FullyShard(param_dtype=torch.bfloat16)]).apply(net, LAYOUT)
        if late:
            par.adopt(*change(probe, par.module))
        steps(par.module, ids.chunk(2, 1)[par.data_rank])
        found.append({name: whole(parameter) for name, parameter in par.module.named_parameters()})
    assert all(torch.equal(found[1][name], value) for name, value in found[0].items())


def one_process(module):
    spec = MeshSpec()
    resolved = resolve((), spec, module, layout_for(module))
    return Parallelized(module, Plan(spec), resolved, {spec: None}, torch.device("cpu"))


def other_head(net, device=None):
    torch.manual_seed(5)
    net.head = nn.Linear(net.head.in_features, VOCAB, bias=False, device=device)
    return "head"


def other_block(net):
    torch.manual_seed(6)
    net.layers[1] = Layer(net.config)
    return "layers.1"


def mixture():
    return transformer(experts=4, qk_norm=True)


SPLIT = TensorParallel(sequence_parallel=True, loss_parallel=True)
AXES = {
    "positions split over tp": ("tp=2", [SPLIT], transformer, None),
    "cp": (
        "dp_shard=1,cp=2",
        [ContextParallel(), FullyShard()],
        transformer,
        r"mixes positions, .* before plan\.apply",
    ),
    "ep": ("dp_shard=1,ep=2", [ExpertParallel(), FullyShard()], mixture, r"holds experts, .* before plan\.apply"),
}


@pytest.mark.parametrize("axis", daily(AXES, "cp"))
def test_modules_are_adopted_or_refused_where_positions_or_experts_are_divided(axis):
    adopted_where_divided(axis)


@on_ranks(2)
def adopted_where_divided(axis):
    steps = token_steps(VOCAB, parts=2, micro_batches=2)
    mesh, passes, build, refused = AXES[axis]
    for how in (other_head, other_block):
        torch.manual_seed(4)
        alone = build()
        par = Plan(mesh, passes).apply(copy.deepcopy(alone))
        name = how(par.module)
        if how is other_block and refused is not None:
            with pytest.raises(PlanError, match=refused):
                par.adopt(name)
            continue
        par.adopt(name)
        how(alone)
        got, expected = train_steps(par, steps), train_steps(one_process(alone), steps)
        if dist.get_rank() == 0:
            assert_records_match(expected, got)


@on_ranks(2)
def test_modules_are_adopted_before_materialize():
    found = {}
    for late in (False, True):
        with torch.device("meta"):
            net = transformer()
        if not late:
            other_head(net, "meta")
        par = Plan("dp_shard=2", [FullyShard()]).apply(net)
        if late:
            par.adopt(other_head(par.module, "meta"))
        par.materialize(seed=3)
        found[late] = par.state_dict(full=True, everywhere=True)
    assert all(torch.equal(found[True][name], value) for name, value in found[False].items())
