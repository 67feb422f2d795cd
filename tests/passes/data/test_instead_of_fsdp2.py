"""Collectives of units: sums by all-to-alls on CPUs, and HybridShard(optimizer="world"), which equals one process."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from meshpar import (
    ActivationCheckpoint,
    ExpertParallel,
    FullyShard,
    HybridShard,
    MeshparError,
    MeshSpec,
    Plan,
    Replicate,
    TensorParallel,
)
from meshpar._torch.fsdp import units_with_parameters
from meshpar.checkpoints import CheckpointManager
from meshpar.forecasting import Batch, Hardware, forecast
from meshpar.forecasting.hardware import RESERVED_RANGE
from meshpar.forecasting.recorder import Recorder
from meshpar.forecasting.search import search
from meshpar.passes.data import instead_of_fsdp2
from meshpar.passes.data.instead_of_fsdp2 import ReplicaShards, scatter_sums
from meshpar.tensors.placements import local_tensor
from meshpar.testing import assert_parity, on_ranks, one_process, random_tokens, token_loss_sum, token_steps, whole
from meshpar.testing.parity import train_steps
from tests.support.comparison import gradients
from tests.support.models_for_parity import VOCAB, on_meta, transformer
from tests.support.tiers import daily

WORLD = HybridShard(optimizer="world")
ODD = functools.partial(transformer, vocab_size=99, dim=36, heads=6, kv_heads=2, hidden=50, qk_norm=True, tied=True)
"""Rows of 99, 50, 36, 12 and 6: over 4 or 8 ranks slices differ in size, and some are empty."""
SEQUENCE = TensorParallel(sequence_parallel=True, loss_parallel=True)


def sharded(passes=(WORLD,), mesh="dp_replicate=2,dp_shard=2", build=ODD):
    return Plan(mesh, list(passes)).apply(on_meta(build)).materialize(seed=0)


def weights(par):
    return {name: whole(parameter) for name, parameter in par.module.named_parameters()}


def same_bits(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def sgd(par):
    return torch.optim.SGD(par.module.parameters(), lr=0.1, momentum=0.9, nesterov=True)


class PlainReduce(instead_of_fsdp2._Reduce):
    """The sum over replicas as accelerators do it."""

    def __init__(self, *groups, exchanges, by_tree):
        super().__init__(*groups, exchanges=not exchanges, by_tree=by_tree)


@on_ranks(4)
def test_two_replicas_of_two_shards_equal_one_process():
    steps = token_steps(VOCAB, parts=4, micro_batches=2)
    expected = one_process(ODD, steps, max_norm=0.5)
    assert_parity(ODD, "dp_replicate=2,dp_shard=2", [WORLD], steps, expected=expected, max_norm=0.5)
    options = dict(reshard_after_forward=False, offload="cpu", prefetch_forward=1, whole=("norm.weight",))
    passes = [ActivationCheckpoint(), HybridShard(optimizer="world", **options)]
    assert_parity(ODD, "dp_replicate=2,dp_shard=2", passes, steps, expected=expected, max_norm=0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(instead_of_fsdp2, "_Reduce", PlainReduce)
        assert_parity(ODD, "dp_replicate=4,dp_shard=1", [WORLD], steps, expected=expected, max_norm=0.5)


MIXTURE = functools.partial(transformer, experts=8, expert_hidden=16, qk_norm=True)


EXPERTS = "dp_replicate=2,dp_shard=1,ep=2"


@pytest.mark.nightly
@on_ranks(4)
def test_divided_experts_equal_one_process():
    assert_parity(MIXTURE, EXPERTS, [ExpertParallel(), WORLD], token_steps(VOCAB, parts=4, micro_batches=2))


@pytest.mark.nightly
@on_ranks(4)
def test_divided_experts_resume_on_replicas_that_each_have_an_optimizer_and_back(tmp_path):
    steps = token_steps(VOCAB, parts=4, micro_batches=2)
    meshes = [(EXPERTS, [ExpertParallel(), pass_]) for pass_ in (WORLD, HybridShard(), WORLD)]
    manager, seen = CheckpointManager(tmp_path), []
    for number, (mesh, passes) in enumerate(meshes):
        par = sharded(passes, mesh, MIXTURE)
        optimizer = torch.optim.AdamW(par.module.parameters(), lr=1e-2, fused=True)
        train_steps(par, steps[:1], optimizer=optimizer)
        if number:
            manager.restore(par, optimizer)
        manager.save(number, par, optimizer)
        seen.append(weights(par) | moments(par, optimizer))
    same_bits(seen[0], seen[1])
    same_bits(seen[1], seen[2])


@pytest.mark.parametrize("dtype", daily([torch.bfloat16, torch.float16, None], torch.bfloat16, ids=str))
@on_ranks(4)
def test_it_has_the_bits_of_plain_hybrid_sharding(dtype):
    """Momentum and masters are float32 whatever the dtype of the shards that a replica keeps."""
    steps = token_steps(VOCAB, parts=4, micro_batches=2)
    runs = []
    for optimizer in ("replica", "world"):
        reduced = None if dtype is None else torch.float32
        par = sharded([HybridShard(optimizer=optimizer, param_dtype=dtype, reduce_dtype=reduced)])
        record = train_steps(par, steps, optimizer=sgd(par))  # unclipped: the norm adds up in another order
        runs.append(record.weights | {str(number): torch.tensor(value) for number, value in enumerate(record.losses)})
    same_bits(*runs)
    assert {tensor.dtype for tensor in par.run.find(ReplicaShards).tensors()} == {dtype or torch.float32}


@on_ranks(4)
def test_micro_batches_that_are_reduced_each_add_up_in_slices():
    batches = [random_tokens(99, 1, 8, seed=10 * dist.get_rank() + number) for number in range(3)]
    found = []
    for reduces in (False, True):
        par = sharded()
        for batch in par.accumulate(batches, reduce_each=reduces):
            token_loss_sum(par.module, batch)[0].backward()
        found.append(gradients(par.module))
    for name, grad in found[0].items():
        assert torch.allclose(grad, found[1][name], rtol=1e-5, atol=1e-6 * float(grad.abs().max())), name


@on_ranks(4)
def test_every_write_to_a_parameter_is_in_the_next_forward():
    par, batch = sharded(), random_tokens(99, 1, 8, seed=0)

    def loss():
        with torch.no_grad():
            return float(token_loss_sum(par.module, batch)[0])

    seen, state = [loss()], {name: 2 * value for name, value in par.state_dict(full=True, everywhere=True).items()}
    with torch.no_grad():
        for parameter in par.module.parameters():
            parameter.mul_(1.1)
        seen.append(loss())
        if dist.get_rank() == 3:  # whoever writes, all gather: here only the last rank's slices change
            local_tensor(par.module.layers[0].mlp.up.weight).zero_()
        seen.append(loss())
        for factor in (2, 0.5):  # past autograd's count of writes
            for parameter in par.module.parameters():
                local_tensor(parameter).data.mul_(factor)
            seen.append(loss())
        assert seen[-1] == seen[-3] and seen.pop() != seen.pop()
    par.module.load_state_dict(state)
    seen.append(loss())
    average = par.averaged(0.5)
    average.update()
    par.load_state_dict({name: value / 2 for name, value in state.items()})
    seen.append(loss())
    with average.swapped():
        assert loss() == seen[-2]
    assert loss() == seen[-1] == seen[0] and len(set(seen)) == 4
    optimizer = torch.optim.SGD(par.module.parameters(), lr=0.1)
    token_loss_sum(par.module, batch)[0].backward()
    optimizer.step()
    assert loss() < seen[0]


RESUMED = {
    "dp_replicate=2,dp_shard=2": [WORLD],
    "dp_replicate=4,dp_shard=1": [WORLD],
    "dp_replicate=1,dp_shard=4": [HybridShard()],
    "dp_shard=2,tp=2": [TensorParallel(), FullyShard()],
}
BY_DAY = ("dp_replicate=2,dp_shard=2", "dp_shard=2,tp=2")


@pytest.mark.nightly
@pytest.mark.parametrize("meshes", [BY_DAY, tuple(RESUMED)], ids=" then ".join)
@on_ranks(4)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped_on_this_mesh_and_its_values_on_others(tmp_path, meshes):
    steps = token_steps(VOCAB, parts=4, steps=4)
    adamw = lambda par: torch.optim.AdamW(par.module.parameters(), lr=1e-2, eps=1e-3, fused=True)  # noqa: E731
    par = sharded()
    optimizer = adamw(par)
    train_steps(par, steps[:2], optimizer=optimizer)
    manager = CheckpointManager(tmp_path)
    manager.save(2, par, optimizer)
    middle = weights(par) | moments(par, optimizer)
    train_steps(par, steps[2:], optimizer=optimizer)
    for mesh in meshes:
        passes = RESUMED[mesh]
        other = sharded(passes, mesh)
        fresh = adamw(other)
        train_steps(other, steps[:1], optimizer=fresh)
        if passes == [WORLD]:  # its shards are up to date, and restoring makes them old
            with torch.no_grad():
                other.module(steps[0][0][0]["input_ids"])
        manager.restore(other, fresh)
        same_bits(weights(other) | moments(other, fresh), middle)
        manager.save(3, other, fresh, replace=True)
        if passes == [WORLD] and "2,dp" in mesh:
            train_steps(other, steps[2:], optimizer=fresh)
            same_bits(weights(other), weights(par))
    back = sharded()
    again = adamw(back)
    manager.restore(back, again, step=3)  # written by the last of the others
    same_bits(weights(back) | moments(back, again), middle)


@on_ranks(4)
def test_micro_batches_of_a_step_share_what_was_gathered():
    par, batch = sharded(), random_tokens(99, 1, 8, seed=0)
    sent, inner = [], instead_of_fsdp2._TwoHopGather._over_replicas

    def counted(self, mine):
        sent.append(mine.numel())
        inner(self, mine)

    def step(between=lambda: None):
        sent.clear()
        for number, micro in enumerate(par.accumulate([batch, batch])):
            if number:
                between()
            token_loss_sum(par.module, micro)[0].backward()
        par.module.zero_grad()
        return sum(sent)

    def evaluate():
        with torch.no_grad():
            token_loss_sum(par.module, batch)
        if dist.get_rank() == 0:
            par.describe()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(instead_of_fsdp2._TwoHopGather, "_over_replicas", counted)
        once = step()
        assert once == step() > 0
        assert step(evaluate) == 3 * once
        for written in (next(par.module.parameters()), next(par.module.parameters()).data):
            with pytest.raises(MeshparError, match="written between the micro-batches of one step"):
                step(lambda written=written: local_tensor(written).detach().mul_(2))
            par.module.zero_grad()


@on_ranks(4)
def test_slices_of_all_units_travel_from_the_start_of_a_forward_in_a_group_of_their_own():
    par = sharded()
    shards, begun = par.run.find(ReplicaShards), []
    ((axis, group),) = shards.groups
    assert axis == "dp_replicate"
    assert (axis, group) in list(par.groups())
    assert group is not dict(par.groups())["dp_shard"]
    note = lambda *_: begun.append([gather.fresh for gather in shards._gathers])  # noqa: E731
    par.module.layers[0].register_forward_pre_hook(note)
    token_loss_sum(par.module, random_tokens(99, 1, 8, seed=0))
    assert all(begun[0]) and len(begun[0]) > 2


@on_ranks(4)
def test_weights_swapped_for_an_evaluation_leave_the_backward_around_it_alone():
    batch, found = random_tokens(99, 1, 8, seed=0), []
    for passes in (WORLD,), (HybridShard(),):
        par = sharded(passes)
        for micro in par.accumulate([batch, batch]):
            loss = token_loss_sum(par.module, micro)[0]
            for factor in (2, 0.5):
                for parameter in par.module.parameters():
                    local_tensor(parameter).data.mul_(factor)
                if factor == 2:
                    with torch.no_grad():
                        token_loss_sum(par.module, micro)
            loss.backward()
        found.append(gradients(par.module))
    torch.testing.assert_close(*found)


def moments(par, optimizer):
    named = par.module.named_parameters()
    return {
        f"{name}/{key}": whole(value) for name, parameter in named for key, value in optimizer.state[parameter].items()
    }


def test_optimizer_state_is_divided_by_the_replicas_and_described_to_the_byte():
    passes = {scope: [HybridShard(optimizer=scope, param_dtype=torch.bfloat16)] for scope in ("replica", "world")}
    described = {}
    for scope, chosen in passes.items():
        with torch.device("meta"):
            described[scope] = Plan("dp_replicate=2,dp_shard=2", chosen).describe(transformer())
    plain, world = described["replica"], described["world"]
    assert 2 * world.optimizer_bytes == plain.optimizer_bytes and 2 * world.parameter_bytes == plain.parameter_bytes
    assert (world.shard_bytes, plain.shard_bytes) == (world.parameter_bytes, 0), "the whole shard in bfloat16"
    assert "of shards for its replica" in str(world) and "of shards" not in str(plain)
    on_ranks(4)(real_bytes)(passes, described)


def real_bytes(passes, expected):
    for scope, chosen in passes.items():
        par = sharded(chosen, build=transformer)
        optimizer = torch.optim.AdamW(par.module.parameters(), fused=True)
        train_steps(par, token_steps(VOCAB, parts=4, steps=1), optimizer=optimizer)
        state = [value for states in optimizer.state.values() for value in states.values() if value.ndim]
        shards = par.run.find(ReplicaShards)
        assert par.describe() == expected[scope]
        assert sum(local_tensor(value).untyped_storage().nbytes() for value in state) == expected[scope].optimizer_bytes
        assert (0 if shards is None else sum(value.nbytes for value in shards.tensors())) == expected[scope].shard_bytes


@pytest.mark.long
def test_the_search_proposes_it_where_replicas_cannot_each_have_an_optimizer():
    """In nodes of two ranks only all 8 fit."""
    model = on_meta(lambda: transformer(dim=256, hidden=1024, layers=8))
    count = sum(parameter.numel() for parameter in model.parameters())
    h100 = Hardware.load("h100")
    small = replace(h100, node=2, memory=h100.reserved + RESERVED_RANGE[1] * 6 * count)
    found = search(
        model, model.meshpar_layout(), Batch(sequence=16), small, 8, recompute=("full",), micro_batches=(1,), top=0
    )
    mesh = MeshSpec(dp_replicate=4, dp_shard=2)
    proposed = next(
        candidate for candidate in found.fitting if candidate.settings.mesh() == mesh and candidate.settings.reshard
    )
    assert proposed.settings.world and "optimizer=world" in str(proposed.settings)
    exact = forecast(Plan(mesh, proposed.settings.passes()), model, Batch(sequence=16), hardware=small, depth="all")
    assert exact.verdict != "does not fit" and abs(proposed.peak - exact.memory.peak) < 0.1 * exact.memory.peak, (
        proposed.peak,
        exact.memory.peak,
    )
    hybrids = [
        candidate.settings
        for candidate in (*found.fitting, *found.out)
        if candidate.settings.replicas > 1 and candidate.settings.tp == 1
    ]
    assert {hybrid.shards: hybrid.world for hybrid in hybrids} == {2: True, 4: False}


@pytest.mark.parametrize("op", ["SUM", "AVG"])
@on_ranks(4)
def test_both_ways_give_the_sums(op):
    torch.manual_seed(dist.get_rank())
    inputs = [torch.randn(4 * count) for count in (1, 6)]
    expected = [value.clone() for value in inputs]
    for value in expected:
        dist.all_reduce(value)
        value /= 4 if op == "AVG" else 1
    for exchanges in (False, True):
        outputs = [torch.empty(len(value) // 4) for value in inputs]
        scatter_sums(outputs, inputs, getattr(dist.ReduceOp, op), dist.group.WORLD, exchanges=exchanges)
        torch.testing.assert_close(outputs, [value.chunk(4)[dist.get_rank()] for value in expected])


@on_ranks(4)
def test_sums_in_half_precision_are_rounded_once():
    """1 + 3 x 2^-9, of which each sum in bfloat16 would drop a part."""
    mine = torch.full((4,), 1.0 if dist.get_rank() == 0 else 2**-9, dtype=torch.bfloat16)
    got = torch.empty(1, dtype=torch.bfloat16)
    scatter_sums([got], [mine], dist.ReduceOp.SUM, dist.group.WORLD, exchanges=True)
    assert got.item() == torch.tensor(1 + 3 * 2**-9).bfloat16().item() != 1.0


@pytest.mark.parametrize(
    ("mesh", "data_pass"),
    [
        ("dp_replicate=2,dp_shard=2", HybridShard(optimizer="replica")),
        ("dp_replicate=2,dp_shard=2", HybridShard(optimizer="world")),
        ("dp_shard=4", FullyShard()),
    ],
    ids=str,
)
@on_ranks("mesh")
def test_no_unit_makes_a_reduce_scatter_on_a_cpu(mesh, data_pass):
    par = Plan(mesh, [data_pass]).apply(on_meta(transformer)).materialize(seed=0)
    recorder = Recorder({})
    with recorder:
        recorder.phase("step")
        token_loss_sum(par.module, random_tokens(VOCAB, 1, 16, seed=dist.get_rank()))[0].backward()
        (phase,) = recorder.finished()
    kinds = [event.collective.kind for event in phase.events if event.collective is not None]
    assert "reduce_scatter" not in kinds
    assert kinds.count("all_to_all") >= len(par.module.layers) + 1


@on_ranks(2)
def test_a_factor_that_gloo_cannot_apply_is_refused_and_the_remedy_applies_it():
    norms = []
    for forced in (None, False, True):
        module = on_meta(transformer)
        par = Plan("dp_shard=2", [FullyShard()]).apply(module).materialize(seed=0)
        for unit in units_with_parameters(par.module) if forced is not None else ():
            unit.set_gradient_divide_factor(4.0)
            unit.set_force_sum_reduction_for_comms(forced)
        loss = token_loss_sum(par.module, random_tokens(VOCAB, 1, 16, seed=dist.get_rank()))[0]
        if forced is False:
            with pytest.raises(MeshparError, match="set_force_sum_reduction_for_comms"):
                loss.backward()
            continue
        loss.backward()
        norms.append(par.clip_grad_norm_(1e9).item())
    assert norms[0] == pytest.approx(2 * norms[1])


class FlatCopies(TorchDispatchMode):
    """The sizes of flat tensors that are copied into other memory."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default and args[0].ndim == 1 and args[0].data_ptr() != args[1].data_ptr():
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("same_bits", [False, True])
@on_ranks(2)
def test_replicas_reduce_gradients_in_the_memory_in_which_a_unit_collects_them(same_bits):
    par = Plan("dp_replicate=2", [Replicate()], same_bits=same_bits).apply(on_meta(ODD)).materialize(seed=0)
    units = {sum(p.numel() for p in layer.parameters()) for layer in par.module.layers}
    loss, _ = token_loss_sum(par.module, random_tokens(99, 2, 8, seed=par.data_rank))
    with FlatCopies() as copies:
        loss.backward()
    assert not units & set(copies.sizes)
    gradient = next(par.module.layers[0].parameters()).grad
    assert local_tensor(gradient).untyped_storage().nbytes() == 4 * units.pop()
