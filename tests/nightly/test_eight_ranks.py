"""Eight ranks equal one process: three axes at a time, and slices that are empty on some ranks."""

import pytest
import torch
import torch.distributed as dist

from meshpar import ActivationCheckpoint
from meshpar.tensors.placements import local_tensor
from meshpar.testing import assert_parity, on_ranks, one_process, token_steps
from tests.passes.data.test_instead_of_fsdp2 import ODD, SEQUENCE, WORLD
from tests.passes.positions.test_parallel import in_parts
from tests.support.models_for_parity import VOCAB
from tests.tensors.test_adafactor import FACTORS, MOMENTUM
from tests.testing.test_parity import cases, check


@pytest.mark.parametrize(("model", "plan", "forms"), cases(8))
def test_parity(model, plan, forms):
    on_ranks(8)(check)(model, plan, forms)


@on_ranks(8)
def test_an_optimizer_over_the_world_equals_one_process_with_and_without_tensor_parallelism():
    steps = token_steps(VOCAB)
    expected = one_process(ODD, steps)
    for mesh, passes in {
        "dp_replicate=2,dp_shard=4": [WORLD],
        "dp_replicate=4,dp_shard=2": [WORLD],
        "dp_replicate=2,dp_shard=2,tp=2": [SEQUENCE, ActivationCheckpoint(), WORLD],
    }.items():
        par = assert_parity(ODD, mesh, passes, steps, expected=expected)
        held = torch.tensor(sum(local_tensor(parameter).numel() for parameter in par.module.parameters()))
        total = sum(parameter.numel() for parameter in par.module.parameters())
        dist.all_reduce(held)
        assert held == total if "tp" not in mesh else held < 1.1 * total, (
            "an element is trained by one rank, but for what tp keeps whole"
        )


@on_ranks(8)
def test_an_optimizer_over_the_world_equals_one_process_by_each_optimizer():
    steps = token_steps(VOCAB)
    for optimizer in (FACTORS, MOMENTUM):
        expected = one_process(ODD, steps, max_norm=0.5, optimizer=optimizer)
        for mesh, passes in {
            "dp_replicate=2,dp_shard=4": [WORLD],
            "dp_replicate=4,dp_shard=2": [WORLD],
            "dp_replicate=2,dp_shard=2,tp=2": [SEQUENCE, ActivationCheckpoint(), WORLD],
        }.items():
            assert_parity(ODD, mesh, passes, steps, expected=expected, max_norm=0.5, optimizer=optimizer)


def test_a_part_of_the_sequence_on_each_rank_equals_one_process():
    on_ranks(8)(in_parts)("gpt2", "gather")
