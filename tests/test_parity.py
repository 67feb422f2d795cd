"""Training under a plan equals training in one process: losses, gradients, norms and weights over three AdamW steps."""

from __future__ import annotations

import pytest

from meshpar import ActivationCheckpoint, Compile, FullyShard, HybridShard, Replicate, TensorParallel
from meshpar.models import GPT2, GPT2Config, Transformer, TransformerConfig
from meshpar.testing import assert_parity, on_ranks, token_steps

VOCAB = 96


def transformer(**options):
    return Transformer(TransformerConfig(**dict(vocab_size=VOCAB, dim=32, layers=2, heads=4, kv_heads=2, hidden=48, max_positions=64) | options))


def gpt2(**options):
    return GPT2(GPT2Config(**dict(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4) | options))


def huggingface(name, **options):
    import transformers

    sizes = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    config = getattr(transformers, f"{name}Config")(**sizes, max_position_embeddings=64, head_dim=8, use_cache=False, **options)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def huggingface_gpt2(**options):
    import transformers

    sizes = dict(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, use_cache=False, **options))


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


def ranks_of(plan):
    return 8 if plan.startswith("hsdp-tp") else 4 if plan in ("hsdp", "replicate-tp", "fsdp-tp", "fsdp-tp-sequence-loss") else 2


def with_recomputation(passes, **options):
    """The same passes with recomputation where its stage is."""
    place = sum(each.stage < ActivationCheckpoint.stage for each in passes)
    return [*passes[:place], ActivationCheckpoint(**options), *passes[place:]]


def check(model, plan):
    """All variants of one model under one plan: plain with accumulation over uneven tokens, then with recomputation."""
    mesh, passes = PLANS[plan]
    parts = 4 if plan.startswith("hsdp") else 2
    assert_parity(MODELS[model], mesh, passes, token_steps(VOCAB, parts=parts, micro_batches=2))
    assert_parity(MODELS[model], mesh, with_recomputation(passes), token_steps(VOCAB, parts=parts))


check_2, check_4, check_8 = (on_ranks(n)(check) for n in (2, 4, 8))


def cases(count):
    for plan in PLANS:
        for model in MODELS:
            refused = model == "hf-gpt2" and "sequence" in plan
            if ranks_of(plan) == count and not refused:
                yield pytest.param(model, plan, id=f"{model}-{plan}")


@pytest.mark.parametrize(("model", "plan"), cases(2))
def test_two_ranks(model, plan):
    check_2(model, plan)


@pytest.mark.parametrize(("model", "plan"), cases(4))
def test_four_ranks(model, plan):
    check_4(model, plan)


@pytest.mark.parametrize(("model", "plan"), cases(8))
def test_eight_ranks(model, plan):
    check_8(model, plan)
