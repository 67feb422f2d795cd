"""Habits of loops over stages: exact as one process, or refused on all stages in the step in which they happen."""

import copy
import io
import itertools
import math
import zlib
from collections import Counter
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from meshpar import CheckpointError, FullyShard, MeshparError, ModelLayout, PipelineParallel, Plan, TensorParallel
from meshpar.checkpoints import CheckpointManager
from meshpar.testing import on_ranks
from meshpar.training import LossScaler
from tests.support.comparison import assert_gradients, assert_weights
from tests.support.tiers import daily

VOCAB, WIDTH, STEPS = 17, 8, 3


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    """Blocks that are called as ``order`` says, whose outputs in ``dropped`` are not used."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(4))
        self.order, self.dropped, self.noise = (0, 1, 2, 3), (), 0.0

    def forward(self, ids):
        x = self.embed(ids)
        if self.noise and self.training:
            x = F.dropout(x, self.noise)
        for number in self.order:
            value = self.blocks[number](x)
            x = x if number in self.dropped else value
        return self.head(self.norm(x))


def model(**options):
    torch.manual_seed(0)
    return Model(**options).double()


def micro_batches(step, number=4):
    draw = torch.Generator().manual_seed(step)
    return list(torch.randint(VOCAB - 1, (number, 2, 6), generator=draw))


def cross_entropy(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def plain_loss(module, batch):
    return cross_entropy(module(batch), batch) / 4


def masked_loss(module, batch, seen=None):
    mask = torch.rand(batch.shape, dtype=torch.float64) < 0.5
    if seen is not None:
        seen.append(mask)
    return cross_entropy(module(torch.where(mask, VOCAB - 1, batch)), batch) / 4


def in_one_process(loss, after=lambda net: None, make=model, **options):
    """Return losses and the last weights of steps in one process."""
    net = make(**options)
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.3), []
    torch.manual_seed(7)
    for step in range(STEPS):
        total = 0.0
        for batch in micro_batches(step):
            value = loss(net, batch)
            value.backward()
            total += value.detach()
        after(net)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, net.state_dict()


def on_stages(loss, after=lambda par: None, passes=None, mesh="pp=2", make=model, **options):
    """Return the same of steps over stages."""
    par = Plan(mesh, passes or [PipelineParallel(**options)]).apply(make())
    optimizer, losses = torch.optim.SGD(par.module.parameters(), lr=0.3), []
    torch.manual_seed(7)
    for step in range(STEPS):
        losses.append(par.backward(micro_batches(step), loss))
        after(par)
        optimizer.step()
        optimizer.zero_grad()
    return losses, par.state_dict(full=True, everywhere=True)


def assert_equal(one, other):
    # totals are float32
    torch.testing.assert_close(list(map(float, one[0])), list(map(float, other[0])), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dict(one[1]), dict(other[1]), rtol=1e-9, atol=1e-9)


def stages(net=None, layout=None, passes=None, mesh="pp=2", **options):
    """A model of its own, or that of the caller, over stages."""
    return Plan(mesh, passes or [PipelineParallel(**options)]).apply(model() if net is None else net, layout)


def total(net, number=4):
    """The loss of a step's micro-batches in one process, before its backward."""
    return sum(plain_loss(net, batch) for batch in micro_batches(0, number))


TIGHT, LOSS = {"rtol": 1e-9, "atol": 1e-9}, {"rtol": 1e-6, "atol": 1e-6}  # totals are float32


def grads_of(par):
    return [parameter.grad for parameter in par.module.parameters()]


class Counts(Model):
    """A model whose forward counts its calls, by a number and in a list."""

    def __init__(self):
        super().__init__()
        self.calls, self.lengths, self.first, self.samples = 0, [], True, Counter()
        self.embed.register_forward_pre_hook(self.note)

    def note(self, *_):
        self.first = False

    def forward(self, ids):
        scale = 1.0 if self.first else 0.5
        self.calls, self.kept = self.calls + 1, ids.sum()
        self.lengths.append(len(ids))
        self.samples[len(ids)] += 1
        x = self.embed(ids) * scale / self.samples[len(ids)]
        for block in self.blocks:
            x = block(x / len(self.lengths))
        return self.head(self.norm(x))


def counting():
    torch.manual_seed(0)
    return Counts().double()


@pytest.mark.parametrize("options", [{"virtual": 2}, {"virtual": 2, "schedule": "gpipe"}, {}])
@on_ranks(2)
def test_what_a_forward_counts_is_counted_once_a_micro_batch(options):
    counts = []

    def look(net):
        module, batches = getattr(net, "module", net), micro_batches(9)
        with torch.no_grad():
            losses = [plain_loss(net, one) for one in batches] if net is module else net.forward(batches, plain_loss)
        counts.append(
            (
                module.calls,
                len(module.lengths),
                module.samples[2],
                module.first,
                int(module.kept),
                sum(map(float, losses)),
            )
        )

    expected = in_one_process(plain_loss, look, counting)
    assert_equal(expected, on_stages(plain_loss, look, make=counting, **options))
    assert counts[STEPS:] == [pytest.approx(one, rel=1e-6) for one in counts[:STEPS]]


class CountingBlock(Block):
    def forward(self, x):
        self.calls.add_(1)
        return super().forward(x)


def with_a_buffer():
    net = model()
    net.blocks[3].__class__ = CountingBlock
    net.blocks[3].register_buffer("calls", torch.zeros(()))
    return net.double()


COUNTING = [(counting, "calls"), (with_a_buffer, "blocks.3.calls"), (model, "")]
AFTER_ERRORS = [(*make, where) for make in COUNTING for where in ("loss", "data", "evaluation")]


@pytest.mark.parametrize("make, name, where", daily(AFTER_ERRORS, AFTER_ERRORS[1], AFTER_ERRORS[3], AFTER_ERRORS[8]))
@on_ranks(2)
def test_after_an_error_a_model_whose_forwards_count_is_refused_until_it_is_built_again(make, name, where):
    par, batches = stages(make(), ModelLayout(blocks=("blocks.*",))), micro_batches(0)
    weights = par.state_dict(full=True, everywhere=True)
    expected = par.backward(batches, plain_loss)

    def fails(net, batch):
        return plain_loss(net, batch) * (1 // int(batch is not batches[1]))

    with pytest.raises((ZeroDivisionError, MeshparError)):
        if where == "evaluation":
            with torch.no_grad():
                par.forward(batches, fails)
        else:
            par.backward(
                batches if where == "loss" else (one * (1 // int(one is not batches[1])) for one in batches), fails
            )
    for _ in range(2 if name else 0):  # also when it is tried again
        par.module.zero_grad()
        with pytest.raises(MeshparError, match=f"a step before this one ended with an error.*forwards change {name}"):
            par.backward(batches, plain_loss)
        with torch.no_grad(), pytest.raises(MeshparError, match=f"forwards change {name}"):
            par.forward(batches, plain_loss)
    par = stages(make(), ModelLayout(blocks=("blocks.*",))) if name else par
    par.load_state_dict(weights)
    par.module.zero_grad()
    torch.testing.assert_close(par.backward(batches, plain_loss), expected)


NUMBERS = [
    lambda par: torch.nn.utils.clip_grad_norm_(par.module.parameters(), 0.3),
    lambda par: torch.nn.utils.get_total_norm(grads_of(par)),
    lambda par: torch.sqrt(sum(grad.pow(2).sum() for grad in grads_of(par))),
    lambda par: sum(grad.detach().norm().item() ** 2 for grad in grads_of(par)) ** 0.5,
    lambda par: torch.stack([grad.norm() for grad in grads_of(par)]).norm(),
    lambda par: all(bool(grad.isfinite().all()) for grad in grads_of(par)),
    lambda par: torch.cat([parameter.detach().flatten() for parameter in par.module.parameters()]).norm(),
    lambda par: math.sqrt(sum(np.linalg.norm(grad.numpy()) ** 2 for grad in grads_of(par))),
]
OF_SHARDS = [
    *(NUMBERS[place] for place in (0, 2, 4)),
    lambda par: sum(grad.full_tensor().norm() for grad in grads_of(par)),
]


@on_ranks(2)
def test_numbers_of_several_parameters_are_refused_and_the_remedy_is_exact():
    par = stages()
    par.backward(micro_batches(0), plain_loss)
    for number in NUMBERS:
        with pytest.raises(MeshparError, match="would get another number"):
            number(par)
    for parameter in par.module.parameters():  # a number of one
        grad = par.whole(parameter.grad)
        assert math.isclose(grad.norm().item(), np.linalg.norm(grad.numpy()), rel_tol=1e-12)
    one = in_one_process(plain_loss, lambda net: torch.nn.utils.clip_grad_norm_(net.parameters(), 0.3))
    assert_equal(on_stages(plain_loss, lambda par: par.clip_grad_norm_(0.3)), one)


@on_ranks(4)
def test_numbers_of_several_sharded_parameters_are_refused_and_the_remedy_is_exact():
    passes = [PipelineParallel(), FullyShard()]
    par = stages(mesh="pp=2,dp_shard=2", passes=passes)
    par.backward(micro_batches(0), plain_loss)
    for number in OF_SHARDS:
        with pytest.raises(MeshparError, match="would get another number"):
            number(par)

    def penalized(module, batch):
        penalty = sum(parameter.full_tensor().pow(2).sum() for parameter in module.parameters())
        return plain_loss(module, batch) + penalty

    par.module.zero_grad()
    with pytest.raises(MeshparError, match="would get another number"):
        par.backward(micro_batches(0), penalized)
    par = Plan("pp=2,dp_shard=2", [PipelineParallel(), FullyShard(reshard_after_forward=False)]).apply(model())
    par.module.eval()
    with torch.no_grad():
        par.forward(micro_batches(0), plain_loss)
        with pytest.raises(MeshparError, match="would get another number"):  # of what the units have gathered
            sum(parameter.pow(2).sum() for parameter in par.module.parameters())
    one = in_one_process(plain_loss, lambda net: torch.nn.utils.clip_grad_norm_(net.parameters(), 0.3))
    assert_equal(on_stages(plain_loss, lambda par: par.clip_grad_norm_(0.3), passes, "pp=2,dp_shard=2"), one)


@on_ranks(2)
def test_what_is_computed_of_each_parameter_alone_is_exact_and_leaves_no_trace():
    def clip_each(net):
        for parameter in net.parameters():
            parameter.grad.mul_(torch.clamp(0.1 / parameter.grad.norm(), max=1.0))
            parameter.data.mul_(0.99)

    trained = on_stages(plain_loss, lambda par: clip_each(par.module))
    assert_equal(trained, in_one_process(plain_loss, clip_each))
    kept = []
    on_stages(plain_loss, lambda par: kept.extend(value.detach().clone() for value in par.module.parameters()))
    torch.save(kept, saved := io.BytesIO())
    saved.seek(0)
    assert {type(value) for value in torch.load(saved, weights_only=True)} == {torch.Tensor}
    assert {type(value) for value in trained[1].values()} == {torch.Tensor}


@on_ranks(2)
def test_a_penalty_over_all_parameters_in_loss_is_refused_on_all_stages():
    def squares(module):
        return sum(parameter.pow(2).sum() for parameter in module.parameters())

    def before(module, batch):
        penalty = squares(module)
        return plain_loss(module, batch) + penalty

    def behind(module, batch):
        return plain_loss(module, batch) + squares(module)

    for loss in (before, behind):
        with pytest.raises(MeshparError, match=r"several parameters or gradients, .* would get another number"):
            on_stages(loss)

    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3)
    par = stages()
    decaying = torch.optim.SGD(par.module.parameters(), lr=0.3, weight_decay=2.0)
    (total(plain) + squares(plain)).backward()
    par.backward(micro_batches(0), plain_loss)
    optimizer.step()
    decaying.step()
    assert_weights(par, plain, **TIGHT)


def tied_model():
    net = model()
    net.head.weight = net.embed.weight
    return net


def step_in_hooks(net):
    for parameter in net.parameters():
        step = torch.optim.SGD([parameter], lr=0.3).step
        parameter.register_post_accumulate_grad_hook(lambda parameter, step=step: step())


@on_ranks(2)
def test_optimizers_that_step_in_hooks_are_refused_where_gradients_are_parts_and_the_remedy_is_exact():
    par = stages()
    step_in_hooks(par.module)
    with pytest.raises(MeshparError, match=r"an optimizer steps in a hook|another stage of pp failed"):
        par.backward(micro_batches(0, 2), plain_loss)
    assert_equal(on_stages(plain_loss), in_one_process(plain_loss))
    par, net = stages(), model()
    for module, run in ((par.module, partial(par.backward, micro_batches(0, 1), plain_loss)), (net, None)):
        step_in_hooks(module)
        run() if run else plain_loss(net, *micro_batches(0, 1)).backward()
    assert_weights(par, net, **TIGHT)


@on_ranks(2)
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hooks_of_shared_weights_are_refused_and_the_remedy_is_exact(register):
    plan, net = Plan("pp=2", [PipelineParallel()]), tied_model()
    net.embed.weight.register_hook(lambda grad: grad / grad.norm())
    refused = pytest.raises(MeshparError, match=r"a hook of embed\.weight would get a part of its gradient")
    with refused:
        plan.apply(net)
    par = plan.apply(tied_model())
    with refused:
        [getattr(parameter, register)(lambda one: None) for parameter in par.module.parameters()]

    def normed(net):
        for parameter in net.parameters():
            parameter.grad.div_(1e-3 + parameter.grad.norm())

    trained = on_stages(plain_loss, lambda par: normed(par.module), make=tied_model)  # change parameter.grad
    assert_equal(trained, in_one_process(plain_loss, normed, make=tied_model))


@on_ranks(2)
def test_shared_weights_that_no_stage_used_get_no_gradient():
    class Scaled(Model):
        def __init__(self):
            super().__init__()
            self.gain, self.scales = nn.Parameter(torch.tensor(2.0)), True

        def forward(self, ids):
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x) * self.gain if self.scales else block(x)
            return self.head(self.norm(x))

    torch.manual_seed(0)
    par = Plan("pp=2", [PipelineParallel()]).apply(Scaled().double())
    par.backward(micro_batches(0), plain_loss)
    assert par.module.gain.grad is not None
    before = par.module.gain.grad.clone()
    par.module.scales = False
    par.backward(micro_batches(0), plain_loss)
    torch.testing.assert_close(par.module.gain.grad, before)
    par.module.zero_grad()
    par.backward(micro_batches(0), plain_loss)
    assert par.module.gain.grad is None
    par = Plan("pp=2", [PipelineParallel()]).apply(tied_model())
    par.backward([], plain_loss)
    assert all(parameter.grad is None for parameter in par.module.parameters())


@on_ranks(2)
def test_a_grad_scaler_is_refused_and_a_loss_scaler_skips_on_all_stages():
    par = stages()
    optimizer, scaler = torch.optim.SGD(par.module.parameters(), lr=0.3), torch.amp.GradScaler("cpu", init_scale=8.0)
    par.backward(micro_batches(0), lambda module, batch: scaler.scale(plain_loss(module, batch)))
    for call in (scaler.unscale_, scaler.step):
        with pytest.raises(MeshparError, match="GradScaler looks for infinite gradients in this stage of pp alone"):
            call(optimizer)
    own = LossScaler(scale=8.0)
    optimizer.zero_grad()
    par.backward(micro_batches(0), lambda module, batch: plain_loss(module, batch) * own.scale)
    own.unscale_(par.module)
    assert own.update(float(par.clip_grad_norm_(float("inf"))))


@on_ranks(2)
def test_an_optimizer_whose_parameters_depend_on_each_other_is_refused():
    class OfAll(torch.optim.SGD):
        def step(self, closure=None):
            held = [
                parameter for group in self.param_groups for parameter in group["params"] if parameter.grad is not None
            ]
            size = sum(float(parameter.grad.norm()) for parameter in held)
            with torch.no_grad():
                for parameter in held:
                    parameter.sub_(parameter.grad / size)

    for kind, names in ((torch.optim.LBFGS, "LBFGS"), (OfAll, "OfAll")):
        par = stages()
        optimizer = kind(par.module.parameters(), lr=0.1)
        par.backward(micro_batches(0), plain_loss)
        with pytest.raises(
            MeshparError, match=f"{names} .* each stage of pp has the parameters of its own layers; use"
        ):
            optimizer.step(lambda: torch.zeros(()))
        torch.optim.AdamW(par.module.parameters()).step()


DRAWS = [{}, {"schedule": "gpipe"}, {"virtual": 2}]


@on_ranks(2)
@pytest.mark.parametrize("options", daily(DRAWS, {"virtual": 2}, ids=str))
def test_masks_that_loss_draws_are_one_process_s_on_all_stages(options):
    assert_equal(on_stages(masked_loss, **options), in_one_process(masked_loss))


@on_ranks(2)
def test_masks_are_alike_and_dropout_in_blocks_is_drawn_apart():
    masks, par = [], Plan("pp=2", [PipelineParallel()]).apply(model(dropout=0.5))
    par.manual_seed(7)
    for _ in range(2):
        par.backward(micro_batches(0), partial(masked_loss, seen=masks))
    drawn = torch.stack(masks)
    assert len(drawn.unique(dim=0)) == len(drawn) == 8
    kept = []
    for drop in [module for module in par.module.modules() if isinstance(module, nn.Dropout)]:
        drop.register_forward_hook(lambda module, args, output: kept.append(output.detach() / args[0].detach()))
    par.backward(micro_batches(0), masked_loss)
    dropped = torch.stack(kept)
    assert len(dropped.unique(dim=0)) == len(dropped) == 8
    others = [torch.empty_like(both) for both in (drawn, dropped) for _ in range(2)]
    torch.distributed.all_gather(others[:2], drawn)
    torch.distributed.all_gather(others[2:], dropped)
    assert others[0].equal(others[1])
    assert not (others[2][:, None] == others[3]).flatten(2).all(-1).any()


@on_ranks(2)
def test_random_states_that_differ_and_draws_behind_the_call_are_refused():
    par = stages()
    torch.manual_seed(torch.distributed.get_rank())
    with pytest.raises(MeshparError, match="other inputs on rank 1 of pp than on rank 0"):
        par.backward(micro_batches(0), masked_loss)
    par.module.zero_grad()
    par.manual_seed(7)
    par.backward(micro_batches(0), masked_loss)

    def behind(module, batch):
        return plain_loss(module, batch) * torch.rand(())

    with pytest.raises(MeshparError, match="draws random numbers after it has called the module"):
        par.backward(micro_batches(0), behind)
    par.module.zero_grad()
    par.module.noise = 0.5
    with pytest.raises(MeshparError, match="the model has no dropout module that does"):
        par.backward(micro_batches(0), plain_loss)
    par = Plan("pp=2", [PipelineParallel()]).apply(model(), ModelLayout(blocks=("blocks.*",), dropout=True))
    par.module.noise = 0.5
    par.backward(micro_batches(0), plain_loss)


@on_ranks(2)
def test_what_a_stage_takes_otherwise_out_of_a_micro_batch_is_refused():
    def another(module, pair):
        return plain_loss(module, pair[torch.distributed.get_rank()])

    def written(module, pair):
        pair[0].add_(torch.distributed.get_rank()).remainder_(VOCAB - 1)
        return plain_loss(module, pair[0])

    for loss in (another, written):
        par, pairs = stages(), [(one.clone(), one + 1) for one in micro_batches(0)]
        with pytest.raises(MeshparError, match="other inputs on rank 1 of pp than on rank 0, in micro-batch 0"):
            par.backward(pairs, loss)


CHANGES = {
    "another order": {"order": (3, 2, 1, 0)},
    "a block left out": {"order": (0, 2, 3)},
    "an early exit": {"order": (0, 1)},
    "an early exit on the first stage": {"order": (0,)},
    "a loop": {"order": (0, 1, 2, 3, 0, 1, 2, 3)},
    "an output dropped before the cut": {"dropped": (1,)},
}


@on_ranks(2)
@pytest.mark.parametrize("options", daily([{}, {"virtual": 2}], {}, ids=str))
def test_other_calls_of_blocks_are_refused_on_all_stages_and_the_next_step_is_exact(options):
    par = stages(**options)
    for change in CHANGES.values():
        before = {name: getattr(par.module, name) for name in change}
        for name, value in change.items():
            setattr(par.module, name, value)
        with pytest.raises(MeshparError, match="pp"):
            par.backward(micro_batches(0), plain_loss)
        for name, value in before.items():
            setattr(par.module, name, value)
        par.module.zero_grad()
    torch.testing.assert_close(par.backward(micro_batches(0), plain_loss), total(model()).detach(), **LOSS)


@on_ranks(2)
def test_a_look_at_a_model_runs_no_hook_and_hooks_get_values_where_they_are_computed():
    seen, norms = {}, {}

    def keeps(number):
        return lambda module, args, output: seen.update({number: output})

    def measures(number):
        return lambda module, args, output: norms.update({number: output.norm().item()})

    net = model()
    for number, block in enumerate(net.blocks):
        block.register_forward_hook(keeps(number))
    plan = Plan("pp=2", [PipelineParallel()])
    plan.check(net)
    assert not seen
    par = plan.apply(net)
    assert not seen
    for number, block in enumerate(par.module.blocks):
        block.register_forward_hook(measures(number))

    def distils(numbers):
        return lambda module, batch: plain_loss(module, batch) + sum(seen[number].pow(2).mean() for number in numbers)

    par.backward(micro_batches(0), plain_loss)
    assert set(norms) == ({0, 1} if torch.distributed.get_rank() == 0 else {2, 3})
    with pytest.raises(MeshparError, match="a value that a hook has kept of a block"):
        par.backward(micro_batches(0), distils([0, 3]))
    par.module.zero_grad()
    found, one = par.backward(micro_batches(0), distils([2, 3])), model()
    for number, block in enumerate(one.blocks):
        block.register_forward_hook(keeps(number))
    expected = sum(distils([2, 3])(one, batch).detach() for batch in micro_batches(0))
    torch.testing.assert_close(found, expected, **LOSS)


@on_ranks(2)
def test_extra_that_differs_between_stages_is_refused_and_rank_extra_restores_it(tmp_path):
    par = stages()
    rank = torch.distributed.get_rank()
    with CheckpointManager(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match=r"extra=\{'rates'.* rank_extra"):
            checkpoints.save(1, par, extra={"rates": [rank], "epoch": 3})
        checkpoints.save(1, par, extra={"epoch": 3}, rank_extra={"rates": [rank]})
        restored = checkpoints.restore(par)
    assert (restored.extra, restored.rank_extra) == ({"epoch": 3}, {"rates": [rank]})


DATA, SPLIT = (
    ("pp=2,dp_shard=2", [PipelineParallel(), FullyShard()]),
    ("pp=2,tp=2", [PipelineParallel(), TensorParallel()]),
)
TABLE = ModelLayout(blocks=("blocks.*",), tensor={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})


@on_ranks(4)
def test_data_ranks_of_a_stage_that_differ_are_refused_on_all_stages_and_the_next_step_is_exact():
    par = Plan(*DATA).apply(model())
    optimizer = torch.optim.SGD(par.module.parameters(), lr=0.3)
    with pytest.raises(MeshparError, match=r"give par\.backward different numbers of micro-batches, this one [34]"):
        par.backward(micro_batches(0, 3 + par.data_rank), plain_loss)
    with pytest.raises(MeshparError, match=r"give par\.forward different numbers of micro-batches"):
        par.forward(micro_batches(0, 3 + par.data_rank), lambda net, batch: plain_loss(net, batch).item())
    optimizer.zero_grad()
    par.backward(micro_batches(0, 3), plain_loss)
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + par.data_rank)
    with pytest.raises(MeshparError, match="ranks step SGD with different settings"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.3
    optimizer.zero_grad()
    assert_equal(on_stages(plain_loss, passes=DATA[1], mesh=DATA[0]), in_one_process(plain_loss))


@on_ranks(4)
def test_tensor_ranks_of_a_stage_with_other_batches_are_refused():
    par = Plan(*SPLIT).apply(model(), TABLE)
    other = [batch + (torch.distributed.get_rank() % 2) for batch in micro_batches(0)]
    with pytest.raises(MeshparError, match="ranks of tp got different batches"):
        par.backward(other, plain_loss)
    par.module.zero_grad()
    assert par.backward(micro_batches(0), plain_loss).isfinite()


@on_ranks(2)
def test_a_backward_in_loss_is_refused_and_par_backward_runs_it():
    def stepping(module, batch):
        loss = plain_loss(module, batch)
        loss.backward()
        return loss

    def of_gradients(module, batch):
        loss = plain_loss(module, batch)
        grads = torch.autograd.grad(loss, list(module.head.parameters()), create_graph=True)
        return loss + sum(whole(grad).pow(2).sum() for grad in grads)

    def whole(grad):
        return grad.full_tensor() if isinstance(grad, DTensor) else grad

    for loss in (stepping, of_gradients):
        with pytest.raises(
            MeshparError, match=r"loss runs a backward or torch\.autograd\.grad after the module's call"
        ):
            on_stages(loss)
    assert_equal(on_stages(plain_loss), in_one_process(plain_loss))
    net = model()
    batch = micro_batches(0)[0]
    expected = of_gradients(net, batch).detach()
    table = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    layout = ModelLayout(blocks=("blocks.*",), tensor=table)
    par = Plan("tp=2", [TensorParallel()]).apply(model(), layout)  # without pp
    torch.testing.assert_close(par.backward([batch], of_gradients), expected, rtol=1e-6, atol=1e-6)


@on_ranks(2)
def test_parts_of_the_model_are_refused_outside_of_its_calls():
    par = stages()
    hidden, batch = torch.ones(2, 6, WIDTH, dtype=torch.float64), micro_batches(0)[0]
    for part, value in ((par.module.embed, batch), (par.module.blocks[0], hidden), (par.module.head, hidden)):
        with pytest.raises(MeshparError, match="is called from outside of the module, where this rank has some of"):
            part(value)
    with pytest.raises(MeshparError, match=r"embed .* is called from outside of the module"):
        par.backward(micro_batches(0), lambda module, batch: module.head(module.embed(batch)).mean())
    par.module.zero_grad()
    expected = model()(batch).detach()
    for result in par.forward([batch], lambda module, batch: module(batch)):
        torch.testing.assert_close(result, expected)
    assert par.forward([], lambda module, batch: module(batch)) == []


@on_ranks(2)
def test_backward_hooks_run_where_their_block_computes_alone():
    def halved(net):
        for block in net.blocks:
            block.register_full_backward_pre_hook(lambda block, grads: tuple(0.5 * grad for grad in grads))
            block.register_full_backward_hook(lambda block, grads, given: tuple(3.0 * grad for grad in grads))
        return net

    net, par = halved(model()), stages()
    halved(par.module)
    total(net).backward()
    par.backward(micro_batches(0), plain_loss)
    assert_gradients(par.module, net)


class Measuring(Model):
    """Keeps a mean of what it returns, in a buffer of its own."""

    def __init__(self, persistent=True):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()), persistent=persistent)

    def forward(self, ids):
        return measured(self, super().forward(ids))


def measured(module, output):
    module.mean.mul_(0.9).add_(output.detach().mean())
    return output


class Mean(nn.Linear):
    """Keeps it in a buffer of the head."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, hidden):
        return measured(self, super().forward(hidden))


def measuring(kind):
    torch.manual_seed(0)
    if kind == "of the head":
        net = Model()
        head, net.head = net.head, Mean(WIDTH, VOCAB)
        net.head.load_state_dict(head.state_dict(), strict=False)
        return net.double()
    return Measuring(persistent=kind == "persistent").double()


@on_ranks(2)
def test_a_buffer_that_stages_would_fill_differently_is_refused_and_the_remedies_are_exact():
    for options in ({}, {"virtual": 2}):
        with pytest.raises(MeshparError, match="the forward writes into the buffers mean, which each stage of pp"):
            on_stages(plain_loss, make=lambda: measuring("persistent"), **options)
        for kind in ("of the head", "not persistent"):
            make = partial(measuring, kind)
            assert_equal(on_stages(plain_loss, make=make, **options), in_one_process(plain_loss, make=make))


@on_ranks(2)
def test_recomputation_by_the_model_with_reentrant_backwards_is_refused_and_without_is_exact():
    class Recomputing(Model):
        reentrant = False

        def forward(self, ids):
            hidden = self.embed(ids)
            for block in self.blocks:
                hidden = checkpoint(block, hidden, use_reentrant=self.reentrant)
            return self.head(self.norm(hidden))

    def make(kind):
        torch.manual_seed(0)
        return kind().double()

    with (
        mock.patch.object(Recomputing, "reentrant", True),
        pytest.raises(MeshparError, match="did not reach the loss, or was detached"),
    ):
        on_stages(plain_loss, make=lambda: make(Recomputing))
    # Use torch.utils.checkpoint with use_reentrant=False
    assert_equal(on_stages(plain_loss, make=lambda: make(Recomputing)), in_one_process(plain_loss))


@on_ranks(2)
def test_an_output_that_is_dropped_before_a_cut_is_refused_and_other_cuts_are_exact():
    par = stages(stages=(2, 2))
    par.module.dropped = (1,)
    with pytest.raises(MeshparError, match="did not reach the loss, or was detached"):
        par.backward(micro_batches(0), plain_loss)
    for dropped, options in ((1, dict(stages=(1, 3))), (3, {})):  # inside of a stage, known after the cut or before
        net = model()
        if dropped == 3:
            net.dropped = (3,)
        par = stages(copy.deepcopy(net), **options)
        net.dropped = par.module.dropped = (dropped,)
        loss = total(net)
        loss.backward()
        torch.testing.assert_close(par.backward(micro_batches(0), plain_loss), loss.detach(), **LOSS)
        assert_gradients(par.module, net)


@on_ranks(2)
def test_one_process_s_states_load_whole_and_a_stage_s_own_are_not_pickled(tmp_path):
    par, whole = stages(), model()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.mul_(2.0)
    par.module.load_state_dict(whole.state_dict())
    assert_weights(par, whole)
    par.module.load_state_dict(par.module.state_dict())  # this rank's own
    lacking = {name: value for name, value in whole.state_dict().items() if name != "blocks.0.up.weight"}
    other = {**whole.state_dict(), "blocks.3.up.bias": torch.zeros(3)}
    for state, why in (
        (lacking, r"Missing key.*blocks\.0\.up\.weight"),
        (other, r"size mismatch for blocks\.3\.up\.bias"),
    ):
        with pytest.raises(RuntimeError, match=f"(?s){why}"):
            par.module.load_state_dict(state)
    optimizer, alone = torch.optim.AdamW(par.module.parameters()), torch.optim.AdamW(whole.parameters())
    par.backward(micro_batches(0), plain_loss)
    optimizer.step()
    for state in (par.module.state_dict(), optimizer.state_dict()):
        with pytest.raises(MeshparError, match=r"pickling it .* would lose the others'"):
            torch.save(state, io.BytesIO())
    with pytest.raises(MeshparError, match="this optimizer's state is of 29 parameters, expected"):
        optimizer.load_state_dict(alone.state_dict())
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, par, optimizer)
        checkpoints.restore(par, optimizer)


@on_ranks(2)
def test_functional_calls_are_refused_and_loaded_or_averaged_weights_are_exact():
    par, weights = stages(), model().state_dict()
    weights, batch = {name: 2 * value for name, value in weights.items()}, micro_batches(0)[0]
    expected = torch.func.functional_call(model(), weights, (batch,)).detach()
    with pytest.raises(
        MeshparError, match=r"torch\.func\.functional_call puts weights into layers of which this stage"
    ):
        torch.func.functional_call(par.module, weights, (batch,))
    average = par.averaged(0.0)  # the last weights
    par.load_state_dict(weights)
    torch.testing.assert_close(par.forward([batch], lambda module, batch: module(batch))[0], expected)
    average.update()
    with average.swapped():
        outputs = par.forward([batch], lambda module, batch: module(batch))
    torch.testing.assert_close(outputs[0], expected)


def hooked(register, *, before=False):
    """Return a function that makes a model, or a plan's, whose hooks add up gradients, and the list of what they add."""
    seen = []

    def keep(value):
        grad = value.grad if isinstance(value, nn.Parameter) else value
        seen.append(grad.pow(2).sum())

    def add(net):
        for parameter in net.parameters():
            getattr(parameter, register)(keep)
        return net

    par = Plan("pp=2", [PipelineParallel()]).apply(add(model()) if before else model())
    add(nn.Module() if before else par.module)
    return par, seen


@on_ranks(2)
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("before", daily([True, False], False))
def test_sums_of_gradient_hooks_are_refused_and_hooks_of_one_parameter_are_exact(register, before):
    par, seen = hooked(register, before=before)
    par.backward(micro_batches(0, 1), plain_loss)
    with pytest.raises(MeshparError, match="would get another number"):
        sum(seen)
    par.module.zero_grad()
    par.module.head.bias.register_hook(lambda grad: seen.append(float(grad.norm())))  # of a stand-in on the first stage
    with pytest.raises(MeshparError, match="would get another number"):
        par.backward(micro_batches(0, 1), plain_loss)

    def clip_each(net):
        for parameter in net.parameters():
            if register == "register_hook":
                parameter.register_hook(lambda grad: grad * torch.clamp(0.1 / grad.norm(), max=1.0))
            else:
                parameter.register_post_accumulate_grad_hook(lambda one: one.grad.mul_(0.5) is None or None)
        return net

    net, par = clip_each(model()), stages()
    clip_each(par.module)
    for batch in micro_batches(0):  # hooks see each micro-batch
        plain_loss(net, batch).backward()
    par.backward(micro_batches(0), plain_loss)
    assert_gradients(par.module, net)


def to_none(net, optimizer):
    for parameter in net.parameters():
        parameter.grad = None


CLEARS = [
    lambda net, optimizer: optimizer.zero_grad(), lambda net, optimizer: net.zero_grad(set_to_none=False), to_none
]  # fmt: skip


@on_ranks(2)
@pytest.mark.parametrize("options", daily([{}, {"schedule": "gpipe"}, {"virtual": 2}], {"schedule": "gpipe"}, ids=str))
def test_gradients_that_loss_clears_are_refused_on_all_stages_and_the_remedies_are_exact(options):
    for clear, behind in itertools.product(CLEARS, (False, True)):
        par = stages(**options)
        optimizer = torch.optim.SGD(par.module.parameters(), lr=0.3)

        def loss(module, batch, clear=clear, behind=behind, optimizer=optimizer):
            if not behind:
                clear(module, optimizer)
            value = plain_loss(module, batch)
            if behind:
                clear(module, optimizer)
            return value

        with pytest.raises(MeshparError, match="loss reads or writes gradients"):
            par.backward(micro_batches(0), loss)
    for place in ("before", "after"):
        net, par = model(), stages(**options)
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.3) for module in (net, par.module)]
        for step in range(2):
            for optimizer in optimizers if place == "before" else ():
                optimizer.zero_grad()
            par.backward(micro_batches(step), plain_loss)
            sum(plain_loss(net, batch) for batch in micro_batches(step)).backward()
            for optimizer in optimizers:
                optimizer.step()
                if place == "after":
                    optimizer.zero_grad()
        assert_weights(par, net, **TIGHT)


def layers_of(net):
    return [layer for layer in net.modules() if isinstance(layer, nn.Linear)]


def initialised(net):
    torch.manual_seed(3)
    for layer in layers_of(net):
        nn.init.normal_(layer.weight, std=0.1)


DRAWN = [
    initialised,
    lambda net: [layer.reset_parameters() for layer in layers_of(net)],
    lambda net: [parameter.data.add_(0.01 * torch.randn_like(parameter)) for parameter in net.parameters()],
    lambda net: [parameter.data.add_(0.01 * torch.randn(parameter.shape)) for parameter in net.parameters()],
]


@torch.no_grad()
def noised_by_name(net):
    for name, parameter in net.named_parameters():
        draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        parameter.add_(0.01 * torch.randn(parameter.shape, generator=draw))
        if name.endswith("up.weight"):
            nn.init.normal_(parameter, generator=draw)


@on_ranks(2)
def test_numbers_drawn_for_parameters_are_refused_and_the_remedies_are_exact():
    for draw in DRAWN:
        par = stages()
        with pytest.raises(MeshparError, match="draws random numbers for parameters or gradients"):
            draw(par.module)
    net, early, late = model(), model(), stages()
    initialised(net)
    initialised(early)
    late.load_state_dict(net.state_dict())
    for par in (Plan("pp=2", [PipelineParallel()]).apply(early), late):  # initialise the model before plan.apply
        assert_weights(par, net)
    noised_by_name(net)
    noised_by_name(late.module)
    assert_weights(late, net)


@on_ranks(2)
def test_a_part_of_another_stage_s_block_is_refused_by_name_and_the_remedies_find_it():
    par = stages(stages=(2, 2))
    first = torch.distributed.get_rank() == 0
    elsewhere, here = (3, (0, 1)) if first else (0, (2, 3))
    with pytest.raises(MeshparError, match=rf"blocks\.{elsewhere}\.up: the block is on another stage of pp"):
        par.module.blocks[elsewhere].up  # noqa: B018 - the look is the test
    with pytest.raises(AttributeError, match="object has no attribute 'nothing'"):
        par.module.blocks[elsewhere].nothing  # noqa: B018
    assert [hasattr(block, "up") for block in par.module.blocks] == [first, first, not first, not first]
    names = [name for name, _ in par.module.named_parameters() if "up" in name]
    assert names == [f"blocks.{number}.up.{leaf}" for number in here for leaf in ("weight", "bias")]
    whole = par.state_dict(full=True, everywhere=True)
    torch.testing.assert_close(whole[f"blocks.{elsewhere}.up.weight"], model().blocks[elsewhere].up.weight.detach())


def penalised(module, batch):
    return plain_loss(module, batch) + 0.1 * module.embed.weight.pow(2).sum() / 4


@torch.no_grad()
def add_penalty(net):
    for parameter in net.embed.parameters():  # none but on the first stage
        parameter.grad.add_(0.2 * parameter)


@on_ranks(2)
def test_a_penalty_over_a_parameter_of_another_stage_is_refused_and_the_remedies_are_exact():
    with pytest.raises(MeshparError, match="uses a parameter that another stage of pp has, in the loss"):
        on_stages(penalised)
    _, expected = in_one_process(penalised)
    _, added = on_stages(plain_loss, lambda par: add_penalty(par.module))
    torch.testing.assert_close(dict(added), dict(expected), rtol=1e-9, atol=1e-9)
    par = stages()
    others = [one for name, one in par.module.named_parameters() if name != "embed.weight"]
    embed = {"params": par.module.embed.parameters(), "weight_decay": 0.2}
    optimizer = torch.optim.SGD([{"params": others}, embed], lr=0.3)
    for step in range(STEPS):
        par.backward(micro_batches(step), plain_loss)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(par.state_dict(full=True, everywhere=True), dict(expected), rtol=1e-9, atol=1e-9)

    def of_head(module, batch):  # which the last stage has
        assert module.get_parameter("embed.weight").dtype == torch.float64
        return plain_loss(module, batch) + 0.1 * module.get_parameter("head.weight").pow(2).sum()

    assert_equal(on_stages(of_head), in_one_process(of_head))


@on_ranks(2)
def test_an_optimizer_of_parameters_of_other_stages_is_refused_and_a_group_of_them_is_exact():
    par, net = stages(), model()
    if torch.distributed.get_rank() == 0:
        with pytest.raises(MeshparError, match="SGD gets no parameters"):
            torch.optim.SGD(par.module.head.parameters(), lr=0.3)
    optimizer = torch.optim.SGD([{"params": par.module.head.parameters()}], lr=0.3)
    alone = torch.optim.SGD(net.head.parameters(), lr=0.3)
    par.backward(micro_batches(0), plain_loss)
    total(net).backward()
    optimizer.step()
    alone.step()
    assert_weights(par, net, **TIGHT)


def shrink(net):
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.data.mul_(0.9)


@on_ranks(2)
def test_parameters_that_loss_writes_are_refused_and_written_after_the_backward_they_are_exact():
    def shrink_head(module):
        with torch.no_grad():
            module.head.weight.mul_(0.9)

    for write, behind in ((shrink, False), (shrink, True), (shrink_head, False)):

        def writing(module, batch, write=write, behind=behind):
            if not behind:
                write(module)
            loss = plain_loss(module, batch)
            if behind:
                write(module)
            return loss

        with pytest.raises(MeshparError, match="loss writes parameters"):
            on_stages(writing)
    after = on_stages(plain_loss, lambda par: shrink(par.module))  # write after par.backward
    assert_equal(after, in_one_process(plain_loss, shrink))
