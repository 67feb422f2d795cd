"""Operators on a parallel module's parameters: the error's words are exact where they are followed."""

import gc

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import cross_entropy

from meshpar import FullyShard, HybridShard, MeshparError, ModelLayout, Plan, Replicate, TensorParallel
from meshpar.core.errors import note
from meshpar.testing import on_ranks
from tests.support.comparison import assert_gradients, assert_weights
from tests.support.tiers import daily

VOCABULARY, DIM, NEW = 17, 8, 13
LAYOUT = ModelLayout(tensor={"up": "colwise", "down": "rowwise"})
PLANS = {
    "dp_shard=2": [FullyShard()],
    "dp_replicate=2": [Replicate()],
    "tp=2": [TensorParallel()],
    "dp_replicate=2,dp_shard=2": [HybridShard(optimizer="world")],
    "dp_shard=2,tp=2": [TensorParallel(), FullyShard()],
}


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, 2 * DIM)
        self.down, self.head = nn.Linear(2 * DIM, DIM), nn.Linear(DIM, VOCABULARY)

    def forward(self, ids):
        return self.head(self.down(torch.tanh(self.up(self.embed(ids)))))


class Alone:
    """What a loop of one process has in the place of ``par``."""

    data_rank, data_size = 0, 1

    def like(self, tensor, values):
        return torch.as_tensor(values)

    def whole(self, tensor):
        return tensor


MASK = torch.zeros(VOCABULARY, 1, dtype=torch.float64)
MASK[NEW:] = 1
OLD_ROWS = torch.arange(VOCABULARY) < NEW


def hook(weight, par):
    weight.register_hook(lambda grad: grad * par.like(grad, MASK))


def hook_rows(weight, par):
    def zero_old(grad):
        whole = par.whole(grad).clone()
        whole[:NEW] = 0
        return par.like(grad, whole)

    weight.register_hook(zero_old)


def multiply(weight, par):
    weight.grad = weight.grad * par.like(weight.grad, MASK)


def zero_rows(weight, par):
    whole = par.whole(weight.grad)
    whole[:NEW] = 0
    weight.grad.copy_(par.like(weight.grad, whole))


def zero_data(weight, par):
    whole = par.whole(weight.grad.data)
    whole[:NEW].zero_()
    weight.grad.data.copy_(par.like(weight.grad, whole))


def fill_rows(weight, par):
    whole = par.whole(weight.grad)
    whole[OLD_ROWS] = whole[OLD_ROWS].fill_(0)
    weight.grad.copy_(par.like(weight.grad, whole))


def precondition(weight, par):  # Shampoo's left factor
    grad = par.whole(weight.grad)
    values, vectors = torch.linalg.eigh(torch.eye(len(grad), dtype=grad.dtype) + grad @ grad.T)
    weight.grad.copy_(par.like(weight.grad, vectors @ torch.diag(values**-0.25) @ vectors.T @ grad))


def clip_by_unit(weight, par):  # timm's adaptive clipping
    largest = par.whole(weight.norm()).clamp_(min=1e-3)
    weight.grad.mul_(par.like(weight.grad, largest))


def scale_by_norm(weight, par):
    weight.grad.div_(1 + par.whole(weight.grad.norm()).item())


def restore_rows(weight, par, old):
    whole, before = par.whole(weight), par.whole(old)
    whole[OLD_ROWS] = before[OLD_ROWS]
    weight.copy_(par.like(weight, whole))


def choose(weight, par, old):
    weight.copy_(torch.where(par.like(weight, OLD_ROWS[:, None]), old, weight))


def add_noise(weight, par, old):
    weight.add_(par.like(weight, np.random.default_rng(0).standard_normal(weight.shape)))


def read_numpy(weight, par, old):
    weight.copy_(par.like(weight, par.whole(weight.detach()).numpy() * 0.5))


def average_by_hand(weight, par):
    if par is DIRECT and isinstance(weight, DTensor):
        dist.all_reduce(weight.grad)


AT_START, AFTER_BACKWARD = (
    (hook, hook_rows),
    (multiply, zero_rows, zero_data, fill_rows, precondition, clip_by_unit, scale_by_norm, average_by_hand),
)
AFTER_STEP = (restore_rows, choose, add_noise, read_numpy)
DIRECT = Alone()
"""Habits as people write them, without a word of meshpar's."""


def batches(par):
    for seed in range(2):
        ids = torch.randint(VOCABULARY, (8, 6), generator=torch.Generator().manual_seed(seed))
        yield ids.chunk(par.data_size)[par.data_rank]


def train(net, habit, par, parts):
    weight = net.embed.weight
    optimizer, old = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3), weight.detach().clone()
    if habit in AT_START:
        habit(weight, par)
    for ids in batches(parts):
        cross_entropy(net(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        with torch.no_grad():
            if habit in AFTER_BACKWARD:
                habit(weight, par)
            optimizer.step()
            if habit in AFTER_STEP:
                habit(weight, par, old)
        optimizer.zero_grad()


def build():
    torch.manual_seed(0)
    return Words().double()


def message_of(habit, par):
    """What a habit raises that knows nothing of the mesh; empty where it trains as one process does."""
    try:
        train(par.module, habit, DIRECT, par)
    except (MeshparError, RuntimeError) as error:
        note(error)
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    return ""


def check_habits(mesh, passes):
    said = {}
    for habit in (*AT_START, *AFTER_BACKWARD, *AFTER_STEP):
        net = build()
        train(net, habit, DIRECT, Alone())
        par = Plan(mesh, passes).apply(build(), LAYOUT if "tp" in mesh else None)
        train(par.module, habit, par, par)
        assert_weights(par, net, rtol=0, atol=1e-12, msg=lambda text, habit=habit: f"{habit.__name__}: {text}")
        other = Plan(mesh, passes).apply(build(), LAYOUT if "tp" in mesh else None)
        words = message_of(habit, other)
        if not words:
            assert_weights(other, net, rtol=0, atol=1e-12)
        elif habit is average_by_hand:
            assert "gradients are averaged over data ranks already" in words
        else:
            assert "par.like(" in words or "par.whole(" in words, (mesh, habit.__name__, words)
        said[habit] = words
    return said


@pytest.mark.parametrize("mesh", daily(PLANS, "dp_shard=2"))
@on_ranks("mesh")
def test_a_mask_noise_or_a_row_is_told_and_what_is_told_is_exact(mesh):
    said = check_habits(mesh, PLANS[mesh])
    assert "," in mesh or "a plain tensor met a parameter" in said[multiply]
    if mesh == "dp_shard=2":
        for habit, words in {
            zero_rows: "change the whole tensor on every rank, whole = par.whole(tensor)",
            clip_by_unit: "compute with the whole of it, par.whole(tensor)",
            average_by_hand: "gradients are averaged over data ranks already",
            read_numpy: "use par.whole(tensor).numpy() on every rank",
        }.items():
            assert words in said[habit], (habit.__name__, said[habit])


def scaled(factor):
    module = build()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(factor)
    return module


@pytest.mark.parametrize("mesh", daily(PLANS, "dp_shard=2"))
@on_ranks("mesh")
def test_a_teacher_that_is_moved_by_hand_is_refused_and_exact_as_the_message_says(mesh):
    student, teacher = (Plan(mesh, PLANS[mesh]).apply(build(), LAYOUT if "tp" in mesh else None) for _ in range(2))
    pairs = list(zip(teacher.module.parameters(), student.module.parameters(), strict=True))
    with torch.no_grad():
        for target, source in pairs:
            source.mul_(3)
            with pytest.raises(MeshparError, match="each applied plan has a mesh of its own"):
                target.add_(source)
            placed = teacher.like(target, source)
            assert placed.device_mesh is target.device_mesh and placed.placements == target.placements
            target.mul_(0.75).add_(placed, alpha=0.25)
            source.zero_()  # what was placed is a copy
            assert placed.full_tensor().any()
    assert_weights(teacher, scaled(1.5), rtol=0, atol=1e-12)


@on_ranks(2)
def test_a_parameter_that_is_divided_in_another_way_is_placed_too():
    target = Plan("dp_shard=2", [FullyShard()]).apply(build())
    source = Plan("dp_replicate=2", [Replicate()]).apply(build())
    with torch.no_grad():
        for weight, other in zip(target.module.parameters(), source.module.parameters(), strict=True):
            weight.add_(target.like(weight, other))
    assert_weights(target, scaled(2), rtol=0, atol=1e-12)


@on_ranks(2, fresh="a module of another test that lives on keeps the guard, whose end is looked at")
def test_a_lost_write_is_refused_after_rows_were_read_without_meshpar_and_by_each_later_module():
    rows = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (2,)), [Shard(0)])
    assert rows[:3].sum().full_tensor() == 6  # torch keeps how it ran this
    for _ in range(2):
        par = Plan("dp_shard=2", [FullyShard()]).apply(build())
        assert "the write would be lost" in message_of(zero_data, par)
        del par
        gc.collect()
    rows[:3].zero_()


@on_ranks(1)
def test_like_and_whole_work_in_one_process():
    check_habits("", [])


@pytest.mark.parametrize("mesh", daily(["dp_shard=2", "tp=2", "dp_replicate=2"], "dp_shard=2", "tp=2"))
@on_ranks(2)
def test_a_whole_parameter_in_a_loss_has_its_gradient(mesh):
    def penalized(net, whole, parts):
        loss = 0
        for ids in batches(parts):
            loss = loss + net(ids).square().mean()
        (loss + sum(whole(parameter).square().sum() for parameter in net.parameters())).backward()

    alone, par = build(), Plan(mesh, PLANS[mesh]).apply(build(), LAYOUT if "tp" in mesh else None)
    penalized(alone, lambda tensor: tensor, Alone())
    penalized(par.module, par.whole, par)
    assert_gradients(par.module, alone)
    plain = torch.ones(3)
    assert par.whole(plain) is plain and par.like(plain, 2).tolist() == [2, 2, 2]
