"""No schedule of stages waits for itself under NCCL's rules: stages are threads that take turns."""

import functools
import itertools
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from meshpar import MeshparError, ModelLayout, PipelineParallel
from meshpar.core import runtime
from meshpar.losses.token_loss import Totals
from meshpar.passes.pipeline import messages, parallel, stage_checks
from meshpar.passes.pipeline.cuts import examine
from meshpar.passes.pipeline.schedule import SCHEDULES
from meshpar.passes.pipeline.stage_checks import StageErrors
from tests.accelerator.ranks_in_turns import Broken, Group, Hang, Network, Work

LAYOUT = ModelLayout(blocks=("layers.*",))


@pytest.fixture(params=["as beside a CPU", "as beside a device"])
def device(request, monkeypatch):
    """Stages that read what comes where it comes, and those that never wait for a device."""
    monkeypatch.setattr(runtime, "over_hosts", lambda device: "CPU" in request.param)


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


def layers_of(network, rank, virtual=1, schedule="1f1b", *, tied=False):
    """Return the layers of one rank that runs in turns, and its module."""
    blocks = network.size * virtual
    torch.manual_seed(0)  # in one turn: other ranks draw before or after this one
    module = Model(blocks, tied)
    parallel._EXAMINED[module] = LAYOUT, anatomy(blocks, tied)
    installed = PipelineParallel(schedule=schedule, virtual=virtual).apply(module, LAYOUT, Mesh(network.world, rank))
    installed.outermost[0]()
    return installed.facts[0], module


def train(layers, micro_batches, run=loss):
    totals = Totals(torch.device("cpu"))
    layers.backward(micro_batches, run, lambda last: None, lambda: None, totals)
    return totals.loss


def ids(number):
    return [torch.full((1, 2), place % 4) for place in range(number)]


def run_stages(ranks, virtual, micro_batches, schedule, *, tied=False, trains=True, **rules):
    """Train a step, or evaluate, on ranks that have never talked before; return each one's sum and first gradient."""
    network = Network(ranks, **rules)
    anatomy(ranks * virtual, tied)

    def program(rank):
        layers, module = layers_of(network, rank, virtual, schedule, tied=tied)
        if not trains:
            return sum(layers.forward(ids(micro_batches), loss, torch.device("cpu"))), None
        total = train(layers, ids(micro_batches))
        weight = module.embed.weight if rank == 0 else module.head.weight if rank == ranks - 1 else None
        return total, None if weight is None else weight.grad

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


def test_threads_in_turns_have_the_numbers_of_one_process(device):
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
    (2, 2, 4, "gpipe"), (2, 2, 5, "1f1b"), (3, 1, 4, "1f1b"), (3, 2, 5, "1f1b"), (4, 2, 4, "gpipe"),
    (5, 1, 3, "gpipe"),
]  # fmt: skip
ENDS = {
    "untied": {},
    "tied": {"tied": True},
    "evaluation": {"trains": False},
    "a communicator a pair": {"eager": False},
}


@pytest.mark.parametrize("ends", ENDS)
def test_no_schedule_waits_for_itself(ends, device):
    assert hung(DAILY, **ENDS[ends]) == []


@pytest.mark.nightly
@pytest.mark.parametrize("ends", [*ENDS, "tied, a communicator a pair"])
@pytest.mark.parametrize("ranks", range(2, 9))
def test_no_schedule_of_any_number_of_stages_waits_for_itself(ranks, ends, device):
    rules = ENDS["tied"] | ENDS["a communicator a pair"] if "," in ends else ENDS[ends]
    assert hung(combinations([ranks]), **rules) == []


def errors_of(network, program):
    """Run a program on every rank, which fails; return the error of each, and its sum of a step behind it."""

    def run(rank):
        layers, module = layers_of(network, rank)
        with pytest.raises((MeshparError, MemoryError)) as raised:
            program(layers)
        vars(layers.edges).pop("begin", None)
        module.zero_grad()
        return raised.value, train(layers, ids(3))

    anatomy(network.size, False)
    return network.run(run)


def test_a_stage_without_memory_between_a_header_and_its_values_is_told_and_the_next_step_is_exact(monkeypatch, device):
    """Also where the values are known, and where they have another form than the last ones."""
    empty = torch.empty
    expected = run_stages(3, 1, 3, "1f1b")

    def lacking(*shape, **kwargs):
        if network is not None and network.rank == 1 and kwargs.get("dtype") is not torch.int64 and lack:
            lack.pop()
            raise MemoryError("no memory for the values")
        return empty(*shape, **kwargs)

    lack, network = [], None
    monkeypatch.setattr(torch, "empty", lacking)
    for steps in ([2], [2, 2], [2, 3]):
        network = Network(3)

        def program(layers, steps=steps):
            for step, samples in enumerate(steps):
                lack[:] = [True] if step == len(steps) - 1 else []
                train(layers, [torch.zeros(samples, 2, dtype=torch.int64)] * 3)

        for rank, (error, total) in enumerate(errors_of(network, program)):
            assert isinstance(error, MemoryError) if rank == 1 else "no memory for the values" in str(error), error
            torch.testing.assert_close(total, expected[rank][0])


def test_values_of_another_micro_batch_are_refused_on_all_stages(device):
    def program(layers):
        if layers.rank == 0:
            begin = layers.edges.begin
            layers.edges.begin = lambda chunk, number, *form: begin(chunk, (number + 1) % 3, *form)
        train(layers, ids(3))

    for error, _ in errors_of(Network(2), program):
        assert "values of micro-batch 1 came from stage 0, expected those of micro-batch 0 from stage 0" in str(error)


def test_stages_forget_forms_of_micro_batches_together(monkeypatch, device):
    monkeypatch.setattr(messages, "MOST_SHAPES", 2)
    network = Network(2)
    anatomy(4, False)
    shapes = [torch.full((size, 2), size % 4) for size in (1, 2, 3, 1, 4, 4, 1)]

    def program(rank):
        layers, _ = layers_of(network, rank, virtual=2)
        total = train(layers, shapes) + sum(layers.forward(shapes, loss, torch.device("cpu")))
        return total, max(map(len, (*layers.edges.transfers._got, *layers.edges.transfers._given)))

    torch.manual_seed(0)
    alone = Model(4, False)
    for total, known in network.run(program):
        torch.testing.assert_close(total, 2 * sum(loss(alone, one) for one in shapes).detach())
        assert known == 2


def test_carried_values_begin_where_kernels_want_them():
    shapes = ((torch.bfloat16, (3,)), (torch.float32, (5, 7)), (torch.float64, (1,)))
    whole, values, numbers = messages.Header(0, 0, 0, shapes).room(torch.device("cpu"))
    begin = whole.data_ptr()
    assert all((value.data_ptr() - begin) % 256 == 0 for value in (*values, numbers))


def test_a_message_that_was_taken_is_let_go_and_the_order_of_the_others_stays():
    network, held, taken = Network(2), [], []

    def program(rank):
        layers, _ = layers_of(network, rank, virtual=2)
        talk = layers.edges.transfers.messages
        for number in range(3):
            if rank == 0:
                talk.send([torch.full((1,), float(number))], 1, messages.FORTH)
            elif number < 2:
                taken.append(talk.receive(torch.zeros(1), 0, messages.FORTH))
        if rank == 0:
            network.block(lambda: len(taken) == 2, "the other stage")
            talk.send([torch.ones(1)], 1, messages.FORTH)
            held[:] = [len(parts) for parts in talk.sent[messages.FORTH]]

    anatomy(4, False)
    network.run(program)
    assert held == [0, 0, 1, 1]


def test_a_failure_of_one_rank_alone_is_forgotten_where_it_goes_on(monkeypatch):
    store = dist.HashStore()
    for room in (messages, stage_checks):
        monkeypatch.setattr(room, "default_store", lambda: store)
    monkeypatch.setattr(stage_checks, "_ALIKE_S", 0.1)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    errors = StageErrors(Mock(rank=1, ranks=1), lambda: "stage 1, a forward")
    for _ in range(2):
        with pytest.raises(KeyError):
            errors.fail(KeyError("a label is missing"))
        assert "rank 3 failed alone in stage 1, a forward" in messages.failed_alone()
        errors.begin()
        assert messages.failed_alone() == "", "the next failure is told as it is"
    with ThreadPoolExecutor(2) as both:
        assert [*both.map(lambda _: stage_checks.all_fail("stage 1, a forward", 2), range(2))] == [True, True]
    assert not stage_checks.all_fail("stage 1, a forward", 2), "its count began anew"


def test_a_rank_names_the_message_that_has_not_come_where_the_host_goes_on(monkeypatch):
    """As on an accelerator, where no wait holds the host: it stands where it reads a value."""
    network, said = Network(2), []
    anatomy(2, False)
    wait, tolist = Work.wait, torch.Tensor.tolist
    monkeypatch.setattr(Work, "wait", lambda work: (network.rank == 1 and work.kind == "recv") or wait(work))

    def read(tensor):
        if network.rank == 1 and (text := layers[0].doing()):
            said.append(text)
            raise Hang(text)
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", read)
    layers = []

    def hold(module, batch):
        network.block(lambda: bool(said), "the other stage")
        return loss(module, batch)

    def program(rank):
        mine, _ = layers_of(network, rank)
        layers[:] = [mine] if rank == 1 else layers
        train(mine, ids(3), loss if rank else hold)

    with pytest.raises(Hang):
        network.run(program)
    assert said == ["stage 1, forward of micro-batch 0 of 3, waits for stage 0"]


class Fails(Exception):
    pass


def failing(call, backward):
    """A hook of a layer that fails in one of its calls, or in the backward of it."""
    calls = itertools.count()

    def fail(*_):
        raise Fails("the sensor is broken")

    def hook(module, args, output):
        if next(calls) == call:
            if not backward:
                fail()
            output.register_hook(fail)

    return hook


@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_an_error_in_the_second_step_ends_it_on_all_stages_and_the_next_one_is_exact(virtual, backward, device):
    expected = run_stages(3, virtual, 3, "1f1b")
    for stage, call in itertools.product((0, 1, 2), (0, 1, 2)):
        network = Network(3)

        def run(rank, network=network, stage=stage, call=call):
            layers, module = layers_of(network, rank, virtual)
            train(layers, ids(3))
            module.zero_grad()
            hook = module.layers[stage].register_forward_hook(failing(call, backward)) if rank == stage else None
            with pytest.raises((MeshparError, Fails)) as raised:
                train(layers, ids(3))
            if hook is not None:
                hook.remove()
            module.zero_grad()
            return raised.value, train(layers, ids(3))

        for rank, (error, total) in enumerate(network.run(run)):
            assert "the sensor is broken" in str(error) and isinstance(error, Fails if rank == stage else MeshparError)
            torch.testing.assert_close(total, expected[rank][0])


def test_shapes_that_follow_from_values_are_refused_beside_a_device_alone(monkeypatch):
    batches = [torch.zeros(1, 2, dtype=torch.int64)] * 3

    def cut(number, padded=False):
        """Keep as many positions as the number of the micro-batch says, the others as zeros where it is ``padded``."""
        keep = 1 + int(number == 1)
        return lambda layer, args, output: F.pad(output[:, :keep], (0, 0, 0, 2 - keep if padded else 0))

    def run(late, **how):
        monkeypatch.setattr(runtime, "over_hosts", lambda device: not late)
        network = Network(2)
        anatomy(2, False)

        def program(rank):
            layers, module = layers_of(network, rank)
            hook = lambda *given: cut(layers.edges.turn.number, **how)(*given)  # noqa: E731
            module.layers[0].register_forward_hook(hook)
            return train(layers, batches)

        return network.run(program)[0]

    def without_pp(**how):
        torch.manual_seed(0)
        module, total = Model(2, False), 0
        for number, batch in enumerate(batches):
            hook = module.layers[0].register_forward_hook(cut(number, **how))
            total += loss(module, batch).detach()
            hook.remove()
        return total

    torch.testing.assert_close(run(False), without_pp())
    with pytest.raises(MeshparError, match=r"hands on has the shapes \(1, 2, 2\), expected \(1, 1, 2\) as for earlier"):
        run(True)
    torch.testing.assert_close(run(True, padded=True), without_pp(padded=True))
