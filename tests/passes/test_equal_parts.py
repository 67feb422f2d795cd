"""Features in equal parts: the same bits on every size of `tp`, and the values of one process."""

import functools

import pytest
import torch

from meshpar import ActivationCheckpoint, FullyShard, MeshSpec, Plan, Replicate, TensorParallel
from meshpar.tensors.placements import whole_tensor
from meshpar.testing import assert_parity, on_ranks, token_steps
from tests.support.models_for_parity import VOCAB, gpt2, huggingface, huggingface_gpt2, transformer
from tests.support.tiers import daily

MODELS = {
    "transformer": functools.partial(transformer, tied=True),
    "norms of heads": functools.partial(transformer, qk_norm=True),
    "gpt2": functools.partial(gpt2, dropout=0.0),
    "hf-llama": functools.partial(huggingface, "Llama", attention_bias=True),
    "hf-gemma2": functools.partial(huggingface, "Gemma2", attn_implementation="eager"),
    "hf-gpt2": huggingface_gpt2,
    "hf-experts": functools.partial(
        huggingface, "Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
}
OPTIONS = {"plain": {}, "both": {"sequence_parallel": True, "loss_parallel": True}}


def train(model, tp, *, parts=4, steps=2, **options):
    """Return loss, gradients and weights of a few steps; ranks beside ``tp`` train on the same samples."""
    torch.manual_seed(0)
    copies = torch.distributed.get_world_size() // tp
    axes = ([f"dp_replicate={copies}"] if copies > 1 else []) + ([f"tp={tp}"] if tp > 1 else [])
    passes = [TensorParallel(parts=parts, **options), *([Replicate()] if copies > 1 else [])]
    par = Plan(",".join(axes), passes).apply(MODELS[model]())
    optimizer, results = torch.optim.AdamW(par.module.parameters(), lr=1e-2), {}
    for step in range(steps):
        tokens = torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = par.module(tokens, labels=tokens).loss
        loss.backward()
        results[f"loss of step {step}"] = loss.detach()
        for name, parameter in par.module.named_parameters():
            results[f"gradient of {name} in step {step}"] = whole_tensor(parameter.grad).clone()
        optimizer.step()
    return results | {name: whole_tensor(parameter).clone() for name, parameter in par.module.named_parameters()}


CASES = [(model, "plain") for model in MODELS] + [(model, "both") for model in ("transformer", "gpt2", "hf-llama")]
BY_DAY = [("transformer", "both"), ("hf-experts", "plain")]


@pytest.mark.parametrize(("model", "options"), daily(CASES, *BY_DAY))
@on_ranks(4)
def test_bits_are_the_same_on_every_size_of_tp(model, options):
    expected = train(model, 1, **OPTIONS[options])
    for tp in (2, 4):
        results = train(model, tp, **OPTIONS[options])
        assert results.keys() == expected.keys()
        assert not [name for name in results if not torch.equal(results[name], expected[name])], tp


PLANS = {
    "one process": (transformer, "tp=1", []),
    "fsdp": (transformer, "dp_shard=2,tp=2", [ActivationCheckpoint(), FullyShard()]),
    "data axes alone": (transformer, "dp_shard=2", [FullyShard()]),
    "experts": (functools.partial(transformer, experts=4, experts_per_token=2, qk_norm=True), "tp=2", []),
    "cache": (functools.partial(huggingface, "Llama", use_cache=True), "tp=2", []),
}


@pytest.mark.parametrize(("plan", "ranks"), [(plan, MeshSpec(mesh).size) for plan, (_, mesh, _) in PLANS.items()])
@on_ranks("ranks")
def test_values_are_those_of_one_process(plan, ranks):
    model, mesh, passes = PLANS[plan]
    assert_parity(model, mesh, [TensorParallel(parts=4), *passes], token_steps(VOCAB, parts=2))
