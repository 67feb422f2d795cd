"""Large embeddings and heads are units of their own, shown on small ones."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from meshpar import FullyShard, HybridShard, PipelineParallel, Plan, TensorParallel
from meshpar._torch.fsdp import param_groups
from meshpar.passes.data import shard_and_reduce
from meshpar.testing import assert_parity, on_ranks, token_steps
from tests.support.models_for_parity import VOCAB, transformer
from tests.support.stages import assert_as_one_process
from tests.support.tiers import daily

AHEAD = FullyShard(prefetch_forward=1, prefetch_backward=2)
PLANS = {
    "fsdp": ("dp_shard=4", [AHEAD]),
    "fsdp-tp-sequence-loss": (
        "dp_shard=2,tp=2",
        [TensorParallel(sequence_parallel=True, loss_parallel=True), FullyShard()],
    ),
    "world": ("dp_replicate=2,dp_shard=2", [HybridShard(optimizer="world")]),
    "stages": ("pp=2,dp_shard=2", [PipelineParallel(), AHEAD]),
}


def units_of(module):
    return [name for name, child in module.named_modules() if isinstance(child, FSDPModule)]


@pytest.mark.parametrize("plan", daily(PLANS, "fsdp", "stages"))
@on_ranks(4)
def test_large_ends_train_as_one_process(plan: str) -> None:
    mesh, passes = PLANS[plan]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_and_reduce._Sharding, "ends_from", 1)
        if plan == "stages":
            assert_as_one_process(transformer, mesh, passes, 2)
        else:
            assert_parity(transformer, mesh, passes, token_steps(VOCAB, parts=4, micro_batches=2))


@on_ranks(2)
def test_ends_are_units_where_they_are_large_and_not_tied() -> None:
    blocks = ["layers.0", "layers.1"]
    with pytest.MonkeyPatch.context() as patch:
        for least, tied, ends in ((1, False, ("embed", "head")), (1, True, ()), (1 << 27, False, ())):
            patch.setattr(shard_and_reduce._Sharding, "ends_from", least)
            module = Plan("dp_shard=2", [AHEAD]).apply(transformer(tied=tied)).module
            assert units_of(module) == ["", *ends[:1], *blocks, *ends[1:]]
            if ends:  # in the order of forward, whatever the depth of their names
                states = {name: module.get_submodule(name)._get_fsdp_state() for name in (*blocks, *ends)}
                assert states["embed"]._states_to_forward_prefetch == [states["layers.0"]]
                assert states["layers.1"]._states_to_forward_prefetch == [states["head"]]
                assert states["head"]._states_to_backward_prefetch == [states["layers.1"], states["layers.0"]]
                kept = [
                    group._reshard_after_forward for end in ends for group in param_groups(module.get_submodule(end))
                ]
                assert kept == [False, False]
            module(input_ids=torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
