"""Stages with every kind of axis inside them, and every schedule, against one process."""

import hashlib
import itertools
import json
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshpar import (
    ActivationCheckpoint,
    ContextParallel,
    ExpertParallel,
    FullyShard,
    HybridShard,
    PipelineParallel,
    Plan,
    Replicate,
    TensorParallel,
)
from meshpar.checkpoints import CheckpointManager
from meshpar.tensors.placements import whole_tensor
from meshpar.testing import launch, on_ranks, token_loss_sum
from tests.support.models_for_parity import huggingface, transformer
from tests.support.stages import MODELS, assert_as_one_process, batches, one_process, scaled_loss, trained
from tests.support.tiers import daily

INSIDE = {
    "alone": ("", list, 1),
    "FSDP 2": ("dp_shard=2", lambda: [FullyShard()], 2),
    "HSDP 2x2": ("dp_replicate=2,dp_shard=2", lambda: [HybridShard()], 4),
    "TP 2": ("tp=2", lambda: [TensorParallel()], 1),
    "CP 2": ("dp_shard=1,cp=2", lambda: [ContextParallel(), FullyShard()], 1),
    "EP 2": ("dp_shard=1,ep=2", lambda: [ExpertParallel(), FullyShard()], 2),
}
ORDERS = {"gpipe": ("gpipe", 1), "1f1b": ("1f1b", 1), "interleaved": ("1f1b", 2)}


RANKS_INSIDE = dict.fromkeys(INSIDE, 2) | {"alone": 1, "HSDP 2x2": 4}
CELLS = sorted(
    itertools.product((2, 4), INSIDE, ORDERS, (True, False)), key=lambda cell: cell[0] * RANKS_INSIDE[cell[1]]
)
"""Stages, axes inside, schedule, whether weights are tied; by ranks, which serve one cell after another."""


def assert_cell(stages, inside, order, tied):
    """Train three steps of seven micro-batches of different sizes, over stages of different depths."""
    axes, others, data_ranks = INSIDE[inside]
    schedule, virtual = ORDERS[order]
    name = "Qwen3Moe" if inside == "EP 2" else "Llama"
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16) if inside == "EP 2" else {}
    make = partial(huggingface, name, num_hidden_layers=stages * virtual + 1, tie_word_embeddings=tied, **experts)
    passes = others()
    if tied:  # recomputed as well, which tensor parallelism comes before
        place = sum(isinstance(one, TensorParallel | ContextParallel | ExpertParallel) for one in passes)
        passes.insert(place, ActivationCheckpoint())
    mesh = ",".join(filter(None, (f"pp={stages}", axes)))
    passes = [PipelineParallel(schedule=schedule, virtual=virtual), *passes]
    assert_as_one_process(make, mesh, passes, data_ranks, number=7)


@pytest.mark.parametrize(("stages", "inside", "order", "tied"), daily(CELLS, (2, "alone", "interleaved", True)))
def test_stages_with_every_axis_inside_train_as_one_process(stages, inside, order, tied):
    launch(__name__, "assert_cell", stages * RANKS_INSIDE[inside], (stages, inside, order, tied))


@pytest.mark.nightly
@on_ranks(4)
def test_interleaved_stages_differ_from_one_process_by_the_order_of_sums_alone():
    """Nine blocks split over tensor parallelism equal one process to 1e-10 in float64."""
    passes = [PipelineParallel(virtual=2), TensorParallel()]

    def make():
        return huggingface("Llama", num_hidden_layers=9).double()

    found, expected = trained(make, "pp=2,tp=2", passes), one_process(make, 1)
    for mine, whole in zip(found[1:], expected[1:], strict=True):  # losses add up in float32
        if isinstance(mine, dict):
            whole = {name: whole[name] for name in mine}
        torch.testing.assert_close(mine, whole, rtol=1e-10, atol=1e-12)


@on_ranks(2, fresh="counts calls, of which parallel modules of earlier tests add some")
def test_a_micro_batch_costs_a_bounded_number_of_calls_of_functions():
    """Marks of a stage's parameters, four times a micro-batch, walk over no modules, and stand-ins run no own checks."""
    par = Plan("pp=2", [PipelineParallel()]).apply(transformer(layers=8))
    calls = []
    for number in (2, 2, 4, 12):
        seen = Counter()
        micro_batches = [batches(0)[0]] * number
        sys.setprofile(lambda frame, event, arg, seen=seen: seen.update([event]))
        par.backward(micro_batches, scaled_loss(0.01))
        sys.setprofile(None)
        calls.append(seen["call"] + seen["c_call"])
    assert (calls[3] - calls[2]) / 8 < 1800, calls


@on_ranks(2)
def test_evaluations_and_reported_values_come_to_all_stages():
    torch.manual_seed(0)
    par = Plan("pp=2", [PipelineParallel()]).apply(MODELS["Llama"]())
    torch.manual_seed(0)
    alone, mine = MODELS["Llama"](), batches(0)

    def loss(module, batch):
        total, tokens = token_loss_sum(module, batch)
        return total, {"tokens": torch.as_tensor(tokens), "each": total.detach().repeat(2)}

    for _ in range(2):  # the second time, ranks know the form of the values
        total, values = par.backward(mine, loss)
        expected = [loss(alone, batch) for batch in mine]
        torch.testing.assert_close(float(total), sum(float(value) for value, _ in expected))
        for name in ("tokens", "each"):
            torch.testing.assert_close(values[name], sum(reported[name] for _, reported in expected))
    found = par.forward(mine, lambda module, batch: token_loss_sum(module, batch)[0])
    torch.testing.assert_close(found, [value.detach() for value, _ in expected])


@on_ranks(2)
@pytest.mark.parametrize(("mesh", "passes"), [("dp_replicate=2", [Replicate()]), ("pp=2", [PipelineParallel()])])
def test_losses_in_float64_add_up_in_float64(mesh, passes):
    """As LBFGS's line search needs them."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(huggingface("Llama", num_hidden_layers=2).double())
    alone, par = models[0], Plan(mesh, passes).apply(models[1])

    def loss(module, batch):
        return module(batch["input_ids"]).logits.square().mean()

    expected = sum(loss(alone, batch).detach() for batch in batches(0))
    for _ in range(2):  # the second time, ranks know the form
        torch.testing.assert_close(par.backward(batches(0), loss), expected, rtol=1e-12, atol=0)


INSIDE_SAVED = {
    "FSDP": ("dp_shard=2", lambda: [FullyShard()]),
    "TP": ("tp=2", lambda: [TensorParallel()]),
    "FSDP x TP": ("dp_shard=2,tp=2", lambda: [TensorParallel(), FullyShard()]),
}
SAVED = {
    f"pp {stages}, {name}": (f"pp={stages},{axes}", stages, passes)
    for stages in (1, 2, 4)
    for name, (axes, passes) in INSIDE_SAVED.items()
}


def built(name, seed, rate=1e-2):
    """Return a model on the mesh of this name, and its optimizer, which decays matrices alone."""
    mesh, stages, passes = SAVED[name]
    torch.manual_seed(seed)
    par = Plan(mesh, [*([PipelineParallel()] if stages > 1 else []), *passes()]).apply(
        huggingface("Llama", num_hidden_layers=4, tie_word_embeddings=True)
    )
    parameters = list(par.module.parameters())
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim > 1], "lr": rate, "weight_decay": 0.1},
        {"params": [parameter for parameter in parameters if parameter.ndim == 1], "lr": rate / 2, "weight_decay": 0.0},
    ]
    return par, torch.optim.AdamW(groups, fused=True)


def digests(par, optimizer):
    """Return digests of each of this rank's parameters and moments, and its options, by name."""
    options = {
        parameter: {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return {
        name: [
            *(
                hashlib.sha256(whole_tensor(value).detach().numpy().tobytes()).hexdigest()
                for value in (parameter, *(optimizer.state[parameter][moment] for moment in ("exp_avg", "exp_avg_sq")))
            ),
            json.dumps(options[parameter], sort_keys=True),
        ]
        for name, parameter in par.module.named_parameters()
    }


def save_step(folder, name):
    par, optimizer = built(name, 0)
    par.backward(batches(par.data_rank), scaled_loss(par.token_scale(40)))
    optimizer.step()
    with CheckpointManager(f"{folder}/{name}") as manager:
        manager.save(1, par, optimizer)
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, digests(par, optimizer))
    if dist.get_rank() == 0:
        known = {name: value for rank in every for name, value in rank.items()}
        assert all(known[name] == value for rank in every for name, value in rank.items())
        Path(folder, f"{name}.json").write_text(json.dumps(known))


def restore_steps(folder, name):
    for saved in SAVED:
        par, optimizer = built(name, 1, rate=1.0)
        with CheckpointManager(f"{folder}/{saved}") as manager:
            manager.restore(par, optimizer)
        expected = json.loads(Path(folder, f"{saved}.json").read_text())
        found = digests(par, optimizer)
        assert found == {name: expected[name] for name in found}, (saved, name)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_each_mesh_restores_what_each_other_saved_bitwise(tmp_path):
    """Nine meshes, 81 pairs; restored on its own mesh, too."""
    for run in (save_step, restore_steps):
        for name, (mesh, _, _) in SAVED.items():
            launch(__name__, run.__name__, Plan(mesh, []).mesh.size, (str(tmp_path), name), timeout_s=300.0)


@pytest.mark.nightly
@on_ranks(2)
def test_averages_of_stages_are_those_of_one_process_and_restore_on_other_meshes(tmp_path):
    def trained_average(par):
        average = par.averaged(0.5)
        optimizer = torch.optim.AdamW(par.module.parameters(), lr=1e-2, eps=1e-3, fused=True)
        for step in range(3):
            par.backward(batches(0, step), scaled_loss(0.01))
            optimizer.step()
            optimizer.zero_grad()
            average.update()
        with average.swapped():
            losses = par.forward(batches(0), lambda module, batch: float(token_loss_sum(module, batch)[0]))
        return average, optimizer, losses

    def parallel(mesh, passes):
        torch.manual_seed(0)
        return Plan(mesh, passes).apply(MODELS["tied Llama"]())

    _, _, expected = trained_average(parallel("dp_shard=2", [FullyShard()]))
    par = parallel("pp=2", [PipelineParallel()])
    average, optimizer, losses = trained_average(par)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    mine = {name: value.clone() for name, value in average.state_dict()["averages"].items()}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, par, optimizer, averages={"ema": average})
        for mesh, passes in (("dp_shard=2", [FullyShard()]), ("pp=2", [PipelineParallel(stages=(2, 1))])):
            other = parallel(mesh, passes)
            again = other.averaged(0.5)
            manager.restore(other, torch.optim.AdamW(other.module.parameters()), averages={"ema": again})
            found = {name: whole_tensor(value) for name, value in again.state_dict()["averages"].items()}
            every = [None] * 2
            dist.all_gather_object(every, mine)
            known = {name: value for rank in every for name, value in rank.items()}
            assert all(torch.equal(value, known[name]) for name, value in found.items())
    average.load_state_dict({"averages": known, "updates": 1})
