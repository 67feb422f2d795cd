"""The model and the data of the guide's examples: an ordinary language model, without any code for parallelism."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

VOCAB, STEPS, BATCH = 64, 3, 8


class Block(nn.Module):
    def __init__(self, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.head_dim = dim // heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, dim: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batches(rank: int, ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's part of every global batch of 8 sequences: inputs and the tokens after them."""
    for step in range(STEPS):
        ids = torch.randint(VOCAB, (BATCH, 17), generator=torch.Generator().manual_seed(step))
        mine = ids[rank * BATCH // ranks : (rank + 1) * BATCH // ranks]
        yield mine[:, :-1], mine[:, 1:]
