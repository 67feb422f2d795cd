"""Training under a plan equals training in one process: losses, gradients, norms and weights over three AdamW steps."""

import functools
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshpar import (
    ActivationCheckpoint,
    FullyShard,
    HybridShard,
    MeshSpec,
    ModelLayout,
    Replicate,
    TensorLayout,
    TensorParallel,
)
from meshpar.passes.tensor.parts import Parts
from meshpar.testing import RankFailure, assert_parity, on_ranks, one_process, ranks, token_steps
from tests.support.models_for_parity import VOCAB, gpt2, huggingface, huggingface_gpt2, transformer

MODELS = {
    "transformer": transformer,
    "transformer-tied-qknorm": lambda: transformer(tied=True, qk_norm=True),
    "gpt2": gpt2,
    "gpt2-untied": lambda: gpt2(tied=False),
    "hf-llama": lambda: huggingface("Llama", tie_word_embeddings=False),
    "hf-llama-tied": lambda: huggingface("Llama", tie_word_embeddings=True),
    "hf-qwen3": lambda: huggingface("Qwen3", tie_word_embeddings=False),
    "hf-qwen3-tied": lambda: huggingface("Qwen3", tie_word_embeddings=True),
    "hf-gpt2": huggingface_gpt2,
}
SEQUENCE = TensorParallel(sequence_parallel=True, loss_parallel=True)
PLANS = {
    "replicate": ("dp_replicate=2", [Replicate()]),
    "fsdp": ("dp_shard=2", [FullyShard()]),
    "fsdp-no-reshard": ("dp_shard=2", [FullyShard(reshard_after_forward=False)]),
    "hsdp": ("dp_replicate=2,dp_shard=2", [HybridShard()]),
    "tp": ("tp=2", [TensorParallel()]),
    "tp-sequence-loss": ("tp=2", [SEQUENCE]),
    "replicate-tp": ("dp_replicate=2,tp=2", [TensorParallel(), Replicate()]),
    "fsdp-tp": ("dp_shard=2,tp=2", [TensorParallel(), FullyShard()]),
    "fsdp-tp-sequence-loss": ("dp_shard=2,tp=2", [SEQUENCE, FullyShard()]),
    "hsdp-tp": ("dp_replicate=2,dp_shard=2,tp=2", [TensorParallel(), HybridShard()]),
    "hsdp-tp-sequence-loss": ("dp_replicate=2,dp_shard=2,tp=2", [SEQUENCE, HybridShard()]),
}


EVERYWHERE = "transformer-tied-qknorm"
"""The model under every plan."""
SAMPLED = {"transformer", "gpt2-untied", "hf-llama", "hf-llama-tied", "hf-qwen3", "hf-qwen3-tied"}
"""Whose kind is under every plan by another model; under the other plans they are in the long form, ``-m long``."""
SAMPLE = {"fsdp-tp-sequence-loss"}
"""Plans of every model, at night."""
ONCE = {("hf-llama", "fsdp-tp-sequence-loss"), ("gpt2", "tp-sequence-loss")}
"""Other models in each run of the suite: as the plan is."""
RECOMPUTED = ("replicate", "fsdp", "tp-sequence-loss")
"""Plans that are run with recomputation by day: it beside each pass; HybridShard is in test_instead_of_fsdp2.py."""
OFF = ("fsdp-tp-sequence-loss",)
"""Plans that are run without guards by day."""
ON_EIGHT = {(EVERYWHERE, "hsdp-tp-sequence-loss")}
"""What runs on eight ranks in the suite."""


def ranks_of(plan):
    return (
        8
        if plan.startswith("hsdp-tp")
        else 4
        if plan in ("hsdp", "replicate-tp", "fsdp-tp", "fsdp-tp-sequence-loss")
        else 2
    )


def with_recomputation(passes, **options):
    """The same passes with recomputation where its stage is."""
    place = sum(pass_.stage < ActivationCheckpoint.stage for pass_ in passes)
    return [*passes[:place], ActivationCheckpoint(**options), *passes[place:]]


def check(model, plan, forms):
    """One model under one plan, as it is, with recomputation, and without guards, accumulating over uneven token counts."""
    mesh, passes = PLANS[plan]
    steps, expected = trained(model, 4 if plan.startswith("hsdp") else 2)
    for form in forms:
        assert_parity(
            MODELS[model],
            mesh,
            with_recomputation(passes) if form == "recomputed" else passes,
            steps,
            expected=expected,
            guards="off" if form == "off" else "always",
        )


@functools.cache
def trained(model, parts):
    """Steps and what one process makes of them: once in ranks that are kept."""
    steps = token_steps(VOCAB, parts=parts, micro_batches=2)
    return steps, one_process(MODELS[model], steps)


def cases(count):
    for plan in PLANS:
        for model in MODELS:
            refused = model == "hf-gpt2" and "sequence" in plan
            if ranks_of(plan) == count and not refused:
                sampled = (model, plan) in ON_EIGHT if count == 8 else model not in SAMPLED or plan in SAMPLE
                daily = by_day(model, plan)
                nightly = tuple(form for form in FORMS if form not in daily)
                if daily and sampled:
                    yield pytest.param(model, plan, daily, id=f"{model}-{plan}")
                marks = [pytest.mark.nightly if sampled else pytest.mark.long]
                if forms := nightly if sampled else FORMS:
                    yield pytest.param(model, plan, forms, id=f"{model}-{plan}-{'-'.join(forms)}", marks=marks)


FORMS = ("plain", "recomputed", "off")


def by_day(model, plan):
    if model == EVERYWHERE:
        chosen = {"plain": PLANS.keys() - {"fsdp-tp"}, "recomputed": RECOMPUTED, "off": OFF}
        return tuple(form for form in FORMS if plan in chosen[form])
    return ("plain",) if (model, plan) in ONCE else ()


@pytest.mark.parametrize(("model", "plan", "forms"), [*cases(2), *cases(4)])
def test_a_model_under_a_plan_equals_one_process(model, plan, forms):
    on_ranks(ranks_of(plan))(check)(model, plan, forms)


class EveryStyle(nn.Module):
    """Attention in styles that other models lack: lookups by features, copied heads, parameters by name."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)
        self.attn, self.own = Heads(), Own()

    def forward(self, input_ids, position_ids=None):
        x = self.embed(input_ids)
        x = x + self.attn(x)
        return SimpleNamespace(logits=self.head(x + self.own(x)))

    def meshpar_layout(self):
        split = {"attn.q": "colwise", "attn.k": "colwise", "attn.v": "colwise", "attn.out": "rowwise"}
        own = {
            "attn.scale": "grad_sum",
            "attn.sinks": "per_head",
            "own": Parts(dims={"up": (0, 1), "down": (1, 1)}, added=("bias",), sums=True),
        }
        return ModelLayout(
            tensor=TensorLayout(
                {"embed": "features", "attn": "region", **split, **own, "head": "head"},
                heads={"attn.q": 4, "attn.k": 1, "attn.v": 1},
                copied_heads=("attn.k", "attn.v"),
            )
        )


class Own(nn.Module):
    """A feed-forward layer of parameters of its own, and a bias that is added to the sum."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.bias = (nn.Parameter(torch.empty(shape)) for shape in ((48, 32), (32, 48), (32,)))

    def reset_parameters(self):
        for parameter in (self.up, self.down, self.bias):
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x):
        return torch.tanh(x @ self.up.T) @ self.down.T + self.bias


class Heads(nn.Module):
    """Four heads of queries to one of keys and values; each has a sink, all share a scale."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = nn.Linear(32, 32), nn.Linear(32, 8), nn.Linear(32, 8), nn.Linear(32, 32)
        self.scale, self.sinks = nn.Parameter(torch.empty(8)), nn.Parameter(torch.empty(4))

    def reset_parameters(self):
        nn.init.normal_(self.scale)
        nn.init.normal_(self.sinks)

    def forward(self, x):
        q, k, v = (projection(x).unflatten(-1, (-1, 8)).transpose(1, 2) for projection in (self.q, self.k, self.v))
        scores = torch.cat([q * self.scale @ k.transpose(2, 3), self.sinks[:, None, None].expand(*q.shape[:3], 1)], -1)
        return self.out((scores.softmax(-1)[..., :-1] @ v).transpose(1, 2).flatten(2))


@on_ranks(2)
def test_styles_that_no_shipped_model_needs_equal_one_process():
    steps = token_steps(VOCAB, parts=1, micro_batches=2)
    # In float64: the gradient of attn.k.bias is a small rest of large terms.
    assert_parity(lambda: EveryStyle().double(), "tp=2", [TensorParallel()], steps)
    assert_parity(lambda: huggingface("GptOss"), "tp=2", [TensorParallel()], steps)


def seen(folder, kept):
    Path(folder, f"{dist.get_rank()}-{os.getpid()}").touch()
    one, other = (MeshSpec("dp_shard=2").build("cpu") for _ in range(2))
    assert (one is other) is kept


def failing():
    if dist.get_rank() == 1:
        raise ValueError("an error of its own")
    dist.barrier()


def test_kept_ranks_serve_the_next_test_until_one_fails(tmp_path):
    start_anew(2)
    for test, after in ((seen, 2), (seen, 2), (failing, 2), (seen, 4), (seen, 4)):
        with (
            nullcontext()
            if test is seen
            else pytest.raises(RankFailure, match=r"failed on rank 1 of 2(.|\n)*an error of its own")
        ):
            on_ranks(2)(test)(*((str(tmp_path), True) if test is seen else ()))
        assert len(list(tmp_path.iterdir())) == after
    on_ranks(2, fresh="has groups of its own")(seen)(str(tmp_path), False)
    assert len(list(tmp_path.iterdir())) == 6


def start_anew(count):
    kept = ranks._KEPT.pop(count, None)
    if kept is not None:
        kept.close()


def leaves(folder, key):
    assert "LEFT_BY_A_TEST" not in os.environ and os.path.realpath(os.getcwd()) != os.path.realpath(folder)
    os.environ["LEFT_BY_A_TEST"] = "yes"
    os.chdir(folder)
    torch.set_default_dtype(torch.float64)
    if key:
        setattr(MeshSpec, key, lambda self: None)


def test_ranks_find_what_the_last_test_found_and_a_patch_that_is_left_is_refused(tmp_path):
    start_anew(1)
    for _ in range(2):
        on_ranks(1)(leaves)(str(tmp_path), "")
    with pytest.raises(RankFailure, match=r"leaves left meshpar.core.mesh.MeshSpec.build changed .*fresh='the reason'"):
        on_ranks(1)(leaves)(str(tmp_path), "build")
    on_ranks(1, fresh="leaves a patch")(leaves)(str(tmp_path), "build")
