"""Blocks whose outputs some ranks drop (LayerDrop): their gradients count as zero there, in order."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from meshpar import ActivationCheckpoint, FullyShard, HybridShard, Plan, Replicate
from meshpar.testing import on_ranks
from tests.support.tiers import daily

WIDTH, BLOCKS, STEPS = 8, 4, 4
# By step and data rank: the blocks whose outputs are dropped.
DROPPED = [((1,), (2,)), ((1, 2), ()), ((3,), (0, 1)), ((), (0, 1, 2))]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.dropped = ()

    def forward(self, x):
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            value = block(x)
            x = x if number in self.dropped else value
        return self.head(x)


def build(frozen=()):
    torch.manual_seed(0)
    net = Dropping().double()
    for name in frozen:
        net.get_submodule(name).requires_grad_(False)
    return net


def parts(step, size):
    draw = torch.Generator().manual_seed(step)
    x, y = torch.randn(4 * size, WIDTH, generator=draw, dtype=torch.float64), torch.arange(4 * size) % WIDTH
    return list(zip(x.chunk(size), y.chunk(size)))


def in_one_process(size, micro, frozen):
    net = build(frozen)
    optimizer = torch.optim.AdamW([value for value in net.parameters() if value.requires_grad], lr=1e-2)
    for step, dropped in enumerate(DROPPED):
        for rank, (x, y) in enumerate(parts(step, size)):
            for number in range(micro):
                net.dropped = dropped[(rank + number) % 2]
                (cross_entropy(net(x.chunk(micro)[number]), y.chunk(micro)[number]) / micro / size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict()


def on_data_ranks(mesh, passes, micro, frozen):
    par = Plan(mesh, passes).apply(build(frozen))
    optimizer = torch.optim.AdamW([value for value in par.module.parameters() if value.requires_grad], lr=1e-2)
    for step, dropped in enumerate(DROPPED):
        x, y = parts(step, par.data_size)[par.data_rank]
        for number in par.accumulate(range(micro)):
            par.module.dropped = dropped[(par.data_rank + number) % 2]
            (cross_entropy(par.module(x.chunk(micro)[number]), y.chunk(micro)[number]) / micro).backward()
        optimizer.step()
        optimizer.zero_grad()
    return par.state_dict(full=True, everywhere=True)


PLANS = {
    "dp_shard=2": [FullyShard()],
    "dp_shard=2 kept": [FullyShard(reshard_after_forward=False)],
    "dp_shard=2 recomputed": [ActivationCheckpoint(), FullyShard()],
    "dp_replicate=2": [Replicate()],
}
ENDS = {"": (), "frozen ends": ("embed", "head"), "frozen blocks": ("blocks.1", "blocks.2", "embed")}
CASES = [(plan, ends) for plan in PLANS for ends in ENDS]
DAILY = [(plan, ends) for plan, ends in CASES if not ends or plan == "dp_shard=2"]


@on_ranks(2)
@pytest.mark.parametrize(("plan", "ends"), daily(CASES, *DAILY))
def test_outputs_that_ranks_drop_are_reduced_in_their_place(plan, ends):
    for micro in (1, 2):
        found = on_data_ranks(plan.split()[0], PLANS[plan], micro, ENDS[ends])
        torch.testing.assert_close(dict(found), in_one_process(2, micro, ENDS[ends]), rtol=1e-9, atol=1e-9)


FOUR = {
    "dp_replicate=2,dp_shard=2": [HybridShard()],
    "dp_replicate=2,dp_shard=2 world": [HybridShard(optimizer="world")],
    "dp_shard=4": [FullyShard(blocks=("blocks.*.up", "blocks.*"))],
}


@on_ranks(4)
@pytest.mark.parametrize("plan", daily(FOUR, "dp_replicate=2,dp_shard=2 world"))
def test_outputs_that_ranks_drop_are_reduced_in_their_place_on_four(plan):
    found = on_data_ranks(plan.split()[0], FOUR[plan], 1, ())
    torch.testing.assert_close(dict(found), in_one_process(4, 1, ()), rtol=1e-9, atol=1e-9)
