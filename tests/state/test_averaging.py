"""The average of a parallel module equals AveragedModel in one process, is swapped exactly, saved by shards."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from meshpar import (
    CheckpointError,
    FullyShard,
    HybridShard,
    MeshparError,
    MeshSpec,
    ModelLayout,
    Plan,
    Replicate,
    TensorParallel,
)
from meshpar._torch import BEFORE_2_13
from meshpar.checkpoints import CheckpointManager, export_safetensors
from meshpar.state.averaging import Averaged
from meshpar.tensors.placements import local_tensor
from meshpar.testing import on_ranks, random_tokens, token_loss_sum, whole
from tests.support.models_for_parity import VOCAB, transformer
from tests.support.tiers import daily
from tests.testing.test_parity import PLANS as PARITY

PLANS = {
    "fsdp": ("dp_shard=4", [FullyShard()]),
    "hsdp": ("dp_replicate=2,dp_shard=2", [HybridShard()]),
    "tp": ("tp=4", [TensorParallel()]),
    "fsdp-tp": ("dp_shard=2,tp=2", [TensorParallel(), FullyShard()]),
    "replicate-tp": ("dp_replicate=2,tp=2", [TensorParallel(), Replicate()]),
    "world": ("dp_replicate=2,dp_shard=2", [HybridShard(optimizer="world")]),
    "offload": ("dp_shard=4", [FullyShard(offload="cpu")]),
}
SIZES = {"hidden": 50, "kv_heads": 4, "tied": True}


def build():
    torch.manual_seed(0)
    return transformer(**SIZES)


def parallel(plan):
    mesh, passes = PLANS[plan]
    return Plan(mesh, passes).apply(build())


def batch(step):
    """The same on every rank, so that the mean over data ranks is the gradient of one process."""
    return random_tokens(VOCAB, 2, 12, seed=step)


def train(module, steps, update):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for step in steps:
        loss, count = token_loss_sum(module, batch(step))
        (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        update()


def expected(decay=0.8, steps=range(4)):
    model = build()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    train(model, steps, lambda: averaged.update_parameters(model))
    return model, averaged


TRAINED = 3e-6  # of the largest value: what float32 steps of other kernels round, measured up to 1.04e-6


def close(have, want, tolerance=1e-5):
    assert have.keys() == want.keys()
    for name, value in want.items():
        error, scale = float((have[name] - value).abs().max()), float(value.abs().max())
        assert error <= tolerance * scale, f"{name} is off by {error:.1e} of {scale:.1e}"


def values(named):
    return {name: whole(tensor) for name, tensor in named}


def averages_of(averaged):
    return values(averaged.state_dict()["averages"].items())


def bits(module):
    return {name: local_tensor(tensor).clone() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("plan", daily(PLANS, "fsdp-tp"))
@on_ranks(4)
def test_the_average_equals_torchs_in_one_process(plan):
    par = parallel(plan)
    averaged = Averaged(par, decay=0.8)
    train(par.module, range(4), averaged.update)
    model, want = expected()
    close(averages_of(averaged), dict(want.module.named_parameters()))
    before, x = bits(par.module), batch(9)["input_ids"]
    with torch.no_grad():
        with averaged.swapped():
            torch.testing.assert_close(par.module(x).logits, want.module(x).logits, rtol=1e-4, atol=1e-4)
        assert all(torch.equal(value, before[name]) for name, value in bits(par.module).items())
        torch.testing.assert_close(par.module(x).logits, model(x).logits, rtol=1e-4, atol=1e-4)
    train(par.module, range(4, 6), averaged.update)
    close(averages_of(averaged), dict(expected(steps=range(6))[1].module.named_parameters()))


@on_ranks(2)
def test_an_update_does_not_communicate():
    par = Plan("dp_shard=2", [FullyShard()]).apply(build())
    averaged = Averaged(par, decay=0.5)
    if dist.get_rank() == 0:  # a collective would wait for the other rank, and time out
        averaged.update()
        averaged.update()
        with averaged.swapped():
            pass
    assert averaged.updates == 2 * (dist.get_rank() == 0)


@on_ranks(1)
def test_a_decay_that_depends_on_the_step():
    par = Plan("dp_shard=1", [FullyShard()]).apply(nn.Linear(1, 1, bias=False), ModelLayout())
    asked = []
    averaged = Averaged(par, decay=lambda update: asked.append(update) or update / 4)
    seen = []
    for value in (8.0, 4.0, 2.0):
        local_tensor(par.module.weight).fill_(value)
        averaged.update()
        seen.append(float(local_tensor(averaged.state_dict()["averages"]["weight"])))
    assert asked == [1, 2] and seen == [8.0, 0.25 * 8 + 0.75 * 4, 0.5 * 5 + 0.5 * 2]


@on_ranks(2)
def test_an_average_from_the_start_weighs_the_first_values():
    par = Plan("dp_shard=2", [FullyShard()]).apply(build())
    averaged = par.averaged(0.8, from_start=True)
    wanted = {name: whole(parameter).clone() for name, parameter in par.module.named_parameters()}

    def update():
        averaged.update()
        for name, trained in par.module.named_parameters():
            wanted[name].lerp_(whole(trained).detach(), 1 - 0.8)

    train(par.module, range(2), update)
    with averaged.swapped():
        for name, parameter in par.module.named_parameters():
            torch.testing.assert_close(whole(parameter), wanted[name])


@on_ranks(2)
def test_an_average_in_float32_of_parameters_in_bfloat16():
    par = Plan("dp_shard=2", [FullyShard()]).apply(build().bfloat16())
    low, high = Averaged(par, decay=0.999), Averaged(par, decay=0.999, dtype=torch.float32)
    start = bits(par.module)
    for averaged in (low, high):
        averaged.update()
    with torch.no_grad():
        for parameter in par.module.parameters():
            parameter.add_(1e-2)
    for averaged in (low, high):
        averaged.update()
    name = "layers.0.mlp.up.weight"
    moved = local_tensor(high.state_dict()["averages"][name]) - start[name].float()
    assert moved.dtype == torch.float32 and 0.5e-5 < moved.mean() < 2e-5, "bfloat16 would have kept the first value"
    before = bits(par.module)
    with high.swapped():
        assert torch.equal(local_tensor(par.module.get_parameter(name)), local_tensor(high._averages[name]).bfloat16())
    assert all(torch.equal(value, before[key]) for key, value in bits(par.module).items())


class WithBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("count", torch.tensor(0))
        if not BEFORE_2_13:  # where sharding refuses it
            self.index = nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, x):
        return self.linear(x) * self.scale


@pytest.mark.parametrize("buffers", [False, True])
@on_ranks(2)
def test_buffers_as_in_torchs_averaged_model(buffers):
    torch.manual_seed(0)
    par, model = Plan("dp_replicate=2", [Replicate()]).apply(WithBuffers(), ModelLayout()), WithBuffers()
    model.load_state_dict({name: whole(tensor) for name, tensor in par.module.state_dict().items()})
    averaged = Averaged(par, decay=0.5, buffers=buffers)
    want = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=buffers)
    for step in range(3):
        for module in (par.module, model):
            module.scale += step
            module.count += 1
        averaged.update()
        want.update_parameters(model)
    with averaged.swapped():
        assert torch.equal(par.module.scale, want.module.scale)
        assert torch.equal(par.module.scale, torch.full((4,), 2.75 if buffers else 4.0))
        assert int(par.module.count) == 3, "an integer keeps its present value"
    assert torch.equal(par.module.scale, model.scale) and int(par.module.count) == 3


@on_ranks(2)
def test_an_error_inside_restores_the_parameters():
    par = Plan("dp_shard=2", [FullyShard()]).apply(build())
    averaged = Averaged(par, decay=0.5)
    train(par.module, range(2), averaged.update)
    before, average = bits(par.module), averages_of(averaged)
    with pytest.raises(ZeroDivisionError), averaged.swapped(), torch.no_grad():
        par.module(batch(0)["input_ids"])
        raise ZeroDivisionError
    assert all(torch.equal(value, before[name]) for name, value in bits(par.module).items())
    close(averages_of(averaged), average, 0.0)
    with torch.inference_mode(), averaged.swapped():
        par.module(batch(0)["input_ids"])
    assert all(torch.equal(value, before[name]) for name, value in bits(par.module).items())


@on_ranks(2)
def test_wrong_use_is_refused():
    par = Plan("dp_shard=2", [FullyShard()]).apply(build())
    averaged = Averaged(par, decay=0.5)
    for call in (averaged.state_dict, lambda: averaged.load_state_dict({}), lambda: averaged.swapped().__enter__()):
        with (
            pytest.raises(MeshparError, match=r"was called inside of swapped\(\).*; call it after the with block"),
            averaged.swapped(),
        ):
            call()
    before = bits(par.module)
    with (
        pytest.raises(MeshparError, match=r"embed\.weight was changed inside of swapped\(\), and the change is lost"),
        averaged.swapped(),
    ):
        train(par.module, [0], lambda: None)
    assert all(torch.equal(value, before[name]) for name, value in bits(par.module).items())
    for decay in (1.5, lambda update: -1):
        with pytest.raises(MeshparError, match=r"the decay is .*; expected a number from 0 to 1"):
            wrong = Averaged(par, decay=decay)
            wrong.update()
            wrong.update()
    for options, said in (
        ({"dtype": torch.int8}, r"the average's dtype is torch\.int8"),
        *((wrong, "an average got") for wrong in ({"power": -1}, {"every": 0})),
    ):
        with pytest.raises(MeshparError, match=said):
            par.averaged(**options)


@pytest.mark.parametrize(
    "plans", daily([(("hsdp",),), (("tp", "fsdp-tp"),)], (("hsdp",),), ids=lambda case: ", ".join(*case))
)
@on_ranks(4)
def test_the_average_is_saved_and_resumed_on_another_mesh(tmp_path, plans):
    par = parallel("fsdp-tp")
    averaged = Averaged(par, decay=0.8)
    train(par.module, range(3), averaged.update)
    dcp.save({"average": averaged.state_dict(), "model": par.module.state_dict()}, checkpoint_id=tmp_path)
    for plan in plans:
        again = parallel(plan)
        state = {"average": (resumed := Averaged(again, decay=0.8)).state_dict(), "model": again.module.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path)
        resumed.load_state_dict(state["average"])
        assert resumed.updates == 3
        train(again.module, [3], resumed.update)
        close(averages_of(resumed), dict(expected()[1].module.named_parameters()))


@on_ranks(2)
def save_as_a_model(folder):
    par = Plan("dp_shard=2", [FullyShard()]).apply(build())
    averaged = Averaged(par, decay=0.8)
    train(par.module, range(4), averaged.update)
    manager = CheckpointManager(folder)
    with averaged.swapped():
        manager.save(4, par)
    again = Plan("tp=2", [TensorParallel()]).apply(build())
    manager.restore(again)
    close(values(again.module.named_parameters()), dict(expected()[1].module.named_parameters()))


def test_the_averaged_model_is_saved_inside_of_swapped_and_exported(tmp_path):
    save_as_a_model(str(tmp_path / "run"))
    assert (export_safetensors(tmp_path / "run" / "latest", tmp_path / "hf") / "model.safetensors").is_file()


@on_ranks(2)
def test_a_state_that_does_not_fit_is_refused_whole():
    averaged = Averaged(Plan("dp_shard=2", [FullyShard()]).apply(build()), decay=0.5)
    others = Averaged(Plan("dp_replicate=2", [Replicate()]).apply(build()), decay=0.5).state_dict()
    wholes = {name: torch.zeros_like(whole(value)) for name, value in others["averages"].items()}
    odd = {**wholes, "head.bias": torch.zeros(1), "layers.0.mlp.up.weight": torch.zeros(3)}
    del odd["embed.weight"]
    before = averages_of(averaged)
    with pytest.raises(MeshparError) as raised:
        averaged.load_state_dict({"averages": odd, "updates": 1})
    lines = str(raised.value).splitlines()
    assert lines[0] == "this average does not fit the module; nothing was changed:"
    said = [line.strip().split(":")[0] for line in lines[1:]]
    assert said == ["missing", "unexpected", "shape of layers.0.mlp.up.weight"]
    close(averages_of(averaged), before, 0.0)
    averaged.load_state_dict({"averages": wholes, "updates": torch.tensor(7)})
    assert averaged.updates == 7
    assert not any(value.any() for value in averages_of(averaged).values())
    averaged.load_state_dict(others)  # of another mesh
    close(averages_of(averaged), before, 0.0)


FORMS = {"ema": {"decay": 0.8}, "karras": {"power": 2.0, "every": 2, "after": 1}, "swa": {"power": 0, "device": "cpu"}}


def by_hand(steps):
    """The averages of FORMS in one process, and its model."""
    model, calls = build(), 0
    averages, updates = {name: {} for name in FORMS}, dict.fromkeys(FORMS, 0)

    def update():
        nonlocal calls
        calls += 1
        for name in [name for name in FORMS if name != "karras" or calls in (2, 4, 6)]:
            updates[name] += 1
            t = updates[name]
            decay = {"ema": 0.8 if t > 1 else 0.0, "karras": (1 - 1 / t) ** 3, "swa": 1 - 1 / t}[name]
            for key, value in model.named_parameters():
                old = averages[name].get(key, torch.zeros_like(value))
                averages[name][key] = (old.double() * decay + value.detach().double() * (1 - decay)).float()

    train(model, steps, update)
    return model, averages


def keep_several(plan, folder):
    mesh, passes = (PLANS | OTHERS)[plan]
    par = Plan(mesh, passes).apply(build())
    several = {name: par.averaged(**options) for name, options in FORMS.items()}
    train(par.module, range(5), lambda: [average.update() for average in several.values()])
    with CheckpointManager(folder) as manager:
        manager.save(5, par, averages=several)
    return several


OTHERS = {name: plan for name, plan in PARITY.items() if name not in PLANS}
ELSEWHERE = {
    2: ("tp=2", [TensorParallel()]),
    4: ("dp_shard=2,tp=2", [TensorParallel(), FullyShard()]),
    8: ("dp_shard=4,tp=2", [TensorParallel(), FullyShard()]),
}


@pytest.mark.parametrize("plan", daily(PLANS | OTHERS, "fsdp-tp"))
def test_several_averages_are_kept_restored_on_another_mesh_and_exported(plan, tmp_path):
    keeps_several(plan, tmp_path)


def keeps_several(plan, folder):
    size = math.prod(MeshSpec((PLANS | OTHERS)[plan][0]).axes.values())
    want, later = (by_hand(range(steps))[1] for steps in (5, 6))
    on_ranks(size)(kept_and_restored)(plan, str(folder / "run"), want, later)
    for name in FORMS:
        export_safetensors(folder / "run", folder / name, averaged=name)
        got = load_file(folder / name / "model.safetensors")
        shared = want[name].keys() & got.keys()
        close({key: got[key] for key in shared}, {key: want[name][key] for key in shared}, TRAINED)
    with pytest.raises(
        CheckpointError, match=r"step 5: there is no average 'averaged': there are ema, karras, swa; name one"
    ):
        export_safetensors(folder / "run", folder / "other", averaged="averaged")


def kept_and_restored(plan, folder, expected_averages, later):
    several = keep_several(plan, folder)
    for name, want in expected_averages.items():
        close(averages_of(several[name]), want, TRAINED)
    mesh, passes = ELSEWHERE[dist.get_world_size()]
    again = Plan(mesh, passes).apply(build())
    resumed = {name: again.averaged(**options) for name, options in FORMS.items()}
    with CheckpointManager(folder) as manager:
        manager.restore(again, averages=resumed)
        assert [(average.updates, average.calls) for average in resumed.values()] == [(5, 5), (2, 5), (5, 5)]
        for name, average in several.items():
            want = averages_of(average)
            got = averages_of(resumed[name])
            assert all(torch.equal(got[key], want[key]) for key in want)
        with pytest.raises(CheckpointError, match=r"missing: averages\.other\.embed\.weight"):
            manager.restore(again, averages={"other": again.averaged()})
    train(again.module, [5], lambda: [average.update() for average in resumed.values()])
    for name, want in later.items():
        close(averages_of(resumed[name]), want, TRAINED)


@on_ranks(1)
def test_until_the_first_update_an_average_is_the_present_weights():
    par = Plan("dp_shard=1", [FullyShard()]).apply(nn.Linear(1, 1, bias=False), ModelLayout())
    averaged = par.averaged(0.5, after=2)
    for value in (8.0, 4.0):
        local_tensor(par.module.weight).fill_(value)
        averaged.update()
        with averaged.swapped():
            assert float(local_tensor(par.module.weight)) == value
    assert averaged.updates == 0 and averaged.calls == 2
