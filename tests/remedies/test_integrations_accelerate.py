"""Rows of `integrations/accelerate.py` and what it shares with others (`tests/remedies/rows.py`)."""

import itertools

import torch
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.tensor import DTensor

from meshpar import ContextParallel, Float8, FullyShard, PipelineParallel, Plan, Replicate, TensorParallel
from meshpar.integrations.accelerate import Accelerator
from meshpar.testing import on_ranks
from tests.integrations.test_accelerate import Average, Net, start
from tests.remedies.rows import TwoRanks, run_together

SHARDED, SPLIT = Plan("dp_shard=2", [FullyShard()]), Plan("tp=2", [TensorParallel()])
NARROW = Plan("dp_shard=1,tp=2", [TensorParallel(), FullyShard()])


def made(plan=SHARDED, **options):
    start(launched=True)
    return Accelerator(plan=plan, **options)


def trained(make, *, first=False, **extra):
    """Whether a step changes weights, by an optimizer that was made before prepare, or after it (``first``)."""
    net, accelerator = Net(4), made()
    for name, parameter in extra.items():
        net.register_parameter(name, parameter)
    if first:
        net = accelerator.prepare(net)
        optimizer = accelerator.prepare(make(net))
    else:
        net, optimizer = accelerator.prepare(net, make(net))
    before = accelerator.parallelized(net).whole(net.head.weight).clone()
    accelerator.backward(net(torch.ones(2, 4)).sum())
    optimizer.step()
    return not torch.equal(before, accelerator.parallelized(net).whole(net.head.weight))


class Hoards(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.hoard = {"all": list(self.param_groups[0]["params"])}


def factored(net):
    """An optimizer that has stepped, with state of another shape than its parameter's."""
    optimizer = sgd(net)
    optimizer.state[net.head.weight]["rows"] = torch.ones(3)
    return optimizer


def sgd(net, *more):
    return torch.optim.SGD([*net.parameters(), *more], lr=0.1)


def saved(joint, folder):
    """Save two models with one optimizer, or with one each."""
    accelerator, nets = made(), [Net(4), Net(4)]
    chains = [itertools.chain(*(net.parameters() for net in nets))] if joint else [net.parameters() for net in nets]
    accelerator.prepare(*nets, *(torch.optim.SGD(chain, lr=0.1) for chain in chains))
    return accelerator.save_state(folder) == folder


def resumed(plan, folder):
    """Resume a schedule that two data ranks saved."""
    for accelerator, restores in ((made(), False), (made(plan), True)):
        net = Net(4)
        optimizer = sgd(net)
        schedule = torch.optim.lr_scheduler.SequentialLR(
            optimizer, [torch.optim.lr_scheduler.ConstantLR(optimizer) for _ in range(2)], [9]
        )
        accelerator.prepare(net, optimizer, schedule)
        if restores:
            accelerator.load_state(folder)
        else:
            accelerator.save_state(folder)
    return True


def two(*plans):
    return len(made(dict(zip("ab", plans))).prepare(Net(4), Net(4))) == 2


def built(device):
    with torch.device(device):
        net = Net(4)
    return made().prepare(net) is net


def averages(*models_first):
    """Whether an average is divided, that is prepared after its model or without it."""
    accelerator, net = made(), Net(4)
    average = Average(net.parameters())
    accelerator.prepare(*(net for _ in models_first), average)
    return all(isinstance(shadow, DTensor) for shadow in average.shadow_params)


ROWS = [
    TwoRanks("parameters that no model on the mesh has, of shapes")
    .refuses(lambda: trained(lambda net: sgd(net, nn.Parameter(torch.ones(3)))))
    .helps(
        "make them parameters of a model before a plan is applied to it",
        lambda: trained(sgd, temperature=nn.Parameter(torch.ones(3))),
    ),
    TwoRanks("keeps parameters of before in its attribute")
    .refuses(lambda: trained(lambda net: Hoards(net.parameters())))
    .helps(
        "put the model on the mesh first, and build the optimizer from its parameters",
        lambda: trained(lambda net: Hoards(net.parameters()), first=True),
    ),
    TwoRanks("so the state cannot be moved to the mesh; expected one value for each element")
    .refuses(lambda: trained(factored))
    .helps("put the optimizer on the mesh before its first step", lambda: trained(sgd)),
    TwoRanks("and a script for accelerate calls its model with whole sequences and every layer")
    .refuses(lambda: made(Plan("pp=2", [PipelineParallel()])))
    .helps(
        "use dp_replicate, dp_shard, ep or tp", lambda: made(SPLIT).num_processes == 1 and made().num_processes == 2
    ),
    TwoRanks("loader feeds all models; use meshes whose data axes have the same sizes")
    .refuses(lambda: two(SHARDED, SPLIT))
    .helps(
        "use meshes whose data axes have the same sizes", lambda: two(SHARDED, Plan("dp_replicate=2", [Replicate()]))
    ),
    TwoRanks("tensors, and no model on the mesh has parameters of their shapes")
    .refuses(averages)
    .helps("pass the model to prepare first", lambda: averages(True)),
    TwoRanks("join_uneven_inputs lets ranks run other numbers of batches")
    .refuses(lambda: made().join_uneven_inputs([]))
    .helps("leave join_uneven_inputs out", lambda: trained(sgd)),
    TwoRanks("is on the meta device; expected weights")
    .refuses(lambda: built("meta"))
    .helps("build it with values before accelerator.prepare", lambda: built("cpu")),
    TwoRanks("give plan= a name and a plan for each model")
    .refuses(lambda: two(SHARDED))
    .helps("give plan= a name and a plan for each model", lambda: two(SHARDED, SHARDED)),
    TwoRanks("is on no mesh; expected a model that accelerator.prepare returned")
    .refuses(lambda: made().parallelized(Net(4)))
    .helps("pass it to prepare first", lambda: trained(sgd)),
    TwoRanks("checkpoint keeps a module with its optimizers")
    .refuses(lambda: saved(True, "joint"))
    .helps("save its module, too", lambda: saved(False, "each"))
    .helps("make an optimizer for each module", lambda: saved(False, "each")),
    TwoRanks("which places models by another engine; expected the plan alone")
    .refuses(lambda: made(fsdp_plugin=FullyShardedDataParallelPlugin()))
    .helps("drop the other, and write its axes into the plan's mesh", lambda: made(SHARDED).num_processes == 2),
    TwoRanks("Accelerator got mixed_precision='fp8'")
    .refuses(lambda: made(mixed_precision="fp8"))
    .helps("add the pass Float8() to the plan", lambda: made(Plan("dp_shard=2", [Float8(), FullyShard()])) is not None),
    TwoRanks("expected no options of other engines")
    .refuses(lambda: made().save_state("options", exclude_frozen_parameters=True))
    .helps("leave them out", lambda: made().save_state("options") == "options"),
    TwoRanks("dispatch_batches=True sends other batches to each rank")
    .refuses(lambda: made(SPLIT, dataloader_config=DataLoaderConfiguration(dispatch_batches=True)))
    .helps(
        "use DataLoaderConfiguration(dispatch_batches=False)",
        lambda: made(SPLIT, dataloader_config=DataLoaderConfiguration(dispatch_batches=False)).num_processes == 1,
    ),
    TwoRanks("counts the steps of {} data ranks in schedules of its own")
    .refuses(lambda: resumed(NARROW, "schedule"))
    .helps("use a mesh with as many", lambda: resumed(SHARDED, "schedule again")),
]


@on_ranks(2)
def test_the_printed_remedies_help_on_two_ranks(tmp_path):
    run_together(ROWS, 2, tmp_path)


@on_ranks(2)
def test_positions_are_refused_as_layers_are():
    try:
        made(Plan("dp_shard=1,cp=2", [ContextParallel(), FullyShard()]))
    except Exception as error:
        assert "cp=2 [ContextParallel -> FullyShard] divides positions of a sequence over cp, and" in str(error)
    else:
        raise AssertionError("accepted")
