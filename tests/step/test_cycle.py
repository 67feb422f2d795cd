"""Blocks and layers that are called otherwise than each once on every rank: exact, or refused where it happens."""

import copy
import re
import sys
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from meshpar import (
    ActivationCheckpoint,
    Compile,
    FullyShard,
    HybridShard,
    MeshparError,
    ModelLayout,
    Plan,
    Replicate,
    TensorParallel,
    token_loss,
)
from meshpar._torch.fsdp import is_gathered, units_with_parameters
from meshpar.core import runtime
from meshpar.core.errors import ParallelError
from meshpar.guards.agreement import compare_losses
from meshpar.guards.explain import Explanation
from meshpar.passes.data.whole_parameters import WholeParameters
from meshpar.passes.tensor.context import Context
from meshpar.step.inner_calls import Calls
from meshpar.tensors.placements import local_tensor
from meshpar.testing import on_ranks, whole
from meshpar.trials.split import SplitTest
from tests.support.comparison import assert_gradients, assert_weights, gradients
from tests.support.loop_habits import OutOfMemory
from tests.support.models_for_parity import VOCAB, Given, on_meta, transformer

LAYOUT = ModelLayout(blocks=("blocks.*",), tensor={"blocks.*.ff.0": "colwise", "blocks.*.ff.2": "rowwise"})
IDS = torch.arange(16)[None] % VOCAB


class Block(nn.Module):
    def __init__(self, norm=nn.Identity, counts=False):
        super().__init__()
        self.norm, self.ff = norm(), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.gain = nn.Parameter(torch.ones(8))
        self.register_buffer("calls", torch.zeros(()) if counts else None)

    def forward(self, x):
        if self.calls is not None:
            self.calls += 1.0
        return (x + self.ff(self.norm(x))) * self.gain


class Net(nn.Module):
    """Blocks in ``order``, by wish recomputed by the model, or the first one's gain used outside of it."""

    def __init__(self, order=(0, 1), recomputed=False, outside=False, **options):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(2))
        self.order, self.recomputed, self.outside = order, recomputed, outside

    def forward(self, x, order=None):
        for place in order or self.order:
            block = self.blocks[place]
            x = checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x)
        return x * self.blocks[0].gain if self.outside else x


def x_of(rows=4):
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(1))


def applied(net, mesh, passes, layout=LAYOUT):
    return Plan(mesh, passes).apply(copy.deepcopy(net), layout)


@on_ranks(2)
def test_ranks_at_different_places_name_both_lines_of_their_code():
    par = applied(Net(), "dp_shard=2", [FullyShard()])
    lines = {}
    with pytest.raises(MeshparError, match="ranks are at different places of their loops") as caught:
        if par.data_rank:
            lines[1] = line() + 1
            par.data_sum(torch.ones(1))
        else:
            lines[0] = line() + 1
            par.token_scale(3)
    every = [None, None]
    dist.all_gather_object(every, lines)
    for place, number in {"par.data_sum": every[1][1], "par.token_scale": every[0][0]}.items():
        assert re.search(rf"at {place} \(model \d+ Net, {re.escape(__file__)}:{number}\)", str(caught.value))


def line():
    return sys._getframe(1).f_lineno


def trained(par, steps, **kwargs):
    """Run steps after which the order of the blocks is known."""
    for _ in range(steps):
        par.module(x_of(), **kwargs).sum().backward()
        par.module.zero_grad()


@pytest.mark.parametrize("order", [(0,), (1, 0), (0, 1, 1), (1,)], ids=str)
@on_ranks(2)
def test_a_data_rank_that_calls_other_blocks_is_refused_where_it_happens_in_the_first_step_and_later(order):
    for passes in ([FullyShard()], [FullyShard(reshard_after_forward=False)], [Replicate()]):
        for steps in (0, 3):
            par = applied(Net(), f"{passes[0].axes[0]}=2", passes)
            trained(par, steps)
            where = "" if steps else r": this rank is at (the forward of blocks\.|a backward)"
            with pytest.raises(MeshparError, match=f"ranks are at different places of their loops{where}"):
                par.module(x_of(), order=order if par.data_rank else (0, 1)).sum().backward()


@on_ranks(2)
def test_blocks_that_all_ranks_leave_out_or_call_again_after_some_steps_match_one_process():
    one, par = Net(), applied(Net(), "dp_shard=2", [FullyShard()])
    for order in [(0, 1)] * 3 + [(0,), (0, 1, 1), (0, 1), (1, 0), (0, 1), (0, 1), (0, 1), (0, 1), (1,)]:
        for module in (one, par.module):
            module.zero_grad()
            module(x_of(), order=order).square().mean().backward()
        assert_gradients(par.module, one)


@on_ranks(2)
def test_a_data_rank_whose_forward_fails_after_some_steps_is_refused_where_the_others_are():
    par = applied(Net(), "dp_shard=2", [FullyShard()])
    trained(par, 3)
    batches = [x_of()[:, :5], x_of()] if par.data_rank else [x_of(), x_of()]
    with pytest.raises(MeshparError, match="ranks are at different places of their loops"):
        for batch in batches:
            try:
                loss = par.module(batch).sum()
            except RuntimeError:
                continue
            loss.backward()


@on_ranks(2)
def test_parameters_that_one_rank_freezes_after_some_steps_are_named():
    par = applied(Net(), "dp_shard=2", [FullyShard()])
    trained(par, 3)
    par.module.blocks[1].requires_grad_(par.data_rank == 0)
    with pytest.raises(MeshparError, match=r"data ranks train different parameters in blocks\.1"):
        par.module(x_of())


@on_ranks(2)
def test_data_ranks_that_call_two_models_of_one_class_in_different_orders_are_refused():
    first, second = (applied(Net(), "dp_shard=2", [FullyShard()]) for _ in range(2))
    with pytest.raises(
        MeshparError, match=r"this rank is at .*\(model (\d+) Net, .*, rank \d at .*\(model (?!\1)\d+ Net, "
    ):
        (second if first.data_rank else first).module(x_of())


def test_whole_parameters_of_traced_modules_are_compared_without_reading_their_memory():
    with runtime.simulated(2), torch.device("meta"):
        par = Plan("dp_shard=2", [FullyShard(whole=("blocks.0.gain",))]).apply(Net(), LAYOUT)
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        par.module.blocks[0].gain._local_tensor = traced = torch.ones(8)
        before = par.run.find(WholeParameters).versions()
        traced.mul_(2.0)
        assert before != par.run.find(WholeParameters).versions()


@on_ranks(2)
def test_a_loss_of_ones_own_is_refused_also_after_an_error_in_a_forward():
    par = applied(Net(), "tp=2", [TensorParallel(sequence_parallel=False)])
    kept = par.module(x_of())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        par.module(x_of()[:, :5])
    with pytest.raises(MeshparError, match="their backward starts from different losses"):
        (kept.sum() * (1 + torch.distributed.get_rank())).backward()


@on_ranks(1)
def test_selective_recomputation_of_a_compiled_block_that_changes_buffers_is_explained():
    def trained(net):
        net(x_of()).square().mean().backward()
        return gradients(net)

    net, compiled = Net(norm=norm, order=(0,)), Compile(backend="aot_eager")
    selective = ActivationCheckpoint(mode="selective")
    with pytest.raises(
        ParallelError,
        match=r"HigherOrderOperator(.|\n)*use ActivationCheckpoint\(mode='full'\), or leave such blocks out: Compile",
    ):
        trained(applied(net, "dp_shard=1", [selective, compiled, FullyShard()]).module)
    expected = trained(copy.deepcopy(net))
    for passes in (
        [ActivationCheckpoint(mode="full"), compiled],
        [selective, Compile(backend="aot_eager", blocks=("blocks.*.ff",))],
    ):
        torch.testing.assert_close(trained(applied(net, "dp_shard=1", [*passes, FullyShard()]).module), expected)


@on_ranks(2)
def test_weights_of_a_block_are_not_used_outside_of_it():
    for passes in ([FullyShard()], [Replicate()]):
        par = applied(Net(outside=True), f"{passes[0].axes[0]}=2", passes)
        with pytest.raises(ParallelError, match="used where its weights are not gathered"):
            par.module(x_of())


class UsesPart(Net):
    """A part of its first block is called again behind the blocks, as diffusers' DiT does."""

    def forward(self, x):
        return x + self.blocks[0].ff(super().forward(x))


@on_ranks(2)
def test_a_part_that_is_called_from_outside_of_its_block_is_named_and_exact_as_a_block_of_its_own():
    net = UsesPart()
    net(x_of()).square().mean().backward()
    for unit in (FullyShard, Replicate):
        mesh = f"{unit().axes[0]}=2"
        with pytest.raises(
            ParallelError,
            match=r"blocks\.0\.ff is called from outside of blocks\.0.*\n.*make it a block of its own too, "
            rf"{unit.__name__}.*'blocks\.0\.ff'\)\), beside the layout's blocks; or {unit.__name__}\(blocks=\(\)\)",
        ):
            applied(net, mesh, [unit()]).module(x_of())
        for passes in ([unit(blocks=("blocks.*", "blocks.0.ff"))], [unit(blocks=())]):
            par = applied(net, mesh, passes)
            par.module(x_of()[par.data_rank :: 2]).square().mean().backward()
            assert_gradients(par.module, net)


class Fails(nn.Identity):
    fails = False

    def forward(self, x):
        return OutOfMemory.apply(x) if self.fails else x


def failing():
    """Its second block fails in backward by wish, where the block's weights are gathered."""
    net = Net()
    net.blocks[1].norm = Fails()
    return net


def fail_in_backward(*modules):
    for module in modules:
        (net,) = (child for child in module.modules() if hasattr(child, "fails"))
        net.fails = True
        with pytest.raises(MemoryError):
            module(x_of()).square().mean().backward()
        net.fails = False


def after_a_failed_backward(mesh="dp_shard=2", passes=None):
    """Return a module in one process and on a mesh after a backward and one that failed, and an optimizer of each."""
    plain, par = failing(), applied(failing(), mesh, passes or [FullyShard()])
    modules = plain, par.module
    optimizers = [torch.optim.SGD(child.parameters(), lr=0.5) for child in modules]
    for child in modules:
        child(x_of()).square().mean().backward()
    fail_in_backward(*modules)
    return plain, par, *optimizers


RECOVERING = [
    ("dp_shard=2", (FullyShard(),)),
    ("dp_shard=2", (FullyShard(reshard_after_forward=False, prefetch_backward=2),)),
    ("dp_shard=2", (ActivationCheckpoint(), FullyShard())),
    ("dp_replicate=2", (Replicate(),)),
    ("tp=2", (TensorParallel(),)),
]


@on_ranks(2)
def test_a_loop_that_catches_an_error_of_a_backward_and_goes_on_is_exact():
    for mesh, passes in RECOVERING:
        for clears_by_zeros in (False, True):
            plain, par, *optimizers = after_a_failed_backward(mesh, passes)
            for module, optimizer in zip((plain, par.module), optimizers):
                optimizer.zero_grad(set_to_none=not clears_by_zeros)
                for _ in range(2):
                    module(x_of()).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            assert_weights(par, plain)


@on_ranks(2)
def test_gradients_of_a_part_of_a_backward_are_refused():
    for mesh, passes in RECOVERING:
        _, par, _, optimizer = after_a_failed_backward(mesh, passes)
        for use in (optimizer.step, lambda module=par.module: module(x_of()), optimizer.step):
            with pytest.raises(MeshparError, match="an error ended a backward"):
                use()
        with torch.no_grad():
            par.module(x_of())
        optimizer.zero_grad()
        optimizer.step()


@on_ranks(1)
def test_a_step_of_another_thread_leaves_a_backward_of_another_model_alone():
    plain, other = Net(), applied(Net(), "dp_shard=1", [FullyShard()]).module
    par = applied(plain, "dp_shard=1", [FullyShard()])
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.5) for network in (plain, par.module, other)]
    errors = []

    def step(optimizer):
        try:
            optimizer.step()
        except MeshparError as error:
            errors.append(error)

    def step_elsewhere(grad):
        thread = threading.Thread(target=step, args=(optimizers[2],))
        thread.start()
        thread.join()

    other(x_of()).square().mean().backward()
    for network in (plain, par.module):
        output = network(x_of())
        output.register_hook(step_elsewhere)
        output.square().mean().backward()
    for optimizer in optimizers[:2]:
        optimizer.step()
    assert not errors
    assert_weights(par, plain)


@on_ranks(2)
def test_after_a_backward_that_failed_everything_works_on_the_shards():
    plain, par, *_ = after_a_failed_backward()
    table = str(par.describe())
    assert table == str(applied(failing(), "dp_shard=2", [FullyShard()]).describe())

    _, par, *_ = after_a_failed_backward()
    assert par.clip_grad_norm_(float("inf")) > 0
    assert all(isinstance(parameter, DTensor) for parameter in par.module.parameters())

    plain, par, *_ = after_a_failed_backward()
    changed = {name: 0.5 * tensor for name, tensor in plain.state_dict().items()}
    par.load_state_dict(changed)
    state = par.state_dict(full=True, everywhere=True)
    assert all(torch.equal(state[name], tensor) for name, tensor in changed.items())

    _, par, _, optimizer = after_a_failed_backward()
    with torch.no_grad():
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.zero_()
    assert not any(tensor.any() for tensor in par.state_dict(full=True, everywhere=True).values())

    _, par, *_ = after_a_failed_backward()
    par.materialize(weights=Given(changed))
    par.reshard()
    assert all(torch.equal(whole(parameter), changed[name]) for name, parameter in par.module.named_parameters())

    _, par, _, optimizer = after_a_failed_backward("dp_replicate=2", [Replicate()])
    if par.data_rank:
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].mul_(1.5)
    with pytest.raises(MeshparError, match="differ between ranks"):
        par.check_replicas()


@on_ranks(2)
def test_weights_that_were_gathered_ahead_of_a_change_are_not_used_after_it():
    net = Net()
    par = applied(net, "dp_shard=2", [FullyShard(prefetch_forward=1)])
    with torch.no_grad():
        torch.testing.assert_close(
            par.module.blocks[0](x_of()), net.blocks[0](x_of())
        )  # asks for the second block, too
        for network in (net, par.module):
            network.load_state_dict({name: 0.5 * value for name, value in Net().state_dict().items()})
        torch.testing.assert_close(par.module(x_of()), net(x_of()))


@on_ranks(2)
def test_no_call_sees_the_weights_of_an_earlier_one():
    net = Net()
    par = applied(net, "dp_shard=2", [FullyShard(reshard_after_forward=False)])
    with torch.no_grad():
        for part in (lambda module: module.blocks[0], lambda module: module):
            par.module(x_of())
            for parameter in (
                *net.parameters(),
                *par.module.parameters(),
            ):  # as an optimizer does; load_state_dict frees what is gathered
                parameter.mul_(0.5)
            torch.testing.assert_close(part(par.module)(x_of()), part(net)(x_of()))


@on_ranks(2)
def test_gradients_are_reduced_with_the_last_micro_batch_alone_also_after_a_step_that_was_left():
    for passes in ([FullyShard()], [Replicate()]):
        net = Net()
        par = applied(net, f"{passes[0].axes[0]}=2", passes)
        x = x_of()[2 * par.data_rank :][:2]
        for number, micro in enumerate(par.accumulate([x, x, x])):
            par.module(micro).sum().backward()
            if number == 1:
                break
        par.module.zero_grad()
        par.module(x).square().mean().backward()
        net(x_of()).square().mean().backward()
        assert_gradients(par.module, net)
        par.module.zero_grad()
        for number, micro in enumerate(par.accumulate([x, x])):
            assert {*gradients(par.module).values()} == {None}, number
            par.module(micro).square().mean().backward()
        net(x_of()).square().mean().backward()
        assert_gradients(par.module, net)
    assert par.token_scale(3 + 2 * par.data_rank) == 2 / 8
    assert par.data_sum(torch.tensor(1.0 + par.data_rank)) == 3


@on_ranks(4)
def test_the_split_is_tried_with_nothing_gathered():
    held = []

    def run(self):
        held.extend(map(is_gathered, units_with_parameters(par.module)))
        return tried(self)

    tried = SplitTest.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SplitTest, "run", run)
        par = applied(Net(), "dp_shard=2,tp=2", [TensorParallel(), FullyShard(reshard_after_forward=False)])
        par.module(x_of())
        par.verify(x_of())
    assert len(held) >= 4 and not any(held)


class Featured(Net):
    def features(self, x):
        return self.blocks[0].ff(x)


@on_ranks(4)
def test_layers_and_blocks_called_from_outside_are_refused():
    par = applied(net := Featured(), "dp_shard=2,tp=2", [TensorParallel(), FullyShard(min_params=10**6)])
    with pytest.raises(ParallelError, match="a layer is called where its weights are not gathered"):
        par.module.blocks[0].ff[0](x_of())
    torch.testing.assert_close(par.module(x_of()), net(x_of()))
    par.register_method("features")
    torch.testing.assert_close(par.module.features(x_of()), net.features(x_of()))
    with pytest.raises(MeshparError, match=r"blocks\.0 \(Block\) is called from outside of the module"):
        par.module.blocks[0](x_of())


class CountsAll(nn.Module):
    """A block that counts on all of its features."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(6, 8)

    def forward(self, x):
        left, right = self.up(x).split(6, -1)
        return self.down(left * right)


@on_ranks(2)
def test_an_error_of_a_block_called_alone_is_explained():
    layout = ModelLayout(blocks=("0",), tensor={"0.up": "packed_colwise:2", "0.down": "rowwise"})
    par = applied(nn.Sequential(CountsAll()), "tp=2", [TensorParallel()], layout)
    for call in (par.module, par.module[0]):
        with pytest.raises(
            ParallelError, match=r"0 \(CountsAll\) failed under tp=2(.|\n)*take the count from the tensor"
        ):
            call(x_of())


@on_ranks(2)
def test_an_error_without_a_message_is_explained():
    features = applied(Net(), "tp=2", [TensorParallel()]).run.find(Context)

    def fails():
        raise RuntimeError

    with pytest.raises(ParallelError, match="run the model without the plan"):
        Calls(Net(), Explanation(Net(), "tp=2", features=features, unit_pass=None).explained).explained(fails, (), {})


@on_ranks(2)
def test_a_forward_mode_derivative_equals_one_process_without_tensor_parallelism_and_is_refused_with_its_reason_under_it():
    x = x_of()
    want = torch.func.jvp(Net(), (x,), (x.sin(),))[1]
    par = applied(Net(), "dp_shard=2", [FullyShard()])
    torch.testing.assert_close(torch.func.jvp(par.module, (x,), (x.sin(),))[1], want)
    par = applied(Net(), "tp=2", [TensorParallel(styles={"blocks.*.gain": None})])
    with pytest.raises(
        ParallelError,
        match=r"likely cause: torch.func \(jvp, vmap, grad\)(.|\n)*use a mesh without tp, on which they equal one process's",
    ):
        torch.func.jvp(par.module, (x,), (x.sin(),))


@on_ranks(2)
def test_other_weights_are_noticed_also_after_a_forward():
    for passes in ([FullyShard()], [Replicate()]):
        par = applied(net := Net(), f"{passes[0].axes[0]}=2", passes)
        par.module(x_of())
        with torch.no_grad(), pytest.raises(ParallelError, match="was replaced by another tensor"):
            torch.func.functional_call(par.module, dict(net.named_parameters()), (x_of(),))


@on_ranks(2)
def test_gradients_of_what_data_ranks_share_are_not_taken_by_autograd():
    par = applied(Net(), "dp_shard=2", [FullyShard(whole=("blocks.*.gain",))])
    loss = par.module(x := x_of().requires_grad_()).sum()
    for wanted in ([par.module.blocks[0].ff[0].weight], [par.module.blocks[0].gain]):
        with pytest.raises(MeshparError, match=r"read parameter\.grad"):
            torch.autograd.grad(loss, wanted, allow_unused=True)
    with pytest.raises(MeshparError, match=r"read parameter\.grad"):
        loss.backward(inputs=list(par.module.parameters()))
    (found,) = torch.autograd.grad(loss, [x])
    assert found.abs().sum() > 0
    assert all(parameter.grad is None for parameter in par.module.parameters())


@on_ranks(2)
def test_a_recomputed_and_compiled_block_that_counts_is_refused():
    passes = [ActivationCheckpoint(), Compile(backend="eager"), FullyShard()]
    par = applied(Net(counts=True), "dp_shard=2", passes)
    with pytest.raises(MeshparError, match="changes its buffer 'calls' in forward"):
        par.module(x_of())


@on_ranks(4)
def test_a_step_that_was_left_between_two_reductions_leaves_nothing_behind():
    net = Net()
    par = applied(net, "dp_replicate=2,dp_shard=2", [HybridShard()])
    for micro in par.accumulate([x_of(), x_of()], reduce_each=True):
        par.module(micro[par.data_rank :][:1]).square().mean().backward()
        break
    par.module.zero_grad()
    par.module(x_of()[par.data_rank :][:1]).square().mean().backward()
    net(x_of()).square().mean().backward()
    assert_gradients(par.module, net)


@on_ranks(2)
def test_units_in_selectively_recomputed_blocks_equal_one_process():
    net = Net(order=(0, 1, 0))
    net(x_of()).square().mean().backward()
    passes = [
        ActivationCheckpoint(mode="selective"),
        FullyShard(blocks=("blocks.*.ff.0",), reshard_after_forward=False, prefetch_forward=1),
    ]
    par = applied(net, "dp_shard=2", passes)
    for _ in range(2):
        par.module.zero_grad()
        par.module(x_of()[2 * par.data_rank :][:2]).square().mean().backward()
    assert_gradients(par.module, net)


def norm():
    return nn.BatchNorm1d(8)


@on_ranks(2)
def test_the_models_own_recomputation_counts_batches_as_in_one_process():
    net = Net(norm=norm, recomputed=True)
    for passes in ([FullyShard()], [Replicate()]):
        par = applied(net, f"{passes[0].axes[0]}=2", passes)
        par.module(x_of()[2 * par.data_rank :][:2]).square().mean().backward()
        alone = copy.deepcopy(net)
        alone(x_of()).square().mean().backward()
        got = dict(par.module.named_buffers())
        for name, expected in alone.named_buffers():
            torch.testing.assert_close(got[name], expected, msg=name)
    par = applied(net, "dp_shard=2", [ActivationCheckpoint(), FullyShard()])
    with pytest.raises(MeshparError, match="remove one of the two"):
        par.module(x_of())


@on_ranks(2)
def test_what_is_split_when_the_model_returns_it_is_found():
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 6))
    tensor = {"0": "colwise", "2": "rowwise", "3": "colwise"}
    par = Plan("tp=2", [TensorParallel()]).apply(net, ModelLayout(tensor=tensor))
    with pytest.raises(ParallelError, match=r"returns other values on each rank \(output 0\)"):
        par.module(x_of())


@on_ranks(2)
def test_a_number_beside_split_logits_gets_its_whole_gradient():
    torch.manual_seed(0)
    net = Scaled()
    labels = torch.tensor([[1, 2, 3, 4]])
    nn.functional.cross_entropy(net(labels).flatten(0, 1), labels.flatten()).backward()
    layout = ModelLayout(tensor={"head": "head"})
    par = Plan("tp=2", [TensorParallel(loss_parallel=True)]).apply(copy.deepcopy(net), layout)
    token_loss(par.module(labels), labels).backward()
    torch.testing.assert_close(whole(par.module.scale.grad), net.scale.grad)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head, self.scale = nn.Embedding(16, 8), nn.Linear(8, 16), nn.Parameter(torch.tensor(0.7))

    def forward(self, ids):
        return self.scale * self.head(self.embed(ids))


class Packed(nn.Module):
    """Every style that moves features: packed, gathered, split by rows of a table and of a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv, self.out = nn.Embedding(16, 8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.gathered, self.head = nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, ids):
        x = self.embed(ids)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = x + self.out(torch.tanh(q * k) * v)
        return self.head(torch.tanh(self.gathered(x)))


PACKED_STYLES = {
    "embed": "vocab", "qkv": "packed_colwise:3", "out": "rowwise", "gathered": "colwise_gather", "head": "head",
}  # fmt: skip


@on_ranks(2)
def test_gradients_of_gradients_of_weights_equal_one_process():
    net, ids = Packed(), torch.arange(6)[None]
    par = applied(net, "tp=2", [TensorParallel()], ModelLayout(tensor=PACKED_STYLES))
    for module in (net, par.module):
        loss = module(ids).square().mean()
        grads = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
        norms = [grad.square().sum() for grad in grads]
        sum(one_norm.full_tensor() if isinstance(one_norm, DTensor) else one_norm for one_norm in norms).backward()
    assert_gradients(par.module, net)


@on_ranks(2)
def test_a_batch_of_ones_own_is_refused_in_a_later_step_too():
    par = applied(Packed(), "tp=2", [TensorParallel()], ModelLayout(tensor=PACKED_STYLES))
    for _ in range(5):
        par.module(torch.arange(6)[None]).square().mean().backward()
    with pytest.raises(MeshparError, match="ranks of tp got different batches"):
        par.module(torch.arange(6)[None] + torch.distributed.get_rank())


@on_ranks(2)
def test_settings_of_ones_own_are_refused_and_the_loop_goes_on_where_they_are_alike_again():
    for passes in ([Replicate()], [FullyShard()]):
        par = applied(Net(), f"{passes[0].axes[0]}=2", passes)
        optimizer = torch.optim.SGD(par.module.parameters(), lr=0.1)
        wrong = {
            0: {"lr": 0.1 * (1 + par.data_rank)},
            2: {"betas": (torch.tensor(0.9 + 1e-6 * par.data_rank),)},
            3: {"lr": 0.1 * (1 + par.data_rank)},
        }
        for step in range(5):
            par.module(x_of()).square().mean().backward()
            if step in wrong:
                optimizer.param_groups[0].update(wrong[step])
                said = r"betas=\(0\.[89]\d*,\)" if step == 2 else r"lr=0\.[12]"
                with pytest.raises(MeshparError, match=f"SGD with different settings, this rank with .*{said}"):
                    optimizer.step()
                optimizer.param_groups[0].update(lr=0.1, betas=(torch.tensor(0.9),))
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_clipping_between_micro_batches_is_refused():
    par = applied(Net(), "dp_shard=2", [FullyShard()])
    for number, _ in enumerate(par.accumulate(range(2))):
        par.module(x_of()).square().mean().backward()
        if number == 0:
            with pytest.raises(MeshparError, match="between the micro-batches"):
                par.clip_grad_norm_(1.0)
    assert float(par.clip_grad_norm_(1.0)) > 0


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.inlet, self.rnn, self.out = nn.Linear(8, 8), kind(8, 8, num_layers=2, bidirectional=True), nn.Linear(16, 8)

    def forward(self, x):
        self.rnn.flatten_parameters()
        return self.out(self.rnn(self.inlet(x)[None])[0][0])


def packed(module):
    """Do what a recurrent layer does on CUDA: give its weights other memory, where they stand side by side."""
    weights = [weight for weight in module._flat_weights if isinstance(weight, torch.Tensor) and not weight.is_meta]
    with torch.no_grad():
        memory = torch.cat([weight.reshape(-1) for weight in weights] or [torch.empty(0)])
        for weight, part in zip(weights, memory.split([weight.numel() for weight in weights])):
            weight.data = part.view_as(weight)


@on_ranks(2)
def test_recurrent_layers_equal_one_process_also_where_they_would_pack_their_weights():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.RNNBase, "flatten_parameters", packed)
        recurrent_layers_equal_one_process()


def recurrent_layers_equal_one_process():
    for kind, mesh, data in (
        (nn.LSTM, "dp_shard=2", [FullyShard()]),
        (nn.GRU, "dp_shard=2", [FullyShard(whole=("rnn",))]),
        (nn.LSTM, "dp_replicate=2", [Replicate(blocks=("rnn",))]),
        (nn.GRU, "tp=2", [TensorParallel(sequence_parallel=False)]),
        (nn.LSTM, "dp_shard=1,tp=2", [TensorParallel(sequence_parallel=False), FullyShard()]),
    ):
        one = Recurrent(kind)
        par = applied(one, mesh, data, ModelLayout(tensor={"inlet": "colwise_gather"}))
        steps = [torch.optim.SGD(network.parameters(), lr=0.1) for network in (one, par.module)]
        for _ in range(3):
            one(x_of()).square().mean().backward()
            par.module(x_of()[par.data_rank :: par.data_size]).square().mean().backward()
            for optimizer in steps:
                optimizer.step()
                optimizer.zero_grad()
        assert_weights(par, one)


@on_ranks(2)
def test_losses_that_cancel_to_about_zero_may_differ_by_the_rounding_of_their_terms():
    rank = torch.distributed.get_rank()
    groups = {"tp": torch.distributed.group.WORLD}
    compare_losses([torch.tensor(1e-9 * (1 - 2 * rank))], groups, torch.device("cpu"))
    with pytest.raises(ParallelError, match="starts from different losses"):
        compare_losses([torch.tensor(1e-6 * (1 - 2 * rank))], groups, torch.device("cpu"))


class Probed(nn.Module):
    """A block with a loss of its own, which it keeps; it adds what the block before it kept to its input by wish."""

    def __init__(self, detached):
        super().__init__()
        self.up, self.down, self.probe, self.detached = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 3), detached
        self.before = []

    def forward(self, x):
        x = x + sum(0.1 * earlier.aux for earlier in self.before)
        x = x + self.down(torch.relu(self.up(x)))
        self.aux = self.probe(x.detach() if self.detached else x).square().mean(-1, keepdim=True)
        return x


class Supervised(nn.Module):
    def __init__(self, detached=False, chained=False):
        super().__init__()
        torch.manual_seed(0)
        self.inlet, self.blocks, self.out = (
            nn.Linear(8, 8),
            nn.ModuleList(Probed(detached) for _ in range(3)),
            nn.Linear(8, 8),
        )
        for before, block in zip(self.blocks, list(self.blocks)[1:] if chained else []):
            block.before.append(before)

    def forward(self, x):
        x = self.inlet(x)
        self.first = x.square().mean()
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def both_losses(model, x):
    (model(x).square().mean() + sum(block.aux.mean() for block in model.blocks) + model.first).backward()


def kept_losses(model, x):
    model(x)
    sum(block.aux.mean() for block in model.blocks).backward()


def one_kept_loss(model, x):
    model(x)
    model.blocks[1].aux.mean().backward()


def first_loss(model, x):
    model(x)
    model.first.backward()


def one_after_the_other(model, x):
    model(x).square().mean().backward()
    for block in model.blocks:
        block.aux.mean().backward()


def begun_late(model, x):
    for weight in (0.0, 0.0, 0.0, 1.0):
        loss = model(x).square().mean()
        (loss + weight * sum(block.aux.mean() for block in model.blocks) if weight else loss).backward()


KEPT = [
    (both_losses, {}),
    (both_losses, dict(detached=True)),
    (both_losses, dict(chained=True)),
    (kept_losses, {}),
    (one_kept_loss, {}),
    (first_loss, {}),
    (one_after_the_other, dict(detached=True)),
    (begun_late, {}),
]
PROBED = ModelLayout(blocks=("blocks.*",), tensor={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
KEEPING = {
    "fsdp": ("dp_shard=2", [FullyShard(prefetch_backward=0)], KEPT),
    "recomputed": ("dp_shard=2", [ActivationCheckpoint(), FullyShard()], KEPT[:4:3]),
    "replicas": ("dp_replicate=2", [Replicate()], KEPT[:1]),
    "world": ("dp_replicate=2,dp_shard=1", [HybridShard(optimizer="world")], KEPT[:1]),
    "tp": ("tp=2", [TensorParallel()], KEPT[:2]),
}


@on_ranks(2)
def test_a_loss_that_leaves_a_block_by_an_attribute_equals_one_process():
    for name, (mesh, passes, habits) in KEEPING.items():
        for run, options in habits:
            one, par = Supervised(**options), Plan(mesh, passes).apply(Supervised(**options), PROBED)
            x, part = x_of(), slice(2 * par.data_rank, 2 * par.data_rank + 4 // par.data_size)
            for _ in range(2):
                run(one, x)
                run(par.module, x[part])
                told = lambda said: f"{run.__name__}, {options}, {name}: {said}"  # noqa: B023, E731
                assert_gradients(par.module, one, msg=told)


@on_ranks(2)
def test_a_kept_loss_has_no_backward_after_a_step():
    par = applied(Supervised(), "dp_shard=2", [FullyShard()], PROBED)
    optimizer = torch.optim.SGD(par.module.parameters(), lr=0.1)
    par.module(x_of()).sum().backward()
    par.module(x_of())
    optimizer.step()
    with pytest.raises(MeshparError, match="weights changed between a forward and its backward"):
        par.module.blocks[0].aux.mean().backward()
    par.module(x_of())
    with pytest.raises(MeshparError, match="a gradient of a gradient"):
        par.module.blocks[0].aux.mean().backward(create_graph=True)


class Gathers(TorchDispatchMode):
    """Count all-gathers, and swaps of two ranks, which are all-to-alls with sizes."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        self.count += "c10d::" in name and ("allgather" in name or ("alltoall" in name and bool(args[3])))
        return func(*args, **(kwargs or {}))


def evaluated(par, tokens):
    """How often an evaluation gathered, and its logits."""
    with Gathers() as gathers, torch.no_grad():
        logits = par.module(tokens).logits
    return gathers.count, logits


def check_kept(passes, mesh):
    par = Plan(mesh, passes).apply(on_meta(transformer)).materialize(seed=0)
    tokens, part = torch.arange(8)[None], local_tensor(par.module.head.weight)
    units = units_with_parameters(par.module)
    counts = [evaluated(par, tokens)[0] for _ in range(2)]
    assert min(counts) >= len(units), "in training mode a forward keeps nothing"
    par.module.eval()
    first, before = evaluated(par, tokens)
    again, same = evaluated(par, tokens)
    assert first >= len(units) and again == 0 and torch.equal(before, same)
    if dist.get_rank() == 1:  # one rank alone writes, and all gather
        with torch.no_grad():
            part.mul_(2)
    count, doubled = evaluated(par, tokens)
    assert count == first and not torch.equal(doubled, before)
    if dist.get_rank() == 1:
        part.data.div_(2)  # of which no version tells
    assert torch.equal(evaluated(par, tokens)[1], before) and evaluated(par, tokens)[0] == 0
    if dist.get_rank() == 0:  # another model's backward on one rank alone
        torch.ones(2, requires_grad=True).sum().backward()
    assert torch.equal(evaluated(par, tokens)[1], before)
    par.module.train()
    assert not any(map(is_gathered, units))
    grads = []
    for evaluates in (False, True):
        loss = par.module(tokens).logits.square().sum()
        if evaluates:  # with other weights, which are swapped back before the backward
            par.module.eval()
            for factor in (2.0, 0.5):
                with torch.no_grad():
                    part.mul_(factor)
                if factor == 2.0:
                    assert torch.equal(evaluated(par, tokens)[1], evaluated(par, tokens)[1])
        loss.backward()
        grads.append(gradients(par.module))
        par.module.zero_grad()
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


@on_ranks(2)
def test_an_evaluation_gathers_kept_weights_once_until_a_rank_writes():
    check_kept([FullyShard(reshard_after_forward=False)], "dp_shard=2")
    check_kept(
        [HybridShard(reshard_after_forward=False, optimizer="world", param_dtype=torch.bfloat16)],
        "dp_replicate=2,dp_shard=1",
    )


@pytest.mark.parametrize("keeps", [False, True])
@on_ranks(2)
def test_an_evaluation_that_fails_on_one_rank_inside_of_a_forward_leaves_the_next_one_exact(keeps):
    def fail(*_):
        if dist.get_rank() == 1:
            raise RuntimeError("no memory")

    par = Plan("dp_shard=2", [FullyShard(reshard_after_forward=not keeps)]).apply(chain())
    x = torch.arange(8, dtype=torch.float64).view(2, 4) / 8
    par.module.eval()
    with torch.no_grad():
        expected = [par.module(x) for _ in range(2)][-1]
        hook = par.module[1].register_forward_pre_hook(fail)
        try:
            par.module(x)
        except RuntimeError as error:
            assert "no memory" in str(error) and dist.get_rank() == 1
        hook.remove()
        for _ in range(3):
            assert torch.equal(par.module(x), expected)
    par.module.train()(x).sum().backward()
    assert all(parameter.grad is not None for parameter in par.module.parameters())


def chain():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).double()
