"""Memory that a parallel module lends comes back with its values, bit for bit."""

from __future__ import annotations

import pytest
import torch

import meshpar
from meshpar import FullyShard, Plan, Replicate, TensorParallel
from meshpar.placements import local_tensor
from meshpar.testing import on_ranks
from tests.support.models_for_parity import VOCAB, transformer

PLANS = {"dp_shard=2": [FullyShard()], "tp=2": [TensorParallel()], "dp_replicate=2": [Replicate()]}


def step(par, optimizer, seed):
    ids = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(seed))
    par.module(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(2)
def test_a_lent_module_trains_on_as_if_nothing_had_been() -> None:
    for mesh, passes in PLANS.items():
        ends = []
        for lent in (False, True):
            torch.manual_seed(0)
            par = Plan(mesh, passes).apply(transformer(tied=True))
            optimizer = torch.optim.AdamW(par.module.parameters(), lr=1e-2)
            step(par, optimizer, 1)
            if lent:
                sizes = [local_tensor(parameter).untyped_storage().nbytes() for parameter in par.module.parameters()]
                with par.offloaded(optimizer):
                    held = [local_tensor(parameter).untyped_storage() for parameter in par.module.parameters()]
                    states = [value for state in optimizer.state.values() for value in state.values()]
                    assert not any(storage.nbytes() for storage in held)
                    assert not any(local_tensor(state).untyped_storage().nbytes() for state in states if state.ndim)
                    with pytest.raises(meshpar.MeshparError, match=r"inside of par\.offloaded"):
                        par.module(torch.zeros(1, 2, dtype=torch.long))
                assert sizes == [
                    local_tensor(parameter).untyped_storage().nbytes() for parameter in par.module.parameters()
                ]
            step(par, optimizer, 2)
            par.reshard()
            ends.append([local_tensor(parameter).clone() for parameter in par.module.parameters()])
        assert all(torch.equal(one, other) for one, other in zip(*ends))
