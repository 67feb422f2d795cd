"""No schedule of stages waits for itself under NCCL's rules for messages: the project's own stages run as threads that
take turns, so that a hang is found and not waited for.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import nn

from meshpar import ModelLayout, PipelineParallel
from meshpar.loss import Totals
from meshpar.passes.applied import applied
from meshpar.passes.pipeline import parallel
from meshpar.passes.pipeline.cuts import examine
from meshpar.passes.pipeline.schedule import SCHEDULES
from tests.accelerator.ranks_in_turns import Broken, Group, Hang, Network

LAYOUT = ModelLayout(blocks=("layers.*",))


class Model(nn.Module):
    def __init__(self, blocks, tied):
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(blocks))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return self.head(hidden)


@functools.cache
def anatomy(blocks, tied):
    found, problems = examine(Model(blocks, tied), LAYOUT)
    assert not problems
    return found


class Mesh:
    """The axis of stages, as passes see it."""

    def __init__(self, group, rank):
        self._group, self._rank = group, rank

    def __getitem__(self, axis):
        return self

    def get_group(self):
        return self._group

    def size(self):
        return len(self._group.ranks)

    def get_local_rank(self):
        return self._rank


def loss(module, ids):
    return module(ids).square().sum()


def run_stages(ranks, virtual, micro_batches, schedule, *, tied=False, trains=True, **rules):
    """Train a step, or evaluate, on ranks that have never talked before; return each one's sum and first gradient."""
    network, known = Network(ranks, **rules), anatomy(ranks * virtual, tied)

    def program(rank):
        torch.manual_seed(0)
        module = Model(ranks * virtual, tied)
        parallel._EXAMINED[module] = LAYOUT, known
        PipelineParallel(schedule=schedule, virtual=virtual).apply(module, LAYOUT, Mesh(network.world, rank))
        applied(module).outermost[0]()
        layers, ids = applied(module).layers, [torch.full((1, 2), number % 4) for number in range(micro_batches)]
        if not trains:
            return sum(layers.forward(ids, loss, torch.device("cpu"))), None
        totals = Totals(torch.device("cpu"))
        layers.backward(ids, loss, lambda last: None, lambda: None, totals)
        weight = module.embed.weight if rank == 0 else module.head.weight if rank == ranks - 1 else None
        return totals.loss, None if weight is None else weight.grad

    # The order in which threads are made decides nothing: each draws its weights in one turn.
    return network.run(program)


def combinations(sizes, virtual=(1, 2, 3, 4)):
    """Every combination of the issue's kind: ranks, stages of a rank, micro-batches, schedule."""
    for ranks in sizes:
        counts = sorted({1, 2, 3, 4, ranks, ranks + 1, 2 * ranks, 2 * ranks + 3, 4 * ranks})
        yield from itertools.product((ranks,), virtual, counts, SCHEDULES)


def hung(cases, **kwargs):
    """The cases in which ranks wait for one another."""
    found = []
    for case in cases:
        try:
            run_stages(*case, **kwargs)
        except Hang:
            found.append(case)
    return found


def test_the_rules_are_kept():
    def crossing(network):
        def program(rank):
            other, group = 1 - rank, network.world
            sent = network.call(group, "send", torch.ones(1), other)
            network.call(group, "recv", torch.zeros(1), other).wait()
            sent.wait()

        return program

    for eager in (True, False):
        network = Network(2, eager)
        with pytest.raises(Hang, match="first send" if eager else "recv"):
            network.run(crossing(network))

    def behind(backend):
        network = Network(2, connects=False)
        group = Group((0, 1), backend)

        def program(rank):
            value, tags = torch.full((1,), 7.0), (0, 1) if rank == 0 else (1, 0)
            kinds = [("send" if rank == tag else "recv", tag) for tag in tags]
            for work in [network.call(group, kind, value, 1 - rank, tag) for kind, tag in kinds]:
                work.wait()

        return network.run(program)

    behind("gloo")
    with pytest.raises(Hang):
        behind("nccl")

    network = Network(2)
    with pytest.raises(Broken, match=r"for torch\.Size"):
        network.run(lambda rank: network.call(network.world, ("send", "recv")[rank], torch.zeros(rank + 1), 1 - rank))


def test_threads_in_turns_have_the_numbers_of_one_process():
    for tied in (False, True):
        torch.manual_seed(0)
        alone = Model(4, tied)
        expected = sum(loss(alone, torch.full((1, 2), number % 4)) for number in range(4))
        expected.backward()
        results = run_stages(2, 2, 4, "1f1b", tied=tied)
        for total, _ in results:
            torch.testing.assert_close(total, expected.detach())
        torch.testing.assert_close(results[0][1], alone.embed.weight.grad)
        torch.testing.assert_close(results[1][1], alone.head.weight.grad)


DAILY = [
    (2, 2, 4, "gpipe"),
    (2, 2, 5, "1f1b"),
    (3, 1, 4, "1f1b"),
    (3, 2, 5, "1f1b"),
    (4, 2, 4, "gpipe"),
    (5, 1, 3, "gpipe"),
]
ENDS = {
    "untied": {},
    "tied": {"tied": True},
    "evaluation": {"trains": False},
    "a communicator a pair": {"eager": False},
}


@pytest.mark.parametrize("ends", ENDS)
def test_no_schedule_waits_for_itself(ends):
    assert hung(DAILY, **ENDS[ends]) == []


@pytest.mark.nightly
@pytest.mark.parametrize("ends", [*ENDS, "tied, a communicator a pair"])
@pytest.mark.parametrize("ranks", range(2, 9))
def test_no_schedule_of_any_number_of_stages_waits_for_itself(ranks, ends):
    rules = ENDS["tied"] | ENDS["a communicator a pair"] if "," in ends else ENDS[ends]
    assert hung(combinations([ranks]), **rules) == []
