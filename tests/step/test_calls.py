"""Calls other than ``module(x)``: ``forward``, inference mode, ``torch.compile``; and a plan without passes."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from meshpar import FullyShard, MeshparError, ModelLayout, Plan, PlanError, Replicate, TensorParallel
from meshpar.testing import on_ranks
from tests.support.comparison import assert_gradients, assert_weights
from tests.support.models_for_parity import transformer

LAYOUT = ModelLayout(blocks=("blocks.*",), tensor={"embed": "colwise_gather"})
PLANS = {"dp_shard=2": [FullyShard()], "dp_replicate=2": [Replicate()], "tp=2": [TensorParallel()]}


TIGHT = {"rtol": 0, "atol": 1e-12}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks = nn.Linear(4, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 2)
        self.double()

    def forward(self, x, cache=None):
        x = self.embed(x)
        for place, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            if cache is not None:
                cache[place] = x
        return self.head(x)


def draw(rows, width, seed):
    return torch.randn(rows, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def train(net, call, rows):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for seed in range(2):
        mse_loss(call(rows(draw(8, 4, seed))), rows(draw(8, 2, 100 + seed))).backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_module_forward_is_a_call_of_the_module():
    for mesh, passes in PLANS.items():
        alone, par = Net(), Plan(mesh, passes).apply(Net(), LAYOUT)
        train(alone, alone.forward, lambda batch: batch)
        train(par.module, par.module.forward, lambda batch, par=par: batch[par.data_rank :: par.data_size])
        assert_weights(par, alone, **TIGHT)


@on_ranks(2)
def test_a_cache_made_in_inference_mode_is_written_or_the_error_says_what_helps():
    alone, x = Net(), draw(3, 4, 0)
    expected = torch.zeros(2, 3, 8, dtype=torch.float64)
    with torch.no_grad():
        alone(x, expected)
    for mesh, passes in PLANS.items():
        par = Plan(mesh, passes).apply(Net(), LAYOUT)
        with torch.inference_mode():
            cache = torch.zeros_like(expected)
            if mesh.startswith("dp"):
                with pytest.raises(MeshparError, match=r"make such tensors under torch\.no_grad\(\)"):
                    par.module(x, cache)
            else:
                par.module(x, cache)
                assert cache.is_inference()
        with torch.no_grad():
            writable = torch.zeros_like(expected)
            par.module(x, writable)
        torch.testing.assert_close(writable, expected)
        if mesh == "tp=2":
            torch.testing.assert_close(cache.clone(), expected)
        train(par.module, par.module, lambda batch, par=par: batch[par.data_rank :: par.data_size])


@on_ranks(2)
def test_a_compiled_form_of_the_module_is_what_par_backward_calls():
    alone, par = Net(), Plan("dp_shard=2", [FullyShard()]).apply(Net(), LAYOUT)
    train(alone, alone, lambda batch: batch)
    compiled, called = torch.compile(par.module, backend="eager"), []
    optimizer = torch.optim.SGD(par.module.parameters(), lr=0.1)
    for seed in range(2):
        batch = [draw(8, 4, seed)[par.data_rank :: 2], draw(8, 2, 100 + seed)[par.data_rank :: 2]]
        par.backward([batch], lambda module, batch: called.append(module) or mse_loss(module(batch[0]), batch[1]))
        optimizer.step()
        optimizer.zero_grad()
    assert_weights(par, alone, **TIGHT)
    assert all(module is compiled for module in called)
    assert par.forward([0], lambda module, batch: module) == [compiled]
    torch._dynamo.reset()


class Rare(nn.Module):
    """What other plans refuse, or change: sparse gradients, rows that a forward renorms, a packed LSTM, batch norm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(11, 4, sparse=True)
        self.words, self.cell = nn.Embedding(11, 4, max_norm=1.0), nn.LSTM(4, 4, batch_first=True)
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, ids):
        return self.head(self.norm(self.bag(ids) + self.cell(self.words(ids))[0][:, -1]))


def train_rare(net):
    sparse = torch.optim.SparseAdam([net.bag.weight], lr=0.1)
    dense = torch.optim.SGD([value for name, value in net.named_parameters() if name != "bag.weight"], lr=0.1)
    for seed in range(3):
        ids = torch.randint(11, (6, 5), generator=torch.Generator().manual_seed(seed))
        cross_entropy(net.forward(ids), ids[:, 0] % 3).backward()
        for optimizer in (sparse, dense):
            optimizer.step()
            optimizer.zero_grad()
    return net.state_dict()


@on_ranks(1)
def test_a_plan_without_passes_changes_nothing_in_one_process():
    net = Rare()
    before = {name: (type(child), set(vars(child))) for name, child in net.named_modules()}
    par = Plan().apply(net, ModelLayout())
    assert {name: (type(child), set(vars(child))) for name, child in net.named_modules()} == before
    expected, found = train_rare(Rare()), train_rare(par.module)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    copied = copy.deepcopy(par.module)
    assert type(copied) is Rare and copied is not par.module
    with pytest.raises(AttributeError, match="no_sync"):
        par.module.no_sync()
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        par.module.head(torch.ones(2, 7))
    assert type(caught.value) is RuntimeError
    verbs(par)


def verbs(par):
    """Everything that needs a mesh works without one."""
    ids = torch.zeros(2, 5, dtype=torch.long)
    total = par.backward([ids], lambda module, batch: module(batch).sum())
    par.module.bag.weight.grad = None  # sparse, of which torch computes no norm in one process either
    assert par.clip_grad_norm_(float("inf")).isfinite() and total.isfinite()
    assert [micro.shape for micro in par.accumulate([ids])] == [ids.shape]
    assert par.forward([ids], lambda module, batch: module(batch).shape) == [(2, 3)]
    assert par.data_sum(torch.ones(2)).tolist() == [1, 1] and par.token_scale(4).item() == 0.25
    assert par.split(ids) is ids and par.data_group.size() == 1
    average = par.averaged(0.9)
    average.update()
    par.load_state_dict(par.state_dict(full=True))
    par.check_replicas()
    par.register_method("forward")
    assert not par.verify([ids]).modules and "head" in str(par.describe())


@on_ranks(1)
def test_a_plan_without_passes_keeps_inference_mode():
    par = Plan().apply(Net(), ModelLayout())
    with torch.inference_mode():
        cache = torch.zeros(2, 3, 8, dtype=torch.float64)
        par.module(draw(3, 4, 0), cache)
    assert cache.abs().sum() > 0


@on_ranks(2)
def test_sgd_without_momentum_trains_dense_gradients_as_it_does_sparse_ones():
    def build(sparse):
        torch.manual_seed(0)
        return nn.Sequential(nn.EmbeddingBag(11, 4, sparse=sparse).double())

    plan = Plan("dp_shard=2", [FullyShard()])
    with pytest.raises(PlanError, match=r"build it with sparse=False\. SGD without momentum then trains alike"):
        plan.apply(build(True), ModelLayout())
    alone, par = build(True), plan.apply(build(False), ModelLayout())
    ids = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(0))
    for net, rows in ((alone, ids), (par.module, ids[par.data_rank :: 2])):
        net(rows).square().mean().backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()
    assert_weights(par, alone, **TIGHT)


MESHES = {"dp_replicate=2,tp=2": [TensorParallel(), Replicate()], "dp_shard=2,tp=2": [TensorParallel(), FullyShard()]}


PAGE = Path(__file__).parents[2] / "docs" / "parallelized.md"


def contrast(features):
    """A loss over all samples together."""
    normal = nn.functional.normalize(features, dim=1)
    return cross_entropy(normal @ normal.T, torch.arange(len(normal)))


def next_ones(features, group):
    """The features of the next rank, as an exchange of embeddings has them."""
    parts = [torch.empty_like(features) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, features.detach(), group=group)
    return parts[(dist.get_rank(group) + 1) % len(parts)]


@pytest.mark.parametrize("mesh", MESHES)
@on_ranks(4)
def test_values_gathered_over_the_data_group_are_exact_beside_tp(mesh):
    x, code = draw(8, 4, 0), next(part for part in PAGE.read_text().split("```") if "par.data_group)" in part)
    alone, par = Net(), Plan(mesh, MESHES[mesh]).apply(Net(), LAYOUT)
    mine = x.chunk(2)[par.data_rank]
    assert (par.data_group.size(), dist.get_rank(par.data_group)) == (par.data_size, par.data_rank)
    known = {"torch": torch, "dist": dist, "par": par, "contrast": contrast, "features": par.module(mine)}
    exec(code.removeprefix("python"), known)
    contrast(alone(x)).backward()
    known["loss"].backward()
    assert_gradients(par.module, alone, **TIGHT)
    for net in (alone, par.module):
        net.zero_grad()
    one, other = alone(x).chunk(2)
    ((one * other.detach()).mean() / 2 + (other * one.detach()).mean() / 2).backward()
    features = par.module(mine)
    (features * next_ones(features, par.data_group)).mean().backward()
    assert_gradients(par.module, alone, **TIGHT)
    wrong = Plan(mesh, MESHES[mesh]).apply(Net(), LAYOUT)
    features = wrong.module(mine)
    loss = (features * next_ones(features, None)).mean()
    with pytest.raises(
        MeshparError, match=r"[Gg]ive collectives of your own in a loss or a hook group=par\.data_group"
    ):
        loss.backward()


@pytest.mark.nightly
@on_ranks(8)
def test_the_data_group_joins_the_ranks_with_different_samples():
    from meshpar import ContextParallel, HybridShard

    mesh = "dp_replicate=2,dp_shard=2,cp=2"
    par = Plan(mesh, [ContextParallel(), HybridShard()]).apply(transformer())
    ranks = dist.get_process_group_ranks(par.data_group)
    assert ranks == [rank for rank in range(8) if rank % 2 == dist.get_rank() % 2]
    assert ranks.index(dist.get_rank()) == par.data_rank
