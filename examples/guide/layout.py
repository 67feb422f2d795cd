"""A layout for the guide's model, so that ``tp`` can split it: ``python layout.py`` compares it with one process."""

import sys

import torch
from model import Model

from meshpar import FullyShard, ModelLayout, TensorLayout, TensorParallel
from meshpar.testing import assert_parity, launch, token_steps

LAYOUT = ModelLayout(
    blocks=("blocks.*",),
    tensor=TensorLayout(
        {
            "embed": "vocab",
            "blocks.*.norm1": "sequence",
            "blocks.*.norm2": "sequence",
            "blocks.*.qkv": "packed_colwise:3",
            "blocks.*.out": "rowwise",
            "blocks.*.up": "colwise",
            "blocks.*.down": "rowwise",
            "norm": "sequence",
            "head": "head",
        },
        heads={"blocks.*.qkv": 4},
    ),
)


def loss_sum(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Return the summed loss and how many tokens it counts."""
    from meshpar import token_loss

    labels = batch["labels"]
    return token_loss(model(batch["input_ids"]), labels, reduction="sum"), int((labels != -100).sum())


def check() -> None:
    """Train under the plan and in one process, and compare every loss, gradient and weight."""
    assert_parity(
        Model, "dp_shard=2,tp=2", [TensorParallel(), FullyShard()], token_steps(64), layout=LAYOUT, loss_sum=loss_sum
    )


if __name__ == "__main__":
    launch("layout", "check", 4)
    print("FSDP x TP on 4 ranks equals one process", file=sys.stdout)
