"""The gradient norm of each module, in the exchange of the joint norm, equals that of one process."""

import functools

import pytest
import torch

from meshpar import (
    ContextParallel,
    ExpertParallel,
    FullyShard,
    HybridShard,
    MeshparError,
    PipelineParallel,
    Plan,
    Replicate,
    TensorParallel,
    matches,
)
from meshpar.testing import on_ranks
from tests.support.models_for_parity import gpt2, huggingface, transformer
from tests.support.stages import batches, count, scaled_loss
from tests.support.tiers import daily

TP, FSDP = TensorParallel(), FullyShard()
MODELS = {
    "transformer": functools.partial(transformer, tied=True),
    "untied": transformer,
    "gpt2": functools.partial(gpt2, tied=False),
    "moe": lambda: huggingface("Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
}
PATTERNS = {"gpt2": ["transformer.wte", "transformer.h.*", "**.attn.c_attn"], "moe": ["model.layers.*", "lm_head"]}
OURS = ["embed", "layers.*", "layers.*.attn"]
PLANS = {
    "fsdp": ("transformer", "dp_shard=4", [FSDP]),
    "fsdp-3": ("transformer", "dp_shard=3", [FSDP]),
    "replicate": ("transformer", "dp_replicate=2", [Replicate()]),
    "hsdp-tp": ("gpt2", "dp_replicate=1,dp_shard=2,tp=2", [TP, HybridShard()]),
    "hsdp": ("gpt2", "dp_replicate=2,dp_shard=2", [HybridShard()]),
    "cp": ("untied", "dp_shard=2,cp=2", [ContextParallel(), FSDP]),
    "experts": ("moe", "dp_shard=2,ep=2", [ExpertParallel(), FSDP]),
    "stages": ("untied", "pp=2,dp_shard=2", [PipelineParallel(), FSDP]),
    "tied-stages": ("transformer", "pp=2,tp=2", [PipelineParallel(), TP]),
}

BY_DAY = [(plan, PLANS[plan][1]) for plan in ("hsdp-tp", "tied-stages")]


@functools.cache
def alone(model, data_ranks):
    """The norm of each module in one process, by name, for two kinds of norm."""
    torch.manual_seed(0)
    module = MODELS[model]()
    every = [batch for rank in range(data_ranks) for batch in batches(rank, 0, 2)]
    for batch in every:
        scaled_loss(1.0 / sum(map(count, every)))(module, batch).backward()
    return {name: one for name, one in module.named_parameters() if one.grad is not None}


def expected(model, data_ranks, patterns, kind):
    found = {"": []}
    for name, parameter in alone(model, data_ranks).items():
        found[""].append(parameter.grad)
        around = [name.rsplit(".", cut)[0] for cut in range(name.count(".") + 1)]
        place = next((one for one in around if any(matches(pattern, one) for pattern in patterns)), None)
        if place is not None:
            found.setdefault(place, []).append(parameter.grad)
    return {name: float(torch.nn.utils.get_total_norm(grads, kind)) for name, grads in found.items()}


@pytest.mark.parametrize(("plan", "mesh"), daily([(plan, mesh) for plan, (_, mesh, _) in PLANS.items()], *BY_DAY))
@on_ranks("mesh")
def test_norms_of_modules_are_those_of_one_process(plan, mesh):
    model, _, passes = PLANS[plan]
    patterns = PATTERNS.get(model, OURS)
    torch.manual_seed(0)
    par = Plan(mesh, passes).apply(MODELS[model]())
    mine = [par.split(batch) for batch in batches(par.data_rank, 0, 2)]
    par.backward(mine, scaled_loss(par.token_scale(sum(map(count, mine)))))
    for kind in (2.0, float("inf")):
        norms = par.clip_grad_norms_(float("inf"), patterns, norm_type=kind)
        assert {name: float(norm) for name, norm in norms.items()} == pytest.approx(
            expected(model, par.data_size, patterns, kind), rel=1e-5
        ), kind
    with pytest.raises(MeshparError, match=r"module 'layer\.\*' matches no module"):
        par.clip_grad_norms_(1.0, ["layer.*"])
    before = {name: float(norm) for name, norm in par.clip_grad_norms_(0.1, patterns).items()}
    after = par.clip_grad_norms_(1.0, patterns)
    assert {name: float(norm) for name, norm in after.items()} == pytest.approx(
        {name: norm * 0.1 / before[""] for name, norm in before.items()}, rel=1e-4
    )
