"""A rank holds what the description says and nothing else, after every verb."""

from __future__ import annotations

import gc
import weakref

import torch
import torch.optim.optimizer as optimizers
from torch import nn
from torch.distributed._composable import checkpoint_activation
from torch.distributed.tensor import DTensor

from meshpar import ActivationCheckpoint, FullyShard, HybridShard, ModelLayout, Plan, Replicate, TensorParallel
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


def changed_in_torch():
    """What a plan changes for the whole process."""
    handlers = tuple(DTensor._op_dispatcher._custom_op_handlers)
    checked = torch.autograd.grad, torch.autograd.backward, torch.nn.utils.clip_grad._get_total_norm
    recomputed = checkpoint_activation._no_hook, torch.utils.checkpoint.SAC_IGNORED_OPS
    return tuple(optimizers._global_optimizer_pre_hooks), checked, recomputed, handlers


def trained():
    par = Plan("dp_shard=2", [ActivationCheckpoint(), FullyShard()]).apply(Blocks(), LAYOUT)
    par.module(torch.ones(2, DIM)).sum().backward()
    torch.optim.SGD(par.module.parameters(), lr=0.1).step()
    return weakref.ref(par.module), par


@on_ranks(2, keep=True)
def test_nothing_of_a_plan_stays_in_torch_when_its_module_is_gone():
    gc.collect()
    before = changed_in_torch()
    plans = [trained() for _ in range(3)]
    assert len(changed_in_torch()[0]) == len(before[0]) + 1, "one hook, however many modules"
    assert all(one is not other for one, other in zip(changed_in_torch()[1], before[1]))
    gone = [ref for ref, _ in plans]
    del plans[1:]
    gc.collect()
    assert [ref() is None for ref in gone] == [False, True, True]
    assert len(changed_in_torch()[0]) == len(before[0]) + 1
    plans.clear()
    gc.collect()
    assert gone[0]() is None
    assert changed_in_torch() == before


@on_ranks(2, keep=True)
def test_a_module_may_go_inside_of_an_optimizers_step():
    gc.collect()
    before = changed_in_torch()
    held = [trained()]

    def drop(*_):
        held.clear()
        gc.collect()

    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    other = torch.optim.SGD([parameter], lr=0.5)
    # Two hooks after the plan's, so that torch goes on iterating when the module goes.
    hooks = [optimizers.register_optimizer_step_pre_hook(drop) for _ in range(2)]
    other.step()
    assert parameter.item() == 0.5
    for hook in hooks:
        hook.remove()
    gc.collect()
    assert changed_in_torch() == before
