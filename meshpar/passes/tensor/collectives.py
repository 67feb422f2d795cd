"""Pairs of collectives that autograd knows: f and g of Megatron-LM (arXiv 1909.08053, sec. 3; 2205.05198, sec. 4)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshpar._torch.groups import collective_ops as ops
from meshpar._torch.in_parts import in_parts, parts_of
from meshpar.core import runtime
from meshpar.passes.data.instead_of_fsdp2 import swaps
from meshpar.same_bits.trees import sum_over, sum_share, tree_sum

_ALIGNMENT = 64
"""Bytes to which torch aligns the memory of a tensor on a CPU, and more elsewhere."""


@final
class SimulatedRanks:
    """Where the threads of ``size`` simulated ranks hand each other tensors; one that waits too long gives up."""

    def __init__(self, size: int, timeout_s: float = 60.0) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=timeout_s)


@final
class SimulatedGroup:
    """The process group of one of several simulated ranks, which the collectives below know."""

    def __init__(self, ranks: SimulatedRanks, rank: int) -> None:
        self._ranks, self._rank = ranks, rank

    def size(self) -> int:
        """Return the number of ranks."""
        return len(self._ranks.values)

    def rank(self) -> int:
        """Return this rank."""
        return self._rank

    def exchange(self, value: Any) -> list[Any]:
        """Hand in ``value`` and return what every rank handed in; BrokenBarrierError where one failed."""
        self._ranks.values[self._rank] = value
        self._ranks.barrier.wait()
        everything = list(self._ranks.values)
        self._ranks.barrier.wait()  # nobody hands in the next before all have read
        return everything


@final
class PartsGroup:
    """An axis that computes ``parts`` equal parts, several a rank as one tensor in parts; sums follow one tree."""

    def __init__(self, group: Any, parts: int) -> None:
        self.group, self.each = group, parts // group.size()

    def size(self) -> int:
        """Return the number of parts of all ranks."""
        return self.each * self.group.size()  # type: ignore[no-any-return]


class _Linked(torch.autograd.Function):
    # how is one argument: torch.compile takes the context away where forward(ctx, ..., *how) has as many as parameters
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, compute: Callable[..., Tensor], back: Callable[..., Tensor], how: tuple[Any, ...]
    ) -> Tensor:
        ctx.back, ctx.how = back, how
        return compute(x, *how)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grads[0], *ctx.how), None, None, None


def link(x: Tensor, compute: Callable[..., Tensor], back: Callable[..., Tensor], *how: Any) -> Tensor:
    """Return ``compute(x, *how)``, whose gradient is ``back(grad, *how)``, which has a gradient, too."""
    return _Linked.apply(x, compute, back, how)


def own_parts(x: Tensor, dim: int, group: Any, fused: int = 1) -> Tensor:
    """Return this rank's part along ``dim`` of ``fused`` equal projections, [q_r | k_r | v_r], of its contiguous shard
    of [q | k | v]; cut into the parts that it computes.
    """
    x = _regroup(x, fused, dim, _ranks(group)) if fused > 1 else x
    if not isinstance(group, PartsGroup):
        return x
    pieces = zip(*(projection.chunk(group.each, dim) for projection in x.chunk(fused, dim)))
    return in_parts([torch.cat(part, dim) if fused > 1 else _own_memory(part[0]) for part in pieces])


def join_parts(x: Tensor, dim: int, group: Any) -> Tensor:
    """Return the parts of this rank joined along ``dim``."""
    if not isinstance(group, PartsGroup):
        return x
    return torch.cat([link(part, _view, _own_memory) for part in parts_of(x)], dim)


def copy_to(x: Tensor, group: Any) -> Tensor:
    """Return ``x``, replicated over the axis; its gradient is summed over the axis."""
    return _to_each_part(_copy(x, group), group)


def _copy(x: Tensor, group: Any) -> Tensor:
    return link(x, _view, reduce_from, group)


def copy_weight(x: Tensor, group: Any) -> Tensor:
    """Return a parameter that every rank holds whole; its gradient is summed over the axis, in float32 or wider."""
    if isinstance(group, PartsGroup):
        return copy_to(x.to(torch.promote_types(x.dtype, torch.float32)), group).to(x.dtype)
    return link(x, _view, _sum_in_float32, group)


def reduce_from(x: Tensor, group: Any) -> Tensor:
    """Return the sum of the axis's partial ``x``, replicated; the gradient passes as it is."""
    return link(tree_sum(parts_of(x)), _all_reduce, _copy_trained, group)


def gather_partial(x: Tensor, dim: int, group: Any) -> Tensor:
    """Return the shards of ``x`` joined along ``dim``; the gradient, partial over the axis, is summed and scattered."""
    return _to_each_part(_gather(x, dim, group), group)


def _gather(x: Tensor, dim: int, group: Any) -> Tensor:
    return link(x, _all_gather, reduce_scatter, dim, group)


def reduce_scatter(x: Tensor, dim: int, group: Any) -> Tensor:
    """Return this rank's shard along ``dim`` of the sum of the axis's partial ``x``; the gradient is gathered."""
    return link(tree_sum(parts_of(x)), _reduce_scatter, _gather, dim, group)


def _to_each_part(x: Tensor, group: Any) -> Tensor:
    return in_parts(link(x, _repeat, _total, group.each).unbind()) if isinstance(group, PartsGroup) else x


def gather_replicated(x: Tensor, size: int, group: Any) -> Tensor:
    """Return the last dim's chunks joined to ``size`` features, for a use that is the same on every rank."""
    return link(join_parts(x, x.ndim - 1, group), join_chunks, _split_chunks, x.ndim - 1, size, _ranks(group))


def split_replicated(x: Tensor, group: Any) -> Tensor:
    """Return this rank's chunk of the last dim of a replicated ``x``; the gradients of the chunks are joined."""
    return own_parts(_split_chunks(x, x.ndim - 1, x.shape[-1], _ranks(group)), x.ndim - 1, group)


def _regroup(weight: Tensor, parts: int, dim: int, group: Any) -> Tensor:
    return link(weight, _by_part, _ungroup, parts, dim, group)


def _ungroup(x: Tensor, parts: int, dim: int, group: Any) -> Tensor:
    return link(x, _by_shard, _regroup, parts, dim, group)


def gather_values(x: Tensor, group: dist.ProcessGroup, dim: int = 0) -> Tensor:
    """Return the ranks' ``x`` joined along ``dim``, without a gradient."""
    return _all_gather(x.detach(), dim, group)


def join_chunks(x: Tensor, dim: int, length: int, group: Any) -> Tensor:
    """Return the ranks' chunks of ``length`` along ``dim``, torch's, of which the last may be short, joined."""
    missing = -(-length // group.size()) - x.shape[dim]
    whole = _all_gather(F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, missing]) if missing else x, dim, group)
    return whole if whole.shape[dim] == length else whole.narrow(dim, 0, length)


def take_chunk(x: Tensor, dim: int, length: int, group: Any) -> Tensor:
    """Return this rank's chunk of ``x``, of ``length`` along ``dim``, torch's, with memory of its own."""
    width = -(-length // group.size())
    start = min(width * group.rank(), length)
    return x.narrow(dim, start, min(width, length - start)).clone(memory_format=torch.contiguous_format)


def _all_reduce(x: Tensor, group: Any) -> Tensor:
    ranks = _ranks(group)
    if isinstance(ranks, SimulatedGroup):
        return torch.stack(ranks.exchange(x.detach())).sum(0)
    if ranks is not group or swaps(x, ranks):
        return sum_over(x, ranks)
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", ranks.group_name))


def _all_gather(x: Tensor, dim: int, group: Any) -> Tensor:
    ranks = _ranks(group)
    if isinstance(ranks, SimulatedGroup):
        return torch.cat(ranks.exchange(x.detach()), dim)
    whole = ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), ranks.size(), ranks.group_name))
    return torch.cat(whole.chunk(ranks.size(), 0), dim) if dim else whole


def _reduce_scatter(x: Tensor, dim: int, group: Any) -> Tensor:
    ranks = _ranks(group)
    if isinstance(ranks, SimulatedGroup):
        return _all_reduce(x, ranks).chunk(ranks.size(), dim)[ranks.rank()].contiguous()
    stacked = torch.cat(x.chunk(ranks.size(), dim), 0) if dim else x.contiguous()
    if ranks is not group or runtime.over_hosts(x.device):
        return sum_share(stacked, ranks, by_tree=ranks is not group)
    return ops.wait_tensor(ops.reduce_scatter_tensor(stacked, "sum", ranks.size(), ranks.group_name))


def _ranks(group: Any) -> Any:
    return group.group if isinstance(group, PartsGroup) else group


def _all_to_all(x: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
    if isinstance(group, SimulatedGroup):
        return torch.cat([parts[group.rank()] for parts in group.exchange(x.detach().split(sent))])
    return ops.wait_tensor(ops.all_to_all_single(x.contiguous(), received, sent, group.group_name))


def _repeat(x: Tensor, count: int) -> Tensor:
    return x.expand(count, *x.shape)


def _total(grads: Tensor, count: int) -> Tensor:
    return tree_sum(grads.unbind())


def _own_memory(part: Tensor) -> Tensor:
    """Return a part as a rank of its own has it: libraries compute other bits of other strides and alignments."""
    aligned = part.is_contiguous() and part.storage_offset() * part.element_size() % _ALIGNMENT == 0
    return part.view_as(part) if aligned else part.clone(memory_format=torch.contiguous_format)


def _view(x: Tensor, *how: Any) -> Tensor:
    return x.view_as(x)


def _copy_trained(grad: Tensor, group: Any) -> Tensor:
    # The gradient is replicated and goes on into what each rank computes of its part, as copy_to's input does.
    return _copy(grad, group) if grad.requires_grad else grad


def _sum_in_float32(grad: Tensor, group: Any) -> Tensor:
    return reduce_from(grad.to(torch.promote_types(grad.dtype, torch.float32)), group).to(grad.dtype)


def _split_chunks(x: Tensor, dim: int, length: int, group: Any) -> Tensor:
    return link(x, take_chunk, _join_replicated, dim, length, group)


def _join_replicated(x: Tensor, dim: int, length: int, group: Any) -> Tensor:
    return link(x, join_chunks, _split_chunks, dim, length, group)


def _by_shard(x: Tensor, parts: int, dim: int, group: Any) -> Tensor:
    lengths, order, sent, received = _plan(x.shape[dim], group.size(), parts, group.rank())
    arrived = _all_to_all(x.movedim(dim, 0), sent, received, group)
    pieces = dict(zip(order, arrived.split([lengths[number] for number in order])))
    return torch.cat([pieces[number] for number in range(len(lengths))]).movedim(0, dim).contiguous()


def _by_part(weight: Tensor, parts: int, dim: int, group: Any) -> Tensor:
    """Exchange rows, cut and joined by slices: an index would be copied to the device, and the host would wait."""
    lengths, order, sent, received = _plan(weight.shape[dim], group.size(), parts, group.rank())
    pieces = weight.movedim(dim, 0).split(lengths)
    ordered = torch.cat([pieces[number] for number in order])
    return _all_to_all(ordered, received, sent, group).movedim(0, dim).contiguous()


@cache
def _plan(rows: int, ranks: int, parts: int, rank: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return how ``rank`` regroups its ``rows``: lengths of runs, the order to send them in, rows to and from ranks."""
    width, counts = rows // parts, [[0] * ranks for _ in range(ranks)]
    runs: list[tuple[int, int]] = []
    for source in range(ranks):
        begin, end = rows * source, rows * (source + 1)
        while begin < end:
            number = begin // width
            length, owner = min((number + 1) * width, end) - begin, number % ranks
            counts[source][owner] += length
            if source == rank:
                runs.append((length, owner))
            begin += length
    order = sorted(range(len(runs)), key=lambda number: runs[number][1])
    return [length for length, _ in runs], order, counts[rank], [sent[rank] for sent in counts]
