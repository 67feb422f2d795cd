"""A train step of every kind of plan keeps NCCL's rules; controls show that each rule is asked."""

import functools
import gc
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import meshpar.forecasting.device as device
from benchmarks.scale import groups_of, sent_in, traces_of
from meshpar import (
    ActivationCheckpoint,
    ContextParallel,
    ExpertParallel,
    FullyShard,
    HybridShard,
    MeshSpec,
    PipelineParallel,
    Plan,
    TensorParallel,
)
from meshpar._torch import groups
from meshpar.core import runtime
from meshpar.tensors.placements import whole_tensor
from meshpar.testing import (
    assert_parity,
    launch,
    on_ranks,
    one_process,
    random_tokens,
    token_loss_sum,
    token_steps,
    whole,
)
from tests.accelerator.accelerated import accelerated
from tests.accelerator.nccl_rules import Broken, Rules, check_order, rules
from tests.accelerator.simulated import allocate, alone, simulated
from tests.accelerator.waits import Waits
from tests.checkpoints import test_published
from tests.losses import test_log_probs
from tests.optim import test_muon, test_small_adamw
from tests.passes import test_several
from tests.state import test_offloading
from tests.support.models_for_parity import VOCAB, on_meta, transformer
from tests.support.patience import patient
from tests.support.stages import assert_as_one_process

SEQUENCE = TensorParallel(sequence_parallel=True, loss_parallel=True)
PLAIN = functools.partial(transformer, qk_norm=True)
MIXTURE = functools.partial(transformer, experts=4, expert_hidden=16, qk_norm=True)
PLANS = {
    "fsdp": (PLAIN, "dp_shard=4", [FullyShard()]),
    "hsdp": (PLAIN, "dp_replicate=2,dp_shard=2", [HybridShard()]),
    "world": (PLAIN, "dp_replicate=2,dp_shard=2", [HybridShard(optimizer="world")]),
    "tp": (PLAIN, "tp=4", [TensorParallel()]),
    "fsdp-tp": (PLAIN, "dp_shard=2,tp=2", [SEQUENCE, ActivationCheckpoint(), FullyShard()]),
    "cp": (PLAIN, "dp_shard=2,cp=2", [ContextParallel(), FullyShard()]),
    "experts": (MIXTURE, "dp_shard=2,ep=2", [ExpertParallel(), ActivationCheckpoint(), FullyShard()]),
    "experts-selective": (
        MIXTURE,
        "dp_shard=1,ep=2,tp=2",
        [ExpertParallel(), TensorParallel(), ActivationCheckpoint(mode="selective"), FullyShard()],
    ),
}


def check_controls():
    group, other, third = (dist.new_group([0, 1]) for _ in range(3))
    if dist.get_rank() > 1:
        return
    with pytest.raises(Broken, match="not contiguous"):
        dist.all_reduce(torch.ones(4, 4).t(), group=group)
    with pytest.raises(Broken, match=r"does not know torch\.int16"):
        dist.all_reduce(torch.ones(4, dtype=torch.int16), group=group)
    with pytest.raises(Broken, match="a tensor is on meta"):
        dist.all_reduce(torch.ones(4, device="meta"), group=group)
    with pytest.raises(Broken, match="different calls"):
        dist.all_reduce(torch.ones(4 + dist.get_rank()), group=group)
    with pytest.raises(Broken, match="different calls"):
        dist.all_reduce(torch.ones(4, dtype=torch.float32 if dist.get_rank() else torch.int32), group=group)
    tensor = torch.full((3,), float(dist.get_rank()))
    dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group)
    assert tensor.tolist() == [0.5, 0.5, 0.5]
    Rules.FIRST_S, first_s = 0.3, Rules.FIRST_S
    with pytest.raises(Broken, match=r"the first send \d>\d"):
        dist.isend(tensor, group=group, group_dst=1 - dist.get_rank())  # both send first
    Rules.FIRST_S = first_s
    for tag in (1, 2):  # other tags on both sides
        if dist.get_rank() == 0:
            dist.send(tensor + tag, group=third, group_dst=1, tag=tag)
        else:
            dist.recv(tensor, group=third, group_src=0, tag=3 - tag)
            assert tensor.tolist() == [0.5 + tag] * 3, "NCCL has no tags"
    dist.destroy_process_group(other)
    with pytest.raises(Broken, match="after its end"):
        other.allreduce([torch.ones(4)])


def sockets():
    """The sockets of this process."""
    found = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return sum(str(path.readlink()).startswith("socket:") for path in found if path.is_symlink())


def check_hosts():
    """The hosts have one group beside the device's, and its ranks connect to those that they talk to."""
    gc.collect()  # groups that have ended
    dist.new_group([0, 1], backend="gloo", group_desc=runtime._HOSTS)  # not of all ranks
    before = sockets()
    hosts = runtime.hosts()
    assert hosts is runtime.hosts() is not dist.group.WORLD
    assert dist.get_backend(hosts) == "gloo" and hosts.size() == dist.get_world_size()
    dist.all_reduce(torch.ones(()), group=hosts)
    assert sockets() - before == 3, "a port, and the two neighbours in a ring"


def check_hops(seen):
    """Slices of all data ranks travel by one call a unit and hop, as on an accelerator."""
    calls, grads = [], []
    for optimizer in ("replica", "world"):
        model = on_meta(PLAIN)
        plan = Plan("dp_replicate=2,dp_shard=2", [HybridShard(optimizer=optimizer)], verify=False)
        with accelerated():
            par = plan.apply(model).materialize(seed=0)
            seen.clear()
            loss, _ = token_loss_sum(par.module, random_tokens(VOCAB, 1, 16, seed=dist.get_rank()))
            loss.backward()
        calls.append(
            {(axis, operation): count for (axis, operation), count in seen.calls.items() if operation != "allreduce"}
        )
        grads.append({name: whole(parameter.grad) for name, parameter in par.module.named_parameters()})
    units = len(model.layers) + 1
    hops = {("mesh_dp_replicate", "all_gather"): units, ("mesh_dp_replicate", "reduce_scatter"): units}
    assert calls[1] == calls[0] | hops, calls
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad)


DAILY = ("fsdp-tp",)
NIGHTLY = tuple(name for name in PLANS if name not in DAILY)


@pytest.mark.parametrize("plans", [DAILY, pytest.param(NIGHTLY, marks=pytest.mark.nightly)], ids=["daily", "others"])
@on_ranks(4, timeout_s=170, fresh="changes what a device is")
def test_broken_rules_are_refused_and_a_train_step_of_every_pass_keeps_them(plans):
    with rules() as seen:
        check_controls()
        with pytest.raises(Broken, match="in another order"):
            check_order(seen.groups()[:: -1 if dist.get_rank() == 1 else 1])
        check_hosts()
        check_hops(seen)
        seen.clear()
        Plan("dp_shard=2,tp=2", [SEQUENCE, FullyShard()]).apply(PLAIN())
        assert not seen.calls, "the hosts compare the weights that they were given"
        train_on_every_plan(plans)


def train_on_every_plan(plans):
    expected, steps = {}, token_steps(VOCAB, steps=2, parts=2 if plans == DAILY else 4)
    with accelerated():  # the second step looks at nothing but what the first one exchanged
        for build, mesh, passes in (PLANS[plan] for plan in plans):
            expected[build] = expected.get(build) or one_process(build, steps)
            assert_parity(build, mesh, passes, steps, expected=expected[build])


def stages(mesh, virtual, *passes):
    make = functools.partial(transformer, layers=4 * virtual, tied=True)
    assert_as_one_process(make, mesh, [PipelineParallel(virtual=virtual), *passes], 2 if "dp" in mesh else 1)


def published(mesh):
    par = test_published.planned("llama", mesh)
    torch.manual_seed(0)
    weights, stream = test_published.MODELS["llama"]().state_dict(), test_published.streamed(par, bucket=3000)
    if stream is not None:
        assert stream.keys() == weights.keys()
        assert all(torch.equal(tensor, weights[name]) for name, tensor in stream.items())


BESIDE = {
    "stages": (4, stages, "pp=4", 2),
    "stages under FSDP": (4, stages, "pp=2,dp_shard=2", 1, FullyShard()),
    "stages of TP": (4, stages, "pp=2,tp=2", 2, TensorParallel()),
    "published": (4, published, "dp_shard=2,tp=2"),
    "published stages": (4, published, "pp=2,dp_shard=2"),
    "offloaded": (2, test_offloading.test_a_lent_module_trains_on_as_if_nothing_had_been),
    "log-probs": (4, test_log_probs.test_values_and_gradients_are_those_of_one_process, "dp_shard=2,tp=2 loss", False),
    "Muon": (4, test_muon.test_a_mesh_equals_one_process, "dp_replicate=2,dp_shard=2"),
    "SmallAdamW": (4, test_small_adamw.test_ranks_have_the_bits_of_one_process, 4, False),
    "a second model": (4, test_several.test_two_models_interleave_in_every_order, "dp_shard=4", "dp_shard=2,tp=2", 6),
}
"""What a job does beside the train steps of :data:`PLANS`: ranks, and a test of its numbers."""


def keep_the_rules_beside(name):
    _, body, *args = BESIDE[name]
    with rules(), accelerated():
        getattr(body, "__wrapped__", body)(*args)


@pytest.mark.nightly
@pytest.mark.parametrize("name", BESIDE)
def test_what_a_job_does_beside_keeps_the_rules(name):
    launch(__name__, "keep_the_rules_beside", BESIDE[name][0], (name,), timeout_s=170, fresh="changes what a device is")


@alone
def test_the_groups_of_axes_get_tensors_of_the_device_alone():
    with simulated(8):
        model = on_meta(transformer)
        par = allocate(Plan("dp_shard=8", [FullyShard(offload="cpu")]).apply(model, device_type=device.NAME))
        with Waits() as waits:
            whole_tensor(par.module.head.weight)
            par.data_sum(torch.ones((), device="cpu"))
        assert [place for place in waits.places if place.endswith("(hosts)")] == []


def test_the_default_group_of_an_accelerator_has_its_device_from_the_start(monkeypatch):
    given = []
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **options: given.append((backend, options["device_id"]))
    )
    for here in ("cuda:1", "xpu:0", "mps:0", "cpu"):
        runtime._open_group(torch.device(here), 5.0)
    assert given == [
        ("nccl", torch.device("cuda:1")),
        ("xccl", torch.device("xpu:0")),
        ("cpu:gloo,mps:gloo", None),
        ("gloo", None),
    ]


def test_the_watchdog_names_the_collectives_of_nccl(monkeypatch):
    group = SimpleNamespace(group_name="3", group_desc="mesh_tp")
    entries = [{"process_group": ["3", "mesh_tp"], "collective_seq_id": 6 + n, "profiling_name": f"nccl:{name}", "is_p2p": False}
               for n, name in enumerate(("broadcast", "all_reduce"))]  # fmt: skip
    monkeypatch.setattr(groups, "open_groups", lambda: [group])
    monkeypatch.setattr(groups, "group_title", lambda group: group.group_desc)
    monkeypatch.setattr(groups, "collective_counts", lambda: {"mesh_tp": 7})
    monkeypatch.setattr(
        torch._C._distributed_c10d, "_dump_nccl_trace_json", lambda: json.dumps({"entries": entries}), raising=False
    )
    assert groups.last_collectives() == {"mesh_tp": (7, "nccl:all_reduce")}


@pytest.mark.nightly
def test_what_a_rank_opens_and_calls_does_not_grow_with_the_ranks():
    mesh = MeshSpec("dp_replicate=-1,dp_shard=8", ranks_per_node=8)
    plans = [Plan(mesh.resolve(size), [HybridShard(optimizer="world")]) for size in (1024, 8192)]
    for plan in plans:
        made, seconds = groups_of(plan, plan.mesh.size)
        assert sorted(made) == sorted([plan.mesh.size, 8, plan.mesh.size // 8]) and seconds < patient(20)
    fewer, more = (sent_in(trace)[0] for trace in traces_of(plans, layers=2))
    assert fewer == more, "collectives of a step by axis"
