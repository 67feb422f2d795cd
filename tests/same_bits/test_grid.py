"""Ten steps have the same bits on any two meshes, stages and features included: `parts` is the same on all of them."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshpar import (
    ActivationCheckpoint,
    FullyShard,
    HybridShard,
    ModelLayout,
    PipelineParallel,
    Replicate,
    StagesLayout,
    TensorLayout,
    TensorParallel,
)
from tests.same_bits.test_meshes import HALF, assert_same_bits, one_process  # noqa: F401
from tests.support.models_for_parity import gpt2, huggingface, transformer

PARTS = TensorParallel(parts=4)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.out = heads, nn.Linear(width, width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (-1, 6)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Patches(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.patches, self.places = nn.Conv2d(3, width, 2, 2), nn.Parameter(torch.zeros(1, 16, width))

    def reset_parameters(self):
        nn.init.normal_(self.places)

    def forward(self, images):
        return self.patches(images).flatten(2).transpose(1, 2) + self.places


class Vit(nn.Module):
    def __init__(self, width=24, heads=4, hidden=40):
        super().__init__()
        self.patches = Patches(width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def meshpar_layout(self):
        styles = {f"blocks.*.{name}": "colwise" for name in ("attention.q", "attention.k", "attention.v", "up")}
        styles |= {"blocks.*.attention.out": "rowwise", "blocks.*.down": "rowwise"}
        heads = {f"blocks.*.attention.{name}": 4 for name in "qkv"}
        stages = StagesLayout(example=torch.zeros(2, 3, 8, 8))
        return ModelLayout(blocks=("blocks.*",), tensor=TensorLayout(styles, heads=heads), stages=stages)

    def forward(self, images):
        x = self.patches(images)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


MODELS = {
    "transformer": ("transformer", functools.partial(transformer, layers=4, tied=False)),
    "llama": ("llama", functools.partial(huggingface, "Llama", num_hidden_layers=4)),
    "gemma2": (
        "gemma2",
        functools.partial(
            huggingface,
            "Gemma2",
            num_hidden_layers=4,
            sliding_window=4,
            query_pre_attn_scalar=8,
            tie_word_embeddings=False,
        ),
    ),
    "gpt2-dropout": ("gpt2", functools.partial(gpt2, n_layer=4, dropout=0.1, tied=False)),
    "vit": ("vit", Vit),
}
DATA = {
    "dp_shard=2": FullyShard,
    "dp_shard=4": FullyShard,
    "dp_replicate=2": Replicate,
    "dp_replicate=4": Replicate,
    "dp_replicate=2,dp_shard=2": HybridShard,
    "dp_replicate=2,dp_shard=2 world": functools.partial(HybridShard, optimizer="world"),
    "dp_shard=1,tp=2": FullyShard,
    "dp_shard=1,tp=4": FullyShard,
    "dp_shard=2,tp=2": FullyShard,
    "pp=2,dp_shard=1": FullyShard,
    "pp=4,dp_shard=1": FullyShard,
    "pp=2,dp_shard=2": FullyShard,
}
KINDS = {"adamw": {}, "muon": {}, "small": {}, "recomputed": {}, "bfloat16": HALF}
CASES = [(mesh, model, "adamw") for model in MODELS for mesh in DATA]
CASES += [(mesh, "transformer", kind) for kind in KINDS if kind != "adamw" for mesh in DATA]


@pytest.mark.nightly
@pytest.mark.parametrize(("mesh", "model", "kind"), CASES)
def test_ten_steps_have_the_bits_of_one_process(mesh, model, kind, one_process):  # noqa: F811
    name, build = MODELS[model]
    options = {"model": name, "build": build, "steps": 10}
    options |= {"optimizer": kind} if kind in ("muon", "small") else {}
    common = [PARTS, *[ActivationCheckpoint()] * (kind == "recomputed")]
    expected = one_process("dp_shard=1", (*common, FullyShard(**KINDS[kind])), **options)
    passes = [*[PipelineParallel()] * ("pp" in mesh), *common, DATA[mesh](**KINDS[kind])]
    assert_same_bits(mesh.removesuffix(" world"), passes, expected, options)
