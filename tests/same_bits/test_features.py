"""The same bits on every mesh with `tp`: features are computed in equal parts."""

import functools

import pytest

from meshpar import FullyShard, HybridShard, TensorParallel
from tests.same_bits.test_meshes import assert_same_bits, one_process  # noqa: F401
from tests.support.models_for_parity import gpt2, huggingface, transformer
from tests.support.tiers import daily

PARTS, SEQUENCE = TensorParallel(parts=4), TensorParallel(parts=4, sequence_parallel=True, loss_parallel=True)
MODELS = {
    "transformer": transformer,
    "gpt2": functools.partial(gpt2, dropout=0.0),
    "llama": functools.partial(huggingface, "Llama"),
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
CASES = [(plan, "transformer") for plan in PLANS] + [(plan, model) for model in MODELS for plan in ("fsdp-tp", "tp-4")]


@pytest.mark.parametrize(("plan", "model"), daily(dict.fromkeys(CASES), ("fsdp-tp", "transformer")))
def test_tp_has_the_bits_of_one_process(plan, model, one_process):  # noqa: F811
    mesh, passes = PLANS[plan]
    options = {"build": MODELS[model]}
    assert_same_bits(mesh, passes, one_process(passes=passes[:1], **options), options)
