"""Gradients on a CPU are reduced by all-to-alls, to what a reduce-scatter gives."""

import pytest
import torch
import torch.distributed as dist

from meshpar import FullyShard, HybridShard, MeshparError, Plan
from meshpar._torch.fsdp import units_with_parameters
from meshpar.forecasting.recorder import Recorder
from meshpar.passes.data.gloo_collectives import scatter_sums
from meshpar.testing import on_ranks, random_tokens, token_loss_sum
from tests.support.models_for_parity import VOCAB, transformer


@pytest.mark.parametrize("op", ["SUM", "AVG"])
@on_ranks(4)
def test_both_ways_give_the_sums(op):
    torch.manual_seed(dist.get_rank())
    inputs = [torch.randn(4 * count) for count in (1, 6)]
    expected = [value.clone() for value in inputs]
    for value in expected:
        dist.all_reduce(value)
        value /= 4 if op == "AVG" else 1
    for exchanges in (False, True):
        outputs = [torch.empty(len(value) // 4) for value in inputs]
        scatter_sums(outputs, inputs, getattr(dist.ReduceOp, op), dist.group.WORLD, exchanges=exchanges)
        torch.testing.assert_close(outputs, [value.chunk(4)[dist.get_rank()] for value in expected])


@on_ranks(4)
def test_sums_in_half_precision_are_rounded_once():
    """1 + 3 x 2^-9, of which each sum in bfloat16 would drop a part."""
    mine = torch.full((4,), 1.0 if dist.get_rank() == 0 else 2**-9, dtype=torch.bfloat16)
    got = torch.empty(1, dtype=torch.bfloat16)
    scatter_sums([got], [mine], dist.ReduceOp.SUM, dist.group.WORLD, exchanges=True)
    assert got.item() == torch.tensor(1 + 3 * 2**-9).bfloat16().item() != 1.0


@pytest.mark.parametrize(
    ("mesh", "data_pass"),
    [
        ("dp_replicate=2,dp_shard=2", HybridShard(optimizer="replica")),
        ("dp_replicate=2,dp_shard=2", HybridShard(optimizer="world")),
        ("dp_shard=4", FullyShard()),
    ],
    ids=str,
)
@on_ranks("mesh")
def test_no_unit_makes_a_reduce_scatter_on_a_cpu(mesh, data_pass):
    with torch.device("meta"):
        module = transformer()
    par = Plan(mesh, [data_pass]).apply(module).materialize(seed=0)
    recorder = Recorder({})
    with recorder:
        recorder.phase("step")
        token_loss_sum(par.module, random_tokens(VOCAB, 1, 16, seed=dist.get_rank()))[0].backward()
        (phase,) = recorder.finished()
    kinds = [event.collective.kind for event in phase.events if event.collective is not None]
    assert "reduce_scatter" not in kinds
    assert kinds.count("all_to_all") >= len(par.module.layers) + 1


@on_ranks(2)
def test_a_factor_that_gloo_cannot_apply_is_refused_and_the_remedy_applies_it():
    norms = []
    for forced in (None, False, True):
        with torch.device("meta"):
            module = transformer()
        par = Plan("dp_shard=2", [FullyShard()]).apply(module).materialize(seed=0)
        for unit in units_with_parameters(par.module) if forced is not None else ():
            unit.set_gradient_divide_factor(4.0)
            unit.set_force_sum_reduction_for_comms(forced)
        loss = token_loss_sum(par.module, random_tokens(VOCAB, 1, 16, seed=dist.get_rank()))[0]
        if forced is False:
            with pytest.raises(MeshparError, match="set_force_sum_reduction_for_comms"):
                loss.backward()
            continue
        loss.backward()
        norms.append(par.clip_grad_norm_(1e9).item())
    assert norms[0] == pytest.approx(2 * norms[1])
