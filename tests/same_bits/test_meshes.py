"""The same bits on every mesh: losses, gradients, norms, weights and optimizer state equal one process's, bit by bit."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshpar import (
    ActivationCheckpoint,
    Compile,
    Float8,
    FullyShard,
    HybridShard,
    MeshparError,
    ModelLayout,
    PipelineParallel,
    Plan,
    Replicate,
)
from meshpar.optim import Muon, SmallAdamW
from meshpar.tensors.placements import local_tensor
from meshpar.testing import on_ranks, random_tokens, token_loss_sum, whole
from tests.support.comparison import differing_bits
from tests.support.models_for_parity import VOCAB, gpt2, huggingface, huggingface_gpt2, transformer
from tests.support.tiers import daily

MICRO_BATCHES = 8


def tokens(number):
    return random_tokens(VOCAB, 2, 16, seed=number, ignored=0.25 * (number % 3))


def images(number):
    generator = torch.Generator().manual_seed(number)
    return {
        "images": torch.randn(2, 3, 8, 8, generator=generator),
        "labels": torch.randint(0, 10, (2,), generator=generator),
    }


def image_loss_sum(module, batch):
    return F.cross_entropy(module(batch["images"]), batch["labels"], reduction="sum"), 2


class ImageBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 3, batch_first=True)
        self.up, self.down = nn.Linear(width, 37), nn.Linear(37, width)

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ImageNet(nn.Module):
    """A small ViT of odd sizes, with a token, positions and a scale of its own, and a parameter that nothing uses."""

    def __init__(self, width=21):
        super().__init__()
        self.patches, self.blocks = nn.Conv2d(3, width, 2, 2), nn.ModuleList(ImageBlock(width) for _ in range(2))
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, 17, width))
        self.scale, self.unused, self.head = (
            nn.Parameter(torch.ones(())),
            nn.Parameter(torch.ones(3)),
            nn.Linear(width, 10),
        )

    def reset_parameters(self):
        nn.init.normal_(self.token), nn.init.normal_(self.places), nn.init.ones_(self.scale), nn.init.ones_(self.unused)

    def meshpar_layout(self):
        return ModelLayout(blocks=("blocks.*",))

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        for block in self.blocks:
            x = block(x) * self.scale
        return self.head(x[:, 0])


class Branch(nn.Module):
    """A block that uses its input three times, beside the use that its caller makes of it; it draws without a module."""

    def __init__(self, width, dropout):
        super().__init__()
        self.dropout = dropout
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        return F.dropout(sum(layer(x) for layer in self.layers), self.dropout, self.training)


class Branches(nn.Module):
    def __init__(self, width=24, dropout=0.0):
        super().__init__()
        self.first, self.head = nn.Linear(192, width), nn.Linear(width, 10)
        self.blocks, self.draws = nn.ModuleList(Branch(width, dropout) for _ in range(2)), dropout > 0

    def meshpar_layout(self):
        return ModelLayout(blocks=("blocks.*",), dropout=self.draws)

    def forward(self, x):
        x = self.first(x.flatten(1))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def frozen_and_tied():
    """Return a model whose first stages are frozen, with weights that are tied inside of a block of the last one."""
    module = transformer(layers=4, tied=False)
    module.layers[3].mlp.up.weight = module.layers[3].mlp.gate.weight
    for part in (module.embed, module.layers[0], module.layers[2].attn):
        part.requires_grad_(False)
    return module


TEXT = (tokens, token_loss_sum)
MODELS = {
    "transformer": (transformer, *TEXT),
    "odd-transformer": (functools.partial(transformer, hidden=45, vocab_size=VOCAB + 5, layers=3, tied=False), *TEXT),
    "mixture": (functools.partial(transformer, experts=4, expert_hidden=24, qk_norm=True), *TEXT),
    "frozen-and-tied": (frozen_and_tied, *TEXT),
    "four-layers": (functools.partial(transformer, layers=4, tied=False), *TEXT),
    "deep-llama": (functools.partial(huggingface, "Llama", num_hidden_layers=4), *TEXT),
    "llama": (functools.partial(huggingface, "Llama"), *TEXT),
    "gemma2": (functools.partial(huggingface, "Gemma2", sliding_window=4, query_pre_attn_scalar=8), *TEXT),
    "gpt2": (gpt2, *TEXT),
    "huggingface-gpt2": (huggingface_gpt2, *TEXT),
    "vit": (ImageNet, images, image_loss_sum),
    "branches": (Branches, images, image_loss_sum),
    "drawing": (functools.partial(Branches, dropout=0.1), images, image_loss_sum),
}
OPTIMIZERS = {
    "adamw": lambda par: torch.optim.AdamW(par.module.parameters(), lr=1e-2),
    "muon": lambda par: Muon(par, lr=1e-2),
    "small": lambda par: SmallAdamW(par, lr=1e-2),
}


def scaled_loss(loss_sum, scale, module, batch):
    return loss_sum(module, batch)[0] * scale


def train(mesh, passes, *, model="transformer", build=None, optimizer="adamw", steps=3, by_hand=False, guards="always"):
    """Return everything that must have the same bits, by name."""
    of_model, draw, loss_sum = MODELS[model]
    with torch.device("meta"):
        module = (build or of_model)()
    par = Plan(mesh, passes, same_bits=True, guards=guards).apply(module).materialize(seed=0)
    par.manual_seed(0)
    optimizer = OPTIMIZERS[optimizer](par)
    results, names = {}, {id(parameter): name for name, parameter in par.module.named_parameters()}
    for step in range(steps):
        batches = [draw(step * 101 + number) for number in range(par.data_rank, MICRO_BATCHES, par.data_size)]
        scale = par.token_scale(sum(int((batch["labels"] != -100).sum()) for batch in batches))
        loss = functools.partial(scaled_loss, loss_sum, scale)
        if by_hand:
            for number, batch in enumerate(batches if by_hand == "no_sync" else par.accumulate(batches)):
                more = by_hand == "no_sync" and number + 1 < len(batches)
                with par.no_sync() if more else contextlib.nullcontext():
                    loss(par.module, batch).backward()
        else:
            results[f"loss {step}"] = par.data_sum(par.backward(batches, loss)) / par.loss_size
        named = par.module.named_parameters()
        results |= {f"gradient {step} {name}": whole(one.grad) for name, one in named if one.grad is not None}
        results[f"norm {step}"] = par.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    results |= {f"weight {name}": whole(one) for name, one in par.module.named_parameters()}
    for parameter, state in optimizer.state.items():
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        results |= {f"{key} {names[id(parameter)]}": whole(value) for key, value in tensors.items()}
    return results


@on_ranks(1)
def save(path, mesh="", passes=(), **options):
    torch.save(train(mesh, list(passes), **options), path)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Return the file with the results of one process; each is trained once."""
    folder, files = tmp_path_factory.mktemp("alone"), {}

    def path_of(mesh="", passes=(), **options):
        key = repr((mesh, passes, sorted(options.items())))
        if key not in files:
            save(folder / str(len(files)), mesh, passes, **options)
            files[key] = folder / str(len(files))
        return files[key]

    return path_of


@on_ranks("mesh")
def assert_same_bits(mesh, passes, path, options):
    expected, got = torch.load(path), train(mesh, passes, **options)
    if "pp" not in mesh:
        assert [name for name in expected if name not in got and not name.startswith("loss")] == []
    wrong = differing_bits({name: expected[name] for name in got}, got)
    assert not wrong, f"{len(wrong)} of {len(got)} differ: {wrong[:8]}"


PLANS = {
    "fsdp-2": ("dp_shard=2", [FullyShard()]),
    "fsdp-4": ("dp_shard=4", [FullyShard()]),
    "fsdp-8": ("dp_shard=8", [FullyShard()]),
    "replicate-2": ("dp_replicate=2", [Replicate()]),
    "replicate-4": ("dp_replicate=4", [Replicate()]),
    "hsdp": ("dp_replicate=2,dp_shard=2", [HybridShard()]),
    "hsdp-4x2": ("dp_replicate=4,dp_shard=2", [HybridShard()]),
    "world": ("dp_replicate=2,dp_shard=2", [HybridShard(optimizer="world")]),
    "recomputed": ("dp_shard=2", [ActivationCheckpoint(), FullyShard(reshard_after_forward=False)]),
    "offloaded": ("dp_shard=4", [FullyShard(offload="cpu")]),
}
CASES = [(plan, model) for plan in PLANS for model in MODELS]


@pytest.mark.parametrize(
    ("plan", "model"),
    daily(
        CASES,
        *((plan, "transformer") for plan in ("fsdp-2", "replicate-2", "hsdp", "world")),
        *(("fsdp-4", model) for model in ("llama", "vit", "gpt2", "branches", "drawing")),
    ),
)
def test_a_model_has_the_same_bits_on_every_mesh(plan, model, one_process):
    assert_same_bits(*PLANS[plan], one_process(model=model), {"model": model})


@pytest.mark.parametrize(
    ("plan", "optimizer"),
    daily(
        [(plan, optimizer) for plan in PLANS for optimizer in OPTIMIZERS if optimizer != "adamw"],
        ("fsdp-4", "muon"),
        ("hsdp", "small"),
    ),
)
def test_an_optimizer_has_the_same_bits_on_every_mesh(plan, optimizer, one_process):
    options = {"optimizer": optimizer}
    assert_same_bits(*PLANS[plan], one_process(**options), options)


def test_parameters_that_ranks_keep_whole_have_the_same_bits(one_process):
    whole = ("norm", "layers.*.attn.q")
    assert_same_bits("dp_replicate=2,dp_shard=2", [HybridShard(whole=whole)], one_process(), {})


HALF = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
HALVES = {
    "fsdp-4": ("dp_shard=4", [FullyShard(**HALF)]),
    "replicate-2": ("dp_replicate=2", [Replicate(**HALF)]),
    "hsdp": ("dp_replicate=2,dp_shard=2", [HybridShard(**HALF)]),
    "world": ("dp_replicate=2,dp_shard=2", [HybridShard(optimizer="world", **HALF)]),
}


@pytest.mark.parametrize(
    ("plan", "model"), daily([(plan, model) for plan in HALVES for model in MODELS], ("hsdp", "llama"))
)
def test_bfloat16_with_a_reduction_in_float32_has_the_same_bits(plan, model, one_process):
    options = {"model": model}
    assert_same_bits(*HALVES[plan], one_process("dp_shard=1", (FullyShard(**HALF),), **options), options)


STAGES = {
    "two": ("pp=2", [PipelineParallel()]),
    "four": ("pp=4", [PipelineParallel()]),
    "gpipe": ("pp=2", [PipelineParallel(schedule="gpipe")]),
    "virtual": ("pp=2", [PipelineParallel(virtual=2)]),
    "fsdp": ("pp=2,dp_shard=2", [PipelineParallel(), FullyShard()]),
    "replicate": ("pp=2,dp_replicate=2", [PipelineParallel(), ActivationCheckpoint(), Replicate()]),
    "kept": ("pp=2,dp_shard=2", [PipelineParallel(), FullyShard(reshard_after_forward=False)]),
}


@pytest.mark.parametrize(
    ("plan", "model"),
    daily(
        [(plan, model) for plan in STAGES for model in ("four-layers", "deep-llama", "frozen-and-tied")],
        ("fsdp", "four-layers"),
        ("two", "deep-llama"),
        ("virtual", "frozen-and-tied"),
    ),
)
def test_stages_have_the_same_bits(plan, model, one_process):
    options = {"model": model}
    assert_same_bits(*STAGES[plan], one_process(**options), options)


@pytest.mark.parametrize("plan", daily(["fsdp-2", "hsdp"]))
def test_compiled_blocks_have_the_bits_of_compiled_blocks(plan, one_process):
    mesh, passes = PLANS[plan]
    compiled = Compile(backend="aot_eager")
    assert_same_bits(mesh, [compiled, *passes], one_process("", (compiled,)), {})


@pytest.mark.parametrize("recipe", daily(["tensorwise", "rowwise"], "tensorwise"))
def test_float8_scales_a_micro_batch_alike_on_every_mesh(recipe, one_process):
    float8 = Float8(recipe=recipe, emulate=True)
    assert_same_bits("dp_shard=2", [float8, FullyShard()], one_process("", (float8,)), {})


@pytest.mark.parametrize("loop", ["accumulate", "no_sync"])
def test_a_loop_by_hand_has_the_bits_of_backward(loop, one_process):
    assert_same_bits("dp_shard=2", [FullyShard()], one_process(), {"by_hand": loop})


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("passes", [[], [FullyShard()]])
@on_ranks(1)
def test_hooks_on_parameters_are_refused_because_they_see_sums_that_follow_the_mesh(passes, register):
    par = Plan("dp_shard=1" if passes else "", passes, same_bits=True).apply(transformer())
    getattr(next(par.module.parameters()), register)(lambda value: None)
    with pytest.raises(MeshparError, match="a hook on a parameter gets the gradient of a micro-batch"):
        par.backward([tokens(0), tokens(1)], functools.partial(scaled_loss, token_loss_sum, 1.0))


@on_ranks(1)
def test_draws_that_a_model_does_not_declare_are_refused():
    for declared in (True, False):
        module = Branches(dropout=0.1)
        module.draws = declared
        par = Plan("dp_shard=1", [FullyShard()], same_bits=True).apply(module)
        if not declared:
            with pytest.raises(MeshparError, match="the model has no dropout module that does"):
                par.module(images(0)["images"])
        par.module.eval()
        par.module(images(0)["images"])


@on_ranks(1)
def test_a_forward_that_draws_nothing_leaves_the_random_state():
    par = Plan("dp_shard=1", [FullyShard()], same_bits=True).apply(Branches())
    before = torch.get_rng_state()
    par.module(images(0)["images"])
    assert torch.equal(torch.get_rng_state(), before)


class RecomputingBranches(Branches):
    def forward(self, x):
        x = self.first(x.flatten(1))
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x)


@on_ranks(1)
def test_blocks_that_a_model_recomputes_draw_what_they_drew_before():
    gradients = []
    for kind in (Branches, RecomputingBranches):
        torch.manual_seed(0)
        par = Plan("dp_shard=1", [FullyShard()], same_bits=True).apply(kind(dropout=0.5))
        par.manual_seed(3)
        par.backward([images(0), images(1)], functools.partial(scaled_loss, image_loss_sum, 1.0))
        gradients.append([whole(parameter.grad) for parameter in par.module.parameters()])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("guards", ["first", "off"])
def test_guards_change_no_bit(guards, one_process):
    assert_same_bits("dp_replicate=2,dp_shard=2", [HybridShard()], one_process(), {"guards": guards})


@on_ranks(2)
def test_a_micro_batch_without_a_backward_counts_as_zero():
    par, norms = Plan("dp_shard=2", [FullyShard()], same_bits=True).apply(transformer()), []
    for numbers in ((0,), (1, 0), (0, 1)):
        for number in par.accumulate(numbers):
            loss, _ = token_loss_sum(par.module, tokens(par.data_rank + 2 * number))
            if number == 0:
                loss.backward()
        norms.append(par.clip_grad_norm_(float("inf")))
        par.module.zero_grad()
    assert torch.equal(norms[1], norms[0])
    assert torch.equal(norms[2], norms[0])


@on_ranks(2)
def test_the_norm_of_what_is_empty_or_frozen_is_zero():
    module = nn.Linear(4, 2)
    module.empty, _ = nn.Parameter(torch.zeros(3, 0)), module.bias.requires_grad_(False)
    par = Plan("dp_shard=2", [FullyShard()], same_bits=True).apply(module, ModelLayout())
    par.backward([torch.ones(2, 4)], lambda module, x: module(x).sum())
    norms = par.clip_grad_norms_(float("inf"), ["bias", "empty"])
    assert norms["bias"] == norms["empty"] == 0.0 < norms[""]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("value", [0.0, 1e-42, 1e-30, 1.0, 1e30, float("inf"), float("nan")])
@on_ranks(1)
def test_norms_of_any_gradients_are_those_of_float64(norm_type, value):
    par = Plan("dp_shard=1", [FullyShard()], same_bits=True).apply(nn.Linear(4, 4), ModelLayout(blocks=()))
    par.backward([torch.ones(2, 4)], lambda module, batch: module(batch).sum())
    scales = torch.linspace(0.1, 1.0, 4)
    grads = [(scales * value).expand_as(parameter).clone() for parameter in par.module.parameters()]
    for parameter, grad in zip(par.module.parameters(), grads):
        local_tensor(parameter.grad).copy_(grad)
    expected = torch.linalg.vector_norm(torch.cat([grad.flatten().double() for grad in grads]), norm_type).float()
    norm = par.clip_grad_norm_(1.0, norm_type=norm_type)
    torch.testing.assert_close(norm, expected, rtol=2e-7, atol=0.0, equal_nan=True)
    if value <= 1e-30:
        assert all(torch.equal(local_tensor(p.grad), grad) for p, grad in zip(par.module.parameters(), grads))
