"""The way of tokens to the ranks of their experts, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from meshpar.core.errors import ParallelError
from meshpar.passes.host_reads import begin_read, beside
from meshpar.passes.tensor.collectives import _all_to_all

Inner = Callable[[Tensor, Tensor, Tensor], Tensor]
INTERFACE = "(hidden states (N, D), chosen experts (N, K) of an integer dtype, their weights (N, K))"


@dataclass(frozen=True, slots=True)
class Routing:
    """Decide by values of tensors how many rows go where; ``skew`` is for simulated ranks."""

    skew: float = 1.0

    def filled(self, rows: Tensor, count: int) -> Tensor:
        """Return which of the rows (R, D) for ``count`` experts are not zeros."""
        return begin_read(lambda: lambda: rows.ne(0).any(1).nonzero()[:, 0])()

    def sizes(self, numbers: Tensor, held: int) -> list[int]:
        """Return how many of the rows, whose experts ``numbers`` (R,) says, go to each of ``held`` experts."""
        return begin_read(lambda: lambda: _listed(torch.bincount(numbers, minlength=held)))()

    def exchanged(self, counts: Tensor, rows: int, rank: int) -> tuple[list[int], list[int], list[int]]:
        """Return how many rows go to each rank, come from each, and how many of each rank's choices are no expert.

        ``counts``, on the host, is (2, ranks, experts of a rank + 1): this rank's rows by expert, and the rows of each
        rank by this rank's experts; the last number is that of choices of no expert.
        """
        sent, received = counts[:, :, :-1].sum(2).tolist()
        return sent, received, counts[1, :, -1].tolist()

    def simulated(self) -> Routing:
        """Return what decides where ranks are simulated, whose tensors have no values."""
        return Assumed(self.skew)


@final
class Assumed(Routing):
    """As many rows for the busiest rank, which this one is, as its skew says; the others' share the rest equally."""

    __slots__ = ()

    def filled(self, rows: Tensor, count: int) -> Tensor:
        """Return as many rows as one expert would have."""
        return torch.arange(len(rows) // count, device=rows.device)

    def sizes(self, numbers: Tensor, held: int) -> list[int]:
        """Return equal numbers of rows."""
        rows = len(numbers)
        return [rows * (place + 1) // held - rows * place // held for place in range(held)]

    def exchanged(self, counts: Tensor, rows: int, rank: int) -> tuple[list[int], list[int], list[int]]:
        """Return what the skew says, and no choice that is no expert."""
        size = counts.shape[1]
        busiest, others = round(rows * self.skew / size), size - 1
        rest = rows - busiest
        sent = [rest * (place + 1) // others - rest * place // others for place in range(others)]
        sent.insert(rank, busiest)
        return sent, [busiest] * size, []


def by_experts(
    run: Inner, hidden: Tensor, chosen: Tensor, weights: Tensor, count: int, group: Any, routing: Routing
) -> Tensor:
    """Return for each of this rank's tokens (..., D) the sum over its experts, which ``group`` holds in equal parts.

    The host waits once, for the exchange of counts on a stream of its own. ``run`` computes (R, D) rows by this rank's
    experts, numbered from 0: (R, 1) int64, with weights (R, 1). Every rank calls it, also one without tokens; all raise
    if one chose an expert that does not exist.
    """
    x, expert = hidden.reshape(-1, hidden.shape[-1]), chosen.reshape(-1).long()
    refuse_shapes(hidden, chosen, weights)
    slots = chosen.shape[-1]
    counted = begin_read(partial(_begin_count, expert, count, group))
    order = expert.argsort(stable=True)  # meanwhile
    rows, scales = x.index_select(0, order // slots), weights.reshape(-1, 1).index_select(0, order)
    joined = torch.cat([rows, scales], 1) if rows.dtype == scales.dtype else None
    sent, received, numbers = _routed(counted(), expert, count, group, routing)
    if joined is not None:  # one exchange instead of two
        rows, scales = _Exchange.apply(joined, received, sent, group).split([x.shape[1], 1], 1)
    else:
        rows, scales = (_Exchange.apply(tensor, received, sent, group) for tensor in (rows, scales))
    arrived = len(rows)
    # one row, so that the same modules run and the same collectives follow in backward; no zeros, which may divide
    # something
    if not arrived:
        ramp = torch.linspace(-1, 1, x.shape[1], device=x.device, dtype=rows.dtype)[None]
        rows, scales, numbers = torch.cat([rows, ramp]), F.pad(scales, (0, 0, 0, 1), value=1.0), numbers.new_zeros(1)
    computed = run(rows, numbers[:, None], scales)[:arrived]
    back = _Exchange.apply(computed, sent, received, group)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    # The sum comes last: a view cannot be changed in place behind an FSDP2 unit.
    return back.index_select(0, places).view(*hidden.shape[:-1], slots, back.shape[-1]).sum(-2)


def refuse_shapes(hidden: Tensor, chosen: Tensor, weights: Tensor) -> None:
    """Refuse other shapes than each token's chosen experts and their weights."""
    if (
        weights.shape != chosen.shape
        or chosen.ndim < 2
        or chosen.numel() != hidden.numel() // hidden.shape[-1] * chosen.shape[-1]
    ):
        raise ParallelError(
            f"experts got chosen experts {tuple(chosen.shape)} and weights {tuple(weights.shape)} for hidden states "
            f"{tuple(hidden.shape)}, expected {INTERFACE}; use a mesh without ep for this model"
        )


def _listed(numbers: Tensor) -> list[int]:
    listed: list[int] = numbers.tolist()
    return listed


def _begin_count(expert: Tensor, count: int, group: Any) -> Callable[[], Tensor]:
    """Start to exchange how many rows chose each expert, or none: then all ranks raise; return what waits for them."""
    size, held = group.size(), count // group.size()
    with beside(expert.device) as to_host:
        known = (expert >= 0) & (expert < count)
        chose = torch.zeros(count, dtype=torch.int64, device=expert.device).index_add_(
            0, expert.clamp(0, count - 1), known.long()
        )
        mine = torch.cat([chose.view(size, held), (~known).sum().expand(size, 1)], 1)
        heard = _all_to_all(mine.flatten(), [held + 1] * size, [held + 1] * size, group).view(size, held + 1)
        return to_host(torch.stack([mine, heard]))


def _routed(
    counts: Tensor, expert: Tensor, count: int, group: Any, routing: Routing
) -> tuple[list[int], list[int], Tensor]:
    """Return the rows that go to each rank, that come from each, and the local expert of each that comes."""
    sent, received, outside = routing.exchanged(counts, len(expert), group.rank())
    if any(outside):
        ranks = ", ".join(str(rank) for rank, beyond in enumerate(outside) if beyond)
        raise ParallelError(
            f"{sum(outside)} chosen experts of rank(s) {ranks} of ep are no experts, expected numbers from 0 to "
            f"{count - 1}; choose expert 0 with weight 0 for a slot that is dropped, or use a mesh without ep"
        )
    theirs = counts[1, :, :-1].flatten().to(expert.device, non_blocking=True)
    numbers = torch.arange(count // group.size(), device=expert.device).repeat(group.size())
    return sent, received, numbers.repeat_interleave(theirs, output_size=sum(received))


class _Exchange(torch.autograd.Function):
    """Rows to the ranks, in the order of ranks; their gradients come back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return _all_to_all(x.contiguous(), received, sent, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.apply(grads[0], ctx.sent, ctx.received, ctx.group), None, None, None


class Mean(torch.autograd.Function):
    """A weight that saw the tokens of ``size`` ranks: its gradient is their sum, of which data ranks want the mean,
    as of every other.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        ctx.size = size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / ctx.size, None
