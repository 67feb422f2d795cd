"""Batch norm under data parallelism equals one process: loss, gradients, weights, running statistics."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from meshpar import ActivationCheckpoint, Compile, FullyShard, HybridShard, ModelLayout, Plan, Replicate, TensorParallel
from meshpar._torch import BEFORE_2_13
from meshpar.passes.data.batch_norm import synchronize_batch_norm
from meshpar.testing import assert_parity, on_ranks, whole
from tests.support.tiers import daily

LAYOUT = ModelLayout(blocks=("blocks.*",), tensor={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
PLANS = {
    "replicate": ("dp_replicate=4", [Replicate()]),
    "fsdp": ("dp_shard=4", [FullyShard()]),
    "hsdp": ("dp_replicate=2,dp_shard=2", [HybridShard()]),
    "fsdp-tp": ("dp_shard=2,tp=2", [TensorParallel(), FullyShard()]),
    "replicate-tp": ("dp_replicate=2,tp=2", [TensorParallel(), Replicate()]),
    "recomputed": ("dp_shard=4", [ActivationCheckpoint(), FullyShard()]),
    "recomputed-in-part": ("dp_replicate=2,dp_shard=2", [ActivationCheckpoint(mode="selective"), HybridShard()]),
    "recomputed-under-tp": ("tp=4", [TensorParallel(), ActivationCheckpoint()]),
    "compiled": ("dp_shard=4", [Compile(backend="aot_eager"), FullyShard()]),
    "recomputed-and-compiled": ("dp_shard=4", [ActivationCheckpoint(), Compile(backend="aot_eager"), FullyShard()]),
}


class Block(nn.Module):
    def __init__(self, norm, **options):
        super().__init__()
        self.norm, self.up, self.down = norm(8, **options), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """A convolution with batch norm that nothing splits, and blocks with batch norm beside split projections."""

    def __init__(self, plane=nn.BatchNorm2d, vector=nn.BatchNorm1d, **options):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), plane(8, **options), nn.ReLU())
        self.blocks = nn.ModuleList(Block(vector, **options) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x).mean((2, 3))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(**options):
    torch.manual_seed(0)
    return Net(**options)


def batches(sizes, steps=3, dtype=torch.float32):
    """For each step a batch for each data rank, with as many samples as ``sizes`` says."""
    made = torch.Generator().manual_seed(1)
    return [
        # A mean far from zero: the variance as a difference of squares would be lost in float32.
        [
            ((3 + torch.randn(size, 3, 5, 5, generator=made)).to(dtype), torch.randint(5, (size,), generator=made))
            for size in sizes
        ]
        for _ in range(steps)
    ]


def train(module, steps, scale, clip):
    """Return the gradients of the first step, and the summed loss of each."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses, gradients = [], {}
    for number, (x, y) in enumerate(steps):
        loss = F.cross_entropy(module(x), y, reduction="sum")
        (loss * scale(len(y))).backward()
        if number == 0:
            gradients = {name: whole(parameter.grad) for name, parameter in module.named_parameters()}
        clip()
        losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), gradients


def alone(reference, steps):
    joined = [tuple(map(torch.cat, zip(*step))) for step in steps]
    return train(reference, joined, lambda count: 1 / count, lambda: None)


def assert_equals_one_process(mesh, passes, sizes, *, build=build, reference=build, tolerance=1e-5, evaluate=True):
    par = Plan(mesh, passes).apply(build(), LAYOUT)
    steps = batches(sizes[: par.data_size])
    expected = reference()
    want_losses, want = alone(expected, steps)
    losses, got = train(
        par.module, [step[par.data_rank] for step in steps], par.token_scale, lambda: par.clip_grad_norm_(float("inf"))
    )
    close("loss", par.data_sum(losses), want_losses, tolerance)
    typical = max(float(grad.abs().max()) for grad in want.values())
    for name, grad in want.items():
        close(f"gradient of {name}", got[name], grad, tolerance, floor=1e-3 * typical)
    weights = {name: whole(value) for name, value in par.module.state_dict().items()}
    assert list(weights) == list(expected.state_dict())
    for name, value in expected.state_dict().items():
        close(name, weights[name], value, tolerance)
    par.check_replicas()
    if evaluate:
        x = steps[0][0][0]
        close("evaluation", par.module.eval()(x), expected.eval()(x), tolerance)


def close(name, have, want, tolerance, floor=0.0):
    error, scale = float((have - want).detach().abs().max()), max(float(want.detach().abs().max()), floor)
    assert error <= tolerance * scale, f"{name} is off by {error:.2e} of {scale:.2e}"


def synchronized(norm, axes=("dp_shard",), sizes=(2,)):
    """A norm, and a copy of it that synchronises over all ranks."""
    other = copy.deepcopy(norm)
    synchronize_batch_norm(other, dist.init_device_mesh("cpu", sizes, mesh_dim_names=axes), axes)
    return norm, other


LONG = ("recomputed-and-compiled", "replicate")


@pytest.mark.parametrize(
    "plan",
    [
        *daily([plan for plan in PLANS if plan not in LONG], "fsdp-tp"),
        *(pytest.param(plan, marks=pytest.mark.long) for plan in LONG),
    ],
)
@on_ranks(4, timeout_s=170)
def test_batch_norm_equals_one_process(plan):
    assert_equals_one_process(*PLANS[plan], [4, 4, 4, 4])


@pytest.mark.parametrize("plan", daily(["replicate", "hsdp", "fsdp-tp", "recomputed"], "hsdp"))
@on_ranks(4)
def test_uneven_batches_equal_one_process(plan):
    assert_equals_one_process(*PLANS[plan], [2, 5, 3, 4])


@on_ranks(4)
def test_assert_parity_holds_batch_norm_against_the_concatenated_batch():
    steps = [[step[:4], step[4:]] for step in batches([2] * 8)]  # two micro-batches of four parts
    assert_parity(Net, "dp_shard=2,tp=2", [TensorParallel(), FullyShard()], steps, layout=LAYOUT, loss_sum=loss_sum)


def loss_sum(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)


@on_ranks(4)
def test_a_rank_without_samples_equals_one_process():
    expected, norm = synchronized(nn.BatchNorm1d(6), ("dp_replicate", "dp_shard"), (2, 2))
    made = torch.Generator().manual_seed(0)
    parts = [torch.randn(size, 6, generator=made) for size in (2, 0, 0, 3)]
    got, want = norm(parts[dist.get_rank()]), expected(torch.cat(parts))
    close("output", torch.cat(gathered(got, parts)), want, 1e-6)
    close("variance", norm.running_var, expected.running_var, 1e-6)


def gathered(mine, like):
    found = [torch.empty_like(tensor) for tensor in like]
    found[dist.get_rank()] = mine.detach().contiguous()
    for rank, tensor in enumerate(found):
        dist.broadcast(tensor, rank)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": None},
        {"track_running_stats": False},
        pytest.param({"affine": False}, marks=pytest.mark.nightly),
        pytest.param(
            {"bias": False},
            marks=[pytest.mark.nightly, pytest.mark.skipif(BEFORE_2_13, reason="this torch's batch norm has no bias=")],
        ),
        pytest.param({"momentum": 0.3, "eps": 0.1}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
@on_ranks(2)
def test_the_knobs_of_batch_norm_equal_one_process(options):
    evaluate = options.get("track_running_stats", True)
    made = {"build": lambda: build(**options), "reference": lambda: build(**options)}
    assert_equals_one_process("dp_shard=2", [FullyShard()], [1, 4], evaluate=evaluate, **made)


@on_ranks(2)
def test_evaluation_without_running_statistics_takes_those_of_all_ranks():
    par = Plan("dp_replicate=2", [Replicate()]).apply(build(track_running_stats=False), LAYOUT)
    (parts,) = batches([2, 3], steps=1)
    expected = build(track_running_stats=False).eval()(torch.cat([x for x, _ in parts])).split([2, 3])
    close("output", par.module.eval()(parts[dist.get_rank()][0]), expected[dist.get_rank()], 1e-5)


@on_ranks(2)
def test_sync_batch_norm_trains_on_any_device():
    convert = nn.SyncBatchNorm.convert_sync_batchnorm
    assert_equals_one_process("dp_shard=2", [FullyShard()], [2, 3], build=lambda: convert(build()))


@on_ranks(2)
def test_evaluation_does_not_communicate():
    expected, norm = synchronized(nn.BatchNorm2d(8).eval())
    if dist.get_rank() == 0:  # a collective would wait for the other rank, and time out
        x = torch.randn(2, 8, 3, 3)
        torch.testing.assert_close(norm(x), expected(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str
)
@on_ranks(2)
def test_input_dtypes(dtype, tolerance):
    expected, norm = synchronized(nn.BatchNorm2d(4, dtype=torch.float64 if dtype == torch.float64 else torch.float32))
    expected.double()
    made = torch.Generator().manual_seed(0)
    x = (100 + torch.randn(5, 4, 3, 3, generator=made, dtype=torch.float64)).to(dtype)
    up = torch.randn(x.shape, generator=made, dtype=torch.float64)
    mine = slice(0, 2) if dist.get_rank() == 0 else slice(2, 5)
    got, want = x[mine].clone().requires_grad_(), x.double().requires_grad_()
    y = norm(got)
    y.backward(up[mine].to(dtype))
    target = expected(want)
    target.backward(up)
    assert y.dtype == got.grad.dtype == dtype
    close("output", y.double(), target[mine], tolerance)
    close("gradient", got.grad.double(), want.grad[mine], 20 * tolerance)
    # The statistics are sums in float32 or wider, whatever the input is.
    close("mean", norm.running_mean.double(), expected.running_mean, min(tolerance, 1e-6))
    close("variance", norm.running_var.double(), expected.running_var, min(tolerance, 1e-6))


@on_ranks(2)
def test_mixed_precision_trains_and_evaluates():
    par = Plan("dp_shard=2", [FullyShard(param_dtype=torch.bfloat16)]).apply(build(), LAYOUT)
    (parts,) = batches([2, 2], steps=1)
    x = parts[dist.get_rank()][0]
    expected = build()
    expected(torch.cat([x for x, _ in parts]))
    par.module(x).float().sum().backward()
    assert par.module.stem[1].running_var.dtype == torch.float32
    close("variance", par.module.stem[1].running_var, expected.stem[1].running_var, 1e-2)
    close("evaluation", par.module.eval()(x).float(), expected.eval()(x), 3e-2)


@pytest.mark.nightly
@on_ranks(2, timeout_s=170)
def test_compiled_as_one_graph():
    expected, norm = synchronized(nn.BatchNorm1d(4))
    norm.compile(backend="aot_eager", fullgraph=True)
    parts = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        got, want = norm(parts[dist.get_rank()]), expected(parts.flatten(0, 1))
    close("output", got, want.view(2, 3, 4)[dist.get_rank()], 1e-5)
    close("variance", norm.running_var, expected.running_var, 1e-6)
    assert norm.num_batches_tracked == 2


@on_ranks(2)
def test_a_gradient_penalty_equals_one_process():
    expected, norm = synchronized(nn.BatchNorm1d(4))
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mine = slice(0, 2) if dist.get_rank() == 0 else slice(2, 5)

    def penalty(module, whole, part):
        own = whole.clone().requires_grad_()
        taken = own[part]
        (grad,) = torch.autograd.grad(module.double()(taken).pow(3).sum(), taken, create_graph=True)
        loss = grad.square().sum()
        loss.backward()
        return loss.detach(), own.grad[part], module.weight.grad

    loss, grad, weight = penalty(norm, x, mine)
    want_loss, want_grad, want_weight = penalty(expected, x, slice(0, 5))
    for value in (loss, weight):
        dist.all_reduce(value)
    close("penalty", loss, want_loss, 1e-12)
    close("its gradient of the input", grad, want_grad[mine], 1e-12)
    close("its gradient of the weight", weight, want_weight, 1e-12)


@on_ranks(2)
def test_a_single_value_per_channel_is_refused():
    _, norm = synchronized(nn.BatchNorm1d(4))
    with pytest.raises(RuntimeError, match="more than one value per channel in the batch of all data ranks"):
        norm(torch.ones(1 - dist.get_rank(), 4))


class WithActivation(nn.BatchNorm1d):
    def forward(self, input):
        return F.relu(F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, self.training))


def test_one_data_rank_keeps_any_batch_norm():
    assert Plan("dp_shard=1", [FullyShard()]).check(nn.Sequential(nn.Linear(4, 4), WithActivation(4)), ModelLayout(), 1)
