"""A rank holds what the description says and nothing else, after every verb."""

from __future__ import annotations

import gc

import torch
from torch import nn

from meshpar import FullyShard, HybridShard, ModelLayout, Plan, Replicate, TensorParallel
from meshpar.testing import on_ranks
from meshpar.testing.memory import allocated

DIM = 512
SLACK = 4096


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


LAYOUT = ModelLayout(blocks=("blocks.*",), tensor={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
APPLIED = {
    "tp": ("tp=4", [TensorParallel()]),
    "fsdp": ("dp_shard=4", [FullyShard()]),
    "fsdp, one unit": ("dp_shard=4", [FullyShard(blocks=())]),
    "replicate": ("dp_replicate=4", [Replicate()]),
    "fsdp-tp": ("dp_shard=2,tp=2", [TensorParallel(), FullyShard()]),
    "hsdp": ("dp_replicate=2,dp_shard=2", [HybridShard()]),
}


@on_ranks(4, keep=True)
def test_apply_frees_each_parameter_when_its_part_is_made():
    bytes_ = torch.float32.itemsize
    whole, largest = 16 * DIM * DIM * bytes_, 4 * DIM * DIM * bytes_
    for name, (mesh, passes) in APPLIED.items():
        gc.collect()
        gc.disable()
        par, most, left = allocated(lambda mesh=mesh, passes=passes: Plan(mesh, passes).apply(Blocks(), LAYOUT))
        gc.enable()
        assert most <= whole + largest + SLACK, (name, most)
        assert par.describe().parameter_bytes <= left <= par.describe().parameter_bytes + SLACK, (name, left)
