"""Log-probabilities and entropies of tokens: one process's values and gradients, on any mesh."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import meshpar
from meshpar import ContextParallel, FullyShard, TensorParallel
from meshpar.log_probs import token_log_probs
from meshpar.placements import whole_tensor
from meshpar.testing import on_ranks
from tests.support.models_for_parity import VOCAB, huggingface, transformer
from tests.support.tiers import daily

SP = TensorParallel(sequence_parallel=True, loss_parallel=True)
PLANS = {
    "dp_shard=4": [FullyShard()],
    "dp_shard=2,tp=2": [TensorParallel(), FullyShard()],
    "tp=4": [TensorParallel(loss_parallel=True)],
    "dp_shard=2,tp=2 loss": [SP, FullyShard()],
    "dp_shard=2,cp=2": [ContextParallel(), FullyShard()],
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
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6)
    grads = [torch.autograd.grad(objective(*outputs), list(model.parameters())) for outputs in (found, expected)]
    for one, other in zip(*grads):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def test_a_batch_without_labels_is_refused():
    with pytest.raises(meshpar.MeshparError, match="expected labels, too"):
        token_log_probs(transformer(), {"input_ids": torch.zeros(1, 2, dtype=torch.long)})


@pytest.mark.parametrize("mesh", daily(PLANS, "dp_shard=2,tp=2 loss", "dp_shard=2,cp=2"))
def test_values_and_gradients_are_those_of_one_process(mesh):
    on_a_mesh(mesh)


@on_ranks(4)
def on_a_mesh(mesh: str) -> None:
    for build in (transformer, lambda: huggingface("Llama")):
        torch.manual_seed(0)
        one = build()
        given = batch()
        expected = plain(one, given, 1.0)
        objective(*expected).backward()
        torch.manual_seed(0)
        model = build()
        par = meshpar.Plan(mesh.partition(" ")[0], PLANS[mesh]).apply(model)
        weights = torch.linspace(0.5, 1.5, 64).view(4, 16)
        rows = slice(par.data_rank * 4 // par.data_size, (par.data_rank + 1) * 4 // par.data_size)
        mine = {name: tensor[rows] for name, tensor in (given | {"weights": weights}).items()}
        mine |= {"log_probs": expected[0][rows].detach(), "entropy": expected[1][rows].detach()}
        mine = par.split(mine)
        weight, log_probs, entropy = (mine.pop(name) for name in ("weights", "log_probs", "entropy"))
        found = par.token_log_probs(mine)
        torch.testing.assert_close(found.log_probs, log_probs, rtol=0, atol=2e-6)
        torch.testing.assert_close(found.entropy, entropy, rtol=0, atol=2e-6)
        loss = ((found.log_probs * weight).sum() + 0.3 * (found.entropy.exp() * weight).sum()) * par.loss_size
        loss.backward()
        for (name, parameter), other in zip(par.module.named_parameters(), one.parameters()):
            gradient = whole_tensor(parameter.grad)
            assert (gradient - other.grad).abs().max() <= 1e-5 * other.grad.abs().max(), (name, dist.get_rank())
