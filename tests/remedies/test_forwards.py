"""Rows of `passes` about what ranks meet in a forward or a step (`tests/remedies/rows.py`)."""

import inspect
from collections.abc import Mapping
from contextlib import suppress
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_tensor

from meshpar import (
    Compile,
    ContextParallel,
    ExpertParallel,
    FullyShard,
    HybridShard,
    MeshparError,
    ModelLayout,
    PipelineParallel,
    Plan,
    StagesLayout,
    TensorLayout,
    TensorParallel,
    attention,
    attention_mask,
)
from meshpar.passes.data import shard_and_reduce
from meshpar.passes.pipeline import parallel
from meshpar.tensors.placements import local_tensor, whole_tensor
from meshpar.testing import on_ranks
from tests.passes.experts.test_parallel import OWN, Elsewhere, Own, OwnMixture, Paired, Residual, Scaled, dropped
from tests.passes.test_traps import CROSS, CrossAttention
from tests.remedies.rows import Row, Tested, TwoRanks, in_one_process, run_together
from tests.step.test_cycle import LAYOUT, Net, x_of
from tests.support.models_for_parity import huggingface, transformer
from tests.support.plans import TwoLayers, problems

IDS = torch.arange(8)[None]
CP, TP, PP = "dp_shard=1,cp=2", "tp=2", "pp=2"
SHARDED = "dp_shard=2", [FullyShard()]


def made(make):
    torch.manual_seed(0)
    module = make()
    for child in module.modules():  # some experts begin with memory that is not written
        if isinstance(child, Own):
            child.reset_parameters()
    return module


def logits(output):
    if isinstance(output, torch.Tensor):
        return output
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


def exact(make, mesh, passes, layout=None, given=IDS, *, as_does=None, verify=True):
    """Run a forward and a backward on a mesh, and compare with one process, of the same model or of ``as_does``."""
    given = given if isinstance(given, Mapping) else {"input_ids": given}
    alone, module = made(as_does or make), made(make)
    par = Plan(mesh, passes, verify=verify).apply(module, layout)
    positional = "input_ids" not in inspect.signature(alone.forward).parameters
    whole = logits(alone(*given.values()) if positional else alone(**given))
    part = par.split(given) if "cp" in mesh else given
    found = logits(par.module(*part.values()) if positional else par.module(**part))
    whole.square().sum().backward()
    found.square().sum().backward()
    expected = par.split({"logits": whole})["logits"] if "cp" in mesh else whole
    torch.testing.assert_close(whole_tensor(found), expected, rtol=1e-5, atol=1e-5)
    return True


# Experts


def mix(kind=Own, call=None, *, mesh="dp_shard=1,ep=2", passes=(), as_does=None, verify=True):
    passes = [*([ExpertParallel()] if "ep=" in mesh else []), *passes, FullyShard()]
    options = {} if call is None else {"call": call}
    reference = None if as_does is None else lambda: OwnMixture(as_does)
    return exact(lambda: OwnMixture(kind, **options), mesh, passes, OWN, as_does=reference, verify=verify)


def without_ep(kind=Own, call=None, passes=()):
    return mix(kind, call, mesh="dp_shard=2", passes=passes)


def first(experts, *given):
    return experts(*given)[0]


def scaled_inside(experts, x, chosen, weights):
    return experts(x, chosen, weights, x.mean(-1, keepdim=True))


def scaled_outside(experts, x, chosen, weights):
    return experts(x, chosen, weights) * x.mean(-1, keepdim=True)


class FirstChoice(Own):
    """Gets one expert for each token, without a dim for its choices."""

    def forward(self, x, chosen, weights):
        return super().forward(x, chosen[:, None], weights[:, None])


def first_choice(experts, x, chosen, weights):
    return experts(x, chosen[:, 0], weights[:, 0])


def dropped_with_weight_0(experts, x, chosen, weights):
    lost = torch.arange(2) < dist.get_rank()
    return experts(x, chosen.masked_fill(lost, 0), weights.masked_fill(lost, 0.0))


def in_one_graph(mesh, *, fullgraph, forward=True):
    compiled = Compile(backend="eager", fullgraph=fullgraph, blocks=("layers.*.experts",))
    if forward:
        return mix(mesh=mesh, passes=[compiled])
    Plan(mesh, [compiled, FullyShard()]).apply(OwnMixture(), OWN)
    return True


# Stages


class Line(nn.Module):
    """Four linear blocks, with habits in what passes between them."""

    def __init__(self, habit=""):
        super().__init__()
        self.embed, self.head, self.habit = nn.Embedding(16, 8), nn.Linear(8, 16), habit
        self.layers = nn.ModuleList((Lends if habit == "lends" else nn.Linear)(8, 8) for _ in range(4))

    def forward(self, ids):
        self.calls = self.habit == "counts" and getattr(self, "calls", 0) + 1
        hidden = self.embed(ids)
        if self.habit == "lends":
            lent = None
            for layer in self.layers:
                hidden, value = layer(hidden)
                lent = value if lent is None else lent
            return self.head(hidden if lent is None else hidden + lent)
        for layer in self.layers:
            hidden = layer(hidden)
            if self.habit == "writes":
                hidden *= 2.0
            elif self.habit == "scales":
                hidden = hidden * 2.0
        return self.head(hidden)


class Lends(nn.Linear):
    """Returns a second value, but for texts of three tokens."""

    def forward(self, x):
        return super().forward(x), None if x.shape[1] == 3 else x * 0.5


LINE = ModelLayout(blocks=("layers.*",))
LENDS = ModelLayout(blocks=("layers.*",), stages=StagesLayout(carries=("layers.*",)))
MICRO = [torch.arange(6).view(2, 3), torch.arange(6, 12).view(2, 3)]


def square(module, ids):
    return module(ids).square().sum()


def staged(loss=square, micro=MICRO, habit="", layout=LINE, mesh=PP, passes=None, as_does=None, fails=False, **options):
    """Train a step on stages, after one that ``fails``, and compare the sum of losses with that of one process."""
    passes = [PipelineParallel(**options)] if passes is None else passes
    par = Plan(mesh, passes).apply(made(lambda: Line(habit)), layout)
    if fails:
        with suppress(ZeroDivisionError, MeshparError):
            par.backward(micro, lambda module, ids: square(module, ids) * (1 // 0))
        par.module.zero_grad()
    total = par.backward(micro, loss)
    total = total[0] if isinstance(total, tuple) else total
    alone = made(lambda: Line(as_does or habit))
    torch.testing.assert_close(total, sum(square(alone, ids) for ids in micro).detach())
    return True


def twice(module, ids):
    return square(module, ids[:1]) + square(module, ids[1:])


def joined(module, ids):
    return module(torch.cat([ids[:1], ids[1:]])).square().sum()


def evaluated():
    par = Plan(PP, [PipelineParallel()]).apply(made(Line), LINE)
    losses = par.forward(MICRO, lambda module, ids: float(square(module, ids)))
    alone = made(Line)
    torch.testing.assert_close(losses, [float(square(alone, ids)) for ids in MICRO])
    return True


def other_versions(**options):
    """Cut a model where an even cut of rank 1 is another one than that of rank 0."""
    with mock.patch.object(parallel, "even_cuts", lambda costs, stages: [0, 1 + dist.get_rank()]):
        return staged(**options)


# Positions


class Attention(nn.Module):
    def __init__(self, habit):
        super().__init__()
        self.habit, self.qkv = habit, nn.Linear(8, 24)

    def forward(self, x, mask):
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.habit == "other":
            k, v = (torch.cat([part, part], 2) for part in (k, v))
        return x + attention(self, q, k, v, mask).transpose(1, 2).flatten(2)


class Attends(nn.Module):
    """Attends by a mask of its own, or to another sequence."""

    def __init__(self, habit=""):
        super().__init__()
        self.habit, self.embed = habit, nn.Embedding(16, 8)
        self.layers = nn.ModuleList([Attention(habit)])

    def forward(self, input_ids, position_ids=None):
        x = self.embed(input_ids)
        if self.habit == "mask":
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[None, None]
        else:
            mask = attention_mask(self, position_ids)
        return self.layers[0](x, mask)


ATTENDS = ModelLayout(blocks=("layers.*",), attention=("layers.*",))


def positions(make, layout=None, mesh=CP, **options):
    return exact(make, mesh, [ContextParallel(**options), FullyShard()], layout, IDS)


def three_heads():
    return transformer(heads=3, kv_heads=3, dim=24)


def with_sinks():
    return huggingface("GptOss", num_local_experts=4, num_experts_per_tok=2, attn_implementation="eager")


# Tensors


class Named(nn.Module):
    """Calls a region by a name that is its own."""

    def __init__(self):
        super().__init__()
        self.embed, self.mlp = nn.Embedding(16, 8), FeedForward()

    def forward(self, ids):
        return self.mlp(features=self.embed(ids))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, features):
        return self.down(torch.tanh(self.up(features)))


PROJECTIONS = {"mlp.up": "colwise", "mlp.down": "rowwise"}


def region(**options):
    return exact(
        Named, TP, [TensorParallel()], ModelLayout(tensor=TensorLayout({"mlp": "region", **PROJECTIONS}, **options))
    )


def around(styles):
    return exact(
        Named,
        TP,
        [TensorParallel()],
        ModelLayout(tensor=TensorLayout(styles, hidden_inputs=("features",))),
        verify=False,
    )


class Branches(nn.Module):
    """Runs an expert where a position has chosen it."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 16)
        self.mixture = Mixture()

    def forward(self, ids):
        x = self.norm(self.embed(ids))
        return self.head(x + self.mixture(x, ids))


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(FeedForward() for _ in range(2))

    def forward(self, x, ids):
        length = x.shape[1]  # a rank may have a part of the positions
        ids = ids.narrow(1, dist.get_rank() * length if length < ids.shape[1] else 0, length)
        return sum(expert(x) for place, expert in enumerate(self.experts) if bool((ids == place).any()))


def branches(region, **options):
    styles = {
        "embed": "vocab", "norm": "sequence", region: "region", "mixture.experts.*.up": "colwise",
        "mixture.experts.*.down": "rowwise", "head": "head",
    }  # fmt: skip
    passes = [TensorParallel(**{"sequence_parallel": True} | options)]
    return exact(Branches, TP, passes, ModelLayout(tensor=styles), torch.tensor([[0, 0, 1, 1]]), verify=False)


def sequence(length, *, sequence_parallel=True):
    return exact(
        transformer, TP, [TensorParallel(sequence_parallel=sequence_parallel)], None, torch.arange(length)[None]
    )


class Crosses(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.cross = nn.Embedding(16, 8), nn.LayerNorm(8), CrossAttention()

    def forward(self, ids):
        return self.cross(self.norm(self.embed(ids)))


def cross(*, sequence_parallel):
    styles = {f"cross.{name}": style for name, style in CROSS.tensor.styles.items()}
    layout = ModelLayout(tensor={"embed": "vocab", "norm": "sequence", **styles})
    return exact(Crosses, TP, [TensorParallel(sequence_parallel=sequence_parallel)], layout)


# Parameters


def other_weights():
    torch.manual_seed(9)
    return {name: torch.randn_like(value) for name, value in Net().state_dict().items()}


def replaced(how):
    """Call a module with other weights than its own."""
    weights, alone = other_weights(), Net()
    alone.load_state_dict(weights)
    par = Plan(TP, [TensorParallel()], guards="off").apply(Net(), LAYOUT)
    if how == "load":
        par.load_state_dict(weights)
        found = par.module(x_of())
    elif how == "average":
        average = par.averaged(0.0)
        par.load_state_dict(weights)
        average.update()
        par.load_state_dict(Net().state_dict())
        with average.swapped():
            found = par.module(x_of())
    else:
        given = {
            name: distribute_tensor(weights[name], parameter.device_mesh, parameter.placements)
            if how == "place" and hasattr(parameter, "placements")
            else weights[name]
            for name, parameter in par.module.named_parameters()
        }
        found = torch.func.functional_call(par.module, given, (x_of(),))
    torch.testing.assert_close(found, alone(x_of()))
    return True


class Halves(nn.Linear):
    """Halves its weight in each forward, or a scale, which is a buffer."""

    def __init__(self, how=""):
        super().__init__(8, 8)
        self.how = how
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        if self.how == "parameter":
            with torch.no_grad():
                self.weight.mul_(0.5)
        elif self.how == "buffer":
            self.scale *= 0.5
        return super().forward(x * self.scale)


def halved(how, *, between=False):
    """Two forwards on two ranks, with a write in each or between them, and those of one process."""
    results = []
    for parallel_ in (False, True):
        module = made(lambda: nn.Sequential(Halves(how)))
        if parallel_:
            module = Plan(*SHARDED).apply(module, ModelLayout(blocks=("0",))).module
        module(x_of()).sum().backward()
        if between:
            with torch.no_grad():
                module[0].weight.mul_(0.5)
        results.append(module(x_of()).detach())
    torch.testing.assert_close(results[1], results[0])
    return True


def written(when):
    """Write a parameter before a micro-batch, or after the step, and train as one process."""
    trained = []
    for parallel_ in (False, True):
        module, passes = made(TwoLayers), [HybridShard(optimizer="world")]
        par = Plan("dp_replicate=2,dp_shard=1", passes).apply(module) if parallel_ else None
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

        def write(module=module):
            local_tensor(module.head.weight.detach()).mul_(2.0)

        for _ in range(2):
            batches = [x_of(), -x_of()]
            for number, x in enumerate(par.accumulate(batches) if par else batches):
                if when == number:
                    write()
                module(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if when == "after":
                write()
        trained.append([whole_tensor(parameter.detach()) for parameter in module.parameters()])
    torch.testing.assert_close(trained[1], trained[0])
    return True


def with_integers(**options):
    module = TwoLayers()
    module.index = nn.Parameter(torch.arange(4), requires_grad=False)
    with mock.patch.object(shard_and_reduce, "BEFORE_2_13", True):
        return problems("dp_shard=2", [FullyShard(**options)], module)


ROWS = [
    # Experts
    TwoRanks("{} ({}) returned {}, expected one tensor (N, D) for hidden states {}")
    .refuses(lambda: mix(Paired, first))
    .helps("use a mesh without ep", lambda: without_ep(Paired, first)),
    TwoRanks("{} ({}) got the tensors ({}), expected {} and no other tensor")
    .refuses(lambda: mix(Scaled, scaled_inside))
    .helps("compute with others outside of the module", lambda: mix(Own, scaled_outside))
    .helps("use a mesh without ep", lambda: without_ep(Scaled, scaled_inside)),
    TwoRanks("Compile(fullgraph=True) got blocks with divided experts")
    .refuses(lambda: in_one_graph("dp_shard=1,ep=2", fullgraph=True))
    .helps("drop fullgraph=True", lambda: in_one_graph("dp_shard=1,ep=2", fullgraph=False))
    .helps("use a mesh without ep", lambda: in_one_graph("dp_shard=2", fullgraph=True, forward=False)),
    TwoRanks("{} ({}) gives other results with the experts of each rank of ep than with all experts")
    .refuses(lambda: mix(Residual))
    .helps(
        "move computations over all experts of a token",
        lambda: mix(Own, lambda experts, x, *given: x + experts(x, *given), as_does=Residual),
    )
    .helps("use a mesh without ep", lambda: without_ep(Residual)),
    TwoRanks("{} ({}) does not run with {} of its experts on rows of noise")
    .refuses(lambda: mix(Elsewhere))
    .helps("use a mesh without ep", lambda: without_ep(Elsewhere)),
    TwoRanks("experts got chosen experts {} and weights {} for hidden states {}")
    .refuses(lambda: mix(FirstChoice, first_choice))
    .helps("use a mesh without ep for this model", lambda: without_ep(FirstChoice, first_choice)),
    TwoRanks("{} chosen experts of rank(s) {} of ep are no experts")
    .refuses(lambda: mix(Own, dropped))
    .helps("choose expert 0 with weight 0 for a slot that is dropped", lambda: mix(Own, dropped_with_weight_0))
    .helps("use a mesh without ep", lambda: without_ep(Own, dropped)),
    # Stages
    TwoRanks("the model writes into what a block returns, which is on its way to the next stage")
    .refuses(lambda: staged(habit="writes"))
    .helps(
        "let it compute a new tensor there, such as by hidden = hidden * scale",
        lambda: staged(habit="scales", as_does="writes"),
    ),
    TwoRanks("a step before this one ended with an error, until which stages of pp have run other forwards than one")
    .refuses(lambda: staged(habit="counts", fails=True))
    .helps("build the model and apply the plan again", lambda: staged(habit="counts", as_does="")),
    TwoRanks("the module is called twice for one micro-batch")
    .refuses(lambda: staged(twice))
    .helps("join the inputs of both calls along the samples", lambda: staged(joined)),
    TwoRanks("{} has not returned what StagesLayout.carries says")
    .refuses(lambda: staged(habit="lends", layout=LENDS))
    .helps("use a mesh without pp for it", lambda: exact(lambda: Line("lends"), *SHARDED, LENDS, MICRO[0])),
    TwoRanks("the module is called, and this rank has a part of its layers")
    .refuses(lambda: Plan(PP, [PipelineParallel()]).apply(made(Line), LINE).module(MICRO[0]))
    .helps("run a step by par.backward(micro_batches, loss)", lambda: staged() and evaluated()),
    TwoRanks("the ranks of pp cut the model differently")
    .refuses(other_versions)
    .helps("build the same model with the same versions on all ranks", staged)
    .helps("set PipelineParallel(stages=...)", lambda: other_versions(stages=(1, 3))),
    TwoRanks("{}; give all ranks of pp the same micro-batches, those of par.data_rank")
    .refuses(lambda: staged(micro=MICRO[: 1 + dist.get_rank()]))
    .helps("give all ranks of pp the same micro-batches", lambda: staged(micro=MICRO)),
    TwoRanks("loss(module, micro_batch) returned a {} and called the module {} times")
    .refuses(lambda: staged(lambda module, ids: None))
    .helps("call it once and return a scalar tensor", staged)
    .helps(
        "one and values to report",
        lambda: staged(lambda module, ids: ((loss := square(module, ids)), {"twice": 2 * loss.detach()})),
    ),
    # Positions
    TwoRanks("attention over a part of the positions needs the mask of {} queries and {} keys")
    .refuses(lambda: positions(lambda: Attends("mask"), ATTENDS))
    .helps("use a mesh without cp", lambda: exact(lambda: Attends("mask"), *SHARDED, ATTENDS)),
    TwoRanks("ContextParallel splits self-attention, got {} queries and {} keys")
    .refuses(lambda: positions(lambda: Attends("other"), ATTENDS))
    .helps("use a mesh without cp", lambda: exact(lambda: Attends("other"), *SHARDED, ATTENDS)),
    TwoRanks("ContextParallel(transport='heads') over cp={} divides the heads, got {}")
    .refuses(lambda: positions(three_heads, transport="heads"))
    .helps("use transport='gather'", lambda: positions(three_heads, transport="gather"))
    .helps("a cp that divides them", lambda: positions(three_heads, mesh="dp_shard=2,cp=1", transport="heads")),
    TwoRanks("attention does not run with {} of its {} heads ({}): it has separate values for each head")
    .refuses(lambda: positions(with_sinks, transport="heads"))
    .helps("use ContextParallel(transport='gather')", lambda: positions(with_sinks, transport="gather")),
    Tested("computes whole sequences of")
    .by("tests/passes/positions/test_parallel.py::named_mixers")
    .helps("use TensorParallel(sequence_parallel=False)", "TensorParallel(sequence_parallel=False), *more")
    .helps("a mesh without cp", 'Plan("dp_shard=2,tp=2"'),
    # Tensors
    TwoRanks("ranks of the tensor axis run different modules at a time, this one {}")
    .refuses(lambda: branches("mixture.experts.*"))
    .helps("give the module around it the style 'region'", lambda: branches("mixture"))
    .helps(
        "use TensorParallel(sequence_parallel=False)", lambda: branches("mixture.experts.*", sequence_parallel=False)
    ),
    TwoRanks("sequence length {} is not divided by {}, over which")
    .refuses(lambda: sequence(15))
    .helps("pad the batch to a multiple", lambda: sequence(16))
    .helps("use TensorParallel(sequence_parallel=False)", lambda: sequence(15, sequence_parallel=False)),
    TwoRanks("{} got no hidden states: expected a tensor first, or as {}; name it in layout.tensor.hidden_inputs")
    .refuses(lambda: region())
    .helps("name it in layout.tensor.hidden_inputs", lambda: region(hidden_inputs=("features",))),
    TwoRanks("{} is a region, which splits what is computed of hidden states, and got {}")
    .refuses(lambda: around({"": "region", **PROJECTIONS}))
    .helps("give 'region' to the modules inside", lambda: around({"mlp": "region", **PROJECTIONS})),
    TwoRanks("{} has a second input with a gradient, whose positions in the sequence are unknown")
    .refuses(lambda: cross(sequence_parallel=True))
    .helps("use TensorParallel(sequence_parallel=False)", lambda: cross(sequence_parallel=False)),
    # Parameters
    Tested("a layer is called where its weights are not gathered")
    .by("tests/step/test_cycle.py::test_layers_and_blocks_called_from_outside_are_refused")
    .helps("call par.module", "par.module(x_of())")
    .helps("let a method of the model's own enter by par.register_method(name)", 'par.register_method("features")'),
    TwoRanks("a plain tensor {} replaced a layer's part of a parameter, a DTensor")
    .refuses(lambda: replaced(""))
    .helps(
        "load them with par.load_state_dict, average weights with par.averaged",
        lambda: replaced("load") and replaced("average"),
    )
    .helps("hand in DTensors placed like the parameters", lambda: replaced("place")),
    TwoRanks("{} was written or replaced in a forward: a gathered copy is freed afterwards")
    .refuses(lambda: halved("parameter"))
    .helps("Write between steps, outside of the module's calls", lambda: halved("", between=True))
    .helps("register as a buffer what forward updates", lambda: halved("buffer")),
    Tested("set_force_sum_reduction_for_comms")
    .by(
        "tests/passes/data/test_instead_of_fsdp2.py::test_a_factor_that_gloo_cannot_apply_is_refused_and_the_remedy_applies_it"
    )
    .helps(
        "call set_force_sum_reduction_for_comms(True) on the same modules",
        "unit.set_force_sum_reduction_for_comms(forced)",
    ),
    TwoRanks("a parameter was written between the micro-batches of one step, which share their weights")
    .refuses(lambda: written(1))
    .helps("write before the first of them", lambda: written(0))
    .helps("after the optimizer's step", lambda: written("after")),
    Row("{}: {} are parameters of integers, which torch {} cannot shard")
    .refuses(with_integers)
    .helps("use {}(whole={})", lambda: with_integers(whole=("index",))),
]


test_the_printed_remedy_helps = in_one_process(ROWS)


@on_ranks(2)
def test_the_printed_remedies_help_on_two_ranks():
    run_together(ROWS, 2)
