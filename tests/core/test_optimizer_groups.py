"""An optimizer's settings go by parameter, so that a checkpoint of one mesh fits any other."""

import pytest
import torch

from meshpar import CheckpointError, FullyShard, MeshparError, PipelineParallel, Plan, TensorParallel
from meshpar.checkpoints import CheckpointManager
from meshpar.testing import on_ranks
from meshpar.training.adamw_and_schedules import AdamWSettings, Schedule, build_adamw, scale_rates
from tests.support.models_for_parity import VOCAB, gpt2, t5

PLANS = {"dp_shard=2,tp=2": [TensorParallel(), FullyShard()], "dp_shard=4": [FullyShard()]}


def job(mesh):
    torch.manual_seed(0)
    par = Plan(mesh, PLANS[mesh]).apply(gpt2())
    return par, build_adamw(par.module, AdamWSettings(lr=1e-2))


def settings_of(module, optimizer, *keys):
    """The settings that the optimizer has for each parameter."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        names[id(parameter)]: tuple(group[key] for key in keys or ("lr", "weight_decay"))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def moments(par, optimizer):
    return {
        name: optimizer.state[parameter]["exp_avg"].full_tensor() for name, parameter in par.module.named_parameters()
    }


@on_ranks(4)
def test_settings_are_restored_on_another_mesh(tmp_path):
    par, optimizer = job("dp_shard=2,tp=2")
    ids = torch.randint(0, VOCAB, (2, 8))
    par.module(input_ids=ids).logits.square().mean().backward()
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] = 3e-3 if group["weight_decay"] else 1e-3
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, par, optimizer)
        other, fresh = job("dp_shard=4")
        assert len(fresh.param_groups) == len(optimizer.param_groups) == 2
        manager.restore(other, fresh)
        assert settings_of(other.module, fresh) == settings_of(par.module, optimizer)
        theirs = moments(other, fresh)
        assert all(torch.equal(value, theirs[name]) for name, value in moments(par, optimizer).items())

        plain = torch.optim.AdamW(other.module.parameters(), lr=1e-2, fused=True)
        with pytest.raises(
            CheckpointError,
            match=r"parameter group 0 joins parameters that the checkpoint has with other options: lr \['0.001', '0.003'\]",
        ):
            manager.restore(other, plain)


RATES = {"**.bias": 2.0, "transformer.wte": 0.1}


@on_ranks(4)
def test_rates_by_name_and_depth_are_those_of_one_process_and_restored(tmp_path):
    alone = gpt2()
    expected = told_rates(alone, build_adamw(alone, AdamWSettings(lr=1e-2)))
    assert len(set(expected.values())) > 4
    assert expected["transformer.h.0.attn.c_attn.weight"] == pytest.approx((5e-3 / 2, 0.25))
    for mesh, other in zip(PLANS, reversed(PLANS), strict=True):
        par, optimizer = job(mesh)
        assert told_rates(par.module, optimizer) == expected
        Schedule(name="constant", lr=1e-3).apply(optimizer, 0)
        with CheckpointManager(tmp_path / str(len(mesh))) as manager:
            manager.save(1, par, optimizer)
            again, fresh = job(other)
            told_rates(again.module, fresh)
            for group in fresh.param_groups:
                group["lr_scale"] = 7.0
            manager.restore(again, fresh)
        assert settings_of(again.module, fresh) == settings_of(par.module, optimizer)
        Schedule(name="constant", lr=1e-2).apply(fresh, 0)
        found = {name: lr for name, (lr, _) in settings_of(again.module, fresh).items()}
        assert found == pytest.approx({name: lr for name, (lr, _) in expected.items()})


def told_rates(module, optimizer):
    scale_rates(optimizer, module, RATES, layer_decay=0.5)
    return settings_of(module, optimizer, "lr", "lr_scale")


@on_ranks(2)
def test_stages_have_the_rates_of_one_process():
    alone = gpt2(tied=False)
    expected = told_rates(alone, build_adamw(alone, AdamWSettings(lr=1e-2)))
    par = Plan("pp=2", [PipelineParallel()]).apply(gpt2(tied=False))
    found = told_rates(par.module, build_adamw(par.module, AdamWSettings(lr=1e-2)))
    assert found == {name: expected[name] for name in found} and len(found) < len(expected)


def test_blocks_that_the_layout_names_by_their_class_have_depths():
    module = t5()
    optimizer = build_adamw(module, AdamWSettings(lr=1.0))
    scale_rates(optimizer, module, layer_decay=0.5)
    scales = {id(one): group["lr_scale"] for group in optimizer.param_groups for one in group["params"]}
    first, last = (stack.block[0].layer[0].SelfAttention.q.weight for stack in (module.encoder, module.decoder))
    assert (scales[id(module.shared.weight)], scales[id(first)], scales[id(last)]) == (0.5**5, 0.5**4, 0.5**2)


def test_rates_that_match_nothing_or_have_no_blocks_are_refused():
    net = torch.nn.Sequential(torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(net.parameters())
    with pytest.raises(MeshparError, match=r"rates pattern 'transformer\.wte' matches no module"):
        scale_rates(optimizer, net, {"transformer.wte": 0.1})
    with pytest.raises(MeshparError, match="names no blocks"):
        scale_rates(optimizer, net, layer_decay=0.5)


@on_ranks(2)
def test_the_state_of_one_process_is_divided_and_saved_and_other_shapes_are_refused(tmp_path):
    def begun(plan):
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 6)
        module = plan.apply(net).module if plan is not None else net
        return module, torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)

    alone, before = begun(None)
    alone(torch.ones(1, 4)).sum().backward()
    before.step()
    plan = Plan("dp_shard=2", [FullyShard()])
    torch.manual_seed(0)
    par = plan.apply(torch.nn.Linear(4, 6))
    mine = torch.optim.AdamW(par.module.parameters(), lr=1e-2, fused=True)
    mine.load_state_dict(before.state_dict())
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, par, mine)  # before any step
        fresh = torch.optim.AdamW(par.module.parameters(), lr=1e-2, fused=True)
        fresh.load_state_dict(before.state_dict())
        manager.restore(par, fresh)
    for name, parameter in par.module.named_parameters():
        want = before.state[dict(alone.named_parameters())[name]]["exp_avg"]
        assert torch.equal(fresh.state[parameter]["exp_avg"].full_tensor(), want)
        assert torch.equal(mine.state[parameter]["exp_avg"].full_tensor(), want)

    part = before.state_dict()
    for slots in part["state"].values():
        slots["exp_avg"] = slots["exp_avg"][:3]
    par.module(torch.ones(1, 4)).sum().backward()
    mine.step()  # from here on meshpar sees a load
    refused = r"AdamW's exp_avg has the shape \(3, 4\); expected \(6, 4\).*CheckpointManager"
    with pytest.raises(MeshparError, match=refused):
        mine.load_state_dict(part)
    fresh = torch.optim.AdamW(par.module.parameters(), lr=1e-2, fused=True)
    fresh.load_state_dict(part)
    par.module(torch.ones(1, 4)).sum().backward()
    with pytest.raises(MeshparError, match=refused):
        fresh.step()
    with CheckpointManager(tmp_path) as manager:
        manager.restore(par, fresh)  # the remedy
    par.module(torch.ones(1, 4)).sum().backward()
    fresh.step()
