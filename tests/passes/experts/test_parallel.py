"""ExpertParallel: whole experts on each rank, tokens that travel to them, and the numbers of one process."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from meshpar import (
    ActivationCheckpoint,
    Compile,
    ContextParallel,
    ExpertParallel,
    FullyShard,
    HybridShard,
    MeshparError,
    ModelLayout,
    ParallelError,
    Plan,
    PlanError,
    Replicate,
    TensorParallel,
    distributed,
)
from meshpar.checkpoints import CheckpointManager, export_module, export_safetensors
from meshpar.passes.experts.routing import Routing, by_experts
from meshpar.testing import assert_parity, launch, on_ranks, token_steps, train_steps, whole
from meshpar.training import ExpertLoad
from tests.support.models_for_parity import VOCAB, huggingface, on_meta, transformer


def mixture(name="Qwen3Moe", **options):
    sizes = dict(
        moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=1
    )
    return huggingface(name, **sizes | options)


def own_mixture():
    return transformer(experts=8, expert_hidden=16, qk_norm=True)


def on_two_experts():
    """Every token chooses experts 5 and 4: six experts and three of four ranks get none."""
    model = mixture()
    for layer in model.model.layers:
        gate = layer.mlp.gate

        def forward(hidden, gate=gate):
            logits = F.linear(hidden, gate.weight)
            scores, order = logits[:, 4:6].softmax(-1).sort(descending=True)
            return logits, scores, order + 4

        gate.forward = forward
    return model


EVERY = [ExpertParallel(), TensorParallel(), ActivationCheckpoint(), HybridShard()]
MESHES = {
    2: [("dp_shard=1,ep=2", [ExpertParallel(), FullyShard()])],
    4: [
        ("dp_shard=1,ep=4", [ExpertParallel(), ActivationCheckpoint(), FullyShard()]),
        ("dp_shard=2,ep=2", [ExpertParallel(), FullyShard(reshard_after_forward=False)]),
        ("dp_shard=1,ep=2,tp=2", [ExpertParallel(), TensorParallel(), FullyShard()]),
        ("dp_shard=1,cp=2,ep=2", [ExpertParallel(), ContextParallel(), FullyShard()]),
    ],
    8: [("dp_replicate=2,dp_shard=1,ep=2,tp=2", EVERY)],
    16: [
        ("dp_replicate=2,dp_shard=2,ep=2,tp=2", EVERY),
        ("dp_shard=2,cp=2,ep=2,tp=2", [ExpertParallel(), ContextParallel(), TensorParallel(), FullyShard()]),
    ],
}


DAILY = ("dp_shard=1,ep=2,tp=2", "dp_shard=1,cp=2,ep=2")
"""One mesh of each pair of passes."""


def cases():
    for ranks, meshes in MESHES.items():
        for place, (mesh, _) in enumerate(meshes):
            marks = [pytest.mark.long] if ranks > 4 else [] if mesh in DAILY else [pytest.mark.nightly]
            yield pytest.param(ranks, place, id=mesh, marks=marks)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ranks", "place"), cases())
def test_divided_experts_equal_one_process(ranks, place):
    on_ranks(ranks, timeout_s=90 if ranks < 8 else 500)(divided)(ranks, place)


@pytest.mark.nightly
@on_ranks(4, fresh="closes its groups")
def test_a_mesh_that_equals_one_whose_groups_are_closed_has_its_own(tmp_path):
    """And the first step is tried although the model makes a cache."""
    for number, (mesh, passes) in enumerate([("dp_shard=2,tp=2", []), ("dp_shard=1,ep=2,tp=2", [ExpertParallel()])]):
        model = mixture()
        model.config.use_cache = True
        par = Plan(mesh, [*passes, TensorParallel(), FullyShard()]).apply(model)
        batch = {"input_ids": torch.arange(8)[None] + par.data_rank}
        par.module(**batch).logits.sum().backward()
        par.clip_grad_norm_(1.0)
        verification = par.verify(batch)
        assert verification.modules and not verification.skipped
        rank = dist.get_rank()
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / str(number)), 4), rank=rank, world_size=4)


@pytest.mark.nightly
@pytest.mark.parametrize("place", range(len(MESHES[2])))
def test_divided_experts_are_exact_without_guards(place):
    on_ranks(2, timeout_s=90)(divided)(2, place, guards="off")


def divided(ranks, place, guards="always"):
    """Uneven counts of tokens, two micro-batches and clipping, on our own mixture."""
    build = mixture if ranks < 8 else own_mixture
    mesh, passes = MESHES[ranks][place]
    parts = ranks // 2 ** sum(axis in mesh for axis in ("cp=", "tp="))  # a batch for each data rank
    assert_parity(build, mesh, passes, token_steps(VOCAB, micro_batches=2, parts=parts, length=8), guards=guards)


def test_the_reference_mixture_is_qwen3_moe(tmp_path):
    """The export computes in transformers what the model computes here, by a grouped product or expert by expert."""
    import transformers

    torch.manual_seed(0)
    model, ids = own_mixture(), torch.randint(VOCAB, (2, 9))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    with distributed("cpu"):
        export_module(Plan().apply(model), tmp_path / "hf")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(loaded).__name__ == "Qwen3MoeForCausalLM"
    torch.testing.assert_close(model(ids).logits, loaded(ids).logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.double()(ids).logits.float(), loaded(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.long
@on_ranks(4)
def test_the_reference_mixture_on_any_mesh_equals_one_process():
    for mesh, passes in [
        ("dp_shard=1,ep=4", [ExpertParallel(), Compile(backend="eager"), FullyShard()]),
        *MESHES[4][2:],
    ]:
        assert_parity(own_mixture, mesh, passes, token_steps(VOCAB, micro_batches=2, length=8))
    assert_parity(own_mixture, "dp_shard=2,tp=2", [TensorParallel(), FullyShard()], token_steps(VOCAB, length=8))


@on_ranks(4)
def test_experts_without_tokens_and_all_tokens_on_one_rank_equal_one_process():
    assert_parity(on_two_experts, "dp_shard=1,ep=4", [ExpertParallel(), FullyShard()], token_steps(VOCAB, parts=4))
    few = token_steps(VOCAB, parts=4, batch=1, length=2)
    assert_parity(partial(mixture, num_experts=6), "dp_shard=2,ep=2", [ExpertParallel(), FullyShard()], few)


@pytest.mark.parametrize("trials", [range(120), pytest.param(range(120, 1000), marks=pytest.mark.nightly)])
@on_ranks(4)
def test_a_thousand_routings_equal_the_dense_computation_bitwise(trials):
    """Adversarial skew: no token on a rank, all on one expert, one expert twice, a few heavy experts, at random."""
    group, rank = dist.group.WORLD, dist.get_rank()
    for trial in trials:
        draw = torch.Generator().manual_seed(trial)
        count, slots = (int(torch.randint(1, most, (), generator=draw)) for most in (4, 5))
        count, width = 4 * count, 6
        tables = torch.randn(2, count, width, generator=draw, dtype=torch.float64)
        sizes = torch.randint(0, 9, (4,), generator=draw).tolist()
        heavy = torch.rand(count, generator=draw) ** (1 + trial % 40)
        every = [
            (
                torch.randn(size, width, generator=draw, dtype=torch.float64),
                torch.multinomial(heavy + 1e-12, size * slots, replacement=True, generator=draw).view(size, slots)
                if size
                else torch.zeros(0, slots, dtype=torch.int64),
                torch.rand(size, slots, generator=draw, dtype=torch.float64),
            )
            for size in sizes
        ]
        x, chosen, weights = every[rank]
        x.requires_grad_()
        weights.requires_grad_()
        held = count // 4
        mine = tables[:, rank * held : (rank + 1) * held]
        run = lambda rows, number, scale, own=mine: expert(rows, number[:, 0], scale, own)  # noqa: E731
        got = by_experts(run, x, chosen, weights, count, group, Routing())
        parts = [expert(x, chosen[:, slot], weights[:, slot, None], tables) for slot in range(slots)]
        want = torch.stack(parts, 1).sum(1)
        assert torch.equal(got, want), f"routing {trial} differs on rank {rank}"
        if trial % 20 == 0:
            seen, expected = (torch.autograd.grad(out.square().sum(), (x, weights)) for out in (got, want))
            torch.testing.assert_close(seen, expected, rtol=1e-12, atol=1e-12)


def expert(rows, number, scale, tables):
    """Compute without a matrix product, whose rounding may depend on how many rows there are."""
    return (rows * tables[0][number] + tables[1][number]).tanh() * scale


class Own(nn.Module):
    """Experts as a user may write them; ``each`` and ``forward`` are what the kinds below get wrong."""

    def __init__(self):
        super().__init__()
        self.num_experts = self.num_experts_per_tok = 8
        self.up = nn.Parameter(torch.empty(8, 32, 32))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.up, std=0.1)

    def forward(self, x, chosen, weights):
        out = torch.zeros_like(x)
        for number in range(self.num_experts):
            token, slot = torch.where(chosen == number)
            y = self.each(x[token], number) * weights[token, slot, None] * (self.num_experts_per_tok / 8)
            out = out.index_add(0, token, y)
        return out

    def each(self, x, number):
        return F.silu(F.linear(x, self.up[number]))


class Normalised(Own):
    def forward(self, x, chosen, weights):
        return super().forward(x, chosen, weights / weights.sum(-1, keepdim=True))


class Sometimes(Normalised):
    """Normalises weights by a private setting."""

    _normalises = False

    def forward(self, x, chosen, weights):
        return (Normalised if self._normalises else Own).forward(self, x, chosen, weights)


class Residual(Own):
    def forward(self, x, chosen, weights):
        return x + super().forward(x, chosen, weights)


class Counting(torch.autograd.Function):
    """Multiplies by one, and the gradient by the number of experts that it is told."""

    @staticmethod
    def forward(ctx, x, count):
        ctx.count = count
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.count, None


class Counted(Own):
    def each(self, x, number):
        return Counting.apply(super().each(x, number), len(self.up))


class Capacity(Own):
    def each(self, x, number):
        return super().each(x, number) * (torch.arange(len(x)) < 8)[:, None]


class InTraining(Own):
    def forward(self, x, chosen, weights):
        return super().forward(x, chosen, weights / weights.sum(-1, keepdim=True) if self.training else weights)


class FromZero(Own):
    """Starts from zero, in which a normalisation of weights does not show."""

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.up)

    def forward(self, x, chosen, weights):
        return super().forward(x, chosen, weights / weights.sum(-1, keepdim=True))


class ByChild(Own):
    """The second layer's child normalises; all that can be read of the modules but the child's class is alike."""

    made = 0

    def __init__(self):
        super().__init__()
        self.last = Normalises() if ByChild.made % 2 else nn.Identity()
        ByChild.made += 1

    def forward(self, x, chosen, weights):
        return super().forward(x, chosen, self.last(weights))


class Normalises(nn.Module):
    def forward(self, weights):
        return weights / weights.sum(-1, keepdim=True)


class Rooted(Own):
    """Divides by the size of a row, which is zero for one of zeros, and has a child with a parameter."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)

    def each(self, x, number):
        return self.norm(super().each(x / x.pow(2).mean(-1, keepdim=True).sqrt(), number))


class Dropping(Own):
    def each(self, x, number):
        return F.dropout(super().each(x, number), 0.5, self.training)


class Buffered(Own):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 2, 8))
        self.n_experts, self.norm = 8, nn.Embedding(8, 32)


class OwnMixture(nn.Module):
    """Two layers of experts of a user's own, called by ``call(experts, tokens, chosen, weights)``."""

    def __init__(self, kind=Own, call=lambda experts, x, chosen, weights: experts(x, chosen, weights)):
        super().__init__()
        self.embed, self.router, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, 8), nn.Linear(32, VOCAB)
        self.layers = nn.ModuleList(nn.ModuleDict({"experts": kind()}) for _ in range(2))
        self.call = call

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            tokens = x.flatten(0, 1)
            weights, chosen = self.router(tokens).softmax(-1).topk(2, -1)
            x = x + self.call(layer["experts"], tokens, chosen, weights).view_as(x)
        return SimpleNamespace(logits=self.head(x))


class Keeping(Own):
    """Experts that remember what they return."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def forward(self, hidden, chosen, weights):
        self.kept.append(super().forward(hidden, chosen, weights))
        return self.kept[-1]


OWN = ModelLayout(experts=("layers.*.experts",))


def run_own(model, verify=True):
    torch.manual_seed(0)
    model.router.reset_parameters()
    par = Plan("dp_shard=1,ep=2", [ExpertParallel(), FullyShard()], verify=verify).apply(model, OWN)
    par.module(torch.arange(8)[None]).logits.sum().backward()
    return par


@on_ranks(2)
def test_experts_of_ones_own_that_ranks_cannot_repeat_are_refused_in_the_first_forward():
    """Those that only look wrong, by an attribute that equals the number of experts, train as in one process."""
    assert_parity(
        OwnMixture, "dp_shard=1,ep=2", [ExpertParallel(), FullyShard()], token_steps(VOCAB, parts=2), layout=OWN
    )
    for kind, message in [
        (Normalised, r"layers.0.experts \(Normalised\) gives other results .*off by .*use a mesh without ep"),
        (Residual, "layers.0.experts .*a residual"),
        (Capacity, "layers.0.experts .*a capacity"),
        (Counted, "layers.0.experts .*off by 5.0e-01"),
        (InTraining, "layers.0.experts .*in training"),
        (FromZero, "layers.0.experts .*a normalisation"),
        (ByChild, "layers.1.experts .*a normalisation"),
    ]:
        with pytest.raises(ParallelError, match=message):
            run_own(OwnMixture(kind))
    different = OwnMixture(Sometimes)
    different.layers[1]["experts"]._normalises = True
    with pytest.raises(ParallelError, match=r"layers.1.experts \(Sometimes\) gives other results"):
        run_own(different)
    run_own(OwnMixture(Residual), verify=False)
    for verify in (True, False):
        kept = run_own(OwnMixture(Keeping), verify).module.layers[0]["experts"].kept
        assert [tensor.requires_grad for tensor in kept] == [True], "the comparison leaves no trace"
    run_own(OwnMixture(Dropping))  # what draws random numbers is compared in evaluation alone


@on_ranks(2)
def test_a_rank_without_tokens_divides_nothing_by_zero_and_children_of_experts_train():
    build = partial(OwnMixture, Rooted, lambda experts, x, chosen, weights: experts(x, chosen % 4, weights))
    passes = [ExpertParallel(), FullyShard()]
    assert_parity(build, "dp_shard=1,ep=2", passes, token_steps(VOCAB, parts=2), layout=OWN)


class Noticing(Own):
    def forward(self, x, chosen, weights):
        self.seen = (x.dtype, weights.dtype, self.up.dtype)
        return super().forward(x.to(self.up.dtype), chosen, weights.to(self.up.dtype)).to(x.dtype)


class Around(nn.Module):
    """A router and experts; routers compute weights in float32."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(32, 8), Noticing()

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1, dtype=torch.float32).topk(2, -1)
        return x + self.experts(x, chosen, weights)


@on_ranks(2)
def test_experts_compute_in_the_dtypes_that_they_would_have_without_ep():
    for fp32 in ((), ("*.experts",), ("0", "1"), ("0",)):
        dtypes = []
        for mesh, passes in (("dp_shard=2", []), ("dp_shard=1,ep=2", [ExpertParallel()])):
            plan = Plan(mesh, [*passes, FullyShard(param_dtype=torch.bfloat16)], verify=False)
            par = plan.apply(
                nn.Sequential(Around(), Around()), ModelLayout(blocks=("*",), experts=("*.experts",), fp32=fp32)
            )
            par.module(torch.randn(16, 32))
            dtypes.append([block.experts.seen for block in par.module])
        assert dtypes[0] == dtypes[1], fp32


class Sized(Own):
    """Takes rows in the order of experts, and how many each has; returns wider ones."""

    def forward(self, rows, sizes):
        return torch.cat([self.each(part, number).repeat(1, 2) for number, part in enumerate(rows.split(sizes))])


class Offset(Sized):
    """Takes the numbers as a tensor."""

    def forward(self, rows, sizes):
        ends = sizes.cumsum(0)
        return super().forward(rows, (ends - (ends - sizes)).tolist())


class Even(Own):
    """Takes as many rows for each expert, in their order."""

    def forward(self, rows):
        return torch.cat([self.each(part, number) for number, part in enumerate(rows.chunk(len(self.up)))])

    def each(self, x, number):
        return super().each(x, number) * x


class Biased(Even):
    def each(self, x, number):
        return super().each(x, number) + 1


def in_order(experts, x, chosen, weights):
    order, sizes = chosen.flatten().argsort(stable=True), chosen.flatten().bincount(minlength=8)
    rows = (
        experts(x[order // 2], sizes if isinstance(experts, Offset) else sizes.tolist())
        * weights.flatten()[order, None]
    )
    return torch.zeros_like(x).index_add(0, order // 2, rows[:, :32] - 2 * rows[:, 32:])


def evenly(experts, x, chosen, weights):
    scores = torch.zeros(len(x), 8).scatter(1, chosen, weights)
    return experts(x.repeat(8, 1) * scores.T.reshape(-1, 1)).view(8, *x.shape).sum(0)


@on_ranks(2)
def test_experts_that_take_rows_in_their_order_equal_one_process_and_are_counted():
    layout = replace(OWN, experts=replace(OWN.experts, in_order=OWN.experts.modules))
    passes = [ExpertParallel(), FullyShard()]
    counted = []
    for kind, call in [(Sized, in_order), (Offset, in_order), (Even, evenly)]:
        build = partial(OwnMixture, kind, call)
        assert_parity(build, "dp_shard=1,ep=2", passes, token_steps(VOCAB, parts=2), layout=layout)
        torch.manual_seed(0)
        par = Plan("dp_shard=1,ep=2", passes).apply(OwnMixture(kind, call), layout)
        load = ExpertLoad(par)
        par.module(torch.arange(8)[None])
        load.step()
        counted.append({name: round(float(value), 6) for name, value in load.take().items()})
    assert counted[0] == counted[1] == counted[2], counted
    assert counted[0]["experts/dropped"] == 0 and counted[0]["experts/most"] > 4, counted
    with pytest.raises(ParallelError, match=r"layers.0.experts \(Biased\) gives other results"):
        Plan("dp_shard=1,ep=2", passes).apply(OwnMixture(Biased, evenly), layout).module(torch.arange(8)[None])
    assert "forward(x, chosen, weights), expected (rows (R, D) in the order" in problems_of(
        "dp_shard=1,ep=2", passes, OwnMixture(), layout
    )


def dropped(experts, x, chosen, weights):
    return experts(x, chosen.masked_fill(torch.arange(2) < dist.get_rank(), -1), weights)


def added_in_place(experts, x, chosen, weights):
    out = experts(x, chosen.int(), weights)
    out += x
    return out


class Tied(OwnMixture):
    def __init__(self):
        super().__init__()
        self.layers[1]["experts"].up = self.layers[0]["experts"].up


class Shared(OwnMixture):
    def __init__(self):
        super().__init__()
        self.layers[1]["experts"] = self.layers[0]["experts"]


class Paired(Own):
    def forward(self, x, chosen, weights):
        return super().forward(x, chosen, weights), chosen


class Elsewhere(Own):
    """Keeps the number of its experts where nobody looks for it."""

    def __init__(self):
        super().__init__()
        self.E = self.num_experts
        del self.num_experts

    def forward(self, x, chosen, weights):
        return sum(
            self.each(x, number) * (weights * (chosen == number)).sum(-1, keepdim=True) for number in range(self.E)
        )


class Twice(Own):
    def __init__(self):
        super().__init__()
        self.down = self.up


class Dense(Own):
    def forward(self, x, dense):
        return x


class Scaled(Own):
    def forward(self, x, chosen, weights, factor):
        return super().forward(x, chosen, weights) * factor


@on_ranks(2)
def test_what_a_model_does_with_its_experts_equals_one_process_or_is_refused_on_all_ranks():
    sharded = [ExpertParallel(), FullyShard(blocks=("layers.*.experts",))]
    assert_parity(
        lambda: OwnMixture(call=added_in_place), "dp_shard=1,ep=2", sharded, token_steps(VOCAB, parts=2), layout=OWN
    )
    assert_parity(Shared, "dp_shard=1,ep=2", sharded, token_steps(VOCAB, parts=2), layout=OWN)
    for call, message in (
        (
            lambda experts, x, chosen, weights: experts(x, chosen >= 0, weights),
            r"chosen \(8, 2\) bool.*expected \(hidden states",
        ),
        (
            lambda experts, x, chosen, weights: experts(x, chosen.T, weights.T),
            r"got chosen experts \(2, 8\) .*expected \(hidden",
        ),
    ):
        with pytest.raises(ParallelError, match=message):
            run_own(OwnMixture(call=call))
    par = run_own(OwnMixture())
    with pytest.raises(MeshparError, match=r"gradients on several meshes .*call par.clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_(par.module.parameters(), 1.0)
    par.clip_grad_norm_(1.0)
    par = Plan("dp_shard=1,ep=2", sharded).apply(OwnMixture(call=none_of_them), OWN)
    ExpertLoad(par)
    with pytest.raises(ParallelError, match="are no experts"):  # on all ranks, also where each choice is counted
        par.module(torch.arange(8)[None])


def none_of_them(experts, x, chosen, weights):
    return experts(x, chosen - 100 * dist.get_rank(), weights)


ONE_WAY = {4: ("dp_shard=1,ep=4", [ExpertParallel(), FullyShard()]), 2: ("tp=2", [TensorParallel()]), 1: ("", [])}


def saves(root):
    par, optimizer = fresh(4, seed=1)
    train_steps(par, token_steps(VOCAB, parts=4), optimizer=optimizer)
    CheckpointManager(Path(root) / "from-4").save(1, par, optimizer)
    keep(root, par, optimizer)


def restores(root, source, name=None):
    par, optimizer = fresh(dist.get_world_size(), seed=2)
    CheckpointManager(Path(root) / source).restore(par, optimizer)
    values, expected = state_of(par, optimizer), torch.load(Path(root) / "values.pt")
    assert values.keys() == expected.keys()
    assert not [key for key in values if not torch.equal(values[key], expected[key])]
    if name:
        CheckpointManager(Path(root) / name).save(1, par, optimizer)


def fresh(ranks, seed):
    module = on_meta(mixture)
    mesh, passes = ONE_WAY[ranks]
    par = Plan(mesh, passes).apply(module).materialize(seed=seed)
    return par, torch.optim.AdamW(par.module.parameters(), lr=1e-2, fused=True)


def state_of(par, optimizer):
    names = {id(parameter): name for name, parameter in par.module.named_parameters()}
    values = {name: whole(parameter) for name, parameter in par.module.named_parameters()}
    for name, state in optimizer.state.items():
        values |= {f"{names[id(name)]}/{key}": whole(value) for key, value in state.items() if value.ndim}
    return values


def keep(root, par, optimizer):
    values = state_of(par, optimizer)
    if dist.get_rank() == 0:
        torch.save(values, Path(root) / "values.pt")


def test_a_checkpoint_of_divided_experts_restores_bitwise_on_tensor_parallelism_and_one_process_and_back(tmp_path):
    launch(__name__, "saves", 4, (str(tmp_path),))
    launch(__name__, "restores", 2, (str(tmp_path), "from-4", "from-2"))
    launch(__name__, "restores", 1, (str(tmp_path), "from-2", "from-1"))
    launch(__name__, "restores", 4, (str(tmp_path), "from-1"))
    exported = export_safetensors(tmp_path / "from-4", tmp_path / "hf")
    loaded = type(mixture()).from_pretrained(exported)
    expected = torch.load(tmp_path / "values.pt")
    assert all(torch.equal(parameter, expected[name]) for name, parameter in loaded.named_parameters())


def problems_of(mesh, passes, module, layout=None):
    with pytest.raises(PlanError) as caught:
        Plan(mesh, passes).check(module, layout, world_size=Plan(mesh, passes).mesh.size)
    return "\n".join(caught.value.problems)


def test_what_cannot_be_divided_is_refused_before_anything_runs():
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    sizes = dict(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=32, num_heads=4, num_layers=2, num_sparse_encoder_layers=2)
    with torch.device("meta"):
        model = mixture(num_experts=6)
        switch = SwitchTransformersForConditionalGeneration(SwitchTransformersConfig(**sizes))
    sharded, mesh = [ExpertParallel(), FullyShard()], "dp_shard=1,ep=2"
    for said, *plan in (
        (
            "model.layers.0.mlp.experts has 6 experts, which ep=4 does not divide; use ep=2, 3 or 6",
            *("dp_shard=1,ep=4", sharded, model),
        ),
        ("Replicate keeps it whole", "dp_replicate=2,ep=2", [ExpertParallel(), Replicate()], model),
        ("write ExpertParallel -> TensorParallel", "dp_shard=1,ep=2,tp=2", [TensorParallel(), *sharded], model),
        (
            "encoder.block.0.layer.1.mlp.experts is a list of modules, and each of their parameters is one expert's",
            *(mesh, sharded, switch),
        ),
        (
            "layers.1.experts.norm.weight (8, 32) is a parameter of a child module whose first dim counts experts",
            *(mesh, sharded, OwnMixture(Buffered), OWN),
        ),
        ("layers.0.experts.up and layers.0.experts.down are one parameter", *(mesh, sharded, OwnMixture(Twice), OWN)),
    ):
        assert said in problems_of(*plan)
