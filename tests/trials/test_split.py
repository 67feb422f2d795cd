"""The split tries itself: in the first step, without any guard of a single case, it finds what a split gets wrong."""

import gc
import logging
import random
import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import meshpar.passes.tensor.styles
from meshpar import ActivationCheckpoint, FullyShard, ModelLayout, ParallelError, Plan, PlanError, TensorParallel
from meshpar.passes.positions.attention import Mask, documents
from meshpar.tensors.digests import leaves
from meshpar.testing import assert_parity, on_ranks, token_steps
from meshpar.trials import copies, split_test
from meshpar.trials.engine import Inputs
from tests.accelerator.simulated import without_guards
from tests.support.comparison import assert_gradients, gradients
from tests.support.loop_habits import OutOfMemory
from tests.support.models_for_parity import VOCAB, transformer
from tests.support.tiers import daily

LAYOUT = ModelLayout(
    blocks=("blocks.*",),
    tensor={"embed": "vocab", "blocks.*.up": "colwise", "blocks.*.down": "rowwise", "head": "head"},
)


def with_styles(styles):
    return ModelLayout(blocks=LAYOUT.blocks, tensor={**LAYOUT.tensor.styles, **styles})


class Block(nn.Module):
    def __init__(self, up=nn.Linear, down=nn.Linear, between=F.gelu, **extra):
        super().__init__()
        self.norm, self.up, self.down, self.between = nn.LayerNorm(8), up(8, 16), down(16, 8), between
        for name, module in extra.items():
            self.add_module(name, module())

    def forward(self, x):
        if hasattr(self, "conv"):
            x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        h = self.up(self.norm(x))
        h = self.scale(h) if hasattr(self, "scale") else h
        return x + self.down(self.between(h))


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Doubled(nn.Linear):
    def forward(self, x):
        return F.linear(x, 2.0 * self.weight, self.bias)


class Scale(nn.Module):
    """One number a feature, which sees this rank's part where it stands between projections."""

    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.by


def normed(width, hidden):
    return torch.nn.utils.parametrizations.weight_norm(nn.Linear(width, hidden, bias=False))


def sparse(h):
    return torch.relu(h - h.mean(-1, keepdim=True) - h.std(-1, keepdim=True))


def convolution():
    return nn.Conv1d(8, 8, 3, padding=1)


IDS = torch.arange(12)[None]
WRONG = {
    "a subclass that scales its weight": (dict(up=Doubled), "output", False),
    "a parametrized weight": (dict(up=normed, down=normed), "output", False),
    "a standard deviation over features": (dict(between=sparse), "output", False),
    "a whole parameter that sees a part": (dict(scale=Scale), r"gradient of scale\.by", False),
    "a convolution over split positions": (dict(conv=convolution), "output", True),
}


@pytest.mark.parametrize("case", WRONG)
@on_ranks(2)
def test_the_first_forward_finds(case):
    with pytest.MonkeyPatch.context() as patch:  # without the guards of single cases
        patch.setattr(meshpar.passes.tensor.styles, "replaced_problems", lambda *_: iter(()))
        patch.setattr(meshpar.passes.tensor.styles, "local", unwrapped)
        first_forward_finds(*WRONG[case])


def unwrapped(parameter):
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def first_forward_finds(options, what, positions):
    torch.manual_seed(0)
    layout = with_styles({"blocks.*.norm": "sequence"} if positions else {})
    par = without_guards(Plan("tp=2", [TensorParallel(sequence_parallel=positions)]).apply(Model(**options), layout))
    with pytest.raises(ParallelError, match=rf"blocks\.0: ({what}).*, off by [^\n]*(\n.*)*colwise_gather"):
        par.module(IDS)
    par = Plan("tp=2", [TensorParallel(sequence_parallel=positions)], verify=False).apply(Model(**options), layout)
    par.module(IDS)


@on_ranks(2)
def test_what_differs_between_layers_is_a_kind_of_its_own():
    module = Model()
    module.blocks[1].between = sparse
    module.blocks[1].sparsity = 0.95
    par = Plan("tp=2", [TensorParallel()]).apply(module, LAYOUT)
    with pytest.raises(ParallelError, match=r"blocks\.1: output"):
        par.module(IDS)


@on_ranks(2)
def test_an_error_in_a_blocks_backward_reaches_the_loops_backward_and_no_forward():
    par = Plan("tp=2", [TensorParallel()]).apply(Model(), LAYOUT)
    hook = par.module.blocks[0].norm.register_forward_hook(lambda module, args, output: OutOfMemory.apply(output))
    output = par.module(IDS)
    with pytest.raises(MemoryError):
        output.sum().backward()
    hook.remove()
    par.module.zero_grad()
    par.module(IDS).sum().backward()


RIGHT = {
    "tp": ("tp=4", [TensorParallel()]),
    "tp-sequence-loss": ("tp=4", [TensorParallel(sequence_parallel=True, loss_parallel=True)]),
    "fsdp-tp": ("dp_shard=2,tp=2", [TensorParallel(), ActivationCheckpoint(), FullyShard(param_dtype=torch.bfloat16)]),
}


@on_ranks(4)
@pytest.mark.parametrize("plan", daily(RIGHT, "fsdp-tp"))
def test_a_right_split_is_verified_and_leaves_nothing_behind(plan):
    mesh, passes = RIGHT[plan]
    torch.manual_seed(0)
    par = Plan(mesh, passes).apply(transformer(qk_norm=True))
    before = {name: value.clone() for name, value in par.module.state_dict().items()}
    verification = par.verify({"input_ids": torch.arange(16)[None] % VOCAB})
    assert set(verification.modules) >= {"layers.0", "embed", "head"}, verification
    assert max(verification.modules.values()) < 1e-4 and not verification.skipped, verification
    assert all(
        torch.equal(value.to_local(), before[name].to_local()) for name, value in par.module.state_dict().items()
    )
    par.module(input_ids=torch.arange(16)[None] % VOCAB).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in par.module.parameters())


class Gained(Block):
    """A block with one number a feature, a parameter of its own, for what its split layers return."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))

    def reset_parameters(self):
        nn.init.ones_(self.gain)

    def forward(self, x):
        return x + self.gain * self.down(self.between(self.up(self.norm(x))))


class Scaled(Model):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Gained() for _ in range(2))


WITH_GAIN = with_styles({"blocks.*.gain": None})


def loss_sum(model, batch):
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum"), int(
        (batch["labels"] >= 0).sum()
    )


@pytest.mark.parametrize(
    ("styles", "layout"), [({}, WITH_GAIN), ({"blocks.*.gain": None}, LAYOUT)], ids=["in the layout", "in the pass"]
)
@on_ranks(4)
def test_a_parameter_beside_split_layers_that_meets_whole_features_stays_whole(styles, layout):
    assert_parity(
        Scaled,
        "dp_shard=2,tp=2",
        [TensorParallel(styles=styles), FullyShard()],
        token_steps(12, parts=2),
        layout=layout,
        loss_sum=loss_sum,
    )


def test_a_parameter_beside_split_layers_needs_a_word_about_it():
    with pytest.raises(
        PlanError, match=r"blocks\.0\.gain \(8,\) has no style.*None where it meets whole features"
    ) as raised:
        Plan("tp=2", [TensorParallel()]).check(Scaled(), LAYOUT, 2)
    assert "1 problem" in str(raised.value)
    wrong = TensorParallel(styles={"blocks.*.gain": "grad_sum"})
    with pytest.raises(ParallelError, match=r"gradient of gain.*\n.*sees whole features needs None"):
        Plan("tp=2", [wrong]).prove(Scaled(), IDS, LAYOUT)


@on_ranks(4)
def test_the_first_forward_logs_no_advice_of_torch():
    said, handler = [], logging.Handler()
    handler.emit = said.append
    logging.getLogger("torch.distributed.tensor._redistribute").addHandler(handler)
    par = Plan("dp_shard=2,tp=2", [TensorParallel(), FullyShard()]).apply(transformer())
    par.module(input_ids=torch.arange(16)[None] % VOCAB).logits.sum().backward()
    par.state_dict(full=True)
    assert [record.getMessage() for record in said] == []


@pytest.mark.parametrize("passes", [[TensorParallel()], [TensorParallel(sequence_parallel=True, loss_parallel=True)]])
def test_a_split_is_proved_without_processes(passes):
    torch.manual_seed(0)
    module = transformer(qk_norm=True)
    verification = Plan("tp=4", passes).prove(module, {"input_ids": torch.arange(16)[None] % VOCAB})
    assert set(verification.modules) >= {"layers.0", "embed", "head"} and max(verification.modules.values()) < 1e-4, (
        verification
    )
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())


def test_what_is_wrong_is_found_without_processes():
    with pytest.raises(ParallelError, match=r"blocks\.0: output, off by"):
        Plan("tp=2", [TensorParallel()]).prove(Model(between=sparse), IDS, LAYOUT)
    layout = with_styles({"blocks.*.norm": "sequence", "head": "rowwise_split"})
    with pytest.raises(
        ParallelError, match=r"the model: it returns \(1, 3, 12\), which is no rank's part of \(1, 12, 12\)"
    ):
        Plan("tp=2", [TensorParallel(sequence_parallel=True)]).prove(Model(), IDS, layout)
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    with pytest.raises(
        ParallelError, match=r"2 \(Linear\) failed(.|\n)*remedy: give it the style 'rowwise'.*'2': 'rowwise'"
    ):
        layout = ModelLayout(tensor={"0": "colwise"})
        Plan("tp=2", [TensorParallel()]).prove(module, torch.zeros(1, 4, 8), layout, world_size=2)


def test_an_output_that_refers_to_itself_is_searched_once():
    class Box:
        pass

    box, tensor = Box(), torch.ones(1)
    box.itself, box.held = box, [tensor]
    assert list(leaves(box, objects=True)) == [tensor]


SEEN = []


class Tally:
    """State that a block is called with."""

    def __init__(self):
        self.calls, self.losses = 0, []


class Leaving(Block):
    """A block that keeps what it computes: ``test_copies.py`` has more kinds of places."""

    made = 0

    def __init__(self):
        super().__init__()
        self.probe, self.peak, self.losses = nn.Linear(8, 2), torch.zeros(()), []
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x, tally=None):
        x = super().forward(x)
        self.aux = self.probe(x.detach()).square().mean()
        self.losses.append(self.aux)
        self.mean.mul_(0.5).add_(x.detach().mean((0, 1)))
        self.peak.copy_(x.detach().abs().max())
        type(self).made += 1
        SEEN.append(random.random() + torch.rand(()).item())
        if tally is not None:
            tally.calls += 1
            tally.losses.append(self.aux)
        return x

    def left(self):
        values = [round(value.sum().item(), 4) for value in (self.mean, self.peak)]
        return [type(self).made, list(SEEN), values, self.peak._version, len(self.losses)]


class Remembers(Model):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.blocks = nn.ModuleList(Leaving() for _ in range(2))

    def forward(self, ids):
        x, self.tally = self.embed(ids), Tally()
        for block in self.blocks:
            x = block(x, self.tally)
        return self.head(x)


def first_step(module=None):
    """Return what the first step leaves: its loss, gradients, and traces of all kinds."""
    module = Remembers() if module is None else module
    torch.manual_seed(0)
    random.seed(0)
    Leaving.made, heard = 0, []
    SEEN.clear()
    module.blocks[0].norm.register_forward_hook(lambda *_: heard.append(1))
    loss = (
        module(IDS).square().mean()
        + sum(block.aux + sum(block.losses) for block in module.blocks)
        + sum(module.tally.losses)
    )
    loss.backward()
    grads = gradients(module)
    left = [block.left() for block in module.blocks]
    return loss.detach(), grads, [left, len(heard), module.tally.calls, torch.rand(()).item(), random.random()]


@on_ranks(2)
def test_the_test_in_the_first_forward_leaves_no_trace():
    loss, grads, left = first_step()
    held = []
    for verify in (True, True, False):  # the first in a process makes tensors that stay, such as a random state's
        par = Plan("tp=2", [TensorParallel()], verify=verify).apply(Remembers(), LAYOUT)
        par.verify(IDS)
        got, have, traces = first_step(par.module)
        assert str(traces) == str(left), verify
        torch.testing.assert_close((got, have), (loss, grads))
        del got, have
        gc.collect()
        held.append(sum(issubclass(type(value), torch.Tensor) for value in gc.get_objects()))
        del par
    assert held[1] == held[2]


class Sparse(Block):
    """A block with a penalty on what stands between its split layers, which leaves it by an attribute."""

    def forward(self, x):
        hidden = self.between(self.up(self.norm(x)))
        self.penalty = hidden.abs().mean()
        return x + self.down(hidden)


class Penalised(Model):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.blocks = nn.ModuleList(Sparse() for _ in range(2))


@on_ranks(2)
def test_a_loss_that_takes_in_what_a_rank_has_a_part_of_is_refused_and_exact_where_it_is_whole():
    def step(model, weight):
        (model(IDS).square().mean() + weight * sum(block.penalty for block in model.blocks)).backward()

    one, whole = Penalised(), {f"blocks.*.{name}": None for name in ("up", "down")}
    par = Plan("tp=2", [TensorParallel()]).apply(Penalised(), LAYOUT)
    step(par.module, 0.0)  # as in a warm-up
    with pytest.raises(ParallelError, match=r"ranks of tp .* starts from different losses: .*'blocks.\*.attn': None"):
        step(par.module, 0.1)
    with pytest.raises(ParallelError, match="starts from different losses"):
        par.module.blocks[0].penalty.backward()
    par = Plan("tp=2", [TensorParallel(styles=whole)]).apply(Penalised(), LAYOUT)
    step(one, 0.1)
    step(par.module, 0.1)
    assert_gradients(par.module, one)


@on_ranks(2)
def test_a_block_that_holds_what_cannot_be_copied_is_not_tried_and_is_named():
    model = Model()
    model.blocks[0].numbers = (number for number in range(3))
    verification = Plan("tp=2", [TensorParallel()]).apply(model, LAYOUT).verify(IDS)
    assert verification.skipped == {"blocks.0": "it cannot be copied: cannot pickle 'generator' object"}
    assert next(model.blocks[0].numbers) == 0


def shortened(par, *args):
    return split_test(par.module, par.resolved.blocks, par.device, par.run.facts)._short(args, {}, whole=True)


@on_ranks(2)
def test_a_large_batch_is_tried_on_its_first_samples_and_a_long_one_on_a_shorter_batch():
    par = Plan("tp=2", [TensorParallel()]).apply(Model(), LAYOUT)
    with mock.patch("meshpar.trials.split.INPUTS", 200):
        verification = par.verify(IDS.expand(6, -1))
        kept = shortened(par, torch.zeros(6, 12, 8), torch.zeros(12, 8))
    assert not verification.skipped and set(verification.modules) == {"blocks.0", "embed", "head"}
    assert [argument.shape for argument in kept.args] == [(1, 12, 8), (12, 8)]
    with mock.patch("meshpar.trials.split.INPUTS", 40):
        flat = shortened(par, torch.zeros(1, 96))
        assert flat.why.startswith("its input has 96 elements in one sample, expected at most 80")


@pytest.mark.parametrize("sequence", [False, True])
@on_ranks(2)
def test_a_block_whose_sample_is_too_large_is_tried_on_its_first_positions(sequence):
    layout = with_styles({"blocks.*.norm": "sequence"})
    passes = [TensorParallel(sequence_parallel=sequence)]
    for wrong in (False, True):
        between = (lambda h: F.rms_norm(h, h.shape[-1:])) if wrong else F.gelu
        par = Plan("tp=2", passes).apply(Model(between=between), layout)
        with mock.patch("meshpar.trials.split.INPUTS", 40):
            if wrong:
                with pytest.raises(ParallelError, match=r"blocks\.0: output, off by"):
                    par.verify(IDS.expand(6, -1))
            else:
                verification = par.verify(IDS.expand(6, -1))
                assert not verification.skipped and set(verification.modules) == {"blocks.0", "embed", "head"}


def test_masks_and_tables_are_cut_with_the_positions_and_rows_of_a_sample():
    mask = Mask(documents(torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]).expand(2, -1)), blocks=object())
    args = torch.zeros(2, 8, 8), mask, torch.zeros(2, 1, 8, 8), torch.zeros(8, 3), torch.zeros(1, 16)
    inputs = Inputs(args, {}, 2).shorten(8, 4).first(1)
    shapes = [tuple(getattr(value, "documents", value).shape) for value in inputs.args]
    assert shapes == [(1, 4, 8), (1, 4), (1, 1, 4, 4), (4, 3), (1, 8)]
    assert inputs.args[1].blocks is None and inputs.args[1].documents.tolist() == [[0, 0, 0, 1]]


def scaled(place):
    """Return a model of which one module has a forward of its own, as a wrapper sets it on an instance."""
    torch.manual_seed(0)
    model = Model().double()
    module = model.get_submodule(place)
    inner = module.forward
    module.forward = lambda x: 1.5 * inner(x)
    return model


@on_ranks(2)
def test_the_styles_that_a_message_says_leave_modules_with_a_forward_of_their_own_whole_and_exact():
    for place in ("head", "embed", "blocks.0.up", "blocks.1.down"):
        with pytest.raises(PlanError, match="has a forward that was set on it") as refused:
            Plan("tp=2", [TensorParallel()]).check(scaled(place), LAYOUT)
        (said_pass,) = re.findall(r"TensorParallel\(styles=\{.*?\}\)", str(refused.value))
        remedy = eval(said_pass, {"TensorParallel": TensorParallel})
        alone, par = scaled(place), Plan("tp=2", [remedy]).apply(scaled(place), LAYOUT)
        for net in (alone, par.module):
            F.cross_entropy(net(IDS).flatten(0, 1), IDS.flatten()).backward()
        assert_gradients(par.module, alone, rtol=1e-5, atol=1e-9)


class Mixing(nn.Module):
    """Two layers with a normalisation of the features between them where ``wrong``."""

    def __init__(self, dim, hidden, *, wrong):
        super().__init__()
        self.up, self.down, self.wrong = nn.Linear(dim, hidden), nn.Linear(hidden, dim), wrong

    def forward(self, x):
        h = self.up(x)
        return x + self.down(F.rms_norm(h, h.shape[-1:]) if self.wrong else F.gelu(h))


class Mixed(nn.Module):
    def __init__(self, *args, **options):
        super().__init__()
        self.blocks = nn.ModuleList([Mixing(*args, **options)])

    def forward(self, x):
        return self.blocks[0](x)


@on_ranks(2)
def test_one_parameter_is_whole_at_a_time():
    layout = with_styles({"embed": None, "head": None})
    alive, most, join = [], [], copies.WholeReads.join

    def counted(self, part):
        whole = join(self, part)
        alive.append(copies.StorageWeakRef(whole.untyped_storage()))
        most.append(sum(not memory.expired() for memory in alive))
        return whole

    with mock.patch.object(copies.WholeReads, "join", counted):
        sizes = Plan("tp=2", [TensorParallel()]).apply(Model(), layout).verify(IDS).modules
    assert max(sizes.values()) < 1e-5 and len(alive) == 5, (sizes, len(alive))
    assert max(most) <= 2  # with a bias


@on_ranks(2)
def test_a_block_that_is_out_of_memory_is_tried_on_fewer_samples_or_refused():
    for rows, refused in ((2, False), (0, True)):
        model = Model()
        forward = Block.forward

        def hungry(self, x, rows=rows, forward=forward):
            if len(x) > rows and not isinstance(self.up.weight, DTensor) and len(self.up.weight) == 16:
                raise torch.OutOfMemoryError("16 PiB")
            return forward(self, x)

        with mock.patch.object(Block, "forward", hungry):
            par = Plan("tp=2", [TensorParallel()]).apply(model, LAYOUT)
            if not refused:
                assert "blocks.0" in par.verify(IDS.expand(8, -1)).modules
                continue
            with pytest.raises(ParallelError, match="cannot be compared with its split in the memory that is free"):
                par.verify(IDS.expand(8, -1))
            par = Plan("tp=2", [TensorParallel()], verify=False).apply(Model(), LAYOUT)
            par.module(IDS)


@on_ranks(2)
def test_a_block_that_fails_on_one_rank_only_is_named_on_both():
    par, forward = Plan("tp=2", [TensorParallel()]).apply(Model(), LAYOUT), Block.forward

    def failing(self, x):
        if par.mesh.get_rank() == 1 and not isinstance(self.up.weight, DTensor):
            raise ValueError("only here")
        return forward(self, x)

    with mock.patch.object(Block, "forward", failing):
        said = par.verify(IDS).skipped["blocks.0"]
    assert said.endswith("only here" if par.mesh.get_rank() else "another rank of the axis failed"), said


@pytest.mark.long
@on_ranks(2)
def test_a_block_of_more_than_2_to_the_27_parameters_is_tried_like_others():
    layout = ModelLayout(blocks=("blocks.*",), tensor={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
    for wrong in (True, False):
        torch.manual_seed(0)
        par = Plan("tp=2", [TensorParallel()]).apply(Mixed(2048, 33_000, wrong=wrong), layout)
        assert sum(parameter.numel() for parameter in par.module.parameters()) > 1 << 27
        x = torch.randn(1, 4, 2048)
        if wrong:
            with pytest.raises(ParallelError, match=r"blocks\.0: output, off by"):
                par.module(x)
        else:
            par.module(x)
            assert par.verify(x).modules["blocks.0"] < 1e-5


@on_ranks(2)
def test_a_block_that_computes_otherwise_than_its_copy_is_named():
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("meshpar.trials.engine").addHandler(handler)
    for factor in (1, 3):
        par = Plan("tp=2", [TensorParallel()]).apply(Model(), LAYOUT)
        par.module.blocks[0].norm.register_forward_hook(lambda module, args, output, factor=factor: factor * output)
        par.module(IDS)
        assert len(said) == (factor > 1), said
    assert re.match(
        r"the split of blocks.0 was not verified: its copy computes other values than it did \(off by ", said[0]
    )
