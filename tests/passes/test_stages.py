"""Stages with every kind of axis inside them, and every schedule, against one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from meshpar import (
    ActivationCheckpoint,
    ContextParallel,
    ExpertParallel,
    FullyShard,
    HybridShard,
    PipelineParallel,
    TensorParallel,
)
from meshpar.testing import on_ranks
from tests.support.models_for_parity import huggingface
from tests.support.stages import assert_as_one_process, one_process, trained
from tests.support.tiers import daily

INSIDE = {
    "alone": ("", list, 1),
    "FSDP 2": ("dp_shard=2", lambda: [FullyShard()], 2),
    "HSDP 2x2": ("dp_replicate=2,dp_shard=2", lambda: [HybridShard()], 4),
    "TP 2": ("tp=2", lambda: [TensorParallel()], 1),
    "CP 2": ("dp_shard=1,cp=2", lambda: [ContextParallel(), FullyShard()], 1),
    "EP 2": ("dp_shard=1,ep=2", lambda: [ExpertParallel(), FullyShard()], 2),
}
ORDERS = {"gpipe": ("gpipe", 1), "1f1b": ("1f1b", 1), "interleaved": ("1f1b", 2)}


def cells(ranks):
    """Return the stages, axes inside, schedules and ties that so many ranks train."""
    sizes = {"alone": 1, "HSDP 2x2": 4}
    return [
        (stages, inside, order, tied)
        for stages in (2, 4)
        for inside in INSIDE
        if stages * sizes.get(inside, 2) == ranks
        for order in ORDERS
        for tied in (True, False)
    ]


def assert_cell(stages, inside, order, tied):
    """Train three steps of seven micro-batches of different sizes, over stages of different depths."""
    axes, others, data_ranks = INSIDE[inside]
    schedule, virtual = ORDERS[order]
    name = "Qwen3Moe" if inside == "EP 2" else "Llama"
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16) if inside == "EP 2" else {}
    make = partial(huggingface, name, num_hidden_layers=stages * virtual + 1, tie_word_embeddings=tied, **experts)
    passes = others()
    if tied:  # recomputed as well, which tensor parallelism comes before
        place = sum(isinstance(one, TensorParallel | ContextParallel | ExpertParallel) for one in passes)
        passes.insert(place, ActivationCheckpoint())
    mesh = ",".join(filter(None, (f"pp={stages}", axes)))
    passes = [PipelineParallel(schedule=schedule, virtual=virtual), *passes]
    assert_as_one_process(make, mesh, passes, data_ranks, number=7)


@on_ranks(2)
@pytest.mark.parametrize(("stages", "inside", "order", "tied"), daily(cells(2), (2, "alone", "interleaved", True)))
def test_cells_of_two_ranks_train_as_one_process(stages, inside, order, tied):
    assert_cell(stages, inside, order, tied)


@pytest.mark.nightly
@on_ranks(4)
@pytest.mark.parametrize(("stages", "inside", "order", "tied"), cells(4))
def test_cells_of_four_ranks_train_as_one_process(stages, inside, order, tied):
    assert_cell(stages, inside, order, tied)


@pytest.mark.nightly
@on_ranks(8)
@pytest.mark.parametrize(("stages", "inside", "order", "tied"), cells(8))
def test_cells_of_eight_ranks_train_as_one_process(stages, inside, order, tied):
    assert_cell(stages, inside, order, tied)


@pytest.mark.nightly
@on_ranks(16)
@pytest.mark.parametrize(("stages", "inside", "order", "tied"), cells(16))
def test_cells_of_sixteen_ranks_train_as_one_process(stages, inside, order, tied):
    assert_cell(stages, inside, order, tied)


@pytest.mark.nightly
@on_ranks(4)
def test_interleaved_stages_differ_from_one_process_by_the_order_of_sums_alone():
    """Of nine blocks split over tensor parallelism, float32 parts by 1.3e-5, and float64 by less than 1e-10."""
    passes = [PipelineParallel(virtual=2), TensorParallel()]

    def make():
        return huggingface("Llama", num_hidden_layers=9).double()

    found, expected = trained(make, "pp=2,tp=2", passes), one_process(make, 1)
    for mine, whole in zip(found[1:], expected[1:], strict=True):  # losses add up in float32
        if isinstance(mine, dict):
            whole = {name: whole[name] for name in mine}
        torch.testing.assert_close(mine, whole, rtol=1e-10, atol=1e-12)
