"""Rows of features in equal parts, `TensorParallel(parts=...)`: see `tests/remedies/rows.py`."""

import torch
from torch import nn

from meshpar import Compile, ModelLayout, Plan, PlanError, TensorLayout, TensorParallel
from meshpar.passes import Style
from meshpar.testing import on_ranks
from tests.remedies.rows import Row, in_one_process, run_together
from tests.support.plans import problems

TABLE = {"mlp": "region", "mlp.up": "colwise", "mlp.down": "rowwise"}


class Halved(Style):
    """A style of one's own."""

    def install(self, name, module, context):
        pass


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class FeedForward(nn.Module):
    """Two projections with a function between them."""

    def __init__(self, act=torch.relu, hidden=16):
        super().__init__()
        self.up, self.down, self.act = nn.Linear(8, hidden), nn.Linear(hidden, 8), act
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        return self.drop(self.down(self.act(self.up(x))))


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.mlp, self.other = FeedForward(**options), nn.Linear(8, 8)
        self.norm, self.embed = nn.LayerNorm(8), nn.Embedding(8, 8)

    def forward(self, x):
        return self.mlp(x)


def dropping(probability):
    model = Model()
    model.mlp.drop.p = probability
    return model


def split(model=None, mesh="tp=2", parts=4, *, others=(), table=TABLE, **options):
    """The problems of a plan in equal parts."""
    passes = [TensorParallel(parts=parts, **options), *others]
    return problems(mesh, passes, model or Model(), ModelLayout(tensor=table))


def bits(pass_, size=2):
    """The problems of a plan with the same bits as other meshes."""
    try:
        Plan(f"tp={size}", [pass_], same_bits=True).check(Model(), ModelLayout(tensor=TABLE), size)
    except PlanError as error:
        return error.problems
    return ()


def compute(act, *, parts=4):
    """The shape of what a model returns that has a function between its projections."""
    passes = [TensorParallel(parts=parts)]
    par = Plan("tp=1", passes).apply(Model(act=act), ModelLayout(tensor=TensorLayout(TABLE, hidden_inputs=("x",))))
    return tuple(par.module(torch.ones(1, 2, 8)).shape)


def decide(x):
    return x if float(x.sum()) > -1e9 else -x


def choose(x):
    return torch.where(x.sum() > -1e9, x, -x)


def write(x):
    whole = torch.zeros(x.shape)
    whole[...] = x
    return whole


def without_writing(x):
    return torch.zeros(x.shape) + x


def past_functions(x):
    with torch._C.DisableTorchFunctionSubclass():
        return torch.relu(x)


SEQUENCE = {**TABLE, "norm": "sequence", "embed": "vocab"}
AROUND = {"mlp": "sequence", "mlp.up": "colwise", "mlp.down": "rowwise", "embed": "vocab"}
WIDE = {**TABLE, "mlp": Halved()}
LEFT_WHOLE = dict.fromkeys(TABLE)
ROWS = [
    Row("TensorParallel(parts={}) is no power of two that tp={} divides")
    .refuses(lambda: split(parts=6))
    .helps("write parts={}", lambda: split(parts=8)),
    Row("tp={} is no power of two, as TensorParallel(parts=...) needs")
    .refuses(lambda: split(mesh="tp=3"))
    .helps("use tp={} or {}", lambda: split(mesh="tp=2"), lambda: split(mesh="tp=4")),
    Row("same_bits on tp={} needs features that are computed in equal parts")
    .refuses(lambda: bits(TensorParallel()))
    .helps("write TensorParallel(parts={}) on this mesh and on every other one", lambda: bits(TensorParallel(parts=8))),
    Row("{} does not compute in the equal parts of TensorParallel(parts={})")
    .refuses(lambda: split(others=[Compile(blocks=("mlp",))]))
    .helps("drop {}", split)
    .helps("drop parts= from TensorParallel", lambda: split(parts=None, others=[Compile(blocks=("mlp",))])),
    Row("the model has dropout between split layers, whose masks follow the parts of the sequence")
    .refuses(lambda: split(dropping(0.1), sequence_parallel=True, table=SEQUENCE))
    .helps("set dropout to 0", lambda: split(dropping(0.0), sequence_parallel=True, table=SEQUENCE))
    .helps("use TensorParallel(sequence_parallel=False)", lambda: split(dropping(0.1), table=SEQUENCE)),
    Row("{} has the style 'sequence' and runs {}, which has a style, too")
    .refuses(lambda: split(sequence_parallel=True, table=AROUND))
    .helps("use sequence_parallel=False", lambda: split(table=AROUND))
    .helps("drop parts= from TensorParallel", lambda: split(sequence_parallel=True, table=AROUND, parts=None)),
    Row("{} has the style {}, which does not compute in equal parts")
    .refuses(lambda: split(table=WIDE))
    .helps("leave it whole: {}", lambda: split(table={**WIDE, "other": "colwise"}, styles=LEFT_WHOLE))
    .helps("drop parts= from TensorParallel", lambda: split(table=WIDE, parts=None)),
    Row("{} splits {} rows or features, which parts={} does not divide")
    .refuses(lambda: split(Model(hidden=6), mesh="tp=2"))
    .helps(
        "leave it whole: {}", lambda: split(Model(hidden=6), table={**TABLE, "other": "colwise"}, styles=LEFT_WHOLE)
    ),
    Row("{}; use parts={}")
    .refuses(lambda: split(Model(hidden=6), mesh="tp=2"))
    .helps("use parts={}", lambda: split(Model(hidden=6), mesh="tp=2", parts=2)),
    Row(
        "a torch.autograd.Function inside of a split layer cannot compute in equal parts of tp",
        result=(1, 2, 8),
        ranks=1,
    )
    .refuses(lambda: compute(Double.apply))
    .helps("write it with torch's operators", lambda: compute(lambda x: 2 * x))
    .helps("drop parts= from TensorParallel", lambda: compute(Double.apply, parts=None)),
    Row(
        "{} cannot compute in equal parts of tp: something inside of a split layer calls it past torch's functions",
        result=(1, 2, 8),
        ranks=1,
    )
    .refuses(lambda: compute(past_functions))
    .helps("drop parts= from TensorParallel", lambda: compute(past_functions, parts=None)),
    Row(
        "{} writes values of a split layer, computed in equal parts of tp, into a tensor that is whole",
        result=(1, 2, 8),
        ranks=1,
    )
    .refuses(lambda: compute(write))
    .helps("write it without writing in place", lambda: compute(without_writing))
    .helps("drop parts= from TensorParallel", lambda: compute(write, parts=None)),
    Row("{} gives Python another value in each of the equal parts of tp", result=(1, 2, 8), ranks=1)
    .refuses(lambda: compute(decide))
    .helps("use torch.where", lambda: compute(choose))
    .helps("drop parts= from TensorParallel", lambda: compute(decide, parts=None)),
]

test_the_printed_remedy_helps = in_one_process(ROWS)


@on_ranks(1)
def test_the_printed_remedy_helps_on_one_rank():
    run_together(ROWS, 1)
