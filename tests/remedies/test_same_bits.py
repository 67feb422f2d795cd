"""Rows of `same_bits`: see `tests/remedies/rows.py`."""

import torch
from torch import nn

from meshpar import ContextParallel, FullyShard, ModelLayout, PipelineParallel, Plan, Replicate
from meshpar.testing import on_ranks
from tests.remedies.rows import Row, TwoRanks, in_one_process, run_together
from tests.support.models_for_parity import on_meta, transformer

LAYOUT = ModelLayout(blocks=("*",))


def problems(mesh, passes=(), module=None, *, same_bits=True, **options):
    module = on_meta(lambda: transformer(**options)) if module is None else module
    layout = None if not isinstance(module, nn.Sequential) else LAYOUT
    Plan(mesh, passes, same_bits=same_bits).check(module, layout, Plan(mesh).mesh.size if mesh else 1)
    return ()


def net(*layers):
    return nn.Sequential(nn.Linear(4, 4), *layers)


def trained(loop, dtype=torch.float32, plan=FullyShard, **options):
    """Let ``loop(par, inputs, optimizer)`` train on two ranks; return whether gradients or weights are finite."""
    module = net(nn.Linear(4, 2)).to(dtype)
    par = Plan("dp_shard=2", [plan()], same_bits=True).apply(module, LAYOUT)
    inputs = [torch.full((2, 4), 1.0 + par.data_rank + 2 * number, dtype=dtype) for number in range(2)]
    return loop(par, inputs, torch.optim.SGD(module.parameters(), lr=0.1, **options)) is None


def by_hand(par, inputs, optimizer):
    for x in inputs:
        par.module(x).sum().backward()
    optimizer.step()


def accumulated(par, inputs, optimizer):
    for x in par.accumulate(inputs):
        par.module(x).sum().backward()
    optimizer.step()


def by_backward(par, inputs, optimizer):
    by_hand(par, inputs[:1], optimizer)
    optimizer.zero_grad()
    par.backward(inputs, lambda module, x: module(x).sum())
    optimizer.step()


def twice(par, inputs, optimizer):
    for x in par.accumulate(inputs):
        output = par.module(x)
        output.sum().backward(retain_graph=True)
        output.square().sum().backward()


def once(par, inputs, optimizer):
    for x in par.accumulate(inputs):
        output = par.module(x)
        (output.sum() + output.square().sum()).backward()


def several(par, inputs, optimizer):
    for x in par.accumulate(inputs):
        output = par.module(x)
        torch.autograd.backward([output.sum(), output.square().sum()])


def hooked(par, inputs, optimizer):
    next(par.module.parameters()).register_hook(lambda grad: grad.clamp(max=0.5))
    accumulated(par, inputs, optimizer)


def changed_between(par, inputs, optimizer):
    for x in par.accumulate(inputs):
        par.module(x).sum().backward()
    next(par.module.parameters()).grad.clamp_(max=0.5)
    optimizer.step()


def step_inside(par, inputs, optimizer):
    for x in par.accumulate(inputs):
        par.module(x).sum().backward()
        optimizer.step()


def third_norm(par, inputs, optimizer, norm_types=(3,)):
    accumulated(par, inputs, optimizer)
    for norm_type in norm_types:
        par.clip_grad_norm_(1.0, norm_type)


def other_norms(par, inputs, optimizer):
    third_norm(par, inputs, optimizer, (2, 1, float("inf")))


def torch_norm(par, inputs, optimizer):
    accumulated(par, inputs, optimizer)
    torch.nn.utils.clip_grad_norm_(par.module.parameters(), 1.0)


def unordered(loop=None):
    class Writing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net()

        def forward(self, x):
            output = self.inner(x)
            return output.put_(torch.tensor([1]), torch.ones(1)) if loop is None else loop(output)

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # as it is beside an accelerator
    try:
        par = Plan("dp_shard=2", [FullyShard()], same_bits=True).apply(Writing(), ModelLayout(blocks=("inner",)))
        par.module(torch.ones(2, 4)).sum().backward()
    finally:
        torch.use_deterministic_algorithms(before)
    return True


HALF = {"param_dtype": torch.bfloat16}
ROWS = [
    Row("is no power of two; use {}={} or {}={}")
    .refuses(lambda: problems("dp_shard=3", [FullyShard()]))
    .helps(
        "use",
        lambda: problems("dp_shard=2", [FullyShard()]),
        lambda: problems("dp_shard=4", [FullyShard()]),
    ),
    Row("does not keep the bits of one process on")
    .refuses(lambda: problems("dp_shard=1,cp=2", [ContextParallel(), FullyShard()]))
    .helps("use {}=1", lambda: problems("dp_shard=1,cp=1", [ContextParallel(), FullyShard()]))
    .helps("drop same_bits", lambda: problems("dp_shard=1,cp=2", [ContextParallel(), FullyShard()], same_bits=False)),
    Row("so that same_bits cannot hold; use reduce_dtype")
    .refuses(lambda: problems("dp_replicate=2", [Replicate(**HALF)]))
    .helps("use reduce_dtype", lambda: problems("dp_replicate=2", [Replicate(**HALF, reduce_dtype=torch.float32)])),
    Row("computes statistics of all samples of a forward, whose number follows")
    .refuses(lambda: problems("dp_shard=2", [FullyShard()], net(nn.BatchNorm1d(4))))
    .helps("use a norm", lambda: problems("dp_shard=2", [FullyShard()], net(nn.LayerNorm(4)))),
    Row("so that same_bits cannot hold; untie it")
    .refuses(lambda: problems("pp=2", [PipelineParallel()], tied=True))
    .helps("untie it", lambda: problems("pp=2", [PipelineParallel()], tied=False))
    .helps("use pp=1", lambda: problems("pp=1", [PipelineParallel()], tied=True)),
    TwoRanks("have gradients from before this backward")
    .refuses(lambda: trained(by_hand))
    .helps("use par.accumulate", lambda: trained(accumulated))
    .helps("call par.backward", lambda: trained(by_backward)),
    TwoRanks("same_bits takes one backward a micro-batch")
    .refuses(lambda: trained(twice))
    .helps("add the losses", lambda: trained(once)),
    TwoRanks("same_bits takes the backward of one loss, and got several tensors")
    .refuses(lambda: trained(several))
    .helps("add them", lambda: trained(once)),
    TwoRanks("gets the gradient of a micro-batch of all ranks, whose samples follow the mesh")
    .refuses(lambda: trained(hooked))
    .helps("change gradients between the last backward and the step", lambda: trained(changed_between)),
    TwoRanks("adds up the squares of each rank's shards")
    .refuses(lambda: trained(torch_norm))
    .helps("under same_bits call par.clip_grad_norm_", lambda: trained(other_norms)),
    TwoRanks("fused=True computes the last elements of a shard on a CPU")
    .refuses(lambda: trained(accumulated, fused=True))
    .helps("under same_bits use fused=False", lambda: trained(accumulated, fused=False))
    .helps("foreach=True", lambda: trained(accumulated, foreach=True)),
    TwoRanks("which CPUs add with a factor by other instructions")
    .refuses(lambda: trained(accumulated, torch.bfloat16))
    .helps(
        "under same_bits keep parameters in float32",
        lambda: trained(accumulated, plan=lambda: FullyShard(**HALF, reduce_dtype=torch.float32)),
    ),
    TwoRanks("of which same_bits leaves gradients after")
    .refuses(lambda: trained(step_inside))
    .helps("step after the loop", lambda: trained(accumulated)),
    TwoRanks("write it by other operators")
    .refuses(unordered)
    .helps("write it by other operators", lambda: unordered(lambda output: output + torch.ones(2, 4)))
    .helps("drop same_bits", lambda: trained(accumulated)),
    TwoRanks("takes powers, whose last bits depend on a value's place")
    .refuses(lambda: trained(third_norm))
    .helps("under same_bits use norm_type", lambda: trained(other_norms)),
]  # fmt: skip

test_in_one_process = in_one_process(ROWS)


@on_ranks(2)
def test_on_two_ranks(tmp_path):
    run_together(ROWS, 2, tmp_path)
