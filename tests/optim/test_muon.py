"""Muon: ten steps on a mesh equal torch.optim.Muon and torch.optim.AdamW in one process."""

from __future__ import annotations

import functools
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshpar import ContextParallel, ExpertParallel, FullyShard, HybridShard, Plan, Replicate, TensorParallel
from meshpar.optim import Muon
from meshpar.testing import assert_records_match, on_ranks, token_steps
from meshpar.testing.parity import _alone, train_steps
from tests.passes.test_world import MIXTURE, ODD, WORLD
from tests.support.models_for_parity import VOCAB, gpt2

ADAMW = {"lr": 3e-3, "eps": 1e-3, "weight_decay": 0.01}
FLOAT32 = functools.partial(Muon, lr=0.02, ns_dtype="float32", adamw=ADAMW)


class Torchs:
    """torch.optim.Muon of single matrices and torch.optim.AdamW of the rest, as one optimizer."""

    def __init__(self, module, *, pieces=lambda name, value: [value], lr=0.02, **options):
        self.matrices, rest = {}, []
        for name, parameter in module.named_parameters():
            table = "embed" in name or "wte" in name or "wpe" in name or "lm_head" in name or name.startswith("head")
            if parameter.ndim < 2 or table:
                rest.append(parameter)
            else:
                self.matrices[name] = parameter
        self.pieces = pieces
        self.copies = {
            name: [nn.Parameter(each.detach().clone()) for each in pieces(name, value)]
            for name, value in self.matrices.items()
        }
        self.muon = torch.optim.Muon([each for one in self.copies.values() for each in one], lr=lr, **options)
        decayed, others = ([each for each in rest if (each.ndim > 1) is wide] for wide in (True, False))
        options = {"lr": ADAMW["lr"], "eps": ADAMW["eps"], "betas": (0.9, 0.95)}
        self.adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": ADAMW["weight_decay"]}, {"params": others, "weight_decay": 0.0}],
            **options,
        )

    @torch.no_grad()
    def step(self):
        for name, parameter in self.matrices.items():
            for copy, grad in zip(self.copies[name], self.pieces(name, parameter.grad)):
                copy.grad = grad.clone()
        self.muon.step()
        for name, parameter in self.matrices.items():
            for copy, place in zip(self.copies[name], self.pieces(name, parameter)):
                place.copy_(copy)
        self.adamw.step()

    def zero_grad(self):
        for each in self.matrices.values():
            each.grad = None
        self.adamw.zero_grad()


def in_float32():
    """Let torch.optim.Muon iterate in float32."""
    return mock.patch.object(Tensor, "bfloat16", lambda self: self.float().clone())


def one_process(build, steps, torchs=Torchs):
    if dist.get_rank() != 0:
        return None
    par = _alone(build, None, 0)
    with in_float32():
        return train_steps(par, steps, optimizer=torchs(par.module), max_norm=1.0)


def assert_equals(expected, build, mesh, passes, steps, make=FLOAT32):
    with torch.device("meta"):
        module = build()
    par = Plan(mesh, passes).apply(module).materialize(seed=0)
    optimizer = make(par)
    got = train_steps(par, steps, optimizer=optimizer, max_norm=1.0)
    verdict = [None]
    if dist.get_rank() == 0:
        try:
            assert_records_match(expected, got)
        except AssertionError as error:
            verdict[0] = f"{mesh}: {error}"
    dist.broadcast_object_list(verdict)
    assert verdict[0] is None, verdict[0]
    return par, optimizer


@on_ranks(2, keep=True, timeout_s=400)
def test_two_ranks_equal_one_process():
    steps = token_steps(VOCAB, steps=10, parts=2, micro_batches=2)
    expected = one_process(ODD, steps)
    for mesh, passes in {
        "dp_shard=2": [FullyShard()],
        "dp_replicate=2": [Replicate()],
        "tp=2": [TensorParallel()],
        "dp_shard=1,cp=2": [ContextParallel(), FullyShard()],
    }.items():
        assert_equals(expected, ODD, mesh, passes, steps)


@on_ranks(4, keep=True, timeout_s=400)
def test_four_ranks_equal_one_process():
    steps = token_steps(VOCAB, steps=10, parts=4)
    expected = one_process(ODD, steps)
    for mesh, passes in {
        "dp_shard=4": [FullyShard(offload="cpu")],
        "dp_replicate=2,dp_shard=2": [HybridShard()],
        "dp_replicate=2,dp_shard=2,": [WORLD],
        "dp_shard=2,tp=2": [TensorParallel(), FullyShard()],
        "dp_shard=2,cp=2": [ContextParallel(), FullyShard()],
    }.items():
        assert_equals(expected, ODD, mesh.rstrip(","), passes, steps)


def experts(name, value):
    return list(value) if "experts" in name and value.ndim == 3 else [value]


def thirds(name, value):
    return value.chunk(3, 1 if value.shape[0] < value.shape[1] else 0) if "c_attn" in name else [value]


@on_ranks(4, keep=True, timeout_s=400)
def test_experts_and_fused_projections_are_matrices_of_their_own():
    steps = token_steps(VOCAB, steps=10, parts=4)
    expected = one_process(MIXTURE, steps, functools.partial(Torchs, pieces=experts))
    for mesh, passes in {
        "dp_shard=2,ep=2": [ExpertParallel(), FullyShard()],
        "dp_shard=1,ep=2,tp=2": [ExpertParallel(), TensorParallel(), FullyShard()],
    }.items():
        assert_equals(expected, MIXTURE, mesh, passes, steps)
    expected = one_process(gpt2, steps, functools.partial(Torchs, pieces=thirds))
    assert_equals(expected, gpt2, "dp_shard=2,tp=2", [TensorParallel(), FullyShard()], steps)
