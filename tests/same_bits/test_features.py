"""The same bits on every mesh with `tp`: features are computed in equal parts."""

import functools

import pytest
import torch

from meshpar import (
    ActivationCheckpoint,
    FullyShard,
    HybridShard,
    MeshparError,
    PipelineParallel,
    Plan,
    Replicate,
    TensorParallel,
)
from meshpar.checkpoints import CheckpointManager
from meshpar.passes.tensor.collectives import PartsGroup, SimulatedGroup, SimulatedRanks, copy_to, reduce_from
from meshpar.testing import on_ranks, token_loss_sum, whole
from tests.same_bits.test_meshes import assert_same_bits, one_process, scaled_loss, tokens  # noqa: F401
from tests.support.comparison import differing_bits
from tests.support.models_for_parity import gpt2, huggingface, huggingface_gpt2, on_meta, transformer
from tests.support.tiers import daily

PARTS, SEQUENCE = TensorParallel(parts=4), TensorParallel(parts=4, sequence_parallel=True, loss_parallel=True)
MODELS = {
    "transformer": transformer,
    "gpt2": functools.partial(gpt2, dropout=0.0),
    "llama": functools.partial(huggingface, "Llama"),
    "dropout": functools.partial(transformer, dropout=0.1),
    "hf-gpt2 dropout": functools.partial(
        huggingface_gpt2, embd_pdrop=0.1, attn_pdrop=0.1, resid_pdrop=0.1, attn_implementation="eager"
    ),
    "twelfths": functools.partial(transformer, dim=36, head_dim=8, hidden=44),
    "gemma2": functools.partial(huggingface, "Gemma2", attn_implementation="eager"),
}
PLANS = {
    "tp-2": ("tp=2", [PARTS]),
    "tp-4": ("tp=4", [PARTS]),
    "fsdp": ("dp_shard=4", [PARTS, FullyShard()]),
    "fsdp-tp": ("dp_shard=2,tp=2", [PARTS, FullyShard()]),
    "hsdp-tp": ("dp_replicate=2,dp_shard=1,tp=2", [PARTS, HybridShard()]),
    "fsdp-tp-sequence": ("dp_shard=2,tp=2", [SEQUENCE, FullyShard()]),
}
DATA = {
    "fsdp": ("dp_shard=4", [FullyShard()]),
    "recomputed": ("dp_shard=2", [ActivationCheckpoint(), FullyShard()]),
    "replicate": ("dp_replicate=2", [Replicate()]),
    "pp": ("pp=2", [PipelineParallel()]),
    "pp-fsdp": ("pp=2,dp_shard=2", [PipelineParallel(), FullyShard()]),
}
CASES = [(plan, "transformer") for plan in PLANS] + [(plan, model) for model in MODELS for plan in ("fsdp-tp", "tp-4")]
# biases of sums, each of one part of the sequence
CASES += [("fsdp-tp-sequence", "gpt2")]


@pytest.mark.parametrize(("plan", "model"), daily(dict.fromkeys(CASES), ("fsdp-tp", "transformer")))
def test_tp_has_the_bits_of_one_process(plan, model, one_process):  # noqa: F811
    mesh, passes = PLANS[plan]
    options = {"build": MODELS[model]}
    assert_same_bits(mesh, passes, one_process(passes=passes[:1], **options), options)


@pytest.mark.parametrize("plan", daily(DATA, "recomputed"))
def test_dropout_follows_the_sample_and_not_the_rank(plan, one_process):  # noqa: F811
    options = {"build": MODELS["dropout"]}
    assert_same_bits(*DATA[plan], one_process(**options), options)


def advance(par, optimizer, steps):
    """Train some steps of four micro-batches."""
    for step in steps:
        batches = [tokens(step * 101 + number) for number in range(par.data_rank, 4, par.data_size)]
        scale = par.token_scale(sum(int((batch["labels"] != -100).sum()) for batch in batches))
        par.backward(batches, functools.partial(scaled_loss, token_loss_sum, scale))
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(parameter) for name, parameter in par.module.named_parameters()}


def begin(mesh, passes):
    par = Plan(mesh, passes, same_bits=True).apply(on_meta(MODELS["dropout"])).materialize(seed=0)
    par.manual_seed(0)
    return par, torch.optim.AdamW(par.module.parameters(), lr=1e-2)


@on_ranks(2)
def test_a_run_that_moves_to_another_mesh_goes_on_with_the_same_masks(tmp_path):
    expected = advance(*begin("tp=2", [PARTS]), range(3))
    par, optimizer = begin("dp_shard=2", [PARTS, FullyShard()])
    advance(par, optimizer, range(2))
    CheckpointManager(tmp_path).save(2, par, optimizer)
    par, optimizer = begin("tp=2", [PARTS])
    CheckpointManager(tmp_path).restore(par, optimizer)
    assert not differing_bits(expected, advance(par, optimizer, range(2, 3)))


def test_writes_into_an_input_that_all_parts_see_are_refused():
    group = PartsGroup(SimulatedGroup(SimulatedRanks(1), 0), 4)
    with torch.no_grad(), pytest.raises(MeshparError, match="into a tensor that is whole"):
        copy_to(torch.ones(2, 3), group).mul_(2)
    assert torch.equal(torch.ones(2, 3), reduce_from(copy_to(torch.ones(2, 3), group).add(0).mul_(2), group) / 8)
