"""The random state of an accelerator: drawn from, restored and compared."""

import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import meshpar.forecasting.device as device
from meshpar import ActivationCheckpoint, FullyShard, ModelLayout, Plan, TensorParallel
from meshpar.state import initialize
from tests.accelerator.draws import Draws, install_generator
from tests.accelerator.simulated import allocate, alone, simulated, without_guards
from tests.support.models_for_parity import gpt2, on_meta

CALLS = {
    "positional": lambda block, x: block(x),
    "in a positional list": lambda block, x: block([x]),
    "keyword": lambda block, x: block(hidden=x),
    "in a keyword's dict": lambda block, x: block(inputs={"hidden": [x]}),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, *args, **kwargs):
        (x,) = tree_leaves((args, kwargs))
        return F.dropout(self.up(x).relu(), 0.5) + x


class Model(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call, self.layers = call, nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = self.call(layer, x)
        return x


@alone
def test_a_recomputed_block_draws_what_its_forward_drew_however_its_tensors_come():
    generator = install_generator()
    differing = []
    for mode, (name, call) in itertools.product(["full", "selective"], CALLS.items()):
        model = on_meta(lambda call=call: Model(call))
        with simulated(2), Draws(generator) as draws:
            plan = Plan("dp_shard=2", [ActivationCheckpoint(mode=mode), FullyShard()])
            par = allocate(plan.apply(model, ModelLayout(blocks=("layers.*",)), device_type=device.NAME))
            generator.manual_seed(7)
            loss = par.module(torch.ones(4, 8, device=device.NAME)).sum()
            forward, after = draws.take(), generator.now()
            assert forward == [(7, 0), (7, 4)]
            loss.backward()
            if draws.take() != forward[::-1] or generator.now() != after:
                differing.append(f"{name}, {mode}")
    assert not differing, differing


@alone
def test_ranks_of_the_tensor_axis_draw_alike_but_inside_of_regions_and_again_in_recomputation():
    generator, forwards = install_generator(), []
    for rank in range(2):
        model = on_meta(lambda: gpt2(dropout=0.1))
        with simulated(2, as_rank=rank), Draws(generator) as draws:
            plan = Plan("tp=2", [TensorParallel(), ActivationCheckpoint()])
            par = without_guards(allocate(plan.apply(model, device_type=device.NAME)))
            par.manual_seed(3)
            loss = par.module(torch.ones(2, 16, dtype=torch.int64, device=device.NAME)).logits.sum()
            forward, after = draws.take(), generator.now()
            loss.backward()
            assert sorted(draws.take()) == sorted(forward[1:]), "all but the first, which is in no block"
            assert generator.now() == after
        forwards.append(forward)
    own = [mine != theirs for mine, theirs in zip(*forwards, strict=True)]
    assert own == [False, *[True, False, False] * 2], "of each block, the weights of its heads"
    assert len({*forwards[0], *forwards[1]}) == 9, "no state is drawn from twice"


@alone
def test_a_seed_seeds_the_device_alike_in_each_process_and_initialising_leaves_its_state():
    generator, module = install_generator(), nn.Linear(8, 8, device="meta")
    with simulated(2), Draws(generator) as draws:
        par = Plan("dp_shard=2", [FullyShard()]).apply(module, ModelLayout(), device_type=device.NAME)
        for _ in range(2):  # as a run and one that resumes
            par.manual_seed(5)
            state = generator.now()
            with torch.random.fork_rng([par.device], device_type=device.NAME):
                F.dropout(torch.ones(4, device=device.NAME))
                assert generator.now() != state
            assert generator.now() == state
        first, second = draws.take()
        assert first == second
        initialize.allocate(module, par.device, par.device)
        initialize.from_seed(module, par.layout, 1, par.device, {"weight", "bias"})
        assert draws.take() and generator.now() == state
