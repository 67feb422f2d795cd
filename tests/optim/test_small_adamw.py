"""SmallAdamW: given the same gradients, weights and states have the same bits on every mesh."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshpar import FullyShard, HybridShard, MeshparError, TensorParallel
from meshpar.optim import SmallAdamW
from meshpar.optim.small_adamw import _Codes
from meshpar.testing import on_ranks
from tests.accelerator.accelerated import accelerated
from tests.optim.given import alone, bits, drawn, give, go_on_with_the_same_bits, on, reset, same, trained
from tests.passes.data.test_instead_of_fsdp2 import WORLD
from tests.support.comparison import on_one_rank
from tests.support.tiers import daily

KINDS = [
    functools.partial(SmallAdamW, states=states, stochastic=stochastic, lr=0.01)
    for states in ("8bit", "bfloat16")
    for stochastic in (False, True)
]
MESHES = {
    2: [("dp_shard=2", [FullyShard()]), ("tp=2", [TensorParallel()])],
    3: [("dp_shard=3", [FullyShard()])],
    4: [
        ("dp_shard=4", [FullyShard()]),
        ("dp_replicate=2,dp_shard=2", [HybridShard()]),
        ("dp_replicate=2,dp_shard=2", [WORLD]),
        ("dp_shard=2,tp=2", [TensorParallel(), FullyShard()]),
    ],
}


DAILY = {2: KINDS[:1], 3: KINDS[3:], 4: KINDS[3:]}
"""On two ranks by day the states in 8 bits, on more of them those in bfloat16 with stochastic rounding."""


@pytest.mark.parametrize("every", daily([False, True], False, ids=lambda every: "every kind" if every else "by day"))
@pytest.mark.parametrize("ranks", MESHES)
@on_ranks("ranks", timeout_s=400)
def test_ranks_have_the_bits_of_one_process(ranks, every):
    kinds = KINDS if every else DAILY[ranks]
    expected = on_one_rank(lambda: [alone(make, 20) for make in kinds])
    for mesh, passes in MESHES[ranks]:
        par = on(mesh, passes)
        for make, bits_alone in zip(kinds, expected, strict=True):
            same(bits_alone, bits(par.module, trained(reset(par), make, 20)))


@pytest.mark.parametrize(
    ("make", "worlds"),
    [
        (KINDS[0], {4: MESHES[4][2:]}),
        pytest.param(KINDS[0], MESHES, marks=pytest.mark.nightly),
        pytest.param(KINDS[3], MESHES, marks=pytest.mark.nightly),
    ],
)
def test_a_run_resumes_on_another_mesh(make, worlds, tmp_path):
    go_on_with_the_same_bits(worlds, tmp_path, make, half=4)


def test_states_take_a_quarter_and_half_of_float32():
    layer = nn.Linear(1024, 1024)
    for states, most in (("8bit", 0.27), ("bfloat16", 0.51)):
        optimizer = SmallAdamW(layer, states=states)
        give(layer, 0)
        optimizer.step()
        values = [value for state in optimizer.state.values() for value in state.values()]
        held = sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
        assert held <= most * 8 * sum(parameter.numel() for parameter in layer.parameters())


@pytest.mark.parametrize("states", ["8bit", "bfloat16"])
def test_training_is_close_to_adamw(states):
    torch.manual_seed(0)
    layers = [nn.Linear(96, 64, bias=False) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    options = {"lr": 0.02, "weight_decay": 0.0, "betas": (0.9, 0.95)}
    optimizers = [torch.optim.AdamW(layers[0].parameters(), **options), SmallAdamW(layers[1], states=states, **options)]
    x, target = torch.randn(256, 96), torch.randn(256, 64)
    losses = []
    for layer, optimizer in zip(layers, optimizers, strict=True):
        for _ in range(60):
            optimizer.zero_grad()
            loss = (layer(x) - target).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_stochastic_rounding_is_right_on_average():
    layer = nn.Linear(64, 64, bias=False)
    optimizer = SmallAdamW(layer, states="bfloat16", stochastic=True, betas=(0.9, 0.999))
    for _ in range(500):
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
    second = optimizer.state[layer.weight]["exp_avg_sq"].float()  # rounded to the nearest value it stays at 0.25
    assert second.mean().item() == pytest.approx(1 - 0.999**500, rel=0.01) and second.std() > 0


@pytest.mark.parametrize("signed", [False, True])
def test_the_nearest_value_is_found(signed):
    codes = _Codes(signed, torch.device("cpu"))
    numbers = torch.cat([torch.randn(100_000), 10.0 ** -torch.rand(100_000).mul(9), codes.values, -codes.values])
    numbers = torch.cat([numbers, (codes.values[1:] + codes.values[:-1]) / 2]).clamp(-1 if signed else 0, 1)
    middles = (codes.values[1:] + codes.values[:-1]) / 2
    assert torch.equal(codes.smaller(numbers, middles=True), torch.bucketize(numbers, middles, out_int32=True))
    smaller = torch.bucketize(numbers, codes.values, out_int32=True)
    assert torch.equal(codes.smaller(numbers, middles=False), smaller)


@on_ranks(4)
def test_a_rank_may_hold_no_column():
    layer = nn.Linear(3, 1500, bias=False)
    layer.weight = nn.Parameter(
        distribute_tensor(drawn("weight", (1500, 3), -1), init_device_mesh("cpu", (4,)), [Shard(1)])
    )
    optimizer = trained(layer, SmallAdamW, 3)
    same(alone(SmallAdamW, 3, lambda: nn.Linear(3, 1500, bias=False)), bits(layer, optimizer))


def test_options_that_it_does_not_know_are_refused():
    with pytest.raises(MeshparError, match="states must be '8bit' or 'bfloat16', got 'int4'"):
        SmallAdamW(nn.Linear(2, 2), states="int4")
    with pytest.raises(MeshparError, match="betas from 0 to 1"):
        SmallAdamW(nn.Linear(2, 2), betas=(0.9, 1.0))


class Operators(TorchDispatchMode):
    """Counts the operators that are dispatched."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize(
    "layer", [lambda: nn.Linear(64, 64, bias=False), lambda: nn.LayerNorm(64, bias=False)], ids=["matrices", "vectors"]
)
def test_many_small_parameters_cost_three_operators_each_at_most(make, layer):
    module = nn.ModuleList(layer() for _ in range(200))
    with accelerated():
        optimizer = trained(module, make, 1)
        give(module, 1)
        with Operators() as operators:
            optimizer.step()
    assert operators.count <= 3 * 200


@pytest.mark.parametrize("make", KINDS)
def test_parameters_that_step_together_have_the_bits_of_each_alone(make):
    """Of several shapes, dtypes and steps, in chunks of which one holds several parameters, and parts of them."""
    shapes = [(64, 96), (70, 96), (1, 96), (5, 7, 300), (300, 300), (1000, 300), (96,), (96,), (), (1,), (0, 300)]
    module = nn.ParameterDict({f"{n}": nn.Parameter(drawn("initial", shape, n)) for n, shape in enumerate(shapes * 2)})
    for name, parameter in module.items():
        parameter.data = parameter.data.bfloat16() if int(name) >= len(shapes) else parameter.data
    apart = {name: nn.ParameterDict({name: nn.Parameter(one.detach().clone())}) for name, one in module.items()}
    optimizers = [make(one) for one in (module, *apart.values())]
    for step in range(3):
        for one in (module, *apart.values()):
            give(one, step)
        if step == 1:
            module["3"].grad = apart["3"]["3"].grad = None
        for optimizer in optimizers:
            optimizer.step()
    alone_ = {}
    for one, optimizer in zip(apart.values(), optimizers[1:], strict=True):
        alone_ |= bits(one, optimizer)
    same(alone_, bits(module, optimizers[0]))
