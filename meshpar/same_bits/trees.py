"""Sums over micro-batches in the order of one tree over their numbers, which no mesh changes.

Micro-batch j of data rank r of d has the number ``j * d + r``, as ``meshpar.training.Batches`` deals them. The tree
adds neighbours: ((0 1) (2 3)) ((4 5) (6 7)). Where d is a power of two, the sum of one j over ranks, the innermost axis
first, is a subtree, and the sums of all j are added up by the same rule: a rank keeps log2 + 1 partial sums of shards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from meshpar._torch.groups import collective_ops as ops


@final
@dataclass(frozen=True, slots=True)
class SameBits:
    """A fact: sums over micro-batches follow the tree, of which ``ranks`` data ranks have a part each."""

    ranks: int


def tree_sum(parts: Sequence[Tensor] | Tensor, out: Tensor | None = None) -> Tensor:
    """Return the sum of several tensors in the order of the tree, in ``out`` where it is given."""
    if len(parts) == 1:
        return parts[0].contiguous() if out is None else out.copy_(parts[0])
    half = 1 << ((len(parts) - 1).bit_length() - 1)
    return torch.add(tree_sum(parts[:half]), tree_sum(parts[half:]), out=out)


def to_the_other(length: int, group: dist.ProcessGroup) -> list[int]:
    """Return the sizes of an all-to-all in which two ranks swap ``length`` rows."""
    return [0, length] if group.rank() == 0 else [length, 0]


def sum_over(values: Tensor, group: dist.ProcessGroup, *, in_place: bool = False) -> Tensor:
    """Return the sum of the ranks' ``values``, in their memory, contiguous, if ``in_place``. Collective."""
    size, out = group.size(), values if in_place else None
    if size == 1:
        return values
    values = values.contiguous()
    if size == 2:
        lengths = to_the_other(values.numel(), group)
        other = ops.all_to_all_single(values.view(-1), lengths, lengths, group.group_name)
        return tree_sum([values, ops.wait_tensor(other).view_as(values)], out)
    rest = -values.numel() % size
    flat = functional.pad(values.view(-1), (0, rest)) if rest else values.view(-1)
    result = torch.empty_like(values) if out is None else out
    every = flat if rest else result.view(-1)
    ops.wait_tensor(ops.all_gather_into_tensor_out(sum_share(flat, group), size, group.group_name, out=every))
    return result.copy_(every[: values.numel()].view_as(values)) if rest else result


def average_(values: Tensor, groups: Sequence[dist.ProcessGroup], *, by_tree: bool) -> None:
    """Average ``values`` over groups, the outermost first, in place; ``by_tree``: sum them, the loss was divided."""
    if by_tree:
        for group in reversed(groups):
            sum_over(values, group, in_place=True)
        return
    for group in groups:
        dist.all_reduce(values, group=group)
    values /= math.prod(group.size() for group in groups)


def sum_share(stacked: Tensor, group: dist.ProcessGroup, *, by_tree: bool = True) -> Tensor:
    """Return this rank's share along dim 0 of the sum of the ranks' ``stacked``. Collective."""
    size = group.size()
    rows = [len(stacked) // size] * size
    received = ops.wait_tensor(ops.all_to_all_single(stacked.contiguous(), rows, rows, group.group_name))
    return tree_sum(received.chunk(size)) if by_tree else received.unflatten(0, (size, -1)).sum(0)
