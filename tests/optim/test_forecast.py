"""The forecast of an optimizer's state has the bytes that a rank holds."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from meshpar import FullyShard, Plan
from meshpar.forecasting import Batch
from meshpar.forecasting.simulate import Simulation, simulate
from meshpar.optim import Muon, SmallAdamW
from meshpar.placements import local_tensor
from meshpar.testing import on_ranks
from tests.optim.given import on, trained
from tests.support.models_for_parity import transformer

MAKES = [functools.partial(Muon, lr=0.02), SmallAdamW, functools.partial(SmallAdamW, states="bfloat16")]
BUILD = functools.partial(transformer, dim=64)


@on_ranks(2)
def check(expected):
    par = on("dp_shard=2", [FullyShard()], BUILD)
    for make, size in zip(MAKES, expected, strict=True):
        states = trained(par.module, make, 1).state.values()
        assert size == sum(
            local_tensor(value).nbytes
            for state in states
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )


def test_a_rank_holds_the_bytes_of_the_forecast():
    with torch.device("meta"):
        module = BUILD()
    step = Simulation(plan=Plan("dp_shard=2", [FullyShard()]), model=module, batch=Batch(sequence=16), world_size=2)
    traces = simulate([replace(step, optimizer=make) for make in MAKES], workers=2)
    check([trace.exact["optimizer"] for trace in traces])
