"""Loops for rows of `exact`: what ranks do alike, forwards and backwards, hooks, optimizers, and changes of a parallel module."""

import functools
import tempfile
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import mse_loss

from meshpar import ExpertParallel, FullyShard, ModelLayout, PipelineParallel, Plan, TensorParallel
from meshpar.checkpoints import CheckpointManager
from meshpar.exchange.ranks import GradientMarks, Ranks
from tests.accelerator.accelerated import accelerated
from tests.passes.experts.test_parallel import OWN, OwnMixture
from tests.passes.pipeline.test_stage_habits import assert_equal, in_one_process, on_stages, plain_loss
from tests.remedies.sides import difference, on
from tests.support import loop_habits as habits
from tests.support.loop_sides import CLASSES, DIM, LAYOUT, Block, Net, adamw, batch, sgd, train
from tests.support.models_for_parity import Given, transformer

IDS = torch.arange(16)[None]


def habit(loop):
    """Let ``loop(side, *how)`` be made by ``loop(*how)``."""
    return lambda *how, **options: lambda side: loop(side, *how, **options)


def refused(plan, loop):
    return functools.partial(on, plan, loop)


def exact(plan, *loops):
    """Return what differs from one process; None where nothing does."""
    return lambda: next(filter(None, (difference(plan, loop) for loop in loops)), None)


def fsdp(**options):
    return "dp_shard=2", [FullyShard(**options)]


def tp(*passes, **options):
    return "tp=2", [TensorParallel(**options), *passes]


def of(block):
    """A net of these blocks."""

    class Of(Net):
        def make_block(self):
            return block()

    return Of


def keep_weights(side, net):
    for name, parameter in net.named_parameters():
        side.note(name, parameter)


# What ranks do alike


@habit
def frozen(side, *, alike):
    net = side.apply(side.net())
    net.blocks[1].requires_grad_(not alike and side.rank == 0)
    train(side, net, sgd(net))


@habit
def micro_batches(side, *, rest):
    net = side.apply(side.net())
    optimizer = sgd(net)
    for seed in range(2):
        x, y = batch(seed)
        for rows in side.accumulate([slice(4), slice(4, 8)][: 2 if rest and side.rank else 1]):
            mse_loss(net(side.part(x[rows])), side.part(y[rows])).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.weights(net)


@habit
def rate_of_loss(side, *, mean):
    net = side.apply(side.net())
    optimizer = sgd(net)
    for x, y in side.steps(net, optimizer, 4):
        loss = mse_loss(net(x), y)
        loss.backward()
        value = loss.detach()
        if mean and not side.alone:
            value = side.par.data_sum(value) / side.par.loss_size
        optimizer.param_groups[0]["lr"] = 0.1 * float(value)


class Running(Net):
    """A mean over the batch in a buffer."""

    total = None

    def __init__(self, *, persistent=True, used=True):
        super().__init__()
        self.register_buffer("mean", torch.zeros(DIM), persistent=persistent)
        self.used = used

    def encode(self, x):
        x = super().encode(x)
        with torch.no_grad():
            mean = x.mean(0)
            self.mean.mul_(0.9).add_(mean if self.total is None else self.total(mean), alpha=0.1)
        return x - self.mean if self.used else x


@habit
def running_mean(side, *, summed=False, **options):
    net = side.apply(side.net(lambda: Running(**options)))
    if summed and not side.alone:
        net.total = lambda mean: side.par.data_sum(mean) / side.par.data_size
    optimizer = sgd(net)
    for x, y in side.batches():
        mse_loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    keep_weights(side, net)


def dropped(seed):
    """The losses of a model with dropout, of which ranks of tp must draw the same; whether all ranks have them."""
    torch.manual_seed(0)
    net = nn.Sequential(Net(), nn.Dropout(0.5)).double()
    layout = ModelLayout(tensor={f"0.{name}": style for name, style in LAYOUT.tensor.styles.items()})
    par = Plan("tp=2", [TensorParallel()]).apply(net, layout)
    seed(par)
    outputs = [par.module(batch(number)[0]).detach() for number in range(2)]
    means = par.data_sum(torch.stack(outputs)) / par.loss_size
    every = [torch.empty_like(means) for _ in range(2)]
    torch.distributed.all_gather(every, means)
    return torch.equal(*every) and not torch.equal(outputs[0] != 0, outputs[1] != 0)


class Dither(torch.autograd.Function):
    """Values as they are, gradients with noise."""

    @staticmethod
    def forward(ctx, x, noise):
        ctx.save_for_backward(noise)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


class Dithered(Net):
    generator = None

    def encode(self, x):
        x = super().encode(x)
        return Dither.apply(x, torch.rand(x.shape, generator=self.generator, dtype=x.dtype))


@habit
def dithered(side, *, same):
    net = side.apply(side.net(Dithered))
    torch.manual_seed(side.rank)
    if same:
        net.generator = torch.Generator().manual_seed(3)
    train(side, net, sgd(net))


@habit
def random_loss(side, *, alike):
    net = side.apply(side.net())
    optimizer = sgd(net)
    torch.manual_seed(3 if alike else side.rank)
    for x, y in side.steps(net, optimizer):
        (mse_loss(net(x), y) * torch.rand(())).backward()


@habit
def evaluated(side, *, alike):
    net = side.apply(side.net())
    train(side, net, sgd(net), steps=1)
    with torch.no_grad():
        for x, _ in side.batches(3 if side.rank and not alike else 2):
            side.note_rows("output", net(x))
    train(side, net, sgd(net), steps=1)


@habit
def timed_out(side, *, alike):
    train_evaluated = evaluated(alike=True)
    if alike:
        return train_evaluated(side)
    with mock.patch("meshpar.exchange.ranks.Largest.read", side_effect=RuntimeError("Timed out waiting 1000ms")):
        return train_evaluated(side)


class Body(nn.Module):
    """Blocks, of which ``how`` leaves out the last one where a batch asks for it."""

    def __init__(self, blocks, how):
        super().__init__()
        self.blocks, self.how = blocks, how

    def forward(self, x, skip):
        first, last = self.blocks
        x = first(x)
        if skip and self.how == "skip":
            return x
        return x + 0.0 * last(x) if skip else last(x)


class Skipping(Net):
    def __init__(self, how):
        super().__init__()
        self.body = Body(self.blocks, how)
        del self.blocks

    def forward(self, x, skip):
        return self.head(self.body(self.embed(x), skip))


@habit
def skipping(side, how):
    """Odd parts of each batch leave out a block, or none does where ``how`` is "all"."""
    layout = ModelLayout(blocks=("body.blocks.*",))
    net = side.apply(side.net(lambda: Skipping(how)), layout)
    optimizer = sgd(net)
    for x, y in side.batches(4):
        parts = [(x, y, side.rank)]
        if side.alone:
            parts = [(x[part :: side.parts], y[part :: side.parts], part) for part in range(side.parts)]
        losses = [mse_loss(net(rows, how != "all" and bool(part % 2)), target) for rows, target, part in parts]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    keep_weights(side, net)


def different_gradients():
    """Compare gradients as beside an accelerator, where ranks do not meet before each block."""
    net = Net()
    marks = [
        2 if torch.distributed.get_rank() or not name.startswith("blocks.1") else 0
        for name, _ in net.named_parameters()
    ]
    GradientMarks(Ranks("Net", torch.distributed.group.WORLD), list(net.named_parameters()), marks).check()


@habit
def stepped(side, *, alike):
    """Beside an accelerator, where ranks compare their steps in the exchange of the next backward."""
    with accelerated():
        net = side.apply(side.net())
        optimizer = sgd(net)
        for number, (x, y) in enumerate(side.batches(4)):
            mse_loss(net(x), y).backward()
            if number == 1 and side.rank and not alike:
                optimizer.param_groups[0]["lr"] = 0.2
            optimizer.step()
            optimizer.zero_grad()
        side.weights(net)


@habit
def dealt(side):
    """A sampler of the data ranks that leaves out the ninth row."""
    net = side.apply(side.net())
    optimizer = sgd(net)
    rank, size = (0, 1) if side.alone else (side.par.data_rank, side.par.data_size)
    x, y = (torch.cat([rows, rows[:1]]) for rows in batch(0))
    rows = list(torch.utils.data.DistributedSampler(range(9), size, rank, shuffle=False, drop_last=True))[: 8 // size]
    mse_loss(net(x[rows]), y[rows]).backward()
    optimizer.step()
    side.weights(net)


# Forwards and backwards


class Methods(Net):
    def score(self, x):
        return self.head(self.encode(x))

    def logits(self, x):
        return F.linear(x, self.head.weight, self.head.bias)


@habit
def scored(side, how):
    """Call the module, a method, or a method that is registered."""
    net = side.apply(side.net(Methods))
    if how == "registered" and not side.alone:
        side.par.register_method("score")
    train(side, net, sgd(net), forward=net if how == "module" else net.score)


@habit
def named_method(side, name):
    net = side.apply(side.net(Methods))
    if not side.alone:
        side.par.register_method(name)
    train(side, net, sgd(net), forward=lambda x: getattr(net, name)(x))


def sequence(**options):
    """A block called alone under a plan; without options in one process."""
    torch.manual_seed(0)
    net = transformer()
    if options:
        net = Plan("tp=2", [TensorParallel(**options)]).apply(net).module
    return net.layers[0](torch.sin(torch.arange(512.0)).view(1, 16, 32), IDS, None)


@habit
def stale(side, how):
    """Two losses and a step between them."""
    net = side.apply(side.net())
    optimizer = sgd(net)
    for x, y in side.batches():
        kept = mse_loss(net(x), y)
        mse_loss(net(-x), y).backward()
        if how == "backward first":
            kept.backward()
        optimizer.step()
        if how == "kept":
            kept.backward()
        if how == "forward again":
            mse_loss(net(x), y).backward()
            optimizer.step()
        optimizer.zero_grad()
    side.weights(net)


@habit
def turned(side, when):
    net = side.apply(side.net())
    for number, (x, y) in enumerate(side.steps(net, sgd(net))):
        for moment in ("before", "between", "after"):
            if moment == when and number == 1:
                net.blocks[0].requires_grad_(False)
            if moment == "before":
                loss = mse_loss(net(x), y)
            if moment == "between":
                loss.backward()


@torch.no_grad()
def shrink(module):
    for parameter in module.parameters():
        parameter.mul_(0.9)


@habit
def written(side, when):
    net = side.apply(side.net())
    first = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    average = None if side.alone else side.par.averaged(0.9)
    if average is not None:
        average.update()
    for x, y in side.steps(net, sgd(net)):
        loss = mse_loss(net(x), y)
        if when == "between":
            shrink(net)
        if when == "averaged":
            with torch.no_grad():
                if side.alone:
                    side.note_rows("other weights", torch.func.functional_call(net, first, (x,)))
                else:
                    with average.swapped():
                        side.note_rows("other weights", net(x))
        loss.backward()
        if when == "after":
            shrink(net)


@habit
def two_losses(side, how):
    net = side.apply(side.net())
    for x, y in side.steps(net, sgd(net)):
        output = net(x)
        one, other = mse_loss(output, y), output.square().mean()
        if how == "one backward":
            (one + other).backward()
        else:
            one.backward(retain_graph=True)
            (net(x).square().mean() if how == "forward again" else other).backward()


@habit
def failed(side, how):
    """Catch an error of a backward, and go on in several ways."""
    net = side.apply(side.net(habits.OfTight))
    optimizer = sgd(net)
    for x, y in side.steps(net, optimizer):
        earlier = mse_loss(net(-x), y)
        habits.Tight.full = True
        with pytest.raises(MemoryError):
            mse_loss(net(x), y).backward()
        habits.Tight.full = False
        if how == "cleared":
            optimizer.zero_grad()
        (earlier if how == "earlier" else mse_loss(net(-x), y)).backward()


@habit
def differences(side):
    """A penalty on a derivative, from finite differences."""
    net = side.apply(side.net())
    for x, y in side.steps(net, sgd(net)):
        slope = (net(x + 1e-3) - net(x - 1e-3)) / 2e-3
        (mse_loss(net(x), y) + 0.1 * slope.square().sum(-1).mean()).backward()


def valued(**given):
    """The logits of a model on meta; without values it has none."""
    torch.manual_seed(0)
    alone = transformer()
    if given.get("weights"):
        given["weights"] = Given(alone.state_dict())
    with torch.device("meta"):
        par = Plan("dp_shard=2", [FullyShard()]).apply(transformer())
    if given:
        par.materialize(**given)
    found = par.module(IDS).logits
    alone.load_state_dict(par.state_dict(full=True, everywhere=True))
    return torch.allclose(found, alone(IDS).logits, atol=1e-5)


@habit
def written_by_hook(side, *, inside):
    net = side.apply(side.net())
    if inside:
        net.blocks[0].register_full_backward_hook(lambda *_: shrink(net.blocks[0]))
    train(side, net, sgd(net), before_step=None if inside else lambda x: shrink(net.blocks[0]))


@habit
def two_forwards(side, build):
    net = side.apply(side.net(build))
    train(side, net, sgd(net), forward=habits.two_forwards(net))


class Counting(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1.0
        return super().forward(x)


class CountsFirst(Net):
    def __init__(self):
        super().__init__()
        self.blocks[0] = Counting()


@habit
def trained(side, build=Net, layout=LAYOUT):
    net = side.apply(side.net(build), layout)
    train(side, net, sgd(net))


# Hooks and gradients


class Unused(Net):
    def __init__(self, *, used):
        super().__init__()
        self.other, self.used = nn.Linear(DIM, CLASSES), used

    def forward(self, x):
        x = self.encode(x)
        return self.head(x) + self.other(x) if self.used else self.head(x)


def double(parameter):
    if parameter.grad is not None:
        parameter.grad.mul_(2)


@habit
def doubled(side, *, used, hooked):
    net = side.apply(side.net(lambda: Unused(used=used)))
    for parameter in net.parameters() if hooked else ():
        parameter.register_post_accumulate_grad_hook(double)
    train(side, net, sgd(net), before_step=None if hooked else lambda x: list(map(double, net.parameters())))


@habit
def squashed(side, how):
    """A change of the gradient of a step of two micro-batches, or of one."""

    def squash(grad):
        return grad / (1 + grad.abs())

    net = side.apply(side.net())
    if how != "between":
        for parameter in net.parameters():
            parameter.register_hook(squash)
    for x, y in side.steps(net, sgd(net)):
        count = 1 if how == "one backward" else 2
        for micro, target in side.accumulate(zip(x.chunk(count), y.chunk(count))):
            (mse_loss(net(micro), target) / count).backward()
        if how == "between":
            for parameter in net.parameters():
                parameter.grad = squash(parameter.grad)


# Optimizers


def lbfgs(net):
    return torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)


@habit
def stepped_by(side, optimizer):
    net = side.apply(side.net())
    optimizer = optimizer(net)
    for x, y in side.batches():

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = mse_loss(net(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    side.weights(net)


def older(tensor):
    """What ``flattens`` tells before torch 2.13."""
    return not any(getattr(placement, "dim", 0) > 0 for placement in getattr(tensor, "placements", ()))


@habit
def before_2_13(side, optimizer):
    with mock.patch("meshpar.guards.optimizers.flattens", older):
        stepped_by(optimizer)(side)


def experts(kind, mesh="dp_shard=1,ep=2"):
    """The loss after a step of an optimizer over experts, on a mesh; in one process without one."""
    torch.manual_seed(0)
    net = OwnMixture()
    if mesh:
        passes = [ExpertParallel(), FullyShard()] if "ep" in mesh else [FullyShard()]
        net = Plan(mesh, passes).apply(net, OWN).module
    optimizer = kind(net)
    ids = torch.arange(8)[None]

    def closure():
        optimizer.zero_grad()
        loss = net(ids).logits.square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    return float(closure().detach())


@habit
def built(side, *, first):
    net = side.net()
    optimizer = adamw(net) if first else None
    net = side.apply(net)
    train(side, net, optimizer or adamw(net))


@habit
def factored(side, how):
    """Adafactor, whose state another one takes after a step."""
    net = side.apply(side.net())
    optimizer = torch.optim.Adafactor(net.parameters(), lr=0.01)
    train(side, net, optimizer, steps=1)
    again = torch.optim.Adafactor(net.parameters(), lr=0.01)
    if how == "restored" and not side.alone:
        with tempfile.TemporaryDirectory() as own:
            every = [None, None]
            torch.distributed.all_gather_object(every, own)
            with CheckpointManager(every[0]) as manager:
                manager.save(1, side.par, optimizer)
                manager.restore(side.par, again)
            torch.distributed.barrier()
    else:
        again.load_state_dict(optimizer.state_dict())
    if how == "other":
        again.state[net.head.weight]["col_var"] = torch.zeros(3, 4)
    train(side, net, again, steps=1)


# Changes after plan.apply


@habit
def assigned(side, how):
    net = side.apply(side.net())
    values = torch.full((CLASSES, DIM), 0.25, dtype=torch.float64)

    def assign(x):
        weight = net.head.weight
        if how == "made from it":
            weight.data = weight.data * 0.9
        else:
            weight.data = values.clone() if how == "plain" or side.alone else side.par.like(weight, values)

    train(side, net, sgd(net), after_step=assign)


@habit
def drawn(side, *, alike):
    net = side.apply(side.net())
    torch.manual_seed(3 if alike else side.rank)
    nn.init.normal_(net.head.weight)
    if not side.alone:
        side.par.manual_seed(3)
    train(side, net, sgd(net))


def new_head():
    torch.manual_seed(2)
    return nn.Linear(DIM, CLASSES).double()


@habit
def new_module(side, *, before):
    net = side.net()
    if before:
        net.head = new_head()
    net = side.apply(net)
    if not before:
        net.head = new_head()
    train(side, net, sgd(net))


@habit
def new_parameter(side, how):
    """Another weight: a parameter of its own, there before, or values in the parameter that is there."""
    values, net = torch.full((CLASSES, DIM), 0.25, dtype=torch.float64), side.net()
    if how == "before":
        net.head.weight = nn.Parameter(values)
    net = side.apply(net)
    if how == "after":
        net.head.weight = nn.Parameter(values)
    if how == "loaded":
        (net if side.alone else side.par).load_state_dict({"head.weight": values}, strict=False)
    train(side, net, sgd(net))


class Remembers(Net):
    """Assigns a buffer in its forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros((), dtype=torch.float64), persistent=False)

    def forward(self, x):
        self.last = x.new_tensor(0.5)
        return super().forward(x) * self.last


@habit
def without_head(side, *, stays):
    class Headless(Net):
        stops = False

        def forward(self, x):
            return self.encode(x)[:, :CLASSES] if self.stops else super().forward(x)

    net = side.apply(side.net(Headless))
    train(side, net, sgd(net), steps=1)
    net.stops = True
    if not stays:
        net.head = nn.Identity()
    train(side, net, sgd(net), steps=1)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@habit
def other_class(side, how):
    net = side.net()
    if how == "before":
        net.head.__class__ = Doubled
    net = side.apply(net)
    if how == "after":
        net.head.__class__ = Doubled
    if how == "forward":
        inner = net.head.forward
        net.head.forward = lambda x: 2 * inner(x)
    train(side, net, sgd(net))


def evaluations(*, through_data):
    """The logits of a second evaluation, beside an accelerator, after a write to the weights between the two."""
    torch.manual_seed(0)
    net = transformer()
    par = Plan("dp_shard=2", [FullyShard(reshard_after_forward=False)]).apply(net)
    weight = par.module.head.weight
    with accelerated(), torch.no_grad():
        par.module.eval()
        par.module(IDS)
        par.module(IDS)
        (weight.data if through_data else weight).mul_(2)
        return par.module(IDS).logits


def evaluated_alone():
    torch.manual_seed(0)
    net = transformer()
    with torch.no_grad():
        net.head.weight.mul_(2)
        return net(IDS).logits


def halved_on_stages(*, between):
    """Change the weights between the micro-batches of a step, or after a step's backward."""

    def loss(module, batch):
        if between:
            shrink(module)
        return plain_loss(module, batch)

    passes = [PipelineParallel(), FullyShard(reshard_after_forward=False)]
    stages = on_stages(loss, lambda par: shrink(par.module), passes, "pp=2,dp_shard=1")
    assert_equal(stages, in_one_process(loss, shrink))
