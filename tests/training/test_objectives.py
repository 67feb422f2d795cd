"""Objectives: losses are sums, and come in through the plugins' door."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshpar.core.errors import MeshparError
from meshpar.core.registry import plugin
from meshpar.training.objectives import CausalLM


class Bigram(nn.Module):
    """The smallest language model: a table of scores."""

    def __init__(self, vocab_size: int = 11) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, *, input_ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table(input_ids))


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 11, (3, 9), generator=torch.Generator().manual_seed(0))
    labels = ids[:, 1:].clone()
    labels[1, 2:] = -100
    return {"input_ids": ids[:, :-1], "labels": labels}


def test_causal_lm_sums_over_the_labels_that_count() -> None:
    model, data = Bigram(), batch()
    loss, tokens, metrics = CausalLM().loss(model, data)
    mean = F.cross_entropy(model.table(data["input_ids"]).flatten(0, 1), data["labels"].flatten())
    torch.testing.assert_close(loss / tokens, mean)
    assert int(tokens) == CausalLM().tokens(data) == 18
    assert metrics == {}


def test_a_fully_masked_batch_adds_nothing() -> None:
    model, data = Bigram(), batch()
    data["labels"].fill_(-100)
    loss, tokens, _ = CausalLM().loss(model, data)
    loss.backward()
    assert (loss.item(), int(tokens)) == (0.0, 0)
    assert torch.equal(model.table.weight.grad, torch.zeros(11, 11))


def test_low_precision_logits_give_a_float32_loss() -> None:
    assert CausalLM().loss(Bigram().bfloat16(), batch())[0].dtype == torch.float32


def test_a_model_without_logits_is_named() -> None:
    class Silent(nn.Module):
        def forward(self, *, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids

    with pytest.raises(MeshparError, match=r"output has .logits \(B, L, V\); Silent returned Tensor"):
        CausalLM().loss(Silent(), batch())


def test_the_project_finds_its_own_objective_by_entry_point() -> None:
    assert plugin("meshpar.objectives", "causal_lm") is CausalLM
