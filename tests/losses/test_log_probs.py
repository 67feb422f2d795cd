"""Log-probabilities and entropies of tokens: one process's values and gradients, on any mesh."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import meshpar
from benchmarks.chunked_loss import Head
from meshpar import ContextParallel, FullyShard, HybridShard, TensorParallel
from meshpar.losses import chunked
from meshpar.losses.chunked import token_log_probs
from meshpar.tensors.placements import whole_tensor
from meshpar.testing import assert_parity, on_ranks, token_steps
from tests.accelerator.accelerated import accelerated
from tests.support.models_for_parity import VOCAB, huggingface, transformer
from tests.support.tiers import daily
from tests.testing.test_parity import PLANS as EVERY_PLAN
from tests.testing.test_parity import ranks_of

SP = TensorParallel(sequence_parallel=True, loss_parallel=True)
PLANS = {
    "dp_shard=4": [FullyShard()],
    "dp_shard=2,tp=2": [TensorParallel(), FullyShard()],
    "tp=4": [TensorParallel(loss_parallel=True)],
    "dp_shard=2,tp=2 loss": [SP, FullyShard()],
    "dp_shard=2,cp=2": [ContextParallel(), FullyShard()],
    "dp_shard=2,cp=2 heads": [ContextParallel(transport="heads"), FullyShard()],
    "dp_replicate=2,dp_shard=2": [HybridShard()],
}
POSITIONS = {
    "cp": ("dp_shard=2,cp=2", [ContextParallel(), FullyShard()]),
    "cp-tp": ("dp_shard=1,cp=2,tp=2", [ContextParallel(), TensorParallel(), FullyShard()]),
}


def batch(rows=4, length=16):
    torch.manual_seed(1)
    ids = torch.randint(0, VOCAB, (rows, length))
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


def plain(model, given, temperature):
    """Whole logits, in float64 where the model is."""
    logs = (model(input_ids=given["input_ids"]).logits / temperature).log_softmax(-1)
    counted = given["labels"] != -100
    chosen = logs.gather(-1, given["labels"].clamp(min=0)[..., None])[..., 0] * counted
    return chosen, -(logs.exp() * logs).sum(-1) * counted


def objective(log_probs, entropy):
    weights = torch.linspace(0.5, 1.5, log_probs.numel()).view(log_probs.shape)
    return (log_probs * weights).sum() + 0.3 * (entropy.exp() * weights).sum()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_those_of_whole_logits(temperature):
    torch.manual_seed(0)
    model = transformer(tied=True).eval()
    given = batch()
    found = token_log_probs(model, given, temperature=temperature)
    expected = plain(model, given, temperature)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6)  # whole logits' own error
    grads = [torch.autograd.grad(objective(*outputs), list(model.parameters())) for outputs in (found, expected)]
    for one, other in zip(*grads):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


@pytest.mark.parametrize(
    ("queued", "vocabulary", "chunk", "rows"),
    [(False, 32, 1024, {32}), (True, 32, 1024, {1024}), (True, 1 << 17, 1024, {512}), (True, 32, 64, {64})],
)
def test_an_accelerators_products_have_512_rows_or_more(monkeypatch, queued, vocabulary, chunk, rows):
    """2,048 positions: on a CPU a 64th of them at a time, beside an accelerator what bytes allow."""
    seen, linear = [], chunked.F.linear
    products = SimpleNamespace(linear=lambda hidden_ND, *rest: seen.append(len(hidden_ND)) or linear(hidden_ND, *rest))
    monkeypatch.setattr(chunked, "F", products)
    with FakeTensorMode(allow_non_fake_inputs=True), accelerated() if queued else nullcontext():
        head, labels = Head(2048, 4, vocabulary, torch.bfloat16), torch.zeros(1, 2048, dtype=torch.long)
        sum(token_log_probs(head, {"labels": labels}, chunk=chunk)).sum().backward()
    assert {*seen} == rows and len(seen) == 2 * 2048 // min(rows), "forward, and once more in backward"


def test_a_batch_without_labels_is_refused():
    with pytest.raises(meshpar.MeshparError, match="expected labels, too"):
        token_log_probs(transformer(), {"input_ids": torch.zeros(1, 2, dtype=torch.long)})


def documents(given):
    """Rows of two documents each, whose last positions predict nothing."""
    first = given["input_ids"].shape[1] // 3
    positions = torch.cat([torch.arange(first), torch.arange(given["input_ids"].shape[1] - first)])
    labels = given["labels"].clone()
    labels[:, first - 1] = -100
    return given | {"labels": labels, "position_ids": positions.expand_as(labels)}, first


def llama():
    return huggingface("Llama", use_cache=False)  # with a cache transformers does not look for documents


def one_process(build, given, parts):
    """The values of one process in float64, document by document, and its gradients."""
    torch.manual_seed(0)
    one = build().double()
    pieces = [{name: given[name][:, part] for name in ("input_ids", "labels")} for part in parts]
    found = [torch.cat(values, 1) for values in zip(*(plain(one, piece, 1.0) for piece in pieces))]
    objective(*found).backward()
    return found, [parameter.grad for parameter in one.parameters()]


SEQUENCES = "dp_shard=2,tp=2 loss"  # transformers makes a document's mask of the length that a rank holds
CASES = [(mesh, packed) for mesh in PLANS for packed in (False, True) if not (packed and mesh == SEQUENCES)]


@pytest.mark.parametrize(("mesh", "packed"), daily(CASES, (SEQUENCES, False), ("dp_shard=2,cp=2", True)))
@on_ranks(4)
def test_values_and_gradients_are_those_of_one_process(mesh, packed):
    """Values to 1e-6 of one process in float64: two or three units in the last place of what is near to -4."""
    for build in (llama,) if packed else (transformer, llama):
        given, parts = batch(), [slice(None)]
        if packed:
            given, first = documents(given)
            parts = [slice(first), slice(first, None)]
        expected, gradients = one_process(build, given, parts)
        torch.manual_seed(0)
        par = meshpar.Plan(mesh.partition(" ")[0], PLANS[mesh]).apply(build())
        weights = torch.linspace(0.5, 1.5, 64).view(4, 16)
        rows = slice(par.data_rank * 4 // par.data_size, (par.data_rank + 1) * 4 // par.data_size)
        mine = {name: tensor[rows] for name, tensor in (given | {"weights": weights}).items()}
        mine |= {"log_probs": expected[0][rows].detach(), "entropy": expected[1][rows].detach()}
        mine = par.split(mine)
        weight, log_probs, entropy = (mine.pop(name) for name in ("weights", "log_probs", "entropy"))
        found = par.token_log_probs(mine)
        assert (found.log_probs - log_probs).abs().max() <= 1e-6
        assert (found.entropy - entropy).abs().max() <= 1e-6
        loss = ((found.log_probs * weight).sum() + 0.3 * (found.entropy.exp() * weight).sum()) * par.loss_size
        loss.backward()
        for (name, parameter), other in zip(par.module.named_parameters(), gradients, strict=True):
            gradient = whole_tensor(parameter.grad)
            assert (gradient - other).abs().max() <= 1e-5 * other.abs().max(), (name, dist.get_rank())


def policy_loss(model, given):
    """A policy gradient whose advantages follow the tokens."""
    found = token_log_probs(model, given)
    advantages = given["input_ids"] % 5 - 2.0
    return -(advantages * found.log_probs).sum() - 0.1 * found.entropy.sum(), int((given["labels"] != -100).sum())


@pytest.mark.parametrize("plan", daily([*EVERY_PLAN, *POSITIONS], "tp-sequence-loss"))
def test_a_policy_gradient_trains_as_in_one_process(plan):
    on_ranks(4 if plan in POSITIONS else ranks_of(plan))(train_a_policy)(plan)


def train_a_policy(plan: str) -> None:
    mesh, passes = (EVERY_PLAN | POSITIONS)[plan]
    for build in (lambda: transformer(tied=True), lambda: huggingface("Llama")):
        steps = token_steps(VOCAB, parts=4 if plan.startswith("hsdp") else 2, micro_batches=2)
        assert_parity(build, mesh, passes, steps, loss_sum=policy_loss)
