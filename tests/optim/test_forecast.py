"""The forecast of an optimizer's state has the bytes that a rank holds."""

import functools
from dataclasses import replace

import pytest
import torch

from meshpar import ContextParallel, ExpertParallel, FullyShard, HybridShard, MeshSpec, Plan, TensorParallel
from meshpar.forecasting import Batch
from meshpar.forecasting.simulate import Simulation, simulate
from meshpar.optim import Muon, SmallAdamW
from meshpar.tensors.placements import local_tensor
from meshpar.testing import on_ranks
from tests.optim.given import on, trained
from tests.passes.data.test_instead_of_fsdp2 import MIXTURE, WORLD
from tests.support.models_for_parity import on_meta, transformer
from tests.support.tiers import daily

MAKES = [functools.partial(Muon, lr=0.02), SmallAdamW, functools.partial(SmallAdamW, states="bfloat16")]
BUILD = functools.partial(transformer, dim=64)


MESHES = {
    "dp_shard=2": (BUILD, [FullyShard()]),
    "tp=2": (BUILD, [TensorParallel()]),
    "dp_shard=1,cp=2": (BUILD, [ContextParallel(), FullyShard()]),
    "dp_shard=1,ep=2": (MIXTURE, [ExpertParallel(), FullyShard()]),
    "dp_shard=4": (BUILD, [FullyShard()]),
    "dp_replicate=2,dp_shard=2": (BUILD, [HybridShard()]),
    "dp_replicate=2,dp_shard=2,": (BUILD, [WORLD]),
    "dp_shard=2,tp=2": (BUILD, [TensorParallel(), FullyShard()]),
}


@pytest.mark.parametrize("mesh", daily(MESHES, "dp_shard=2"))
def test_a_rank_holds_the_bytes_of_the_forecast(mesh):
    spec, (build, passes) = MeshSpec(mesh.rstrip(",")), MESHES[mesh]
    module = on_meta(build)
    step = Simulation(plan=Plan(spec, passes), model=module, batch=Batch(sequence=16), world_size=spec.size)
    traces = simulate([replace(step, optimizer=make) for make in MAKES])
    on_ranks(spec.size)(check)(mesh, [trace.exact["optimizer"] for trace in traces])


def check(mesh, expected):
    build, passes = MESHES[mesh]
    par = on(mesh.rstrip(","), passes, build)
    held = []
    for make in MAKES:
        states = trained(par.module, make, 1).state.values()
        values = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        held.append(sum(local_tensor(value).nbytes for value in values))
    assert held == expected
