"""A model that uses the tensor-parallel styles that layout.py does not: ``python styles.py`` compares it with one
process.
"""

import sys

import torch
from layout import loss_sum
from torch import Tensor, nn

from meshpar import ModelLayout, TensorLayout, TensorParallel
from meshpar.testing import assert_parity, launch, token_steps

LAYOUT = ModelLayout(
    blocks=("blocks.*",),
    tensor=TensorLayout(
        {
            "embed": "features",
            "blocks.*.attn": "region",
            "blocks.*.attn.q": "colwise",
            "blocks.*.attn.k": "colwise",
            "blocks.*.attn.v": "colwise",
            "blocks.*.attn.q_norm": "grad_sum",
            "blocks.*.attn.scale": "per_head",
            "blocks.*.attn.out": "rowwise",
            "blocks.*.mix": "colwise_gather",
            "blocks.*.back": "rowwise_split",
            "head": "head",
        },
        heads={"blocks.*.attn.q": 4, "blocks.*.attn.k": 4, "blocks.*.attn.v": 4},
    ),
)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int = 4) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.out = nn.Linear(dim, dim)
        self.q_norm = nn.LayerNorm(self.head_dim)  # one weight for all heads
        self.scale = nn.Parameter(torch.ones(heads))  # one number a head

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        mixed = nn.functional.scaled_dot_product_attention(
            self.q_norm(q) * self.scale[:, None, None], k, v, is_causal=True
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attn = Attention(dim)
        self.mix, self.back = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.back(self.mix(x).softmax(-1))  # softmax needs all features


class Model(nn.Module):
    def __init__(self, dim: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, dim), nn.Linear(dim, 64)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def check() -> None:
    """Train under the plan and in one process, and compare every loss, gradient and weight."""
    assert_parity(Model, "tp=2", [TensorParallel()], token_steps(64), layout=LAYOUT, loss_sum=loss_sum)


if __name__ == "__main__":
    launch("styles", "check", 2)
    print("TP on 2 ranks equals one process", file=sys.stdout)
