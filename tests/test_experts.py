"""ExpertParallel: whole experts on each rank, tokens that travel to them, and the numbers of one process."""

from __future__ import annotations

import pytest
import torch
from models_for_parity import VOCAB, huggingface

from meshpar import ActivationCheckpoint, ContextParallel, ExpertParallel, FullyShard, HybridShard, TensorParallel
from meshpar.testing import assert_parity, on_ranks, token_steps


def mixture(name="Qwen3Moe", **options):
    sizes = dict(moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=1)
    return huggingface(name, **sizes | options)


MESHES = {
    2: [("dp_shard=1,ep=2", [ExpertParallel(), FullyShard()])],
    4: [
        ("dp_shard=1,ep=4", [ExpertParallel(), FullyShard()]),
        ("dp_shard=2,ep=2", [ExpertParallel(), ActivationCheckpoint(), FullyShard()]),
        ("dp_shard=1,ep=2,tp=2", [ExpertParallel(), TensorParallel(), FullyShard()]),
        ("dp_shard=1,cp=2,ep=2", [ExpertParallel(), ContextParallel(), FullyShard()]),
    ],
    8: [("dp_replicate=2,dp_shard=2,ep=2", [ExpertParallel(), HybridShard()])],
}


@pytest.mark.parametrize("ranks", sorted(MESHES))
def test_divided_experts_equal_one_process(ranks):
    on_ranks(ranks)(divided)(ranks)


def divided(ranks):
    steps = token_steps(VOCAB, micro_batches=2)
    for mesh, passes in MESHES[ranks]:
        assert_parity(mixture, mesh, passes, steps)
