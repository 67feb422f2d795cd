"""The ranks of a parallel module: what they gather and reduce equals one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from meshpar import ContextParallel, FullyShard, MeshparError, ModelLayout, Plan, TensorParallel, passes_for
from meshpar.testing import on_ranks
from tests.support.models_for_parity import VOCAB, transformer
from tests.support.tiers import daily

LAYOUT = ModelLayout(blocks=("up", "down"), tensor={"up": "colwise", "down": "rowwise", "scale": None})
SAMPLES = 8


class Towers(nn.Module):
    """Two views of a sample and the scale of their products, as CLIP has them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 6)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.double()

    def forward(self, x):
        views = normalize(self.down(self.up(x).relu()), dim=-1)
        return views[:, 0], views[:, 1], self.scale


def contrast(one, other, scale):
    """CLIP's loss over all samples."""
    logits = scale.exp() * one @ other.T
    labels = torch.arange(len(logits))
    return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2


def whole_loss(par, one, other, scale, **how):
    return contrast(par.gather(one, **how), par.gather(other, **how), scale)


def loss_of_own_rows(par, one, other, scale):
    labels = torch.arange(len(one)) + len(one) * par.data_rank
    rows = scale.exp() * one @ par.gather(other).T, scale.exp() * other @ par.gather(one).T
    return sum(cross_entropy(logits, labels) for logits in rows) / 2


def train(module, x, loss):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    losses = []
    for _ in range(3):
        value = loss(*module(x))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.detach())
    return torch.stack(losses)


def views():
    return torch.randn(SAMPLES, 2, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


MESHES = ["dp_shard=2", "dp_replicate=2,dp_shard=2", "dp_shard=2,tp=2", "dp_replicate=2,tp=2", "tp=2"]


@pytest.mark.parametrize("loss", daily([whole_loss, loss_of_own_rows], whole_loss))
@pytest.mark.parametrize("mesh", daily(MESHES, "dp_shard=2", "dp_replicate=2,dp_shard=2", "dp_shard=2,tp=2"))
@on_ranks("mesh")
def test_in_batch_negatives_equal_one_process(mesh, loss):
    x, alone = views(), Towers()
    expected = train(alone, x, contrast)
    par = Plan(mesh, passes_for(mesh)).apply(Towers(), LAYOUT)
    losses = train(par.module, x.chunk(par.data_size)[par.data_rank], lambda *views: loss(par, *views))
    torch.testing.assert_close(par.data_sum(losses) / par.loss_size, expected, rtol=0, atol=1e-10)
    for (name, parameter), found in zip(alone.named_parameters(), par.module.parameters(), strict=True):
        torch.testing.assert_close(par.whole(found.detach()), parameter.detach(), rtol=0, atol=1e-10, msg=name)


@on_ranks(4)
def test_samples_come_in_the_order_of_data_ranks():
    par = Plan("dp_replicate=2,dp_shard=2", passes_for("dp_replicate=2,dp_shard=2")).apply(Towers(), LAYOUT)
    columns = torch.arange(SAMPLES)[None].expand(3, -1)
    assert par.gather(columns.chunk(4, 1)[par.data_rank], dim=-1).equal(columns)
    assert par.gather(torch.tensor([par.data_rank > 1])).tolist() == [False, False, True, True]


@pytest.mark.parametrize("counts", [[3, 5], [0, 8]])
@on_ranks(2)
def test_uneven_parts_of_a_last_batch_equal_one_process(counts):
    x, alone = views(), Towers()
    expected = train(alone, x, contrast)
    par = Plan("dp_shard=2", [FullyShard()]).apply(Towers(), LAYOUT)
    part = x.split(counts)[par.data_rank]
    assert train(par.module, part, lambda *views: whole_loss(par, *views, uneven=True)).allclose(expected, rtol=1e-10)
    assert par.whole(par.module.up.weight.detach()).allclose(alone.up.weight, rtol=0, atol=1e-10)


@on_ranks(2)
def test_uneven_parts_are_refused_on_every_rank_unless_asked_for():
    par = Plan("dp_shard=2", [FullyShard()]).apply(Towers(), LAYOUT)
    values = torch.arange(2.0 + par.data_rank)
    with pytest.raises(MeshparError) as refused:
        par.gather(values)
    assert f"data ranks give par.gather different numbers of samples, this one {len(values)}" in str(refused.value)
    drop_last = values[:2]
    assert par.gather(drop_last).tolist() == [0, 1, 0, 1]
    assert par.gather(values, uneven=True).tolist() == [0, 1, 0, 1, 2]


@on_ranks(4)
def test_stages_gather_in_the_loss_of_a_pipeline():
    """Ranks of pp join nothing, those of samples do, and what comes is one process's loss and gradients."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(transformer().double())
    par = Plan("pp=2,dp_shard=2", passes_for("pp=2,dp_shard=2")).apply(models[1])
    draw = torch.Generator().manual_seed(1)
    micro_batches = [torch.randint(0, VOCAB, (4, 8), generator=draw) for _ in range(2)]

    def contrast_of(logits):
        features = nn.functional.normalize(logits.mean(1), dim=-1)
        return (features @ features.T).logsumexp(1).mean()

    losses = [contrast_of(models[0](ids).logits) for ids in micro_batches]
    sum(losses).backward()
    parts = [ids.chunk(2)[par.data_rank] for ids in micro_batches]
    total = par.backward(parts, lambda module, ids: contrast_of(par.gather(module(ids).logits)))
    torch.testing.assert_close(total, sum(losses).detach(), rtol=1e-10, atol=0)
    whole = dict(models[0].named_parameters())
    for name, parameter in par.module.named_parameters():
        torch.testing.assert_close(par.whole(parameter.grad), whole[name].grad, rtol=0, atol=1e-10, msg=name)


@on_ranks(4)
def test_the_largest_value_is_taken_over_samples_and_positions():
    par = Plan("dp_shard=2,cp=2", [ContextParallel(), FullyShard()]).apply(transformer())
    lengths = torch.tensor([dist.get_rank(), 3 - dist.get_rank()])
    assert par.data_max(lengths) is lengths and lengths.tolist() == [3, 3]


@on_ranks(2)
def test_ranks_of_tp_have_one_value_to_take():
    par = Plan("tp=2", [TensorParallel()]).apply(Towers(), LAYOUT)
    value = torch.ones(2, 3)
    assert par.gather(value) is value and par.data_max(value) is value
