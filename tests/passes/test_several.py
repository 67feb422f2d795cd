"""Several models in one process: each plan has communicators of its own."""

import itertools
import threading

import pytest
import torch

from meshpar import FullyShard, HybridShard, Plan, TensorParallel
from meshpar.testing import on_ranks
from tests.support.models_for_parity import VOCAB, transformer
from tests.support.patience import patient
from tests.support.tiers import daily

PLANS = {
    "dp_shard=4": [FullyShard()],
    "tp=4": [TensorParallel()],
    "dp_shard=2,tp=2": [TensorParallel(), FullyShard()],
    "dp_replicate=2,dp_shard=2": [HybridShard()],
}


def built(seed):
    torch.manual_seed(seed)
    return transformer()


def ids(step):
    return torch.randint(0, VOCAB, (4, 8), generator=torch.Generator().manual_seed(step))


def applied(mesh, seed, **options):
    return Plan(mesh, PLANS[mesh], **options).apply(built(seed))


def logits(par, step):
    mine = ids(step)[par.data_rank * 4 // par.data_size : (par.data_rank + 1) * 4 // par.data_size]
    with torch.no_grad():
        return par.module(mine).logits


def assert_step(par, one, step):
    with torch.no_grad():
        want = one(ids(step)).logits[par.data_rank * 4 // par.data_size : (par.data_rank + 1) * 4 // par.data_size]
    torch.testing.assert_close(logits(par, step), want, rtol=1e-4, atol=1e-5)


DAILY = ("dp_shard=4", "dp_shard=2,tp=2")
ORDERS = sorted(set(itertools.permutations([0, 1, 0, 1])))


@pytest.mark.parametrize(("first", "second"), daily(itertools.combinations(PLANS, 2), DAILY))
@pytest.mark.parametrize("steps", daily([len(ORDERS), 200], len(ORDERS)))
@on_ranks(4, timeout_s=300)
def test_two_models_interleave_in_every_order(first: str, second: str, steps: int) -> None:
    ones = [built(1), built(2)]
    pars = [applied(first, 1), applied(second, 2, frozen=True)]
    groups = [{group.group_name for _, group in par.groups()} for par in pars]
    assert not groups[0] & groups[1] and "meshpar" not in groups[1]
    optimizer = torch.optim.SGD(pars[0].module.parameters(), lr=0.0)
    for step, order in zip(range(steps), itertools.cycle(ORDERS)):
        for which in order:
            assert_step(pars[which], ones[which], step)
        if step % 2 == 0:  # a training step of one between forwards of the other
            out = pars[0].module(ids(step)[: 4 // pars[0].data_size]).logits
            logits(pars[1], step)
            out.sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("rounds", daily([10, 200], 10))
@on_ranks(4, fresh="kept processes give equal meshes the same communicators")
def test_one_model_runs_in_a_thread(rounds: int) -> None:
    ones = [built(1), built(2)]
    pars = [applied("dp_shard=4", 1), applied("dp_shard=4", 2, frozen=True)]
    found: list[object] = []

    def run() -> None:
        try:
            for step in range(rounds):
                assert_step(pars[1], ones[1], step)
            found.append(True)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    for step in range(rounds):
        assert_step(pars[0], ones[0], step)
    thread.join(patient(60))
    assert found == [True], found


@on_ranks(2)
def test_a_frozen_model_holds_its_parameters_alone() -> None:
    par = Plan("dp_shard=2", [FullyShard()], frozen=True).apply(built(1))
    assert not any(parameter.requires_grad for parameter in par.module.parameters())
    out = par.module(ids(0)).logits
    assert not out.requires_grad
    par.reshard()
