"""The known traps of torch, each with a test that fails without its cure."""

import contextlib
import copy
import gc
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from meshpar import (
    ActivationCheckpoint,
    FullyShard,
    HybridShard,
    MeshparError,
    ModelLayout,
    ParallelError,
    Plan,
    PlanError,
    Replicate,
    TensorParallel,
)
from meshpar.passes.tensor.parts import Experts, FeatureTable, Parts
from meshpar.state.initialize import tied_names
from meshpar.tensors.placements import held_by_this_rank, local_tensor
from meshpar.testing import on_ranks, random_tokens, token_loss_sum, whole
from meshpar.training import LoRA, add_adapters
from tests.support.comparison import assert_gradients, assert_weights, gradients
from tests.support.models_for_parity import VOCAB, huggingface, on_meta, transformer
from tests.support.tiers import daily


def alone(build, seed=0):
    """The whole weights of one process for a seed."""
    from meshpar.testing.parity import _alone

    return {name: whole(parameter) for name, parameter in _alone(build, None, seed).module.named_parameters()}


MESHES = {
    "replicate": ("dp_replicate=4", [Replicate()]),
    "fsdp": ("dp_shard=4", [FullyShard()]),
    "hsdp": ("dp_replicate=2,dp_shard=2", [HybridShard()]),
    "world": ("dp_replicate=2,dp_shard=2", [HybridShard(optimizer="world")]),
    "fsdp-tp": ("dp_shard=2,tp=2", [TensorParallel(), FullyShard()]),
    "replicate-tp": ("dp_replicate=2,tp=2", [TensorParallel(), Replicate()]),
}


TIED = {
    "transformer": lambda: transformer(vocab_size=97, tied=True),
    "qwen3": lambda: huggingface("Qwen3", tie_word_embeddings=True),
}


@pytest.mark.parametrize("name", daily(TIED, "transformer"))
@on_ranks(4)
def test_initial_weights_do_not_depend_on_the_mesh_and_ties_hold(name):
    build = TIED[name]
    expected = alone(build)
    for mesh, passes in MESHES.values():
        par = Plan(mesh, passes).apply(on_meta(build)).materialize(seed=0)
        assert tied_names(par.module), "the head came untied"
        for name, parameter in par.module.named_parameters():
            assert torch.equal(whole(parameter), expected[name]), (mesh, name)
            held = expected[name][held_by_this_rank(parameter)]
            assert torch.equal(local_tensor(parameter).cpu(), held), (mesh, name)


@on_ranks(4)
def test_a_module_that_has_weights_keeps_exactly_those():
    for mesh, passes in MESHES.values():
        torch.manual_seed(7)
        module = transformer(vocab_size=97, tied=True)
        expected = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        par = Plan(mesh, passes).apply(module)
        assert par.module is module
        for name, parameter in module.named_parameters():
            assert torch.equal(whole(parameter), expected[name]), (mesh, name)


class Weights:
    """A WeightSource over whole tensors, which counts what is read."""

    def __init__(self, tensors):
        self.tensors, self.elements = tensors, 0

    def shapes(self):
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def read(self, name, index, out):
        part = self.tensors[name][index]
        self.elements += part.numel()
        out.copy_(part)


@on_ranks(4)
def test_weights_from_a_source_each_rank_its_part():
    build = lambda: transformer(vocab_size=97)  # noqa: E731
    expected = alone(build, seed=3)
    for mesh, passes in MESHES.values():
        source = Weights(expected)
        par = Plan(mesh, passes).apply(on_meta(build)).materialize(weights=source)
        for name, parameter in par.module.named_parameters():
            assert torch.equal(whole(parameter), expected[name]), (mesh, name)
        assert source.elements == sum(local_tensor(parameter).numel() for parameter in par.module.parameters())


@on_ranks(2)
def test_weights_that_do_not_fit_are_all_named_before_any_is_read():
    source = Weights(alone(transformer))
    del source.tensors["norm.weight"]
    source.tensors["head.weight"] = torch.zeros(3, 3)
    par = Plan("dp_shard=2", [FullyShard()]).apply(on_meta(transformer))
    with pytest.raises(
        MeshparError, match=r"missing: norm.weight \(32,\)\n.*shape of head.weight: expected \(96, 32\), got \(3, 3\)"
    ):
        par.materialize(weights=source)
    assert source.elements == 0


@on_ranks(4)
def test_replicas_that_start_different_are_refused_buffers_too():
    for name in ("embed.weight", "scale"):
        torch.manual_seed(dist.get_rank() // 2 if name == "embed.weight" else 0)
        module = transformer()
        module.register_buffer("scale", torch.full((2,), 1.0 + (dist.get_rank() // 2 if name == "scale" else 0)))
        with pytest.raises(
            MeshparError, match=rf"the weights handed to apply differ.*\n(.*\n)*.*{name}: rank 0 against ranks \[2, 3\]"
        ):
            Plan("dp_replicate=2,dp_shard=2", [HybridShard()]).apply(module)


@on_ranks(4)
def test_check_replicas_names_the_parameter_and_the_ranks():
    for mesh, passes, odd in (
        ("dp_replicate=2,dp_shard=2", [HybridShard()], "rank 1 against ranks [3]"),
        ("dp_shard=2,tp=2", [TensorParallel(), FullyShard()], "rank 2 against ranks [3]"),
    ):
        par = Plan(mesh, passes).apply(on_meta(transformer)).materialize(seed=0)
        par.check_replicas()
        if dist.get_rank() == 3:
            local_tensor(par.module.norm.weight)[-1] += 1e-7
        with pytest.raises(MeshparError) as caught:
            par.check_replicas()
        assert str(caught.value).endswith(f"norm.weight: {odd}"), str(caught.value)


class Rotating(nn.Module):
    """A block with a table that no checkpoint holds."""

    def __init__(self, resets=True):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        if resets:
            self.reset_parameters = lambda: self.table.copy_(torch.arange(4.0))

    def forward(self, x):
        return self.linear(x) * self.table


@on_ranks(2)
def test_buffers_outside_the_state_dict_are_right_after_meta():
    layout, stored = ModelLayout(blocks=("0",)), {"0.linear.weight": torch.ones(4, 4), "0.linear.bias": torch.ones(4)}
    for weights in ({"seed": 0}, {"weights": Weights(stored)}):
        module = on_meta(lambda: nn.Sequential(Rotating()))
        Plan("dp_shard=2", [FullyShard()]).apply(module, layout).materialize(**weights)
        assert torch.equal(module[0].table, torch.arange(4.0))


@on_ranks(4)
def test_gradient_norms_across_meshes_and_plain_tensors():
    mesh, passes = MESHES["fsdp-tp"]
    batch = random_tokens(VOCAB, 2, 16, seed=0)
    single = transformer()
    par = Plan(mesh, passes).apply(on_meta(transformer)).materialize(seed=0)
    single.load_state_dict(alone(transformer))
    for norm_type in (2.0, 1.0, math.inf):
        single.zero_grad()
        par.module.zero_grad()
        for module in (single, par.module):
            (token_loss_sum(module, batch)[0] / 32).backward()
        expected = torch.nn.utils.clip_grad_norm_(single.parameters(), 0.01, norm_type)
        got = par.clip_grad_norm_(0.01, norm_type)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)
        assert_gradients(par.module, single, rtol=1e-4, atol=1e-7)
        again = torch.nn.utils.clip_grad_norm_(par.module.parameters(), 1.0, norm_type)
        torch.testing.assert_close(whole(again), torch.tensor(0.01), rtol=1e-4, atol=0)


@on_ranks(2)
def test_the_norm_of_gradients_in_several_dtypes():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    single = torch.tensor([1.0] * 20 + [2.0] * 20, dtype=torch.float64)
    par = Plan("dp_shard=2", [FullyShard()]).apply(module, ModelLayout(blocks=("0", "1")))
    for name, parameter in par.module.named_parameters():
        parameter.grad = torch.full_like(parameter, 2.0 if name.startswith("1") else 1.0)
    torch.testing.assert_close(par.clip_grad_norm_(1.0), single.norm())
    torch.testing.assert_close(par.clip_grad_norm_(math.inf), torch.tensor(1.0, dtype=torch.float64), rtol=1e-6, atol=0)
    assert [parameter.grad.dtype for parameter in par.module.parameters()] == [torch.float32] * 2 + [torch.float64] * 2
    par.module.zero_grad()
    assert float(par.clip_grad_norm_(1.0)) == 0.0, "a rank without a gradient joins the norm all the same"


class Masked(nn.Module):
    """A block whose dropouts leave their masks behind."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 64, bias=False), nn.Linear(64, 8, bias=False)
        self.before, self.inside, self.outside = nn.Dropout(0.5), nn.Dropout(0.5), nn.Dropout(0.5)
        self.masks = []

    def forward(self, x):
        before = self.before(torch.ones_like(x))
        x = x * before
        hidden = self.inside(torch.ones_like(self.up(x))) * self.up(x)
        out = self.down(hidden)
        mask = self.outside(torch.ones_like(out))
        self.masks.append((hidden.detach() == 0, mask == 0, before == 0))
        return x + mask * out


MASKED = ModelLayout(blocks=("0",), tensor={"0": "region", "0.up": "colwise", "0.down": "rowwise"}, dropout=True)


def gathered(tensor):
    parts = [torch.empty_like(tensor, dtype=torch.uint8) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.to(torch.uint8).contiguous())
    return parts


@on_ranks(4)
def test_dropout_differs_across_shards_and_agrees_where_activations_are_replicated():
    par = Plan("dp_replicate=2,tp=2", [TensorParallel(), Replicate()]).apply(
        on_meta(lambda: nn.Sequential(Masked())), MASKED
    )
    par.materialize(seed=0).manual_seed(5)
    par.module(torch.randn(1, 16, 8))
    inside, outside, before = (gathered(mask) for mask in par.module[0].masks[0])
    assert not torch.equal(inside[0], inside[1]) and not torch.equal(inside[2], inside[3]), "shards drew the same mask"
    # before the projections of a region, too: what is split counts, not where a region begins
    for shared in (outside, before):
        assert torch.equal(shared[0], shared[1]) and torch.equal(shared[2], shared[3]), "replicas drew different masks"
    assert not torch.equal(outside[0], outside[2]), "different data drew the same mask"
    par.module(torch.randn(1, 16, 8))
    assert not torch.equal(par.module[0].masks[1][0], par.module[0].masks[0][0]), "every step drew the same mask"


class Splits(nn.Module):
    """A module whose parameters a style splits, and a dropout of what they compute."""

    def __init__(self):
        super().__init__()
        self.inside, self.masks = nn.Dropout(0.5), []


class Nested(Splits):
    """Projections in a module of their own, and a dropout beside it of what they compute."""

    def __init__(self):
        super().__init__()
        self.inner, self.down = nn.Sequential(nn.Linear(8, 64)), nn.Linear(64, 8, bias=False)

    def forward(self, x):
        hidden = self.inner(x)
        mask = self.inside(torch.ones_like(hidden))
        self.masks = [mask == 0]
        return self.down(mask * hidden)


class Features(Splits):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.zeros(64, 8)), nn.Parameter(torch.zeros(8, 64))

    def reset_parameters(self):
        nn.init.normal_(self.up), nn.init.normal_(self.down)

    def forward(self, x):
        mask = self.inside(torch.ones(1, 16, len(self.up)))
        self.masks = [mask == 0]
        return (mask * (x @ self.up.T)) @ self.down.T


class Chosen(Splits):
    def __init__(self):
        super().__init__()
        self.num_experts, self.each = 4, nn.Parameter(torch.zeros(4, 8, 8))

    def reset_parameters(self):
        nn.init.normal_(self.each)

    def forward(self, x, chosen, weights):
        mask = self.inside(torch.ones_like(x))
        self.masks = [mask == 0]
        return sum(
            (weights * (chosen == place)).sum(-1, keepdim=True) * (x * mask @ self.each[place])
            for place in range(self.num_experts)
        )


class Table(Splits):
    def __init__(self):
        super().__init__()
        self.table, self.down = nn.Embedding(16, 64), nn.Linear(64, 8, bias=False)

    def forward(self, x, tokens):
        found = self.table(tokens)
        mask = self.inside(torch.ones_like(found))
        self.masks = [mask == 0]
        return self.down(mask * found)


class Around(nn.Module):
    """Calls one of the modules above, and draws behind it."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.outside = inner(), nn.Dropout(0.5)

    def forward(self, x):
        chosen = torch.arange(16).remainder(4)[None, :, None]
        more = {Nested: (), Features: (), Chosen: (chosen, torch.ones(1, 16, 1)), Table: (chosen[..., 0],)}[
            type(self.inner)
        ]
        out = self.inner(x, *more)
        self.inner.masks.append(self.outside(torch.ones_like(out)) == 0)
        return out


STYLES = {
    Nested: {"inner": "region", "inner.inner.0": "colwise", "inner.down": "rowwise"},
    Features: {"inner": Parts(dims={"up": (0, 1), "down": (1, 1)}, sums=True)},
    Chosen: {"inner": Experts()},
    Table: {"inner": "region", "inner.table": FeatureTable(gather=False), "inner.down": "rowwise"},
}


@on_ranks(2)
def test_dropout_differs_in_whatever_a_style_splits_and_agrees_behind_it():
    for kind, table in STYLES.items():
        layout = ModelLayout(blocks=("inner",), tensor=table, dropout=True)
        plan = Plan("tp=2", [TensorParallel(), ActivationCheckpoint()], verify=False)
        par = plan.apply(on_meta(lambda kind=kind: Around(kind)), layout).materialize(seed=0)
        par.manual_seed(5)
        for _ in range(2):  # the second step comes after a recomputation that stopped where nothing more was needed
            out = par.module(torch.randn(1, 16, 8))
            (one, other), (left, right) = (gathered(mask) for mask in par.module.inner.masks)
            assert not torch.equal(one, other), f"{kind.__name__}: ranks drew the same mask for different parts"
            assert torch.equal(left, right), f"{kind.__name__}: replicated activations drew different masks"
            out.sum().backward()


class StopsEarly(Masked):
    """A block whose recomputation stops inside of its last projection, which keeps its input and nothing behind it."""

    def forward(self, x):
        mask = self.inside(torch.ones_like(self.up(x)))
        self.masks.append(mask == 0)
        return x + self.down(mask * self.up(x))


@on_ranks(2)
def test_recomputation_draws_the_same_masks_again_and_random_state_outlives_one_that_stops_early():
    plan = Plan("tp=2", [TensorParallel(), ActivationCheckpoint()], verify=False)
    par = plan.apply(on_meta(lambda: nn.Sequential(Masked())), MASKED)
    par.materialize(seed=0).manual_seed(5)
    # Two products of the output keep recomputation from stopping before the last dropout.
    par.module(torch.randn(1, 16, 8)).square().sum().backward()
    first, second = par.module[0].masks[:2]
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    projections = {"0.up": "colwise", "0.down": "rowwise"}
    for table in (projections, {"0": "region", **projections}):
        layout = ModelLayout(blocks=("0",), tensor=table, dropout=True)
        par = plan.apply(on_meta(lambda: nn.Sequential(StopsEarly())), layout).materialize(seed=0)
        par.manual_seed(5)
        drawn = []
        for _ in range(2):
            par.module(torch.randn(1, 16, 8)).sum().backward()
            drawn.append(torch.rand(8))
        for mask in par.module[0].masks[::2]:
            one, other = gathered(mask)
            assert not torch.equal(one, other), "shards drew the same mask"
        assert not torch.equal(par.module[0].masks[0], par.module[0].masks[2]), "both steps drew the same mask"
        assert not torch.equal(*drawn), "behind both steps the same was drawn"


class Careless(nn.Module):
    """Code that knows nothing of shards: it uses a weight outside of its module."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)

    def forward(self, tokens):
        return self.embed(tokens) @ self.embed.weight.t()


@on_ranks(2)
def test_errors_inside_a_parallel_module_say_where_why_and_what_to_do():
    plan = Plan("tp=2", [TensorParallel()])
    par = plan.apply(nn.Sequential(Careless()), ModelLayout(tensor={"0.embed": "vocab"}))
    with pytest.raises(ParallelError) as caught:
        par.module(torch.zeros(1, 4, dtype=torch.int64))
    text = str(caught.value)
    assert text.startswith("0 (Careless) failed under tp=2 [TensorParallel]: ")
    assert "embed.weight (16, 8) tp:dim 0" in text and "test_traps.py:" in text
    assert "likely cause: a parameter that is split over the mesh is used outside its own module" in text
    assert "remedy: call the module that owns the weight" in text


@on_ranks(2)
def test_a_sequence_that_does_not_divide_is_refused_by_name():
    # The first module that splits the sequence, which would leave a position out.
    table = nn.Sequential(nn.Embedding(VOCAB, 8))
    par = Plan("tp=2", [TensorParallel(sequence_parallel=True)]).apply(table, ModelLayout(tensor={"0": "sequence"}))
    with pytest.raises(MeshparError, match="sequence length 15 is not divided by tp=2"):
        par.module(torch.arange(15)[None] % VOCAB)


def blocks_of(build, count=2):
    return lambda: nn.Sequential(*(build() for _ in range(count)))


@on_ranks(1)
def test_what_a_lone_data_rank_does_not_use_has_no_gradient():
    for passes in ([FullyShard()], [FullyShard(whole=("c.weight",))], [Replicate()]):
        par = Plan(f"{passes[0].axes[0]}=1", passes).apply(Choosing(), ModelLayout())
        par.module(torch.randn(2, 4), "a").sum().backward()
        trained = [name for name, parameter in par.module.named_parameters() if parameter.grad is not None]
        assert trained == ["stem.weight", "a.weight"]


@on_ranks(1)
def test_a_module_may_be_collected_in_the_step_of_another():
    held = [Plan("dp_shard=1", [FullyShard()]).apply(Choosing(), ModelLayout())]

    def collect(optimizer, args, kwargs):
        held.clear()
        gc.collect()

    hooks = [register_optimizer_step_pre_hook(hook) for hook in (collect, lambda *_: None)]
    try:
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()
    finally:
        for hook in hooks:
            hook.remove()


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.drop(torch.tanh(self.linear(x)))


@on_ranks(2)
def test_recomputation_replays_dropout_that_no_layout_mentions():
    grads = []
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    for passes in ([FullyShard()], [ActivationCheckpoint(), FullyShard()]):
        par = Plan("dp_shard=2", passes).apply(on_meta(blocks_of(Dropping))).materialize(seed=0)
        par.manual_seed(3)
        par.module(x).square().sum().backward()
        grads.append(gradients(par.module))
    torch.testing.assert_close(*grads, rtol=0, atol=0)


class Choosing(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.a, self.b, self.c = (nn.Linear(4, 4, bias=False) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, branch):
        y = getattr(self, branch)(self.stem(x))
        return y * self.scale if branch == "b" else y


CHOICES = [(["a", "b"], ["a", "b"]), (["a", "a"], ["b", "a"])]
"""By micro-batch the ranks' branches; nobody takes ``c``, and the second time nobody ``b`` on its own."""


@on_ranks(2)
def test_branches_that_some_ranks_take_equal_one_process():
    for passes in ([FullyShard()], [Replicate(reduce_dtype=torch.float64)]):
        for accumulated in (False, True):
            torch.manual_seed(0)
            model = Choosing()
            par = Plan(f"{passes[0].axes[0]}=2", passes).apply(copy.deepcopy(model), ModelLayout())
            x = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1))
            micro = list(zip(x, CHOICES))
            for rows, branches in micro:
                for rank in range(2):
                    (model(rows[2 * rank : 2 * rank + 2], branches[rank][0]).square().sum() / 2).backward()
            for rows, branches in par.accumulate(micro) if accumulated else micro:
                par.module(rows[2 * par.data_rank :][:2], branches[par.data_rank][0]).square().sum().backward()
            assert_gradients(par.module, model)


@on_ranks(2)
def test_a_loss_made_of_a_block_alone_is_reduced_and_compared():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.PReLU())
    model[1].weight = nn.Parameter(torch.tensor(0.25))
    par = Plan("dp_shard=2", [FullyShard()]).apply(copy.deepcopy(model), ModelLayout(blocks=("0", "1")))
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    model[1](x).sum().div(2).backward()
    par.module[1](x[2 * par.data_rank :][:2]).sum().backward()
    torch.testing.assert_close(whole(par.module[1].weight.grad), model[1].weight.grad)


class Attending(nn.Module):
    """A region with a second input."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.o = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, memory):
        return self.o(torch.tanh(self.q(x)) * torch.tanh(self.k(memory)))


class CrossAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.attend = nn.Linear(8, 8), Attending()

    def forward(self, x):
        return self.attend(x, self.encode(x))


CROSS = ModelLayout(tensor={"attend": "region", "attend.q": "colwise", "attend.k": "colwise", "attend.o": "rowwise"})


@on_ranks(2)
def test_every_input_of_a_region_gets_its_whole_gradient():
    grads = []
    for mesh, passes in (("dp_replicate=2", [Replicate()]), ("tp=2", [TensorParallel()])):
        par = Plan(mesh, passes).apply(on_meta(CrossAttention), CROSS).materialize(seed=0)
        par.module(torch.ones(2, 3, 8)).square().sum().backward()
        grads.append(gradients(par.module))
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_a_forward_without_gradients_leaves_nothing_stale():
    tokens = random_tokens(VOCAB, 1, 8, seed=0)
    for keep in (True, False):
        results = []
        for evaluate in (False, True):
            plan = Plan("dp_shard=2", [FullyShard(reshard_after_forward=keep)])
            par = plan.apply(on_meta(transformer)).materialize(seed=0)
            optimizer = torch.optim.SGD(par.module.parameters(), lr=1.0)
            token_loss_sum(par.module, tokens)[0].backward()
            if evaluate:
                with torch.no_grad():
                    par.module(input_ids=tokens["input_ids"])
            norm = par.clip_grad_norm_(0.1)
            optimizer.step()
            results.append((norm, token_loss_sum(par.module, tokens)[0].detach()))
        assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@on_ranks(2)
def test_a_part_that_has_weights_keeps_them_and_materialize_takes_one_of_seed_and_weights():
    body = nn.Linear(4, 4)
    body.weight.data.fill_(7.0)
    par = Plan("dp_shard=2", [FullyShard()]).apply(nn.Sequential(body, on_meta(lambda: nn.Linear(4, 4))))
    with pytest.raises(MeshparError, match="either seed= or weights="):
        par.materialize()
    par.materialize(seed=0)
    assert whole(par.module[0].weight).eq(7.0).all() and whole(par.module[1].weight).abs().max() < 1.0


@on_ranks(2)
def test_modules_kept_in_float32_compute_in_it():
    layout = ModelLayout(blocks=("0",), fp32=("1",))
    for passes in ([FullyShard(param_dtype=torch.bfloat16)], [Replicate(param_dtype=torch.bfloat16)]):
        build = blocks_of(lambda: nn.Linear(4, 4), 3)
        par, seen = Plan(f"{passes[0].axes[0]}=2", passes).apply(build(), layout), []
        for place in (1, 2):
            par.module[place].register_forward_hook(
                lambda module, args, out, seen=seen: seen.append(module.weight.dtype)
            )
        par.module(torch.ones(2, 4)).sum().backward()
        assert seen == [torch.float32, torch.bfloat16]


@on_ranks(2)
def test_ids_outside_of_the_vocabulary_are_noticed():
    par = Plan("tp=2", [TensorParallel(loss_parallel=True)]).apply(on_meta(transformer)).materialize(seed=0)
    batch = random_tokens(VOCAB, 1, 8, seed=0)
    with pytest.raises(RuntimeError, match="outside of the vocabulary"):
        token_loss_sum(par.module, batch | {"labels": batch["labels"] + VOCAB})
    with pytest.raises(RuntimeError, match="outside of the vocabulary"):
        token_loss_sum(par.module, batch | {"input_ids": batch["input_ids"] + VOCAB})


class Unusual(nn.Module):
    """Weights written through .data, by a method that torch's attention uses too."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.empty(4))

    def _reset_parameters(self):
        self.w.data.fill_(2.0)

    def forward(self, x):
        return x * self.w


@on_ranks(2)
def test_initialisation_through_data_counts():
    par = Plan("dp_shard=2", [FullyShard()]).apply(on_meta(blocks_of(Unusual)))
    assert torch.equal(par.materialize(seed=0).module(torch.ones(4)), torch.full((4,), 4.0))


def test_one_block_listed_twice_is_no_tie_across_units():
    block = nn.Linear(4, 4)
    assert Plan("dp_shard=2", [FullyShard()]).check(nn.Sequential(block, block), ModelLayout(blocks=("*",)), 2)


@on_ranks(2)
def test_a_gradient_that_is_not_summed_over_the_axis_is_named_in_the_first_step():
    torch.manual_seed(0)
    unsummed = TensorParallel(styles={"layers.*.attn.q_norm": "sequence"})  # which sums nothing here
    par = Plan("tp=2", [unsummed]).apply(transformer(qk_norm=True))
    par.run.first_runs = None
    loss = par.module(input_ids=torch.randint(0, VOCAB, (2, 8))).logits.square().mean()
    with pytest.raises(
        MeshparError, match=r"ranks of tp have different gradients .*layers\.0\.attn\.q_norm\.weight.*'grad_sum'"
    ):
        loss.backward()


@on_ranks(2)
def test_save_pretrained_takes_a_whole_state_on_every_mesh(tmp_path):
    from transformers import AutoModelForCausalLM

    for mesh, passes in (("tp=2", [TensorParallel()]), ("dp_replicate=2", [ActivationCheckpoint(), Replicate()])):
        par = Plan(mesh, passes).apply(on_meta(lambda: huggingface("Llama"))).materialize(seed=0)
        folder = tmp_path / mesh
        with pytest.raises((MeshparError, AssertionError)):
            copy.deepcopy(par.module)
        with pytest.raises(MeshparError, match="save_pretrained does not support shards; hand in whole tensors"):
            par.module.save_pretrained(folder, state_dict=par.state_dict())
        par.module.save_pretrained(folder, state_dict=par.state_dict(full=True))
        dist.barrier()
        expected = par.state_dict(full=True, everywhere=True)
        saved = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert saved.keys() == expected.keys()
        assert all(torch.equal(saved[name], expected[name]) for name in expected)


@on_ranks(2)
def test_a_vocabulary_is_resized_before_apply():
    for mesh, passes in (("tp=2", [TensorParallel()]), ("dp_shard=2", [FullyShard()])):
        model, longer = huggingface("Llama"), VOCAB + 8
        with pytest.raises(MeshparError, match=r"resize_token_embeddings replaces .*; call it before plan\.apply"):
            Plan(mesh, passes).apply(huggingface("Llama")).module.resize_token_embeddings(longer)
        model.resize_token_embeddings(longer)
        par = Plan(mesh, passes).apply(model)
        assert par.module(input_ids=torch.tensor([[longer - 1]])).logits.shape == (1, 1, longer)


@on_ranks(2)
def test_no_sync_names_accumulate_which_is_exact():
    def steps(net, micros, around):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for x in around(micros):
            (net(x).square().mean() / len(micros)).backward()
        optimizer.step()

    alone, micros = _linear(), torch.randn(4, 2, 4, generator=torch.Generator().manual_seed(0))
    steps(alone, list(micros), iter)
    for mesh, passes in (("dp_shard=2", [FullyShard()]), ("dp_replicate=2", [Replicate()])):
        par = Plan(mesh, passes).apply(_linear())
        with pytest.raises(MeshparError, match=r"iterate over par\.accumulate\(micro_batches\)"):
            par.module.no_sync()
        steps(par.module, [x[par.data_rank :: 2] for x in micros], par.accumulate)
        assert_weights(par, alone)


@on_ranks(2)
def test_what_a_block_of_no_sync_leaves_is_reduced_after_it_or_refused_where_an_error_ends_it():
    alone, micros = _linear(), torch.randn(4, 2, 4, generator=torch.Generator().manual_seed(0))
    (alone(micros.flatten(0, 1)).square().mean()).backward()
    for mesh, passes in (("dp_shard=2", [FullyShard()]), ("dp_replicate=2", [Replicate()])):
        par = Plan(mesh, passes).apply(_linear())
        optimizer = torch.optim.SGD(par.module.parameters(), lr=0.1)
        parts = [x[par.data_rank :: 2] for x in micros]
        with pytest.raises(ZeroDivisionError), par.no_sync():
            par.module(parts[0]).sum().backward()
            raise ZeroDivisionError
        with pytest.raises(MeshparError, match="was left before its last micro-batch"):
            optimizer.step()
        optimizer.zero_grad()
        for number, part in enumerate(parts):
            with par.no_sync() if number < 3 else contextlib.nullcontext():
                (par.module(part).square().mean() / len(parts)).backward()
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(whole(par.module.get_parameter(name).grad), parameter.grad)


def _linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def test_a_model_of_peft_under_tp_names_add_adapters():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(huggingface("Llama"), peft.LoraConfig(target_modules=["q_proj"]))
    plan = Plan("tp=2", [TensorParallel()])
    with pytest.raises(
        PlanError, match=r"TensorParallel has nothing to do.*meshpar\.training\.add_adapters\(model, LoRA"
    ):
        plan.check(model, world_size=2)
    model = huggingface("Llama")
    plan.check(model, add_adapters(model, LoRA(targets=("q_proj",))), world_size=2)


@on_ranks(2)
def test_calibrated_observers_of_quantization_train_as_in_one_process():
    from torch.ao import quantization as quant

    def observed():
        net = _linear().train()
        net.qconfig = quant.get_default_qat_qconfig("fbgemm")
        return quant.prepare_qat(net)

    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    par = Plan("dp_shard=2", [FullyShard()]).apply(observed(), ModelLayout())
    with pytest.raises(MeshparError, match=r"calibrate observers .* module\.apply\(disable_observer\)"):
        par.module(x[par.data_rank :: 2]).square().mean().backward()
    nets = [observed(), observed()]
    for net in nets:
        net(x)
        net.apply(quant.disable_observer)
    alone, par = nets[0], Plan("dp_shard=2", [FullyShard()]).apply(nets[1], ModelLayout())
    for net, rows in ((alone, x), (par.module, x[par.data_rank :: 2])):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(rows).square().mean().backward()
        optimizer.step()
    assert_weights(par, alone, atol=1e-6, rtol=0)
