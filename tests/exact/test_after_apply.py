"""Loops that change a parallel module after plan.apply are exact, or refused in the same step."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshpar import FullyShard, MeshparError, ModelLayout, Plan, Replicate, TensorParallel
from meshpar.testing import on_ranks, whole
from tests.support.comparison import gradients
from tests.support.loop_habits import OutOfMemory
from tests.support.loop_sides import LAYOUT, Block
from tests.support.loop_sides import PLANS as COLUMNS
from tests.support.loop_sides import Net as Plain
from tests.support.tiers import daily

PLANS = {mesh: passes() for title, (mesh, passes) in COLUMNS.items() if title != "PP"}  # stages call no module
DATA = ("dp_replicate=2", "dp_shard=2")


class Net(Plain):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.double()


def batch():
    return torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def mine(par, x):
    return x.chunk(par.data_size)[par.data_rank]


def plans(ranks, among=tuple(PLANS)):
    return [(mesh, PLANS[mesh]) for mesh in among if Plan(mesh, PLANS[mesh]).mesh.size == ranks]


def step(par, x):
    optimizer = torch.optim.SGD(par.module.parameters(), 0.1)
    par.module(mine(par, x)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def new_head(net):
    net.head = nn.Linear(8, 7).double()


def adapters(net):
    net.blocks[0].adapter = nn.Linear(8, 8).double()


def no_head(net):
    net.head = nn.Identity()


def tied_blocks(net):
    net.blocks[1] = net.blocks[0]


def more_blocks(net):
    net.blocks.append(Block().double())


def trained(alone, net, par=None):
    """Train a step by a new optimizer; return its loss and weights."""
    optimizer, x = torch.optim.AdamW(net.parameters(), 0.05), batch()
    loss = net(x if alone else mine(par, x)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = loss.detach() if alone else par.data_sum(loss.detach()) / par.loss_size
    return [loss, *(whole(parameter.detach()) for parameter in net.parameters())]


CHANGES = (new_head, adapters, more_blocks, no_head, tied_blocks)
REBUILT = [(mesh, change) for mesh, _ in plans(2) for change in CHANGES]
BY_DAY = [(mesh, change) for mesh, change in REBUILT if mesh == "dp_shard=2" or change in (new_head, tied_blocks)]


@pytest.mark.parametrize(("mesh", "change"), daily(REBUILT, *BY_DAY))
@on_ranks(2)
def test_a_model_that_is_built_again_with_a_change_as_a_message_says_is_exact(mesh, change):
    alone, par = Net(), Plan(mesh, PLANS[mesh]).apply(Net(), LAYOUT)
    trained(True, alone), trained(False, par.module, par)
    torch.manual_seed(2)
    change(alone)
    torch.manual_seed(2)
    change(par.module)
    with pytest.raises(
        MeshparError,
        match=r"(was replaced by another tensor|came into the module after|left the module after)(.|\n)*"
        "build it again with the change, apply a plan to it, and load",
    ):
        par.module(mine(par, batch()))
    state, net = par.state_dict(full=True, everywhere=True), Net()
    torch.manual_seed(2)
    change(net)
    shapes = {name: tensor.shape for name, tensor in net.state_dict().items()}
    again = Plan(mesh, PLANS[mesh]).apply(net, LAYOUT)
    fitting = {name: tensor for name, tensor in state.items() if shapes.get(name, tensor.shape) == tensor.shape}
    again.load_state_dict(fitting, strict=False)
    for _ in range(2):
        for got, expected in zip(trained(False, net, again), trained(True, alone), strict=True):
            assert torch.allclose(got, expected, atol=1e-9)


class Skips(Net):
    skips = False

    def forward(self, x):
        return self.encode(x) if self.skips else super().forward(x)


@on_ranks(2)
def test_a_module_that_stays_and_is_no_longer_called_is_exact():
    for mesh, passes in plans(2):
        alone, par = Skips(), Plan(mesh, passes).apply(Skips(), LAYOUT)
        for net in (alone, par.module):
            trained(net is alone, net, par)
            net.skips = True
        for got, expected in zip(trained(False, par.module, par), trained(True, alone), strict=True):
            assert torch.allclose(got, expected, atol=1e-9), mesh


@on_ranks(2)
def test_parameters_that_came_before_materialize_are_refused_there():
    for mesh, passes in plans(2):
        with torch.device("meta"):
            par = Plan(mesh, passes).apply(Net(), LAYOUT)
            new_head(par.module)
        with pytest.raises(MeshparError, match=r"Put head into the model before plan\.apply and materialize"):
            par.materialize(seed=0)


@on_ranks(2)
def test_parameters_that_came_after_a_forward_are_refused_before_the_step():
    for mesh, passes in plans(2):
        par = Plan(mesh, passes).apply(Net(), LAYOUT)
        optimizer = torch.optim.SGD(par.module.parameters(), 0.1)
        par.module(mine(par, batch())).square().mean().backward()
        adapters(par.module)
        with pytest.raises(MeshparError, match=r"blocks\.0\.adapter\.weight, .* came into the module"):
            optimizer.step()


@on_ranks(2)
def test_modules_without_parameters_may_come_and_go():
    for mesh, passes in plans(2):
        par, x = Plan(mesh, passes).apply(Net(), LAYOUT), batch()
        expected = Net()(x)
        par.module.head.probe = nn.Dropout(0.0)
        assert torch.allclose(par.module(mine(par, x)), mine(par, expected))
        del par.module.head.probe
        assert torch.allclose(par.module(mine(par, x)), mine(par, expected))


class KeepsOutput(Block):
    fails = False

    def forward(self, x):
        y = super().forward(x)
        self.last = OutOfMemory.apply(y) if self.fails else y
        return self.last


@on_ranks(2)
def test_a_backward_from_a_kept_output_that_fails_is_refused_until_gradients_are_cleared():
    """FSDP2's hook alone sees this backward begin: the module's own output is not in the loss."""
    net = Net()
    net.blocks[0] = KeepsOutput().double()
    alone = copy.deepcopy(net)
    alone(batch())
    alone.blocks[0].last.square().mean().backward()
    par = Plan("dp_shard=2", [FullyShard()]).apply(net, LAYOUT)
    module, x = par.module, mine(par, batch())
    module.blocks[0].fails = True
    module(x)
    with pytest.raises(MemoryError):
        module.blocks[0].last.square().mean().backward()
    module.blocks[0].fails = False
    with pytest.raises(MeshparError, match=r"an error ended a backward(.|\n)*zero_grad"):
        module(x)
    module.zero_grad()
    module(x)
    module.blocks[0].last.square().mean().backward()
    check_gradients(par, alone)


class Scaled(Block):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return super().forward(self.scale * x)


def scaled_and_wrapped(between):
    """Train a step, wrap a block between its forward and its backward or after it, and train another one."""
    net = Net()
    net.blocks[1] = Scaled().double()

    def wrap(module):
        module.blocks[1] = nn.Sequential(module.blocks[1])

    def steps(module, x):
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        for number in range(2):
            loss = module(x).square().mean()
            if number == 0 and between:
                wrap(module)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 0 and not between:
                wrap(module)
        return [whole(parameter).clone() for parameter in module.parameters()]

    return net, steps


@on_ranks(2)
def test_a_scalar_of_a_block_that_is_wrapped_stays_the_average_over_ranks():
    for between in (False, True):
        net, steps = scaled_and_wrapped(between)
        expected = steps(copy.deepcopy(net), batch())
        par = Plan("dp_shard=2", [FullyShard()]).apply(net, LAYOUT)
        torch.testing.assert_close(steps(par.module, mine(par, batch())), expected)


class Writes(Net):
    """Writes its head's weight in forward, by one of several ways."""

    def __init__(self, how):
        super().__init__()
        self.how, self.written = how, True

    def forward(self, x):
        weight, values = self.head.weight, F.normalize(self.head.weight.detach(), dim=1)
        if self.written:
            with torch.no_grad():
                if self.how == "copy":
                    weight.copy_(values)
                elif self.how == "data":
                    weight.data = values
                elif self.how == "into data":
                    weight.data.copy_(values)
                elif self.how == "numpy":
                    weight.data.numpy()[:] = values.numpy()
                elif self.how == "parameter":
                    self.head.weight = nn.Parameter(values)
        return super().forward(x)


@on_ranks(2)
def test_a_forward_that_writes_a_parameter_is_refused_in_that_step_whether_it_is_gathered_or_kept_whole():
    whole = ("head.weight",)
    for mesh, passes, hows, earlier in (
        *((mesh, PLANS[mesh], ("copy", "data", "into data", "numpy", "parameter"), 0) for mesh in DATA),
        *((mesh, PLANS[mesh], ("copy", "data", "parameter"), 4) for mesh in DATA),
        ("dp_replicate=2", [Replicate(whole=whole)], ("copy", "data", "parameter"), 0),
        ("dp_shard=2", [FullyShard(whole=whole)], ("copy", "data", "parameter"), 0),
    ):
        for how in hows:
            par = Plan(mesh, passes).apply(Writes(how), LAYOUT)
            par.module.written = False
            for _ in range(earlier):
                step(par, batch())
            par.module.written = True
            with pytest.raises(MeshparError, match=r"weight (was written or replaced)"):
                par.module(mine(par, batch()))


@on_ranks(2)
def test_a_parameter_that_is_written_between_steps_as_the_message_says_is_exact():
    for mesh, passes in plans(2):
        alone, par, x = Net(), Plan(mesh, passes).apply(Net(), LAYOUT), batch()
        for _ in range(2):
            for net in (alone, par.module):
                with torch.no_grad():
                    net.head.weight.copy_(F.normalize(net.head.weight, dim=1))
            expected = alone(x)
            assert torch.allclose(par.module(mine(par, x)), mine(par, expected))


class Hidden(Net):
    def forward(self, x):
        return self.encode(x)


def by_the_whole_weight(net, x):
    weight = net.head.weight
    return F.linear(net(x), weight.full_tensor() if hasattr(weight, "full_tensor") else weight).square().mean()


def by_weights_alone(net, x):
    weight = net.head.weight
    whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return (whole[:, : x.shape[1]] @ x.T).square().mean()


def check_gradients(par, alone):
    """What the loss does not reach has no gradient, or zeros."""
    have, want = gradients(par.module), gradients(alone)
    zeros = {name: have[name] * 0 if grad is None and have[name] is not None else grad for name, grad in want.items()}
    torch.testing.assert_close(have, zeros, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ranks", [2, 4])
@on_ranks("ranks")
def test_a_whole_weight_in_a_loss_outside_of_the_module_is_exact(ranks):
    for mesh, passes in plans(ranks):
        for loss in (by_the_whole_weight, by_weights_alone):
            alone, par, x = Hidden(), Plan(mesh, passes).apply(Hidden(), LAYOUT), batch()
            for _ in range(2):  # the second time on top of the first
                loss(alone, x).backward()
                loss(par.module, mine(par, x)).backward()
            check_gradients(par, alone)


@on_ranks(2)
def test_rows_that_are_scaled_after_each_step_as_the_message_of_max_norm_says_are_exact():
    for mesh, passes in plans(2):
        torch.manual_seed(0)
        alone = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3)).double()
        par, ids = (
            Plan(mesh, passes).apply(copy.deepcopy(alone), ModelLayout(tensor={"1": "colwise_gather"})),
            torch.arange(8) % 7,
        )
        optimizers = [torch.optim.SGD(net.parameters(), 1.0) for net in (alone, par.module)]
        for _ in range(3):
            expected = alone(ids).square().mean()
            expected.backward()
            par.module(mine(par, ids)).square().mean().backward()
            for net, optimizer in zip((alone, par.module), optimizers):
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    net[0].weight.mul_((0.5 / net[0].weight.norm(dim=1, keepdim=True)).clamp(max=1))
        assert torch.allclose(whole(par.module[0].weight), alone[0].weight, atol=1e-12)


class Odd(nn.Module):
    """A complex matrix, and scalars in containers that are never called."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(6, 4, dtype=torch.complex128))
        self.scales = nn.ParameterDict({"a": nn.Parameter(torch.ones(()))})
        self.shifts = nn.ParameterList([nn.Parameter(torch.zeros(())), nn.Parameter(torch.ones(()))])
        self.double()

    def forward(self, x):
        return (x.to(torch.complex128) @ self.matrix).abs() * self.scales["a"] + self.shifts[0] * self.shifts[1]


@on_ranks(2)
def test_complex_parameters_and_scalars_in_containers_are_exact_and_clipped_by_one_norm():
    for mesh, passes in (("dp_replicate=2", Replicate()), ("dp_shard=2", FullyShard())):
        alone, par, x = Odd(), Plan(mesh, [passes]).apply(Odd(), ModelLayout()), batch()
        alone(x).square().mean().backward()
        par.module(mine(par, x)).square().mean().backward()
        for norm_type in (2.0, 1.0, float("inf")):
            expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.1, norm_type)
            assert torch.allclose(par.clip_grad_norm_(0.1, norm_type), expected)
            check_gradients(par, alone)


@on_ranks(2)
def test_ranks_that_evaluate_unevenly_are_refused_at_once_on_both():
    for mesh, passes in plans(2, DATA):
        for dtype in (torch.float32, torch.float64):
            par, total = Plan(mesh, passes).apply(Net(), LAYOUT), torch.zeros((), dtype=dtype)
            with pytest.raises(
                MeshparError,
                match=r"this rank is at (par\.data_sum|a forward of the module) .*, rank [01] at (par|a forward)",
            ):
                with torch.no_grad():
                    for _ in range(2 + par.data_rank):
                        total += par.module(batch()).square().sum().to(dtype)
                par.data_sum(total)


@on_ranks(2)
def test_a_rank_that_skips_a_batch_is_refused_at_once_on_both():
    for mesh, passes in plans(2, DATA):
        par = Plan(mesh, passes).apply(Net(), LAYOUT)
        with pytest.raises(MeshparError, match=r"ranks are at different places"):
            for place in range(3):
                loss = par.module(mine(par, batch())).square().mean()
                if place == 1 and par.data_rank == 1:
                    continue  # as after a loss that is no number
                loss.backward()


@pytest.mark.parametrize("ranks", daily([2, 4], 2))
@on_ranks("ranks")
def test_weights_that_are_loaded_by_assignment_are_trained_as_in_one_process(ranks):
    for mesh, passes in plans(ranks):
        alone, par, x = Net(), Plan(mesh, passes).apply(Net(), LAYOUT), batch()
        step(par, x)
        optimizer = torch.optim.SGD(alone.parameters(), 0.1)
        alone(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        par.module.load_state_dict(
            {name: value.clone() for name, value in par.module.state_dict().items()}, assign=True
        )
        for _ in range(2):
            ours = torch.optim.AdamW(par.module.parameters(), 0.1, fused=True)
            one = torch.optim.AdamW(alone.parameters(), 0.1, fused=True)
            for optimizer in (ours, one):
                optimizer.zero_grad()
            alone(x).square().mean().backward()
            par.module(mine(par, x)).square().mean().backward()
            check_gradients(par, alone)
            assert torch.allclose(
                par.clip_grad_norm_(1.0), torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0), atol=1e-12
            )
            ours.step(), one.step()
        assert str(par.describe())


@on_ranks(2)
def test_whole_weights_that_are_assigned_are_exact_and_an_assignment_that_unties_under_tp_is_refused():
    for mesh, passes in plans(2, ("dp_shard=2", "tp=2")):
        alone, other, par, x = Net(), Net(), Plan(mesh, passes).apply(Net(), LAYOUT), batch()
        other.load_state_dict({name: 0.5 * value for name, value in alone.state_dict().items()}, assign=True)
        par.module.load_state_dict(other.state_dict(), assign=True)
        other(x).square().mean().backward()
        par.module(mine(par, x)).square().mean().backward()
        check_gradients(par, other)
    net = Net()
    net.blocks[1].down.weight = net.blocks[0].down.weight
    par = Plan("tp=2", [TensorParallel()]).apply(net, LAYOUT)
    par.module.load_state_dict({name: value.clone() for name, value in par.module.state_dict().items()}, assign=True)
    with pytest.raises(MeshparError, match=r"blocks\.0\.down\.weight, .*was replaced(.|\n)*\(par\.load_state_dict\)"):
        par.module(batch())


@on_ranks(2)
def test_a_parameter_that_one_like_it_replaces_while_a_unit_keeps_it_is_refused():
    for mesh, passes in plans(2, DATA):
        par, x = Plan(mesh, passes).apply(Net(), LAYOUT), batch()
        step(par, x)
        copy.copy(par.module)(mine(par, x))
        down = par.module.blocks[0].down
        down.weight = nn.Parameter(0.5 * down.weight.detach())
        with pytest.raises(MeshparError, match=r"blocks\.0\.down\.weight was replaced by another tensor"):
            par.module(mine(par, x))


@on_ranks(2)
def test_random_writes_draw_as_one_process_and_refuse_states_that_differ():
    for mesh, passes in plans(2):
        alone, par = Net(), Plan(mesh, passes).apply(Net(), LAYOUT)
        for net in (alone, par.module):
            torch.manual_seed(3)
            nn.init.kaiming_uniform_(net.head.weight)
            with torch.no_grad():
                net.blocks[0].up.weight.add_(torch.randn_like(net.blocks[0].up.weight)).exponential_()
        for name in ("head.weight", "blocks.0.up.weight"):
            assert torch.equal(whole(par.module.get_parameter(name)), alone.get_parameter(name))
        torch.manual_seed(torch.distributed.get_rank())
        with pytest.raises(MeshparError, match=r"random states differ; call torch\.manual_seed"):
            nn.init.normal_(par.module.head.weight)


@on_ranks(2)
def test_whole_values_are_written_between_steps_as_messages_say():
    for mesh, passes in plans(2):
        alone, par, x = Net(), Plan(mesh, passes).apply(Net(), LAYOUT), batch()
        weight = par.module.head.weight
        for write in (lambda p: p.data.numpy(), lambda p: setattr(p, "data", torch.ones(3, 8)), lambda p: p.t_()):
            with (
                pytest.raises(
                    MeshparError,
                    match=r"par\.(like\((tensor|parameter),|load_state_dict\(\{name: whole\}, strict=False\))",
                ),
                torch.no_grad(),
            ):
                write(weight)
        changed = weight.full_tensor().detach().clone()
        changed[0] = 0.5
        par.load_state_dict({"head.weight": changed}, strict=False)
        with torch.no_grad():
            alone.head.weight[0] = 0.5
            assert torch.allclose(par.module(mine(par, x)), mine(par, alone(x)))
            weight.copy_(par.like(weight, torch.full_like(changed, 0.25)))
            alone.head.weight.fill_(0.25)
        assert torch.allclose(par.module(mine(par, x)), mine(par, alone(x)))
