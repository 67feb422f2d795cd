"""Sums over micro-batches in the order of one tree over their numbers, which no mesh changes.

Micro-batch j of data rank r of d has the number ``j * d + r``, as ``meshpar.training.Batches`` deals them. The tree
adds neighbours: ((0 1) (2 3)) ((4 5) (6 7)). Where d is a power of two, the sum of one j over ranks, the innermost axis
first, is a subtree, and the sums of all j are added up by the same rule: a rank keeps log2 + 1 partial sums of shards.
A tree of i with i + n/2 would exchange once a step, and keep as many sums of whole gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from meshpar._torch.groups import all_gather


@final
@dataclass(frozen=True, slots=True)
class SameBits:
    """A fact: sums over micro-batches follow the tree, of which ``ranks`` data ranks have a part each."""

    ranks: int


def tree_sum(parts: Tensor) -> Tensor:
    """Return the sum of ``parts`` along dim 0 in the order of the tree; overwrites them."""
    while len(parts) > 1:
        right = parts[1::2]
        parts[: 2 * len(right) : 2] += right
        parts = parts[0::2]
    return parts[0]


def sum_over_(values: Tensor, groups: Iterable[dist.ProcessGroup]) -> Tensor:
    """Add up ``values`` of the ranks of each group, the innermost axis first, in place. Collective."""
    for group in groups:
        ranks = group.size()
        if ranks == 1:
            continue
        rest = -values.numel() % ranks
        flat = functional.pad(values.reshape(-1), (0, rest)) if rest else values.reshape(-1)
        received = torch.empty_like(flat)
        dist.all_to_all_single(received, flat, group=group)
        all_gather(flat, tree_sum(received.view(ranks, -1)), group=group)
        if rest or not values.is_contiguous():
            values.copy_(flat[: values.numel()].view_as(values))
    return values


def fold(values: Tensor) -> Tensor:
    """Return the sum along the last dim, by additions of halves alone, whose bits follow no kernel; overwrites them."""
    while (width := values.shape[-1]) > 1:
        half = 1 << ((width - 1).bit_length() - 1)
        values[..., : width - half] += values[..., half:]
        values = values[..., :half]
    return values[..., 0]
