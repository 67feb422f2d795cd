"""Training under a plan equals training in one process."""

from __future__ import annotations

import pytest

import meshpar
from meshpar import FullyShard, HybridShard, Replicate, TensorParallel
from meshpar.models import Transformer, TransformerConfig
from meshpar.testing import assert_parity, on_ranks, token_steps

VOCAB = 96


def transformer(**options):
    config = dict(vocab_size=VOCAB, dim=32, layers=2, heads=4, kv_heads=2, hidden=48, max_positions=64) | options
    return lambda: Transformer(TransformerConfig(**config))


@on_ranks(2)
def test_fsdp():
    assert_parity(transformer(), "dp_shard=2", [FullyShard()], token_steps(VOCAB, parts=2))


@on_ranks(2)
def test_tp():
    assert_parity(transformer(), "tp=2", [TensorParallel()], token_steps(VOCAB, parts=2))
