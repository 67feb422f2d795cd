"""``Plan(guards=...)``: what ranks compare in every step, in the first steps, or never."""

from importlib.metadata import EntryPoint

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from meshpar import FullyShard, HybridShard, MeshparError, ModelLayout, Plan, TensorLayout, TensorParallel
from meshpar._torch.groups import collective_counts
from meshpar.core import registry
from meshpar.exchange import ranks
from meshpar.step.moment import Guard
from meshpar.testing import on_ranks

BLOCKS = ModelLayout(
    blocks=("blocks.*",),
    tensor=TensorLayout({"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}, heads={"blocks.*.0": 4}),
)
FEATURES = 8


class Model(nn.Module):
    """Three blocks, of which a forward can leave out the last."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, FEATURES)) for _ in range(3)
        )

    def forward(self, x, skip=False):
        for block in self.blocks[: 2 if skip else 3]:
            x = x + block(x)
        return x


def inputs(seed):
    return torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(seed))


def step(module, optimizer, x, **kwargs):
    module(x, **kwargs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def exchanges(run):
    """The number of collectives that ``run`` makes in each process group, the groups without any left out."""
    before = collective_counts()
    run()
    after = collective_counts()
    return {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}


def counted(mesh, passes, guards):
    """The exchanges of the fourth step."""
    par = Plan(mesh, passes, guards=guards).apply(Model(), BLOCKS)
    optimizer = torch.optim.SGD(par.module.parameters(), lr=0.1)
    for number in range(3):
        step(par.module, optimizer, inputs(par.data_rank + 10 * number))
    return exchanges(lambda: step(par.module, optimizer, inputs(par.data_rank)))


def by_hand():
    """The exchanges of a step of the same model under FSDP2 alone."""
    module, mesh = Model(), dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    step(module, optimizer, inputs(dist.get_rank()))
    return exchanges(lambda: step(module, optimizer, inputs(dist.get_rank())))


@on_ranks(2, fresh="counts the collectives of all groups")
def test_without_guards_ranks_exchange_what_passes_do():
    unused = 1  # which parameters no rank used, beside other work
    found, alone = counted("dp_shard=2", [FullyShard()], "off"), by_hand()
    assert sum(found.values()) == sum(alone.values()) + unused, f"{found} {alone}"
    outputs, gradients = 3, 2  # the first block's input has no gradient
    found = counted("tp=2", [TensorParallel()], "off")
    assert sum(found.values()) == outputs + gradients, f"{found}"


@on_ranks(4, fresh="counts the collectives of all groups")
def test_after_the_first_steps_first_exchanges_no_more_than_off():
    plan = ("dp_replicate=2,dp_shard=2", [HybridShard()])
    always, first, off = (sum(counted(*plan, guards).values()) for guards in ("always", "first", "off"))
    assert first == off, (first, off)
    beside = 3  # before the forward, the backward and the step; which gradients exist is compared by the passes, too
    assert always == off + beside, f"{always} against {off}, with three blocks"
    plan, of_tp = ("dp_shard=2,tp=2", [TensorParallel(), FullyShard()]), 2  # the batch, and the loss
    always, off = (sum(counted(*plan, guards).values()) for guards in ("always", "off"))
    assert always == off + beside + of_tp, f"{always} against {off}, with three blocks that exchange, too"


@on_ranks(4)
def test_a_data_rank_that_leaves_out_a_block_of_tp_after_some_steps_is_refused_on_all_ranks():
    par = Plan("dp_shard=2,tp=2", [TensorParallel(), FullyShard()]).apply(Model(), BLOCKS)
    optimizer = torch.optim.SGD(par.module.parameters(), lr=0.1)
    for number in range(4):
        step(par.module, optimizer, inputs(par.data_rank + 10 * number))
    with pytest.raises(MeshparError, match="ranks are at different places of their loops"):
        step(par.module, optimizer, inputs(par.data_rank), skip=par.data_rank == 1)


PATCHED = {
    "grad": lambda: torch.autograd.grad,
    "backward": lambda: torch.autograd.backward,
    "norms": lambda: torch.nn.utils.clip_grad._get_total_norm,
    "data": lambda: (vars(DTensor).get("data"), vars(DTensor).get("numpy")),
    "operators": lambda: dict(DTensor._op_dispatcher._custom_op_handlers),
    "dispatch": lambda: set(vars(DTensor._op_dispatcher)),
}


@on_ranks(2)
def test_without_guards_torch_is_what_it_was():
    before = {name: get() for name, get in PATCHED.items()}
    par = Plan("tp=2", [TensorParallel()], guards="off").apply(Model(), BLOCKS)
    step(par.module, torch.optim.SGD(par.module.parameters(), lr=0.1), inputs(0))
    assert {name: get() for name, get in PATCHED.items()} == before
    sharded = Plan("dp_shard=2", [FullyShard()], guards="off").apply(Model(), BLOCKS)
    step(sharded.module, torch.optim.SGD(sharded.module.parameters(), lr=0.1), inputs(0))
    changed = {name for name, get in PATCHED.items() if get() != before[name]}
    assert changed <= {"grad", "backward"}, "a backward may come into a unit by another way than its outputs"


@on_ranks(2)
def test_first_compares_batches_in_the_first_steps_alone():
    def different(guards, steps):
        par = Plan("tp=2", [TensorParallel()], guards=guards).apply(Model(), BLOCKS)
        for number in range(steps):
            par.module(inputs(number)).square().mean().backward()
        par.module(inputs(10 + dist.get_rank()))

    for guards, steps in (("always", 0), ("always", 3), ("first", 0)):
        with pytest.raises(MeshparError, match="different batches"):
            different(guards, steps)
    for guards, steps in (("first", 3), ("off", 0)):
        different(guards, steps)


@on_ranks(2)
def test_what_no_rank_used_has_no_gradient_without_guards_and_what_one_used_has():
    par = Plan("dp_shard=2", [FullyShard()], guards="off").apply(Model(), BLOCKS)
    par.module(inputs(0), skip=True).square().mean().backward()
    assert all(parameter.grad is None for parameter in par.module.blocks[2].parameters())
    par.module.zero_grad()
    for used in (0, 1):  # rank 0 alone uses the first layer's bias
        output = par.module(inputs(used))
        (output.square().mean() * (1 if dist.get_rank() == 0 else 0)).backward()
    assert all(parameter.grad is not None for parameter in par.module.blocks[2].parameters())


class Counts(Guard):
    """A stranger's guard: counts the moments that it sees."""

    def __init__(self, guarded):
        self.seen, self.module = [], guarded.module

    def before_forward(self, args, kwargs):
        self.seen.append("forward")
        if kwargs.get("skip"):
            raise MeshparError("a block is left out")

    def after_forward(self, output):
        self.seen.append("output")

    def after_error(self):
        self.seen.append("error")

    def before_unit(self, name, unit):
        self.seen.append(f"unit {name}")

    def before_backward(self, roots, *, reaches):
        self.seen.append("backward" if reaches() else "another backward")

    def after_backward(self):
        assert any(parameter.grad is not None for parameter in self.module.parameters()), "they are reduced by then"
        self.seen.append("gradients")

    def before_micro_batch(self, left):
        self.seen.append(f"micro-batch {left}")

    def before_step(self, optimizer, *, trains):
        self.seen.append(f"step {trains}")


@on_ranks(2)
def test_a_strangers_guard_sees_each_moment_of_a_step_and_may_refuse():
    made = []
    known = registry.plugin
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "names", lambda group: ["counts"] if group == "meshpar.guards" else [])
        patch.setattr(
            registry,
            "plugin",
            lambda group, name: (
                (lambda guarded: made.append(Counts(guarded)) or made[-1:])
                if group == "meshpar.guards"
                else known(group, name)
            ),
        )
        par = Plan("dp_shard=2", [FullyShard()]).apply(Model(), BLOCKS)
        Plan("dp_shard=2", [FullyShard()], guards="off").apply(Model(), BLOCKS)
    (guard,) = made
    optimizer = torch.optim.SGD(par.module.parameters(), lr=0.1)
    for x in par.accumulate([inputs(0), inputs(1)]):
        par.module(x).square().mean().backward()
    optimizer.step()
    call = ["forward", "unit ", *(f"unit blocks.{number}" for number in range(3)), "output", "backward"]
    assert guard.seen == ["micro-batch 2", *call, "micro-batch 1", *call, "gradients", "step True"], guard.seen
    with pytest.raises(MeshparError, match="a block is left out"):
        par.module(inputs(0), skip=True)
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()
    assert guard.seen[-1] == "step False"


@on_ranks(4)
def test_guards_that_some_ranks_alone_have_are_refused_by_name_in_the_exchange_of_weights():
    entry = EntryPoint("meets", "stranger_guards:Meets", "meshpar.guards")
    exchanges, gather = [], ranks.all_gather
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "all_gather", lambda *given: exchanges.append(0) or gather(*given))
        Plan("dp_shard=4", [FullyShard()]).apply(Model(), BLOCKS)
        assert len(exchanges) == 2, "names, with those of guards, and weights"
        patch.setattr(
            registry,
            "_found",
            lambda group: {"meets": entry} if group == registry.GUARDS and dist.get_rank() in (1, 3) else {},
        )
        with pytest.raises(MeshparError) as refused:
            Plan("dp_shard=4", [FullyShard()]).apply(Model(), BLOCKS)
        refused.match(
            r"guard meets \(stranger_guards:Meets, package unknown\): on ranks \[1, 3\], and not on \[0, 2\]\n"
            "ranks of a guard that exchanges values would wait for the others; install the same packages on every host, "
            r"or leave guards out by Plan\(guards='off'\)"
        )
        Plan("dp_shard=4", [FullyShard()], guards="off").apply(Model(), BLOCKS)
