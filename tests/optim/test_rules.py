"""`Muon(update=...)`: nanochat's rule, whose state is of rows or columns, on shards as in one process."""

import functools

import pytest
import torch
from torch import nn

from meshpar import FullyShard, HybridShard, MeshparError, Replicate, TensorParallel
from meshpar.optim import MatrixRule, Muon
from meshpar.testing import on_ranks, token_steps
from tests.optim.given import advance, go_on_with_the_same_bits, initial, trained
from tests.optim.test_muon import ADAMW, Torchs, assert_equals, one_process
from tests.support.models_for_parity import VOCAB, gpt2, transformer
from tests.support.tiers import daily

COEFFICIENTS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def polar_express(matrix, dtype):
    x = matrix.to(dtype)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    for a, b, c in COEFFICIENTS:
        if x.size(-2) > x.size(-1):
            gram = x.mT @ x
            x = a * x + x @ (b * gram + c * (gram @ gram))
        else:
            gram = x @ x.mT
            x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x


def normed_by_neuron(update, second, dim, beta2):
    """Scale rows or columns by their running mean square, with the norm of the whole as before."""
    mean, size = update.float().square().mean(dim=dim, keepdim=True), update.size(dim)
    norm = (mean.sum(dim=(-2, -1), keepdim=True) * size).sqrt()
    second.lerp_(mean.to(second.dtype), 1 - beta2)
    scale = second.clamp_min(1e-10).rsqrt()
    scaled = (mean * size * scale.float().square()).sum(dim=(-2, -1), keepdim=True).sqrt()
    return update * (scale * (norm / scaled.clamp_min(1e-10))).to(update.dtype)


class Nanochat(MatrixRule):
    """The rule of nanochat's MuonAdamW."""

    def __init__(self, dtype=torch.bfloat16, beta2=0.95):
        self.dtype, self.beta2 = dtype, beta2

    def state(self, rows, columns):
        return {"second_momentum": (rows, 1) if rows >= columns else (1, columns)}

    def update(self, matrix, state, group):
        second = state["second_momentum"]
        dim = -1 if second.shape[-1] == 1 else -2
        return normed_by_neuron(polar_express(matrix, self.dtype), second, dim, self.beta2).to(matrix)

    def apply(self, weight, update, factor, group):
        lr = float(group["lr"]) * factor
        mask = (update * weight) >= 0
        weight.sub_(lr * update + lr * group["weight_decay"] * weight * mask)


class Published(Torchs):
    """nanochat's step of all matrices of a shape together, on whole tensors; torch.optim.AdamW of the rest."""

    def __init__(self, module, *, dtype, lr=0.02, weight_decay=0.1, **options):
        super().__init__(module, lr=lr, **options)
        self.dtype, self.lr, self.weight_decay, self.buffers = dtype, lr, weight_decay, {}

    @torch.no_grad()
    def step(self):
        shapes = {}
        for name, parameter in self.matrices.items():
            for number, place in enumerate(self.pieces(name, parameter)):
                shapes.setdefault(place.shape, []).append((name, number, place))
        for (rows, columns), together in shapes.items():
            grads = torch.stack([self.pieces(name, self.matrices[name].grad)[number] for name, number, _ in together])
            weights = torch.stack([place for *_, place in together])
            dim = -1 if rows >= columns else -2
            if (rows, columns) not in self.buffers:
                of_neurons = torch.zeros_like(grads[:, :, :1] if dim == -1 else grads[:, :1])
                self.buffers[rows, columns] = torch.zeros_like(grads), of_neurons
            momentum, second = self.buffers[rows, columns]
            momentum.lerp_(grads, 1 - 0.95)
            update = polar_express(grads.lerp_(momentum, 0.95), self.dtype)
            update = normed_by_neuron(update, second, dim, 0.95)
            lr, mask = self.lr * max(1.0, rows / columns) ** 0.5, (update * weights) >= 0
            weights.sub_(lr * update + lr * self.weight_decay * weights * mask)
            for (*_, place), weight in zip(together, weights, strict=True):
                place.copy_(weight)
        self.adamw.step()


def thirds(name, value):
    return value.chunk(3, 1 if value.shape[0] < value.shape[1] else 0) if "c_attn" in name else [value]


FLOAT32 = functools.partial(Muon, lr=0.02, ns_dtype="float32", adamw=ADAMW, update=Nanochat(torch.float32))
BFLOAT16 = functools.partial(Muon, lr=0.02, adamw=ADAMW, update=Nanochat())
PLANS = {
    "dp_shard=2": [FullyShard()],
    "tp=2": [TensorParallel()],
    "dp_replicate=2": [Replicate()],
    "dp_shard=2,tp=2": [TensorParallel(), FullyShard()],
    "dp_replicate=2,dp_shard=2": [HybridShard()],
    "dp_shard=2,tp=2, fused": [TensorParallel(), FullyShard()],
}


@pytest.mark.parametrize("mesh", daily(PLANS, "dp_shard=2", "dp_shard=2,tp=2"))
@on_ranks("mesh", timeout_s=400)
def test_the_published_rule_on_a_mesh_equals_one_process(mesh):
    steps = token_steps(VOCAB, steps=10, parts=4, length=32)
    build, pieces = (gpt2, thirds) if "fused" in mesh else (transformer, lambda name, value: [value])
    published = functools.partial(Published, dtype=torch.float32, pieces=pieces)
    expected = one_process(build, steps, published)
    assert_equals(expected, build, mesh.partition(", ")[0], PLANS[mesh], steps, FLOAT32, compare=assert_close)


def assert_close(expected, got):
    """Compare losses to 1e-5 and weights to 1e-4: rounding decides whether a weight with an update near 0 decays."""
    torch.testing.assert_close(torch.tensor(got.losses), torch.tensor(expected.losses), rtol=1e-5, atol=0)
    assert got.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        torch.testing.assert_close(got.weights[name], weight, rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("make", "dtype", "within"), [(FLOAT32, torch.float32, 1e-5), (BFLOAT16, torch.bfloat16, 2e-3)]
)
def test_one_process_takes_the_published_steps(make, dtype, within):
    """Within rounding: products of matrices together have other bits than those of each alone."""
    ours, theirs = initial(), initial()
    advance(theirs, Published(theirs, dtype=dtype), range(10))
    optimizer = trained(ours, make, 10)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(parameter, ours.get_parameter(name), rtol=0, atol=within, msg=name)
    assert optimizer.state[ours.up.weight]["second_momentum"].shape == (522,)
    assert optimizer.state[ours.down.weight]["second_momentum"].shape == (522,)


MESHES = {2: [("dp_shard=2", [FullyShard()])], 4: [("dp_shard=2,tp=2", [TensorParallel(), FullyShard()])]}
EVERY = {
    2: [*MESHES[2], ("tp=2", [TensorParallel()]), ("dp_replicate=2", [Replicate()])],
    4: [*MESHES[4], ("dp_replicate=2,dp_shard=2", [HybridShard()]), ("dp_shard=4", [FullyShard(offload="cpu")])],
}


@pytest.mark.parametrize("worlds", [MESHES, pytest.param(EVERY, marks=pytest.mark.nightly)], ids=["two", "every"])
def test_its_state_is_saved_and_every_mesh_goes_on_with_the_bits_of_one_process(worlds, tmp_path):
    go_on_with_the_same_bits(worlds, tmp_path, BFLOAT16)


def test_a_rule_without_a_state_replaces_the_iterations_alone():
    class Sign(MatrixRule):
        def update(self, matrix, state, group):
            assert not state
            return matrix.sign()

    module = nn.Linear(8, 8, bias=False)
    module.weight.grad = torch.randn(8, 8)
    expected = module.weight.detach() * (1 - 0.1 * 0.1) - 0.1 * module.weight.grad.sign()
    optimizer = Muon(module, lr=0.1, update=Sign())
    optimizer.step()
    assert torch.equal(module.weight, expected)
    assert optimizer.state[module.weight].keys() == {"momentum_buffer"}
    with pytest.raises(MeshparError, match="expected an object of a class that inherits meshpar"):
        Muon(module, update=torch.sign)
