"""Muon: ten steps on a mesh equal torch.optim.Muon and torch.optim.AdamW in one process."""

import functools
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from meshpar import (
    ContextParallel,
    ExpertParallel,
    FullyShard,
    HybridShard,
    MeshparError,
    Plan,
    Replicate,
    TensorParallel,
)
from meshpar.optim import Muon, matrices, muon
from meshpar.optim.matrices import Matrices
from meshpar.testing import assert_records_match, on_ranks, token_steps
from meshpar.testing.parity import _alone, train_steps
from meshpar.training import Schedule
from tests.optim.given import Uneven, advance, bits, give, go_on_with_the_same_bits, initial, on, same, trained
from tests.passes.data.test_instead_of_fsdp2 import MIXTURE, ODD, WORLD
from tests.support.models_for_parity import VOCAB, gpt2, on_meta
from tests.support.tiers import daily
from tests.training.test_lora import SETTINGS, check, qwen3, shared_folder

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
            name: [nn.Parameter(piece.detach().clone()) for piece in pieces(name, value)]
            for name, value in self.matrices.items()
        }
        self.muon = torch.optim.Muon([copy_ for one in self.copies.values() for copy_ in one], lr=lr, **options)
        decayed, others = ([parameter for parameter in rest if (parameter.ndim > 1) is wide] for wide in (True, False))
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
        for matrix in self.matrices.values():
            matrix.grad = None
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


def assert_equals(expected, build, mesh, passes, steps, make=FLOAT32, compare=assert_records_match):
    par = Plan(mesh, passes).apply(on_meta(build)).materialize(seed=0)
    optimizer = make(par)
    got = train_steps(par, steps, optimizer=optimizer, max_norm=1.0)
    verdict = [None]
    if dist.get_rank() == 0:
        try:
            compare(expected, got)
        except AssertionError as error:
            verdict[0] = f"{mesh}: {error}"
    dist.broadcast_object_list(verdict)
    assert verdict[0] is None, verdict[0]
    return par, optimizer


ON_TWO = {
    "dp_shard=2": [FullyShard()],
    "dp_replicate=2": [Replicate()],
    "tp=2": [TensorParallel()],
    "dp_shard=1,cp=2": [ContextParallel(), FullyShard()],
}
ON_FOUR = {
    "dp_shard=4": [FullyShard(offload="cpu")],
    "dp_replicate=2,dp_shard=2": [HybridShard()],
    "dp_replicate=2,dp_shard=2,": [WORLD],
    "dp_shard=2,tp=2": [TensorParallel(), FullyShard()],
    "dp_shard=2,cp=2": [ContextParallel(), FullyShard()],
}


@pytest.mark.parametrize("mesh", daily([*ON_TWO, *ON_FOUR], "tp=2"))
@on_ranks("mesh", timeout_s=400)
def test_a_mesh_equals_one_process(mesh):
    ranks = dist.get_world_size()
    steps = token_steps(VOCAB, steps=10, parts=ranks, micro_batches=4 // ranks)
    passes = {**ON_TWO, **ON_FOUR}[mesh]
    assert_equals(one_process(ODD, steps), ODD, mesh.rstrip(","), passes, steps)


def experts(name, value):
    return list(value) if "experts" in name and value.ndim == 3 else [value]


def thirds(name, value):
    return value.chunk(3, 1 if value.shape[0] < value.shape[1] else 0) if "c_attn" in name else [value]


def heads(name, value):
    """Queries, keys and values of four heads each."""
    return value.chunk(12, 1 if value.shape[0] < value.shape[1] else 0) if "c_attn" in name else [value]


PER_HEAD = functools.partial(FLOAT32, per_head=True)
OF_THEIR_OWN = {
    "dp_shard=1,ep=2": (MIXTURE, experts, [ExpertParallel(), FullyShard()], FLOAT32),
    "dp_shard=2,ep=2": (MIXTURE, experts, [ExpertParallel(), FullyShard()], FLOAT32),
    "dp_shard=1,ep=2,tp=2": (MIXTURE, experts, [ExpertParallel(), TensorParallel(), FullyShard()], FLOAT32),
    "dp_shard=2,tp=2": (gpt2, thirds, [TensorParallel(), FullyShard()], FLOAT32),
    "dp_shard=2,tp=2,": (gpt2, heads, [TensorParallel(), FullyShard()], PER_HEAD),
    "dp_shard=4": (gpt2, heads, [FullyShard()], PER_HEAD),
}


@pytest.mark.parametrize("mesh", daily(OF_THEIR_OWN, "dp_shard=1,ep=2"))
@on_ranks("mesh", timeout_s=400)
def test_experts_and_fused_projections_are_matrices_of_their_own(mesh):
    build, pieces, passes, make = OF_THEIR_OWN[mesh]
    # An expert of fewer tokens than its matrix has rows has a gradient of lower rank: the iteration lifts rounding there.
    steps = token_steps(VOCAB, steps=10, parts=dist.get_world_size(), length=64)
    expected = one_process(build, steps, functools.partial(Torchs, pieces=pieces))
    assert_equals(expected, build, mesh.rstrip(","), passes, steps, make)


@pytest.mark.parametrize("plan", daily(["fsdp-tp", "world"]))
@on_ranks(4, timeout_s=400)
def test_adapters_equal_one_process(plan):
    check(qwen3, SETTINGS, shared_folder(), (plan,), FLOAT32)


HALF = functools.partial(Muon, lr=0.02, adamw=ADAMW, adjust_lr_fn="match_rms_adamw")
MESHES = [
    ("dp_shard=4", [FullyShard()]),
    ("dp_replicate=2,dp_shard=2", [HybridShard()]),
    ("dp_replicate=2,dp_shard=2", [WORLD]),
    ("dp_shard=2,tp=2", [TensorParallel(), FullyShard()]),
    ("dp_shard=2,cp=2", [ContextParallel(), FullyShard()]),
]


def test_one_process_has_the_bits_of_torchs():
    ours, theirs = initial(), initial()
    torchs = Torchs(theirs, adjust_lr_fn="match_rms_adamw")
    advance(theirs, torchs, range(10))
    trained(ours, HALF, 10)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, ours.get_parameter(name)), name


REPLICAS = {
    "dp_replicate=4": [Replicate()],
    "dp_replicate=2,dp_shard=2": [HybridShard()],
    "dp_replicate=2,tp=2": [TensorParallel(), Replicate()],
}


def counted(optimizer, module, step):
    """The multiplications of one step."""
    give(module, step)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    return counter.get_total_flops()


@on_ranks(4)
def test_replicas_divide_the_iterations_and_have_the_bits_of_one_process():
    module = initial(ODD)
    optimizer = HALF(module)
    total, single = [counted(optimizer, module, step) for step in range(2)][-1], largest_iteration(module)
    expected = bits(module, optimizer)
    for (mesh, passes), most in zip(REPLICAS.items(), (muon._ROUND_BYTES, 1 << 13, 1 << 12), strict=True):
        par = on(mesh, passes, ODD)
        with mock.patch.object(matrices, "_LEAST", most // 8), mock.patch.object(muon, "_ROUND_BYTES", most):
            divided = HALF(par)
            flops = [counted(divided, par.module, step) for step in range(2)]
        assert max(flops) <= total / 4 + single, (mesh, flops, total)
        everywhere = torch.tensor(flops[-1])
        dist.all_reduce(everywhere)
        assert everywhere == total, "each matrix is computed once"
        same(expected, bits(par.module, divided))


def largest_iteration(module):
    """The multiplications for the largest matrix of the blocks."""
    with FlopCounterMode(display=False) as counter:
        matrix = max((value for name, value in module.named_parameters() if "layers" in name), key=torch.numel)
        muon.orthogonal(matrix.detach().clone(), (3.4445, -4.7750, 2.0315), 5, 1e-7)
    return counter.get_total_flops()


@on_ranks(2)
def test_the_rounds_of_a_step_are_planned_once_and_ranks_listed_once_a_layout():
    par = on("dp_shard=2", [FullyShard()], ODD)
    layers = [value for name, value in par.module.named_parameters() if "layers" in name]
    layouts = {tuple(value.shape) for value in layers if value.ndim > 1}
    with (
        mock.patch.object(muon, "shares", wraps=matrices.shares) as listed,
        mock.patch.object(matrices.Owners, "rounds", autospec=True, side_effect=matrices.Owners.rounds) as planned,
    ):
        advance(par.module, HALF(par), range(3))
    assert (listed.call_count, planned.call_count) == (len(layouts), 1)


EXPERTS = [
    ("dp_shard=4", [FullyShard()]),
    ("dp_shard=2,ep=2", [ExpertParallel(), FullyShard()]),
    ("dp_shard=1,ep=2,tp=2", [ExpertParallel(), TensorParallel(), FullyShard()]),
    ("dp_replicate=2,dp_shard=1,ep=2", [ExpertParallel(), HybridShard()]),
]


ON_TWO_RANKS = [("dp_shard=2", [FullyShard()]), ("tp=2", [TensorParallel()])]
EXPERTS_ON_TWO = [("dp_shard=2", [FullyShard()]), ("dp_shard=1,ep=2", [ExpertParallel(), FullyShard()])]


@pytest.mark.parametrize(
    ("build", "worlds"),
    [
        (Uneven, {4: MESHES[2:4]}),
        pytest.param(
            Uneven,
            {2: [*ON_TWO_RANKS, ("dp_shard=1,cp=2", ON_TWO["dp_shard=1,cp=2"])], 4: MESHES},
            marks=pytest.mark.nightly,
        ),
        pytest.param(MIXTURE, {2: EXPERTS_ON_TWO, 4: EXPERTS}, marks=pytest.mark.nightly),
    ],
    ids=["uneven", "uneven, every mesh", "experts"],
)
def test_given_the_same_gradients_every_mesh_has_the_bits_of_one_process_and_resumes_on_another(
    build, worlds, tmp_path
):
    go_on_with_the_same_bits(worlds, tmp_path, HALF, build)


def test_a_group_has_options_and_matrices_of_its_own():
    module = nn.ModuleDict({"qkv": nn.Linear(8, 48), "embed": nn.Embedding(9, 8), "conv": nn.Conv2d(3, 8, 2)})
    groups = {"qkv.weight": {"parts": (4, 1, 1), "lr": 0.01}, "embed": {"rule": "muon"}}
    optimizer = Muon(module, lr=0.02, weight_decay=0.0, adamw={"lr": 0.001}, groups=groups)
    found = {
        name: {key: group.get(key) for key in ("rule", "lr", "lr_scale", "parts")}
        for name, parameter in module.named_parameters()
        for group in optimizer.param_groups
        if any(parameter is other for other in group["params"])
    }
    assert found["qkv.weight"] == {"rule": "muon", "lr": 0.01, "lr_scale": 0.5, "parts": (4, 1, 1)}
    assert found["embed.weight"] == {"rule": "muon", "lr": 0.02, "lr_scale": 1.0, "parts": 1}
    assert found["conv.weight"]["rule"] == "muon" and found["conv.bias"]["lr"] == 0.001
    Schedule(name="constant", lr=0.2).apply(optimizer, 0)
    assert sorted({group["lr"] for group in optimizer.param_groups}) == pytest.approx([0.01, 0.1, 0.2])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"adjust_lr_fn": "rms"}, "adjust_lr_fn must be one of None, original, match_rms_adamw, got 'rms'"),
        ({"ns_steps": 100}, "ns_steps must be from 1 to 99, got 100"),
        ({"ns_dtype": "float16"}, "ns_dtype must be one of bfloat16, float32"),
        ({"adamw": {"beta": 1}}, "adamw has no option 'beta'"),
        ({"groups": {"0": {"learning_rate": 1}}}, "groups have no option 'learning_rate'"),
        ({"groups": {"7": {"lr": 1}}}, r"groups pattern '7' matches no module"),
        ({"groups": {"0.weight": {"parts": 3}}}, r"0.weight, of shape \(8, 8\), has 8 in dim 0, which parts=3 do not"),
        ({"lr": -1}, "lr must be 0 or more"),
    ],
)
def test_options_that_it_does_not_know_are_refused(options, said):
    with pytest.raises(MeshparError, match=said):
        Muon(nn.Sequential(nn.Linear(8, 8)), **options)


def test_a_parameter_of_three_dims_that_nothing_describes_is_refused():
    module = nn.Module()
    module.stack = nn.Parameter(torch.zeros(3, 4, 4))
    with pytest.raises(MeshparError, match=r'stack has the shape \(3, 4, 4\).*groups=\{"stack": \{"stacked": True'):
        Muon(module)
    (group,) = Muon(module, groups={"stack": {"stacked": True}}).param_groups
    assert group["stacked"] and len(list(Matrices(stacked=True).of((3, 4, 4)))) == 3


def test_the_parameters_of_a_plan_live_as_long_as_the_plan_so_that_no_other_one_has_their_numbers():
    optimizer = Muon(nn.Linear(8, 8, bias=False), lr=0.1)
    (group,) = optimizer.param_groups
    group["params"][0].grad = torch.ones(8, 8)
    optimizer.step()
    gone = weakref.ref(group["params"].pop())
    optimizer.state.clear()
    assert gone() is not None
    other, alone = nn.Linear(16, 4, bias=False), nn.Linear(16, 4, bias=False)
    alone.load_state_dict(other.state_dict())
    group["params"].append(other.weight)
    other.weight.grad = torch.randn(4, 16)
    alone.weight.grad = other.weight.grad.clone()
    optimizer.step()
    Muon(alone, lr=0.1).step()
    assert torch.equal(other.weight, alone.weight) and gone() is None
