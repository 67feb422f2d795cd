"""Gradients of a backward that does not reduce them, which somebody clears before the one that does."""

import contextlib
import re

import pytest
import torch
from torch import nn

from meshpar import FullyShard, HybridShard, MeshparError, ModelLayout, Plan, Replicate
from meshpar.testing import on_ranks
from tests.support.comparison import assert_weights, gradients

PASSES = {"dp_shard=2": [FullyShard()], "dp_replicate=2": [Replicate()], "dp_replicate=2,dp_shard=2": [HybridShard()]}
"""Mesh -> its passes."""


class Net(nn.Module):
    """Two blocks, and a layer that no loss uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.unused = nn.Linear(4, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x


class Side:
    """One side of a comparison: the network, and the loops of a module on a mesh, or of one process."""

    def __init__(self, net, par=None):
        self.net, self.par = net, par
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def backward(self, number):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        x = x if self.par is None else x[self.par.data_rank :: self.par.data_size]
        self.net(x).square().mean().backward()

    def leave(self, *numbers):
        """Run backwards that reduce nothing."""
        for number in numbers:
            with contextlib.nullcontext() if self.par is None else self.par.no_sync():
                self.backward(number)

    def accumulate(self, numbers, **options):
        return iter(numbers) if self.par is None else self.par.accumulate(numbers, **options)


def by_optimizer(side):
    side.leave(0, 1)
    side.optimizer.zero_grad()
    side.backward(2)


def by_zeros(side):
    side.leave(0)
    side.optimizer.zero_grad(set_to_none=False)
    side.leave(1)
    side.backward(2)


def by_module(side):
    side.leave(0)
    side.net.zero_grad()
    side.leave(1)
    side.backward(2)


def by_hand(side):
    side.leave(0)
    for parameter in side.net.parameters():
        parameter.grad = None
    side.backward(2)


def one_block(side):
    side.leave(0)
    torch.optim.SGD(side.net.blocks[1].parameters()).zero_grad()
    side.backward(2)


def after_reduced(side):
    side.backward(0)
    side.leave(1)
    side.optimizer.zero_grad()
    side.leave(2)
    side.backward(3)


def between_micro_batches(side):
    for number in side.accumulate(range(4)):
        side.backward(number)
        if number == 1:
            side.optimizer.zero_grad()


def between_reduced(side):
    for number in side.accumulate(range(4), **({} if side.par is None else {"reduce_each": True})):
        side.backward(number)
        if number == 1:
            side.optimizer.zero_grad()


def after_break(side):
    for number in side.accumulate(range(4)):
        side.backward(number)
        if number == 1:
            break
    side.optimizer.zero_grad()
    side.backward(2)


def after_error(side):
    with contextlib.suppress(ZeroDivisionError):
        for number in side.accumulate(range(4)):
            side.backward(number)
            if number == 1:
                raise ZeroDivisionError
    side.optimizer.zero_grad()
    side.leave(2)
    side.backward(3)


def another_backward(side):
    other = nn.Linear(4, 4)
    side.leave(0)
    other(torch.ones(2, 4)).sum().backward()
    side.optimizer.zero_grad()
    side.backward(2)


def nothing_cleared(side):
    side.backward(0)
    side.leave(1, 2)
    side.backward(3)


LOOPS = [
    by_optimizer,
    by_zeros,
    by_module,
    by_hand,
    one_block,
    after_reduced,
    between_micro_batches,
    between_reduced,
    after_break,
    after_error,
    another_backward,
    nothing_cleared,
]


@pytest.mark.parametrize("mesh", PASSES)
@on_ranks("mesh")
def test_gradients_that_no_rank_has_reduced_are_cleared_as_in_one_process(mesh):
    for loop in LOOPS:
        alone = Side(Net())
        par = Plan(mesh, PASSES[mesh]).apply(Net(), ModelLayout(blocks=("blocks.*",)))
        side = Side(par.module, par)
        loop(alone), loop(side)
        torch.testing.assert_close(
            gradients(side.net), gradients(alone.net), msg=lambda text, loop=loop: f"{loop}: {text}"
        )


@pytest.mark.parametrize("mesh", PASSES)
@on_ranks("mesh")
def test_a_step_or_a_clip_before_gradients_are_reduced_is_refused(mesh):
    par = Plan(mesh, PASSES[mesh]).apply(Net(), ModelLayout(blocks=("blocks.*",)))
    alone, side = Side(Net()), Side(par.module, par)
    side.leave(0)
    with pytest.raises(MeshparError, match=re.escape("optimizer.step() came before gradients were reduced")):
        side.optimizer.step()
    with pytest.raises(MeshparError, match="clip after the loop"):
        par.clip_grad_norm_(1.0)
    side.optimizer.zero_grad()
    side.optimizer.step()
    for each in (alone, side):
        each.leave(1)
        each.backward(2)
        each.optimizer.step()
    assert_weights(par, alone.net)


@on_ranks(4)
def test_parameters_of_which_a_unit_keeps_one_sum_are_cleared_together_or_refused():
    def loop(side, cleared, **options):
        for number in side.accumulate(range(4), **({} if side.par is None else options)):
            side.backward(number)
            if number == 1:
                cleared(side.net).zero_grad()

    def bias(net):
        return torch.optim.SGD([net.blocks[0].bias])

    def on_mesh():
        par = Plan("dp_replicate=2,dp_shard=2", [HybridShard()]).apply(Net(), ModelLayout(blocks=("blocks.*",)))
        return Side(par.module, par)

    with pytest.raises(MeshparError, match="gradients of some parameters of a unit were cleared between micro-batches"):
        loop(on_mesh(), bias, reduce_each=True)
    for cleared, options in ((lambda net: net, {"reduce_each": True}), (bias, {})):
        alone, side = Side(Net()), on_mesh()
        loop(alone, cleared), loop(side, cleared, **options)
        torch.testing.assert_close(gradients(side.net), gradients(alone.net))
