"""``torch.optim.Adafactor`` on sharded parameters: norms, row and column factors are those of the whole parameters."""

import functools
import io

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshpar import ContextParallel, ExpertParallel, FullyShard, HybridShard, MeshparError, TensorParallel
from meshpar._torch.calls import adafactor_on
from meshpar.checkpoints import CheckpointManager
from meshpar.tensors.adafactor import adafactor_by_parts
from meshpar.tensors.placements import local_tensor
from meshpar.testing import assert_parity, on_ranks, token_steps, whole
from meshpar.testing.parity import train_steps
from meshpar.training.replicated import _Packed, _Unpacked
from tests.passes.data.test_instead_of_fsdp2 import MIXTURE, ODD, SEQUENCE, WORLD, moments, same_bits, sharded, weights
from tests.support.models_for_parity import VOCAB
from tests.support.tiers import daily

FACTORS = functools.partial(torch.optim.Adafactor, lr=0.05, weight_decay=0.01)
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)


def partly_frozen():
    """The norms, up projections and keys are trained."""
    module = ODD()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(any(part in name for part in ("norm", "up", "k_proj")))
    return module


TRAINED = {
    "all": (ODD, FACTORS),
    "some": (
        partly_frozen,
        functools.partial(FACTORS, lr=torch.tensor(0.01), maximize=True, foreach=True, eps=(1e-7, 1e-2), d=2.0),
    ),
}
ON_FOUR = {
    "dp_shard=4": [FullyShard()],
    "dp_shard=2,tp=2": [SEQUENCE, FullyShard(offload="cpu", whole=("norm.weight",))],
    "dp_replicate=2,dp_shard=2": [HybridShard()],
    "dp_replicate=4,dp_shard=1": [WORLD],
    "dp_shard=2,cp=2": [ContextParallel(), FullyShard()],
}
CASES = [(trained, mesh) for trained in TRAINED for mesh in ON_FOUR]
DAILY = [("all", "dp_shard=2,tp=2")]


@pytest.mark.parametrize(("trained", "mesh"), daily(CASES, *DAILY))
@on_ranks(4)
def test_four_ranks_equal_one_process(trained, mesh):
    build, optimizer = TRAINED[trained]
    steps = token_steps(VOCAB, parts=2 if "tp" in mesh or "cp" in mesh else 4, micro_batches=2)
    assert_replicas_are_equal(assert_parity(build, mesh, ON_FOUR[mesh], steps, max_norm=0.5, optimizer=optimizer))


def assert_replicas_are_equal(par):
    for name, parameter in par.module.named_parameters():
        mine = whole(parameter)
        first = mine.clone()
        dist.broadcast(first, src=0)
        assert torch.equal(mine, first), name


ON_EXPERTS = {
    "dp_replicate=2,dp_shard=1,ep=2": [ExpertParallel(), WORLD],
    "dp_shard=1,cp=2,ep=2": [ExpertParallel(), ContextParallel(), FullyShard()],
    "dp_shard=1,ep=2,tp=2": [ExpertParallel(), TensorParallel(), FullyShard()],
}


@pytest.mark.parametrize("mesh", daily(ON_EXPERTS))
@on_ranks(4)
def test_divided_experts_equal_one_process(mesh):
    assert_parity(MIXTURE, mesh, ON_EXPERTS[mesh], token_steps(VOCAB, parts=4), optimizer=FACTORS)


SPLITS = [
    ((5, 3), (Shard(0), Replicate())), ((5, 3), (Shard(1), Shard(0))), ((9, 7), (Shard(0), Shard(0))),
    ((1, 7), (Shard(0), Shard(1))), ((5, 1), (Replicate(), Shard(1))), ((3, 4, 5), (Shard(0), Shard(2))),
    ((2, 3, 3, 3), (Shard(0), Shard(1))), ((6,), (Shard(0), Replicate())), ((), (Replicate(), Replicate())),
]  # fmt: skip
"""Shapes, of which ranks hold unequal and empty parts, and how they are divided over a mesh of 2 x 2."""


@on_ranks(4)
def test_every_split_has_the_values_of_the_whole_tensor():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        torch.manual_seed(0)
        plain = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape, _ in SPLITS]
        split = [
            distribute_tensor(tensor.clone(), mesh, placements)
            for tensor, (_, placements) in zip(plain, SPLITS, strict=True)
        ]
        alone, divided = torch.optim.Adafactor(plain, lr=0.1), torch.optim.Adafactor(split, lr=0.1)
        for _ in range(3):
            for one, other in zip(plain, split, strict=True):
                one.grad = torch.randn(one.shape, dtype=torch.float64).to(dtype)
                other.grad = distribute_tensor(one.grad, mesh, other.placements)
            alone.step()
            torch.optim.Adafactor.step(adafactor_on(divided, adafactor_by_parts))
        for one, other in zip(plain, split, strict=True):
            torch.testing.assert_close(whole(other), one, rtol=tolerance, atol=tolerance)
            for key, value in alone.state[one].items():
                held = divided.state[other][key]
                torch.testing.assert_close(
                    whole(held), value, rtol=tolerance, atol=tolerance, msg=lambda text, key=key: f"{key}: {text}"
                )
                most = max(local_tensor(other).numel(), *value.shape, 1)
                assert key == "step" or local_tensor(held).numel() <= most, "a factor is divided as its parameter is"


MESHES = [
    ("dp_replicate=2,dp_shard=2", [WORLD]), ("dp_replicate=2,dp_shard=2", [HybridShard()]),
    ("dp_shard=2,tp=2", [TensorParallel(), FullyShard()]), ("", []), ("dp_replicate=4,dp_shard=1", [WORLD]),
    ("dp_shard=4", [FullyShard()]),
]  # fmt: skip
STEPS = token_steps(VOCAB, parts=4, steps=3)


@pytest.mark.nightly
def test_factors_resume_bitwise_on_other_meshes_and_in_one_process(tmp_path):
    """Each mesh restores what the one before saved."""
    for number, (mesh, _) in enumerate(MESHES):
        on_ranks(4 if mesh else 1)(restored_and_saved)(str(tmp_path), number)
    on_ranks(4)(trained_on)(str(tmp_path))


def factored(number):
    mesh, passes = MESHES[number]
    par = sharded(passes, mesh)
    return par, FACTORS(par.module.parameters())


def restored_and_saved(root, number):
    par, optimizer = factored(number)
    manager = CheckpointManager(root)
    train_steps(par, STEPS[: 1 if number else 2], optimizer=optimizer)
    if number:
        manager.restore(par, optimizer)
    held = weights(par) | moments(par, optimizer)
    if number:
        same_bits(held, torch.load(f"{root}/first.pt"))
    elif dist.get_rank() == 0:
        torch.save(held, f"{root}/first.pt")
    manager.save(number, par, optimizer)


def trained_on(root):
    par, optimizer = factored(0)
    train_steps(par, STEPS, optimizer=optimizer)
    other, again = factored(0)
    CheckpointManager(root).restore(other, again)
    train_steps(other, STEPS[2:], optimizer=again)
    same_bits(weights(other) | moments(other, again), weights(par) | moments(par, optimizer))


class Counted(torch.optim.Adafactor):
    """As users derive from it: state of its own, and a step around torch's."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        return super().step(closure)


@on_ranks(4)
def test_a_class_of_the_users_own_and_a_closure():
    found = []
    for kind in (torch.optim.Adafactor, Counted):
        par = sharded()
        optimizer = kind(par.module.parameters(), lr=0.05)
        train_steps(par, STEPS[:1], optimizer=optimizer)
        loss = optimizer.step(
            lambda optimizer=optimizer: [group.update(lr=0.01) for group in optimizer.param_groups] and 3.0
        )
        assert loss == 3.0
        found.append(weights(par))
    assert optimizer.steps == 2
    same_bits(*found)


@pytest.mark.nightly
@on_ranks(4)
def test_whole_plain_state_of_one_process_is_divided_by_the_next_step():
    par = sharded()
    optimizer = FACTORS(par.module.parameters())
    train_steps(par, STEPS[:2], optimizer=optimizer)
    state = optimizer.state_dict()
    plain = {
        "param_groups": state["param_groups"],
        "state": {key: {name: whole(value) for name, value in kept.items()} for key, kept in state["state"].items()},
    }
    other = sharded()
    train_steps(other, STEPS[:2], optimizer=FACTORS(other.module.parameters()))
    again = FACTORS(other.module.parameters())
    again.load_state_dict(plain)
    for parallel, resumed in ((par, optimizer), (other, again)):
        train_steps(parallel, STEPS[2:], optimizer=resumed)
    same_bits(weights(other) | moments(other, again), weights(par) | moments(par, optimizer))
    largest = max(again.state, key=torch.Tensor.numel)
    again.state[largest]["col_var"] = torch.zeros(3, 4)
    message = r"Adafactor's col_var has shape \(3, 4\), and of a parameter of shape \(99, 36\) it has \(1, 36\)"
    with pytest.raises(MeshparError, match=message):
        train_steps(other, STEPS[:1], optimizer=again)


@on_ranks(2)
def test_factors_arrive_at_another_replica_as_they_were():
    """They have other shapes than their parameter, and columns are whole where rows are split."""
    par = sharded([FullyShard()], "dp_shard=2")
    optimizer = torch.optim.Adafactor(par.module.parameters(), lr=1e-2)
    train_steps(par, token_steps(VOCAB, parts=2, steps=1), optimizer=optimizer)
    sent = _Packed(file := io.BytesIO())
    sent.dump(list(optimizer.state.values()))
    parts = iter(sent.tensors)
    received = _Unpacked(io.BytesIO(file.getvalue()), lambda into: into.copy_(next(parts))).load()
    split = 0
    for (parameter, state), other in zip(optimizer.state.items(), received, strict=True):
        for key, value in state.items():
            if isinstance(value, DTensor):
                arrived = other[key].on(parameter.device_mesh)
                assert (arrived.shape, arrived.placements) == (value.shape, value.placements)
                assert torch.equal(arrived.to_local(), value.to_local())
                split += value.shape != parameter.shape
    assert split, "a factor has another shape"
