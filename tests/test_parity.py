"""Training under a plan equals training in one process: losses, gradients, norms and weights over three AdamW steps."""

from __future__ import annotations

import pytest
from models_for_parity import VOCAB, gpt2, huggingface, huggingface_gpt2, transformer

from meshpar import ActivationCheckpoint, FullyShard, HybridShard, Replicate, TensorParallel
from meshpar.testing import assert_parity, on_ranks, one_process, token_steps

MODELS = {
    "transformer": transformer,
    "transformer-tied-qknorm": lambda: transformer(tied=True, qk_norm=True),
    "gpt2": gpt2,
    "gpt2-untied": lambda: gpt2(tied=False),
    "hf-llama": lambda: huggingface("Llama", tie_word_embeddings=False),
    "hf-llama-tied": lambda: huggingface("Llama", tie_word_embeddings=True),
    "hf-qwen3": lambda: huggingface("Qwen3", tie_word_embeddings=False),
    "hf-qwen3-tied": lambda: huggingface("Qwen3", tie_word_embeddings=True),
    "hf-gpt2": huggingface_gpt2,
}
SEQUENCE = TensorParallel(sequence_parallel=True, loss_parallel=True)
PLANS = {
    "replicate": ("dp_replicate=2", [Replicate()]),
    "fsdp": ("dp_shard=2", [FullyShard()]),
    "fsdp-no-reshard": ("dp_shard=2", [FullyShard(reshard_after_forward=False)]),
    "hsdp": ("dp_replicate=2,dp_shard=2", [HybridShard()]),
    "tp": ("tp=2", [TensorParallel()]),
    "tp-sequence-loss": ("tp=2", [SEQUENCE]),
    "replicate-tp": ("dp_replicate=2,tp=2", [TensorParallel(), Replicate()]),
    "fsdp-tp": ("dp_shard=2,tp=2", [TensorParallel(), FullyShard()]),
    "fsdp-tp-sequence-loss": ("dp_shard=2,tp=2", [SEQUENCE, FullyShard()]),
    "hsdp-tp": ("dp_replicate=2,dp_shard=2,tp=2", [TensorParallel(), HybridShard()]),
    "hsdp-tp-sequence-loss": ("dp_replicate=2,dp_shard=2,tp=2", [SEQUENCE, HybridShard()]),
}


SAMPLED = {"transformer", "gpt2-untied", "hf-llama", "hf-llama-tied", "hf-qwen3", "hf-qwen3-tied"}
"""Whose kind is under every plan by another model; under the other plans they are in the long form, ``-m long``."""
SAMPLE = {"fsdp-tp-sequence-loss"}
ON_EIGHT = {("transformer-tied-qknorm", "hsdp-tp-sequence-loss"), ("hf-gpt2", "hsdp-tp")}
"""What runs on eight ranks in the suite."""


def ranks_of(plan):
    return 8 if plan.startswith("hsdp-tp") else 4 if plan in ("hsdp", "replicate-tp", "fsdp-tp", "fsdp-tp-sequence-loss") else 2


def with_recomputation(passes, **options):
    """The same passes with recomputation where its stage is."""
    place = sum(each.stage < ActivationCheckpoint.stage for each in passes)
    return [*passes[:place], ActivationCheckpoint(**options), *passes[place:]]


def check(model, plan):
    """One model under one plan, without and with recomputation, accumulating over uneven token counts."""
    mesh, passes = PLANS[plan]
    parts = 4 if plan.startswith("hsdp") else 2
    steps = token_steps(VOCAB, parts=parts, micro_batches=2)
    expected = one_process(MODELS[model], steps)
    assert_parity(MODELS[model], mesh, passes, steps, expected=expected)
    assert_parity(MODELS[model], mesh, with_recomputation(passes), steps, expected=expected)


check_2, check_4, check_8 = (on_ranks(n)(check) for n in (2, 4, 8))


def cases(count):
    for plan in PLANS:
        for model in MODELS:
            refused = model == "hf-gpt2" and "sequence" in plan
            if ranks_of(plan) == count and not refused:
                sampled = (model, plan) in ON_EIGHT if count == 8 else model not in SAMPLED or plan in SAMPLE
                marks = [] if sampled else [pytest.mark.long]
                yield pytest.param(model, plan, id=f"{model}-{plan}", marks=marks)


@pytest.mark.parametrize(("model", "plan"), cases(2))
def test_two_ranks(model, plan):
    check_2(model, plan)


@pytest.mark.parametrize(("model", "plan"), cases(4))
def test_four_ranks(model, plan):
    check_4(model, plan)


@pytest.mark.parametrize(("model", "plan"), cases(8))
def test_eight_ranks(model, plan):
    check_8(model, plan)
