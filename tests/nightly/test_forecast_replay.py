"""The simulated step against real gloo jobs: what is planned is what runs."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshpar import (
    ActivationCheckpoint,
    ContextParallel,
    ExpertParallel,
    FullyShard,
    HybridShard,
    PipelineParallel,
    Plan,
    Replicate,
    TensorParallel,
)
from meshpar.forecasting.simulate import Simulation, simulate
from meshpar.forecasting.step import Batch, record_step, summed_token_loss
from meshpar.forecasting.trace import Trace
from meshpar.models import GPT2, GPT2Config, Transformer, TransformerConfig
from meshpar.testing import launch
from meshpar.training.adamw_and_schedules import AdamWSettings, build_adamw
from tests.support.stages import Crossing

SHAPE = TransformerConfig(vocab_size=514, dim=64, layers=2, heads=4, kv_heads=2, hidden=96, max_positions=64)
BATCH = Batch(sequence=64, micro_batch=2, accumulate=2)
MODELS = {
    "transformer": functools.partial(Transformer, SHAPE),
    "gpt2": functools.partial(GPT2, GPT2Config(vocab_size=515, n_positions=64, n_embd=32, n_layer=2, n_head=4)),
}


class EvenRouter(nn.Linear):
    """Prefers two experts by a token's number, so that all get equally many tokens, as the forecast assumes."""

    def forward(self, x):
        token, expert = torch.arange(len(x), device=x.device), torch.arange(self.out_features, device=x.device)
        return super().forward(x) + 100.0 * (expert // 2 == (token % (self.out_features // 2))[:, None])


class SkewedRouter(nn.Linear):
    """Sends six of eight tokens to the first half of the experts, and equally many to each of a half."""

    def forward(self, x):
        token, expert = torch.arange(len(x), device=x.device), torch.arange(self.out_features, device=x.device)
        pair = torch.where(token % 8 < 6, token % 2, 2 + token % 2)
        return super().forward(x) + 100.0 * (expert // 2 == pair[:, None])


def mixture_of(router):
    model = Transformer(replace(SHAPE, experts=8, expert_hidden=48, shared_experts=1, qk_norm=True))
    for layer in model.layers:
        layer.mlp.router = router(SHAPE.dim, 8, bias=False)
    return model


class SmallEnds(FullyShard):
    """Embedding and head are units of their own, as large ones are."""

    ends_from = 1


SP = TensorParallel(sequence_parallel=True)
CASES = {
    "fsdp": ("dp_shard=2", [FullyShard()]),
    "fsdp, uneven": ("dp_shard=4", [FullyShard()]),
    "fsdp, recomputed": ("dp_shard=4", [ActivationCheckpoint(), FullyShard()]),
    "fsdp, bfloat16": ("dp_shard=2", [FullyShard(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)]),
    "no reshard": ("dp_shard=2", [FullyShard(reshard_after_forward=False)]),
    "no reshard, recomputed": (
        "dp_shard=2",
        [ActivationCheckpoint(mode="selective"), FullyShard(reshard_after_forward=False)],
    ),
    "replicas": ("dp_replicate=2", [Replicate()]),
    "hybrid": ("dp_replicate=2,dp_shard=2", [HybridShard()]),
    "hybrid, recomputed": ("dp_replicate=2,dp_shard=2", [ActivationCheckpoint(), HybridShard()]),
    "hybrid, optimizer of the world": (
        "dp_replicate=2,dp_shard=2",
        [HybridShard(optimizer="world", param_dtype=torch.bfloat16)],
    ),
    "tp": ("tp=2", [TensorParallel()]),
    "tp, recomputed": ("tp=2", [TensorParallel(loss_parallel=True), ActivationCheckpoint()]),
    "fsdp x tp": ("dp_shard=2,tp=2", [SP, FullyShard()]),
    "fsdp x tp, recomputed": (
        "dp_shard=2,tp=2",
        [TensorParallel(sequence_parallel=True, loss_parallel=True), ActivationCheckpoint(), FullyShard()],
    ),
    "experts": ("dp_shard=1,ep=2", [ExpertParallel(), FullyShard()]),
    "experts, skewed": ("dp_shard=1,ep=2", [ExpertParallel(skew=1.5), FullyShard()]),
    "experts, fsdp x ep": ("dp_shard=2,ep=2", [ExpertParallel(), ActivationCheckpoint(), FullyShard()]),
    "gpt2, fsdp x tp": ("dp_shard=2,tp=2", [SP, FullyShard()]),
    "stages": ("pp=2", [PipelineParallel()]),
    "stages, tied, fsdp": ("pp=2,dp_shard=2", [PipelineParallel(), FullyShard()]),
    "stages of tp, recomputed": (
        "pp=2,tp=2",
        [PipelineParallel(schedule="gpipe"), TensorParallel(), ActivationCheckpoint()],
    ),
    "fsdp, ends": ("dp_shard=2", [SmallEnds()]),
    "stages, ends, fsdp": ("pp=2,dp_shard=2", [PipelineParallel(), SmallEnds()]),
    "stages, interleaved": ("pp=2", [PipelineParallel(virtual=2)]),
    "crossing stages, fsdp": ("pp=2,dp_shard=2", [PipelineParallel(), FullyShard()]),
    "fsdp x cp": ("dp_shard=2,cp=2", [ContextParallel(), FullyShard()]),
    "cp by heads, recomputed": (
        "dp_shard=1,cp=2",
        [ContextParallel(transport="heads"), ActivationCheckpoint(), FullyShard()],
    ),
}
COVERED = {
    "fsdp", "fsdp, recomputed", "no reshard", "hybrid", "tp", "experts", "fsdp x tp, recomputed",
    "hybrid, recomputed", "cp by heads, recomputed",
}  # fmt: skip
"""Whose collectives another case has, too: in the long form."""
ON_THE_LAST_RANK = ("fsdp, uneven", "fsdp x tp")


def model_of(case):
    if case.startswith("experts"):
        return functools.partial(mixture_of, SkewedRouter if "skewed" in case else EvenRouter)
    if case.startswith("crossing"):
        return functools.partial(Crossing, width=32)
    if case.startswith("stages"):
        return functools.partial(Transformer, replace(SHAPE, layers=5, tied="tied" in case))
    return MODELS["gpt2" if case.startswith("gpt2") else "transformer"]


def on_meta(case):
    with torch.device("meta"):
        return model_of(case)()


def world_of(case):
    return Plan(*CASES[case]).mesh.size


@functools.cache
def simulated(covered):
    """The cases that another one covers, or the others, on their first rank, some on their last too, in one process."""
    cases = [case for case in CASES if (case in COVERED) == covered]
    wanted = [(case, 0) for case in cases] + [(case, world_of(case) - 1) for case in cases if case in ON_THE_LAST_RANK]
    jobs = [
        Simulation(
            plan=Plan(*CASES[case]),
            model=on_meta(case),
            batch=BATCH,
            world_size=world_of(case),
            rank=rank,
            device="cpu",
        )
        for case, rank in wanted
    ]
    found = {}
    for (case, rank), trace in zip(wanted, simulate(jobs), strict=True):
        stages = trace.stages or (trace,)
        found |= {
            (case, rank + stage * world_of(case) // len(stages)): one.to_json() for stage, one in enumerate(stages)
        }
    return found


def real_step(case, expected):
    """Run steps of a real job; ranks of which a simulation is known hold theirs against it."""
    par = Plan(*CASES[case]).apply(on_meta(case)).materialize(seed=0)
    optimizer = build_adamw(par.module, AdamWSettings(fused=True))
    batches = [
        {name: tensor.zero_() for name, tensor in BATCH.tensors(par.device).items()} for _ in range(BATCH.accumulate)
    ]
    for _ in range(2):
        par.backward(map(par.split, batches), summed_token_loss)
        optimizer.step()
        optimizer.zero_grad()
    # Gloo's threads let go of a collective's input some time after its result is there, now and then at the peak: the
    # least of a few steps.
    steps = [record_step(par, optimizer, batches) for _ in range(4)]
    if dist.get_rank() in expected:
        plan = Trace.from_json(expected[dist.get_rank()])
        for fact in steps:
            assert plan.collectives() == fact.collectives()
            assert plan.exact == fact.exact
            assert plan.flops() == fact.flops()
        want, got = plan.memory(), min((fact.memory() for fact in steps), key=lambda memory: memory.peak)
        assert want.peak == pytest.approx(got.peak, rel=0.03), (
            f"planned {want.peak}: {want.held}; measured {got.peak}: {got.held}"
        )


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long) if case in COVERED else case for case in CASES]
)
def test_the_simulated_step_is_the_real_one(case):
    expected = {rank: text for (name, rank), text in simulated(case in COVERED).items() if name == case}
    launch(__name__, "real_step", world_of(case), (case, expected))
