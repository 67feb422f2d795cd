"""Collectives over one mesh axis that autograd knows, in pairs: what one does forward the other does backward.

The f and g operators of Megatron-LM (arXiv 1909.08053, section 3; sequence-parallel: arXiv 2205.05198, section 4).
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshpar._torch.groups import collective_ops as ops
from meshpar.core import runtime
from meshpar.core.errors import MeshparError
from meshpar.passes.data.gloo_collectives import swaps, to_the_other


@final
class Meeting:
    """Where the threads of ``size`` simulated ranks hand each other tensors; one that waits too long gives up."""

    def __init__(self, size: int, timeout_s: float = 60.0) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=timeout_s)
        self._given: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Hand in ``value`` and return what every rank handed in; BrokenBarrierError where one failed."""
        self._given[rank] = value
        self._barrier.wait()
        everything = list(self._given)
        self._barrier.wait()  # nobody hands in the next before all have read
        return everything

    def abort(self) -> None:
        """Let the other ranks know that one failed."""
        self._barrier.abort()


@final
class SimulatedGroup:
    """One rank's process group on a :class:`Meeting`, which the collectives below know."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._meeting.size

    def rank(self) -> int:
        """Return this rank."""
        return self._rank

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' ``x``."""
        return torch.stack(self._meeting.exchange(self._rank, x.detach())).sum(0)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Return the ranks' ``x`` joined along ``dim``."""
        return torch.cat(self._meeting.exchange(self._rank, x.detach()), dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's chunk along ``dim`` of the sum of the ranks' ``x``."""
        return self.all_reduce(x).chunk(self.size(), dim)[self._rank].contiguous()

    def all_to_all(self, x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        """Return the rows that the ranks sent to this one: ``sent[r]`` rows of ``x`` go to rank r."""
        parts = self._meeting.exchange(self._rank, x.detach().split(sent))
        return torch.cat([part[self._rank] for part in parts])


def copy_to(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return ``x``, replicated over the axis; its gradient is summed over the axis."""
    return _Copy.apply(x, group)


def copy_weight(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a parameter that every rank holds whole; its gradient is summed over the axis, in float32 or wider."""
    return _CopyWeight.apply(x, group)


def reduce_from(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of the axis's partial ``x``, replicated; the gradient passes as it is."""
    return _Reduce.apply(x, group)


def gather_partial(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return the shards of ``x`` joined along ``dim``; the gradient, partial over the axis, is summed and scattered."""
    return _GatherPartial.apply(x, dim, group)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's shard along ``dim`` of the sum of the axis's partial ``x``; the gradient is gathered."""
    return _ReduceScatter.apply(x, dim, group)


def gather_replicated(x: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
    """Return the last dim's chunks joined to ``size`` features, for a use that is the same on every rank."""
    return _GatherReplicated.apply(x, size, group)


def split_replicated(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's chunk of the last dim of a replicated ``x``; the gradients of the chunks are joined."""
    return _SplitReplicated.apply(x, group)


def regroup(weight: Tensor, parts: int, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's slice of each of ``parts`` equal parts that stand fused along ``dim``, from contiguous shards.

    A fused [q | k | v] stored as plain contiguous shards becomes [q_r | k_r | v_r] on rank r by one all-to-all.
    """
    return _Regroup.apply(weight, parts, dim, group)


def gather_values(x: Tensor, group: dist.ProcessGroup, dim: int = 0) -> Tensor:
    """Return the ranks' ``x`` joined along ``dim``, without a gradient."""
    return _all_gather(x.detach(), dim, group)


def _all_reduce(x: Tensor, group: Any) -> Tensor:
    if isinstance(group, SimulatedGroup):
        return group.all_reduce(x)
    if swaps(x, group):
        return _swapped(x, group) + x
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", group.group_name))


def _all_gather(x: Tensor, dim: int, group: Any) -> Tensor:
    if isinstance(group, SimulatedGroup):
        return group.all_gather(x, dim)
    whole = ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name))
    return torch.cat(whole.chunk(group.size(), 0), dim) if dim else whole


def _reduce_scatter(x: Tensor, dim: int, group: Any) -> Tensor:
    if isinstance(group, SimulatedGroup):
        return group.reduce_scatter(x, dim)
    stacked = torch.cat(x.chunk(group.size(), dim), 0) if dim else x.contiguous()
    if runtime.over_hosts(x.device):
        rows = [len(stacked) // group.size()] * group.size()
        return _all_to_all(stacked, rows, rows, group).view(group.size(), rows[0], *stacked.shape[1:]).sum(0)
    return ops.wait_tensor(ops.reduce_scatter_tensor(stacked, "sum", group.size(), group.group_name))


def _all_to_all(x: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
    if isinstance(group, SimulatedGroup):
        return group.all_to_all(x, received, sent)
    return ops.wait_tensor(ops.all_to_all_single(x, received, sent, group.group_name))


def _swapped(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the other one's ``x``, of two ranks."""
    flat = x.contiguous().view(-1)
    sizes = to_the_other(len(flat), group)
    return _all_to_all(flat, sizes, sizes, group).view(x.shape)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return reduce_from(grads[0], ctx.group), None


class _CopyWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        return reduce_from(grads[0].to(wide), ctx.group).to(grads[0].dtype), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # The gradient is replicated and goes on into what each rank computes of its part, as copy_to's input does.
        return copy_to(grads[0], ctx.group) if grads[0].requires_grad else grads[0], None


class _GatherPartial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(grads[0], ctx.dim, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return gather_partial(grads[0], ctx.dim, ctx.group), None, None


class _GatherReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
        ctx.size, ctx.group = size, group
        width = -(-size // group.size())
        padded = F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
        whole = _all_gather(padded, x.ndim - 1, group)
        return whole[..., :size] if whole.shape[-1] > size else whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return split_replicated(grads[0], ctx.group), None, None


class _SplitReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.size, ctx.group = x.shape[-1], group
        width = -(-ctx.size // group.size())
        start = width * group.rank()
        return x.narrow(-1, start, min(width, ctx.size - start)).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return gather_replicated(grads[0], ctx.size, ctx.group), None


class _Regroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, parts: int, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.parts, ctx.dim, ctx.group = parts, dim, group
        return _by_part(weight, parts, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _Ungroup.apply(grads[0], ctx.parts, ctx.dim, ctx.group), None, None, None


class _Ungroup(torch.autograd.Function):
    """The way back of _Regroup, which is the gradient of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: int, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.parts, ctx.dim, ctx.group = parts, dim, group
        runs, sent, received = _plan(x.shape[dim], parts, group)
        came = _all_to_all(x.movedim(dim, 0).contiguous(), sent, received, group)
        pieces = dict(zip(_by_owner(runs), came.split([runs[number][0] for number in _by_owner(runs)])))
        return torch.cat([pieces[number] for number in range(len(runs))]).movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if grads[0].requires_grad:
            raise MeshparError(
                "gradients of the third order through packed_colwise are not known; split the projection into its parts"
            )
        return _by_part(grads[0], ctx.parts, ctx.dim, ctx.group), None, None, None


def _by_part(weight: Tensor, parts: int, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Exchange rows, cut and joined by slices: an index would be copied to the device, and the host would wait."""
    runs, sent, received = _plan(weight.shape[dim], parts, group)
    pieces = weight.movedim(dim, 0).split([length for length, _ in runs])
    ordered = torch.cat([pieces[number] for number in _by_owner(runs)])
    return _all_to_all(ordered, received, sent, group).movedim(0, dim).contiguous()


def _plan(rows: int, parts: int, group: dist.ProcessGroup) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """Return the runs of this rank's rows, and how many rows it sends to and receives from each rank."""
    ranks, me = group.size(), group.rank()
    counts = rows_by_owner(rows, ranks, parts)
    return runs_of(rows, ranks, parts, me), counts[me], [sent[me] for sent in counts]


def _by_owner(runs: list[tuple[int, int]]) -> list[int]:
    """Return the runs, by their places, in the order in which they are sent."""
    return sorted(range(len(runs)), key=lambda number: runs[number][1])


@cache
def runs_of(rows: int, ranks: int, parts: int, rank: int) -> list[tuple[int, int]]:
    """Return lengths and owners of the runs of ``rank``'s rows when ``parts`` fused parts are split one by one."""
    width = rows // parts  # rows of one part that one rank owns, in sequence
    runs, begin, end = [], rows * rank, rows * (rank + 1)
    while begin < end:
        run = begin // width
        runs.append((min((run + 1) * width, end) - begin, run % ranks))
        begin += runs[-1][0]
    return runs


@cache
def rows_by_owner(rows: int, ranks: int, parts: int) -> list[list[int]]:
    """Return how many of each rank's ``rows`` belong to each rank when ``parts`` fused parts are split one by one."""
    counts = [[0] * ranks for _ in range(ranks)]
    for rank, mine in enumerate(counts):
        for length, owner in runs_of(rows, ranks, parts, rank):
            mine[owner] += length
    return counts
