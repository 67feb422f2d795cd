"""A backward in a thread of its own finds what the user and the library set for the forward."""

import threading
from contextvars import ContextVar

import pytest
import torch
from torch import nn

from meshpar import ActivationCheckpoint, FullyShard, ModelLayout, Plan
from meshpar.testing import on_ranks
from tests.accelerator.accelerated import backward_apart

SCALE = ContextVar("SCALE", default=1.0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.ran = []

    def forward(self, x):
        self.ran.append((threading.current_thread().name, SCALE.get()))
        return torch.sin(self.up(x) * SCALE.get()).square()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def gradients(*recompute):
    """The gradients of a model of two layers, and where each of its layers ran last, with which scale."""
    torch.manual_seed(0)
    module = Model()
    Plan("dp_shard=2", [*recompute, FullyShard()], verify=False).apply(module, ModelLayout(blocks=("layers.*",)))
    token = SCALE.set(3.0)
    output = module(torch.linspace(-1, 1, 32).view(4, 8)).sum()
    SCALE.reset(token)
    output.backward()
    return [parameter.grad.full_tensor() for parameter in module.parameters()], [
        layer.ran[-1] for layer in module.layers
    ]


@on_ranks(2)
def test_a_recomputed_block_finds_the_context_variables_of_its_forward():
    expected, _ = gradients()
    for mode in ("full", "selective"):
        with backward_apart():
            found, ran = gradients(ActivationCheckpoint(mode=mode))
        assert ran == [("backward", 3.0)] * 2
        torch.testing.assert_close(found, expected)
    assert SCALE.get() == 1.0


def test_a_thread_of_backward_has_no_context_variables_and_hands_on_errors():
    """The control: what would go wrong is seen."""
    leaf, seen = torch.ones(2, requires_grad=True), []

    def look(grad):
        seen.append((threading.current_thread().name, SCALE.get()))

    leaf.register_hook(look)
    token = SCALE.set(3.0)
    with backward_apart():
        (leaf * 2).sum().backward()
        assert torch.autograd.grad((leaf * 2).sum(), leaf)[0].tolist() == [2.0, 2.0]
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.ones(()).backward()
    assert seen == [("backward", 1.0)] * 2
    (leaf * 2).sum().backward()
    assert seen[-1] == ("MainThread", 3.0)
    SCALE.reset(token)
