"""Rows of the loose files of `meshpar`, and of its small rooms: see `tests/remedies/rows.py`."""

import os
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from meshpar import FullyShard, MeshSpec, ModelLayout, PipelineParallel, Plan, attention, attention_mask, token_loss
from meshpar.losses.chunked import chunked_token_loss
from meshpar.optim import Muon
from meshpar.passes.positions.attention import Mask, documents
from meshpar.process.imports import expanded
from meshpar.process.leftovers import build_once
from meshpar.state.drawing import mesh_svg
from meshpar.tensors.placements import local_gradient, whole_tensor
from meshpar.testing import on_ranks, one_process
from meshpar.weights.maps import average_called
from tests.remedies.rows import Loop, Row, Tested, TwoRanks, in_one_process, run_together
from tests.remedies.sides import difference, on
from tests.remedies.test_forwards import LINE, MICRO, Line, made, staged

LABELS = torch.arange(16).view(2, 8)


class Headless(nn.Module):
    """A model that names no head, with a few habits around it."""

    def __init__(self, habit=""):
        super().__init__()
        self.embed, self.out = nn.Embedding(32, 8), (OwnHead if habit == "own head" else nn.Linear)(8, 32)
        self.habit = habit

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        if self.habit == "twice":
            self.out(hidden)
        if self.habit == "short":
            hidden = hidden[:, 1:]
        logits = self.out(hidden)
        return Output(2 * logits if self.habit == "scaled" else logits)


class Named(Headless):
    def meshpar_layout(self):
        return ModelLayout(tensor={"out": "head"})


class OwnHead(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1.0


class Output:
    def __init__(self, logits):
        self.logits = logits


def chunked(habit="", *, kind=Headless, named=True, chunk=4):
    """The loss in chunks, or of all logits at once where ``chunk`` is 0, as the objective and a recipe do."""
    torch.manual_seed(0)
    model = kind(habit)
    labels = LABELS[:, 1:] if habit == "short" and not chunk else LABELS
    if not chunk:
        return token_loss(model(LABELS).logits, labels)
    return chunked_token_loss(model, {"input_ids": LABELS}, labels, chunk=chunk, head=model.out if named else None)


def at_once(habit=""):
    return lambda: chunked(habit, chunk=0)


def home_of(path, home=None):
    """A path of a user whom the system does not know, as in a container."""
    with mock.patch.dict(os.environ), mock.patch("pwd.getpwuid", side_effect=KeyError):
        os.environ.pop("HOME", None)
        if home is not None:
            os.environ["HOME"] = home
        return str(expanded(Path(path)))


def materialized(*, meta):
    with torch.device("meta" if meta else "cpu"):
        module = nn.Sequential(nn.Linear(2, 2))
    par = Plan("", []).apply(module).materialize(seed=0)
    return bool(torch.isfinite(par.module[0].weight).all())


def muon(**groups):
    module = nn.Module()
    module.stack = nn.Parameter(torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0)))
    return Muon(module, **({"groups": {"stack": groups}} if groups else {})) is not None


def sparse_gradient(sparse):
    layer = nn.Embedding(4, 2, sparse=sparse)
    layer(torch.tensor([1])).sum().backward()
    return local_gradient(layer.weight)


def alone_with(*passes):
    from tests.support.plans import transformer as small

    return one_process(small, [], passes=passes).weights.keys() >= {"embed.weight"}


def windowed(position_ids):
    return attention_mask(nn.Module(), position_ids, window=2).shape[-1]


def attended(length):
    q = torch.randn(1, 2, 8, 4, generator=torch.Generator().manual_seed(0))
    return attention(nn.Module(), q, q, q, Mask(documents(torch.arange(length)[None]), None, None, None))


def whole_attention():
    q = torch.randn(1, 2, 8, 4, generator=torch.Generator().manual_seed(0))
    return nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)


def clipping(where):
    def loop(side):
        net = side.apply(side.net())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for x, y in side.batches(2):
            for micro, target in side.accumulate(list(zip(x.chunk(2), y.chunk(2), strict=True))):
                nn.functional.mse_loss(net(micro), target).backward()
                if where == "inside":
                    side.clip(net, 0.1)
            side.clip(net, 0.1)
            optimizer.step()
            optimizer.zero_grad()
        side.weights(net)

    return loop


@contextmanager
def as_somebody():
    """Write as a user who is not root, who may write everywhere."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def built(*, mode=0o500, inside="closed"):
    """Build a folder in one that is closed, or in another, and return its files."""
    with TemporaryDirectory() as root:
        os.chmod(root, 0o755)
        for name in ("closed", "open"):
            place = Path(root) / name
            place.mkdir()
            place.chmod(mode if name == "closed" else 0o777)
        with as_somebody():
            made = build_once(Path(root) / inside / "made", lambda folder: (folder / "file").touch())
        return [path.name for path in made.iterdir()]


def sparse_adam():
    """How far a step moves the row that was looked up."""
    layer = nn.Embedding(4, 2, sparse=True)
    before = layer.weight.detach().clone()
    layer(torch.tensor([1])).sum().backward()
    torch.optim.SparseAdam(layer.parameters(), lr=0.5).step()
    return before - layer.weight.detach()


def apart(*kinds):
    """Apply a plan to a model that is on ``kinds[rank]``, and return the values of a weight that is drawn then."""
    torch.manual_seed(0)
    with torch.device(kinds[dist.get_rank() % len(kinds)]):
        module = nn.Sequential(nn.Linear(4, 4))
    par = Plan("dp_shard=2", [FullyShard()]).apply(module, ModelLayout())
    if kinds == ("meta",):
        par.materialize(seed=0)
    return bool(whole_tensor(par.module[0].weight.detach()).abs().sum() > 0)


ROWS = [
    Row("free some space or correct the folder's mode, or name another folder", result=["file"])
    .refuses(built)
    .helps("correct the folder's mode", lambda: built(mode=0o777))
    .helps("name another folder, in a recipe by data.cache", lambda: built(inside="open")),
    Row(
        "the optimizer does not support sparse gradients",
        result=lambda: torch.tensor([[0.0, 0.0], [0.5, 0.5], [0.0, 0.0], [0.0, 0.0]]),
    )
    .refuses(lambda: sparse_gradient(True))
    .helps("use SparseAdam", sparse_adam),
    TwoRanks("{} needs every layer on every rank, and {} divides them")
    .refuses(lambda: list(Plan("pp=2", [PipelineParallel()]).apply(made(Line), LINE).accumulate(MICRO)))
    .helps("run a step by par.backward(micro_batches, loss)", staged),
    TwoRanks("{} have other names or dtypes on ranks {} than on rank 0")
    .refuses(lambda: apart("cpu", "meta"))
    .helps(
        "build the same model on every rank, everywhere on the meta device or everywhere with weights",
        lambda: apart("meta") and apart("cpu"),
    ),
    Tested("got no position_ids, and each rank has a part")
    .by("tests/passes/positions/test_parallel.py::refused")
    .helps("call the model with par.split(batch), a mapping", "par.module(**par.split({"),
    Tested("different numbers of micro-batches, this one")
    .by(
        "tests/passes/pipeline/test_stage_habits.py::test_data_ranks_of_a_stage_that_differ_are_refused_on_all_stages_and_the_next_step_is_exact"
    )
    .helps("give it the same number on every rank", "par.backward(micro_batches(0, 3), plain_loss)"),
    Tested("fresh='the reason'")
    .by("tests/testing/test_parity.py::test_ranks_find_what_the_last_test_found_and_a_patch_that_is_left_is_refused")
    .helps("write @on_ranks(..., fresh='the reason')", 'on_ranks(1, fresh="leaves a patch")'),
    Tested("has given no sign of life for {} s; end that process, or name another folder, in a recipe by data.cache")
    .by("tests/training/test_data.py::test_who_waits_for_a_build_says_for_whom_and_not_for_ever")
    .helps("name another folder, in a recipe by data.cache", "build_once(tmp_path / name"),
    Tested(
        "ranks of a guard that exchanges values would wait for the others; install the same packages on every host, or "
        "leave guards out by Plan(guards='off')"
    )
    .by(
        "tests/guards/test_agreement.py::test_guards_that_some_ranks_alone_have_are_refused_by_name_in_the_exchange_of_weights"
    )
    .helps("leave guards out by Plan(guards='off')", 'guards="off").apply('),
    Row("{} {}, so its loss cannot be computed in chunks", result=at_once("scaled"))
    .refuses(lambda: chunked("scaled"))
    .helps("use chunk=0 (all logits at once)", lambda: chunked("scaled", chunk=0)),
    Row("{} does not say which module makes its logits", result=lambda: chunked(named=True))
    .refuses(lambda: chunked(named=False))
    .helps("name it (head=), give it the style 'head' in meshpar_layout()", lambda: chunked(named=False, kind=Named))
    .helps("use chunk=0 (all logits at once)", lambda: chunked(chunk=0)),
    Row("the head was called twice in one forward", result=at_once("twice"))
    .refuses(lambda: chunked("twice"))
    .helps("use chunk=0", lambda: chunked("twice", chunk=0)),
    Row("the head got hidden states of {} for labels of {}", result=at_once("short"))
    .refuses(lambda: chunked("short"))
    .helps("use chunk=0", lambda: chunked("short", chunk=0)),
    Row("the head is a {} with a forward of its own", result=at_once("own head"))
    .refuses(lambda: chunked("own head"))
    .helps("use chunk=0", lambda: chunked("own head", chunk=0)),
    Row("{} ranks do not fill nodes of {}; give a number of nodes", result=1)
    .refuses(lambda: mesh_svg(MeshSpec("dp_shard=6"), 4))
    .helps("give a number of nodes that divides them", lambda: mesh_svg(MeshSpec("dp_shard=6"), 3).count("<svg")),
    Row("{}: no home folder is known for {}", result="/data")
    .refuses(lambda: home_of("~/data"))
    .helps("set HOME", lambda: home_of("~/data", home="/"))
    .helps("write a path without ~", lambda: home_of("/data")),
    Row("reduction={} is not known", result=lambda: torch.tensor(4.0).log())
    .refuses(lambda: token_loss(torch.zeros(1, 2, 4), torch.zeros(1, 2, dtype=torch.int64), reduction="average"))
    .helps(
        "use 'sum'", lambda: token_loss(torch.zeros(1, 2, 4), torch.zeros(1, 2, dtype=torch.int64), reduction="sum") / 2
    )
    .helps(
        "'mean' over the tokens that count",
        lambda: token_loss(torch.zeros(1, 2, 4), torch.zeros(1, 2, dtype=torch.int64), reduction="mean"),
    ),
    Row("{} has the shape {}, and no layout says what its matrices are", result=True)
    .refuses(lambda: muon())
    .helps('use groups={"{}": {"stacked": True}} if each index', lambda: muon(stacked=True) and muon(stacked=False))
    .helps('{"rule": "adamw"}', lambda: muon(rule="adamw")),
    Row(
        "the optimizer does not support sparse gradients",
        result=lambda: torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]),
    )
    .refuses(lambda: sparse_gradient(True))
    .helps("build the embedding with sparse=False", lambda: sparse_gradient(False)),
    Row("{} works over {}, which one process does not have", result=True, ranks=1)
    .refuses(lambda: alone_with(FullyShard()))
    .helps("leave it out of alone=", lambda: alone_with()),
    Row("attention_mask with a window needs position_ids", result=8)
    .refuses(lambda: windowed(None))
    .helps("hand over torch.arange(length)[None] where there are none", lambda: windowed(torch.arange(8)[None])),
    Row("attention over {} positions got the mask of {}", result=whole_attention)
    .refuses(lambda: attended(6))
    .helps("make one for this sequence", lambda: attended(8)),
    Row("there are {}; name one of them", result="fast")
    .refuses(lambda: average_called("averaged", ["fast", "slow"]))
    .helps("name one of them", lambda: average_called("fast", ["fast", "slow"])),
    Row("there is none; take the trained weights", result=None)
    .refuses(lambda: average_called("averaged", []))
    .helps("take the trained weights", lambda: average_called("trained", [])),
    Loop("clip_grad_norm_ is called between the micro-batches of par.accumulate")
    .refuses(lambda: on("FSDP", clipping("inside")))
    .helps("clip after the loop", lambda: difference("FSDP", clipping("after"))),
    Tested("its whole state; use HybridShard(optimizer='replica')")
    .by("tests/jobs/test_replicas.py::test_what_cannot_be_lost_is_refused_by_name")
    .helps("use HybridShard(optimizer='replica')", '[HybridShard(optimizer="replica")]'),
    Tested("uses statistics of the whole batch")
    .by("tests/jobs/test_replicas.py::test_what_cannot_be_lost_is_refused_by_name")
    .helps("use another norm", "apply(lab.model())"),
    Tested("inside of one replica")
    .by("tests/jobs/test_replicas.py::test_a_replica_is_described_and_forecast_with_its_whole_state")
    .helps("write dp_replicate=1", '"dp_replicate=1,dp_shard=2"'),
    Tested("and a replica that comes back copies all layers")
    .by("tests/jobs/test_replicas.py::test_a_replica_is_described_and_forecast_with_its_whole_state")
    .helps("drop pp from the mesh", "plan.describe(uneven()[1], replicas=count)"),
    Row("the module has its weights already, and a seed would replace them", result=True, ranks=1)
    .refuses(lambda: materialized(meta=False))
    .helps("build it on meta to draw new ones", lambda: materialized(meta=True)),
]


test_the_printed_remedy_helps = in_one_process(ROWS)


@on_ranks(2)
def test_the_printed_remedies_help_on_two_ranks():
    run_together(ROWS, 2)


@on_ranks(1)
def test_the_printed_remedies_help_on_a_rank():
    run_together(ROWS, 1)
