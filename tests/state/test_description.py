"""What a plan says that a rank will hold is what it holds."""

import pytest
import torch

from meshpar import FullyShard, HybridShard, Plan, Replicate, TensorParallel
from meshpar.models import GPT2, GPT2Config, Transformer, TransformerConfig
from meshpar.tensors.placements import local_tensor
from meshpar.testing import on_ranks
from tests.support.models_for_parity import on_meta, transformer


def test_a_70b_shape_on_512_ranks_is_right_to_the_byte():
    module = on_meta(lambda: Transformer(TransformerConfig.preset("llama-70b")))
    plan = Plan("dp_replicate=8,dp_shard=8,tp=8", [TensorParallel(), HybridShard()])
    got = plan.describe(module, world_size=512)
    dim, hidden, vocab, layers, kv = 8192, 28672, 128256, 80, 1024
    norms = (2 * layers + 1) * dim
    matrices = layers * (2 * dim * dim + 2 * dim * kv + 3 * dim * hidden) + 2 * vocab * dim
    assert got.parameters == norms + matrices == 70_553_706_496
    assert got.parameter_bytes == 4 * (norms // 8 + matrices // 64)
    assert got.gradient_bytes == got.parameter_bytes
    assert got.optimizer_bytes == 2 * got.parameter_bytes
    assert got.buffer_bytes == 0
    text = str(got)
    assert "layers.0..79 (x80)" in text and "dp_replicate:copy dp_shard:dim 0 tp:dim 1" in text
    assert "attn.q.weight     8192 x 8192" in text and "4,194,304 each" in text


def test_gpt2_124m_on_four_ranks_is_the_guides_figure():
    got = Plan("dp_shard=4", [FullyShard()]).describe(on_meta(lambda: GPT2(GPT2Config())), world_size=4)
    assert got.parameters == 124_439_808
    # The vocabulary, 50,257, is odd: the fullest rank holds a row's rounding more than a quarter.
    assert 0 <= got.parameter_bytes - 124_439_808 <= 4 * 768
    assert round(got.parameter_bytes / 1e6) == 124 and round(got.optimizer_bytes / 1e6) == 249


@pytest.mark.parametrize(
    ("mesh", "passes"),
    [
        ("dp_replicate=4", [Replicate()]),
        ("dp_shard=4", [FullyShard(param_dtype=torch.bfloat16)]),
        ("dp_shard=2,tp=2", [TensorParallel(), FullyShard()]),
    ],
)
def test_the_forecast_is_what_a_real_rank_holds(mesh, passes):
    expected = Plan(mesh, passes).describe(on_meta(lambda: transformer(vocab_size=97)), world_size=4)
    real_rank(mesh, passes, expected)


@on_ranks(4)
def real_rank(mesh, passes, expected):
    par = Plan(mesh, passes).apply(on_meta(lambda: transformer(vocab_size=97))).materialize(seed=0)
    held = par.describe()
    stored = sum(local_tensor(parameter).untyped_storage().nbytes() for parameter in par.module.parameters())
    if torch.distributed.get_rank() == 0:
        assert held == expected
        assert stored == expected.parameter_bytes
    assert held.parameter_bytes <= expected.parameter_bytes, "rank 0 is the fullest"
