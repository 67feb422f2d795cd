"""The knobs of the passes against one process, sizes that do not divide, compiled, and mixed precision."""

import pytest
import torch
from torch import nn

from meshpar import (
    ActivationCheckpoint,
    Compile,
    FullyShard,
    HybridShard,
    ModelLayout,
    Pass,
    Plan,
    Replicate,
    TensorParallel,
)
from meshpar._torch.calls import as_one_operator
from meshpar.passes.recompute import _selective_contexts
from meshpar.passes.tensor import collectives
from meshpar.tensors.placements import local_tensor, whole_tensor
from meshpar.testing import assert_parity, on_ranks, random_tokens, token_loss_sum, token_steps
from tests.support.models_for_parity import VOCAB, gpt2, on_meta, transformer
from tests.support.tiers import daily

SEQUENCE = TensorParallel(sequence_parallel=True, loss_parallel=True)


def save_products(ctx, op, *args, **kwargs):
    policy = torch.utils.checkpoint.CheckpointPolicy
    return policy.MUST_SAVE if op is torch.ops.aten.mm.default else policy.PREFER_RECOMPUTE


KNOBS = {
    "offload": [FullyShard(offload="cpu")],
    "prefetch-2": [FullyShard(prefetch_forward=2, prefetch_backward=2)],
    "prefetch-none": [FullyShard(prefetch_backward=0)],
    "one-unit": [FullyShard(min_params=10**6)],
    "by-class-name": [FullyShard(blocks=("Layer",))],
    "whole-subtree": [FullyShard(whole=("layers.1", "embed"))],
    "selective": [ActivationCheckpoint(mode="selective"), FullyShard()],
    "every-second": [ActivationCheckpoint(every=2), FullyShard()],
    "own-policy": [ActivationCheckpoint(policy=save_products), FullyShard()],
    "compiled": [Compile(), FullyShard()],
    "recomputed-and-compiled": [ActivationCheckpoint(), Compile(), FullyShard()],
}

DAILY = ("offload", "one-unit", "whole-subtree", "selective", "every-second")


@pytest.mark.parametrize(
    "knob",
    [*daily([knob for knob in KNOBS if knob != "compiled"], *DAILY), pytest.param("compiled", marks=pytest.mark.long)],
)
@on_ranks(2, timeout_s=170)
def test_fsdp_knobs(knob):
    assert_parity(lambda: transformer(layers=3), "dp_shard=2", KNOBS[knob], token_steps(VOCAB, parts=2))


@on_ranks(4)
def test_reshard_to_a_smaller_group():
    assert_parity(transformer, "dp_shard=4", [FullyShard(reshard_after_forward=2)], token_steps(VOCAB, parts=4))


@pytest.mark.long
@on_ranks(2, timeout_s=170)
def test_compiled_sequence_parallel():
    assert_parity(lambda: transformer(qk_norm=True), "tp=2", [SEQUENCE, Compile()], token_steps(VOCAB, parts=2))


@on_ranks(2)
def test_selective_recomputation_in_mixed_precision():
    grads = []
    for passes in ([], [ActivationCheckpoint(mode="selective")], [ActivationCheckpoint(policy=save_products)]):
        plan = Plan("dp_shard=2", [*passes, FullyShard(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)])
        par = plan.apply(on_meta(transformer)).materialize(seed=0)
        token_loss_sum(par.module, random_tokens(VOCAB, 2, 16, seed=0))[0].backward()
        grads.append([local_tensor(parameter.grad) for parameter in par.module.parameters()])
    assert all(torch.equal(mine, plain) for some in grads[1:] for mine, plain in zip(some, grads[0], strict=True))


@pytest.mark.parametrize(
    ("mesh", "passes"),
    [
        pytest.param("dp_replicate=2", [Compile(backend="aot_eager"), Replicate()], marks=pytest.mark.nightly),
        pytest.param(
            "dp_replicate=2,dp_shard=1", [Compile(backend="aot_eager"), HybridShard()], marks=pytest.mark.long
        ),
        pytest.param("tp=2", [TensorParallel(), Compile(backend="aot_eager")], marks=pytest.mark.long),
        ("dp_shard=1,tp=2", [SEQUENCE, ActivationCheckpoint(), Compile(backend="eager"), FullyShard()]),
        pytest.param(
            "dp_shard=1,tp=2",
            [SEQUENCE, ActivationCheckpoint(), Compile(backend="aot_eager"), FullyShard()],
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["replicate", "hsdp", "tp", "everything", "everything, aot"],
)
@on_ranks(2, timeout_s=170)
def test_compiled_plans(mesh, passes):
    assert_parity(lambda: transformer(layers=1), mesh, passes, token_steps(VOCAB, parts=2, steps=2))


@on_ranks(3)
def test_fsdp_rows_that_do_not_divide():
    assert_parity(lambda: transformer(hidden=50, vocab_size=97), "dp_shard=3", [FullyShard()], token_steps(97, parts=3))


@pytest.mark.parametrize("style", [SEQUENCE, pytest.param(TensorParallel(), marks=pytest.mark.nightly)], ids=str)
@on_ranks(4)
def test_tp_features_that_do_not_divide(style):
    build = lambda: transformer(hidden=7, vocab_size=10, kv_heads=4)  # noqa: E731
    assert_parity(build, "tp=4", [style], token_steps(10, parts=2))


@pytest.mark.nightly
@on_ranks(6)
def test_fsdp_and_tp_sizes_that_do_not_divide():
    build = lambda: transformer(hidden=51, vocab_size=97)  # noqa: E731
    assert_parity(build, "dp_shard=3,tp=2", [SEQUENCE, FullyShard()], token_steps(97, parts=3))


@pytest.mark.nightly
@on_ranks(4)
def test_replicate_and_tp_with_gpt2_of_odd_vocabulary():
    assert_parity(lambda: gpt2(vocab_size=97), "dp_replicate=2,tp=2", [SEQUENCE, Replicate()], token_steps(97, parts=2))


@on_ranks(4)
def test_accumulation_that_reduces_each_time():
    mesh, passes = "dp_replicate=2,dp_shard=2", [HybridShard()]
    batches = [random_tokens(VOCAB, 2, 16, seed=n + 10 * torch.distributed.get_rank()) for n in range(3)]
    grads = []
    for reduce_each in (False, True):
        par = Plan(mesh, passes).apply(on_meta(transformer)).materialize(seed=0)
        for batch in par.accumulate(batches, reduce_each=reduce_each):
            token_loss_sum(par.module, batch)[0].backward()
        grads.append({name: local_tensor(p.grad) for name, p in par.module.named_parameters()})
    for name, once in grads[0].items():
        torch.testing.assert_close(grads[1][name], once, rtol=1e-5, atol=1e-5)


@on_ranks(2)
def test_mixed_precision_computes_low_and_keeps_float32_masters():
    half, single = torch.bfloat16, torch.float32
    sharded = FullyShard(param_dtype=half, reduce_dtype=single, output_dtype=single, buffer_dtype=half)
    module = on_meta(transformer)
    module.register_buffer("counts", torch.ones(3))
    module.norm.register_buffer("scale", torch.ones(3))
    par = Plan("dp_shard=2", [sharded]).apply(module)
    assert module.counts.dtype == torch.bfloat16
    del module.counts, module.norm.scale
    par.materialize(seed=0)
    optimizer = torch.optim.AdamW(par.module.parameters(), fused=True)
    seen = []
    par.module.layers[0].mlp.up.register_forward_hook(lambda module, args, out: seen.append((args[0].dtype, out.dtype)))
    logits = par.module(input_ids=random_tokens(VOCAB, 1, 8, seed=0)["input_ids"]).logits
    assert seen == [(torch.bfloat16, torch.bfloat16)] and logits.dtype == torch.float32
    logits.square().mean().backward()
    optimizer.step()
    for parameter in par.module.parameters():
        assert parameter.dtype == parameter.grad.dtype == optimizer.state[parameter]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("make", [FullyShard, HybridShard, Replicate])
def test_gradients_are_reduced_in_param_dtype_by_default(make):
    """FSDP2's own default has changed with torch 2.15."""
    half, single = torch.bfloat16, torch.float32
    given = make(param_dtype=half)
    policies = given.inner(), given.outer(), given.kept(), make().inner()
    assert [policy.reduce_dtype for policy in policies] == [half, half, single, None]
    assert make(param_dtype=half, reduce_dtype=single).inner().reduce_dtype == single


@on_ranks(2)
def test_transformers_own_loss_under_loss_parallelism():
    from tests.support.models_for_parity import huggingface

    batch = random_tokens(VOCAB, 2, 16, seed=0)
    losses = []
    for mesh, passes in (("dp_replicate=2", [Replicate()]), ("tp=2", [TensorParallel(loss_parallel=True)])):
        par = Plan(mesh, passes).apply(on_meta(lambda: huggingface("Llama"))).materialize(seed=0)
        losses.append(par.module(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss)
    torch.testing.assert_close(losses[0], losses[1])


class Frozen(Pass):
    """Changes what is trained, on any mesh."""

    name, stage = "Frozen", 1

    def apply(self, module, layout, mesh):
        module.head.requires_grad_(False)


@on_ranks(2)
def test_parity_gives_one_process_the_passes_that_change_what_is_trained():
    steps = token_steps(VOCAB, parts=2)
    assert_parity(transformer, "dp_replicate=2", [Frozen(), Replicate()], steps, alone=[Frozen()])
    with pytest.raises(AssertionError, match=r"gradients: names differ, \['head.weight'\]"):
        assert_parity(transformer, "dp_replicate=2", [Frozen(), Replicate()], steps)


def products(q, k, v):
    """Stands for FlexAttention, which trains on accelerators alone."""
    return q @ k.transpose(-1, -2) @ v


def test_selective_recomputation_keeps_attention_that_is_compiled_by_itself():
    counts, grads = [], []
    for run in (torch.compile(products), as_one_operator(products)):
        leaves = [torch.linspace(-1, 1, 256).view(1, 2, 8, 16).requires_grad_() for _ in range(3)]
        scaled = lambda *arguments, run=run: run(*(one * 2 for one in arguments)).sin()  # noqa: E731
        out = torch.utils.checkpoint.checkpoint(scaled, *leaves, use_reentrant=False, context_fn=_selective_contexts)
        with torch.profiler.profile() as trace:
            out.sum().backward()
        counts.append(sum(event.name == "aten::bmm" for event in trace.events()))
        grads.append([leaf.grad for leaf in leaves])
    assert counts[1] < counts[0], "the products of the forward are not computed again"
    torch.testing.assert_close(*grads)


class Gated(nn.Module):
    """Multiplies two projections, which are one layer, or two."""

    def __init__(self, *, packed):
        super().__init__()
        self.packed, self.down = packed, nn.Linear(8, 4, bias=False)
        both = nn.Linear(4, 16, bias=False)
        if packed:
            self.up = both
        else:
            self.gate, self.up = nn.Linear(4, 8, bias=False), nn.Linear(4, 8, bias=False)
            self.gate.weight, self.up.weight = (nn.Parameter(part.detach().clone()) for part in both.weight.chunk(2))

    def forward(self, x):
        gate, up = self.up(x).chunk(2, -1) if self.packed else (self.gate(x), self.up(x))
        return self.down(torch.tanh(gate) * up)


@pytest.mark.parametrize("packed", [False, True])
@on_ranks(2)
def test_the_third_derivative_of_a_loss_by_a_split_projection_is_that_of_one_process(packed):
    gradients = []
    styles = {"up": "packed_colwise:2"} if packed else {"gate": "colwise", "up": "colwise"}
    for divides in (False, True):
        torch.manual_seed(0)
        module = Gated(packed=packed)
        if divides:
            layout = ModelLayout(tensor={**styles, "down": "rowwise"})
            module = Plan("tp=2", [TensorParallel(sequence_parallel=False)]).apply(module, layout).module
        value = module(torch.linspace(-1, 1, 8).view(2, 4)).square().sum()
        for _ in range(3):
            (gradient,) = torch.autograd.grad(value, [module.up.weight], create_graph=True)
            value = gradient.square().sum()
        gradients.append(whole_tensor(gradient.detach()))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)


@pytest.mark.nightly
@on_ranks(1)  # two on a host exchange by swaps, which break a graph
def test_collectives_of_features_are_compiled_in_one_graph():
    group = torch.distributed.group.WORLD

    def compute(x):
        h = collectives.copy_to(x, group) * collectives.copy_weight(x, group)
        h = collectives.own_parts(collectives.gather_replicated(h, 8, group), 1, group, 2)
        return collectives.reduce_from(collectives.split_replicated(h, group), group).sin().sum()

    gradients = []
    for run in (compute, torch.compile(compute, backend="aot_eager", fullgraph=True)):
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        gradients += torch.autograd.grad(run(x), x)
    torch.testing.assert_close(*gradients)
