"""Generate and score in the job: tokens of the sharded model equal those of transformers' own."""

import copy

import pytest
import torch

from meshpar import ContextParallel, FullyShard, Plan, TensorParallel
from meshpar.core.errors import MeshparError
from meshpar.testing import on_ranks
from meshpar.training.evaluation import generate, log_likelihoods
from tests.support.models_for_parity import huggingface, huggingface_gpt2, t5, transformer
from tests.support.tiers import daily

PROMPTS = [[5, 6, 7, 8, 9], [3], [11, 12], [40, 41, 42, 43, 44, 45, 46], [7, 7]]
PLANS = {"fsdp": ("dp_shard=2", [FullyShard()]), "tp": ("tp=2", [TensorParallel()])}
BOTH = ("dp_shard=2,tp=2", [TensorParallel(), FullyShard()])


def moe():
    return huggingface("Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)


MODELS = {"llama": lambda: huggingface("Llama"), "moe": moe, "gpt2": huggingface_gpt2, "t5": t5}


def strong(make):
    """A model with weights large enough that texts differ."""
    torch.manual_seed(3)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


def theirs(model, tokens, end):
    """What transformers' own `generate` answers, prompt by prompt."""
    answers = []
    for prompt in PROMPTS:
        made = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=end,
            pad_token_id=0,
            use_cache=True,
        )[0].tolist()
        answer = made[1:] if model.config.is_encoder_decoder else made[len(prompt) :]
        answers.append(answer[: answer.index(end)] if end in answer else answer)
    return answers


def compared(name, mesh, passes):
    model = strong(MODELS[name]).eval()
    free = theirs(model, 12, 999)
    end = free[0][4]  # the first text ends early, others later or never
    expected = theirs(model, 12, end)
    assert len({len(one) for one in expected}) > 1
    par = Plan(mesh, passes).apply(copy.deepcopy(model))
    assert generate(par, PROMPTS, tokens=12, ends=[end], batch=2) == expected
    assert par.module.training is False


@pytest.mark.parametrize(
    ("name", "plan"), daily([(name, plan) for name in MODELS for plan in PLANS], ("t5", "fsdp"), ("moe", "fsdp"))
)
@on_ranks(2)
def test_tokens_equal_those_of_transformers(name, plan):
    compared(name, *PLANS[plan])


@pytest.mark.parametrize("name", daily(MODELS, "llama"))
@on_ranks(4)
def test_tokens_equal_those_of_transformers_over_two_axes(name):
    compared(name, *BOTH)


def own():
    """Our own model, which has no cache."""
    return strong(transformer)


@on_ranks(2)
def test_draws_and_scores_do_not_depend_on_the_mesh_or_the_batch():
    found = []
    for mesh, passes in (PLANS["fsdp"], PLANS["tp"]):
        for batch in (1, 8):
            par = Plan(mesh, passes).apply(own())
            drawn = generate(par, PROMPTS, tokens=6, temperature=0.8, top_p=0.9, seed=4, batch=batch)
            scores = log_likelihoods(par, [(one, two) for one in PROMPTS for two in ([4, 5, 6], [9])], batch=batch)
            found.append((drawn, scores))
    assert all(drawn == found[0][0] for drawn, _ in found)
    assert len({tuple(one) for one in found[0][0]}) == len(PROMPTS)
    for _, scores in found[1:]:
        torch.testing.assert_close(torch.tensor(scores), torch.tensor(found[0][1]), rtol=1e-5, atol=1e-5)
    frozen = next(par.module.children()).eval()
    greedy = generate(par, PROMPTS, tokens=3)
    assert par.module.training and not frozen.training  # as they were
    scores = log_likelihoods(par, list(zip(PROMPTS, greedy)))
    assert all(written for _, written in scores)
    logits = own()(torch.tensor([[*PROMPTS[0], *greedy[0]]])).logits[0].float().log_softmax(-1)
    place = len(PROMPTS[0]) - 1
    total = sum(float(logits[place + n, token]) for n, token in enumerate(greedy[0]))
    assert scores[0][0] == pytest.approx(total, abs=1e-4)


@on_ranks(2)
def test_an_encoder_decoder_scores_what_it_would_write():
    model = strong(t5).eval()
    pairs = [(prompt, more) for prompt in PROMPTS for more in ([4, 5, 6], [9])]
    pairs.append((PROMPTS[0], theirs(model, 4, 999)[0]))
    with torch.no_grad():
        expected = []
        for context, more in pairs:
            logits = model(input_ids=torch.tensor([context]), labels=torch.tensor([more])).logits[0].log_softmax(-1)
            expected.append(float(logits.gather(-1, torch.tensor(more)[:, None]).sum()))
    for mesh, passes in PLANS.values():
        scores = log_likelihoods(Plan(mesh, passes).apply(copy.deepcopy(model)), pairs, batch=2)
        assert [score for score, _ in scores] == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert scores[-1][1] and not all(greedy for _, greedy in scores)


@on_ranks(2)
def test_divided_positions_and_empty_prompts_are_refused():
    par = Plan("dp_shard=1,cp=2", [ContextParallel(), FullyShard()]).apply(transformer())
    with pytest.raises(MeshparError, match="prompt 1 has no token"):
        generate(par, [[1], []])
