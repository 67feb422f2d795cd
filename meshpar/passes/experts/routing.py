"""The way of tokens to the ranks of their experts, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshpar.core.errors import ParallelError
from meshpar.passes.host_reads import begin_read, beside
from meshpar.passes.tensor.collectives import _all_to_all, _view, link

Inner = Callable[[Tensor, Tensor, Tensor], Tensor]
INTERFACE = "(hidden states (N, D), chosen experts (N, K) of an integer dtype, their weights (N, K))"


@final
@dataclass(frozen=True, slots=True)
class DividedModules:
    """A fact: modules whose own parameters an axis of samples divides -> the mesh of these, which has that axis."""

    meshes: Mapping[nn.Module, DeviceMesh]


@dataclass(frozen=True, slots=True)
class Routing:
    """Decide by values of tensors how many rows go where; ``skew`` is for simulated ranks."""

    skew: float = 1.0

    def filled(self, rows: Tensor, count: int) -> Tensor:
        """Return which of the rows (R, D) for ``count`` experts are not zeros."""
        return begin_read(lambda: lambda: rows.ne(0).any(1).nonzero()[:, 0])()

    def sizes(self, numbers: Tensor, experts: int) -> list[int]:
        """Return how many of the rows, whose experts ``numbers`` (R,) says, go to each of ``experts``."""
        sizes: list[int] = begin_read(lambda: lambda: torch.bincount(numbers, minlength=experts).tolist())()
        return sizes

    def exchanged(self, counts: Tensor, rows: int, rank: int) -> tuple[list[int], list[int], list[int]]:
        """Return the rows sent to each rank, those received from each, and each rank's choices that are no expert.

        ``counts``: (2, ranks, experts of a rank + 1), on the host; the last column counts choices of no expert.
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

    def sizes(self, numbers: Tensor, experts: int) -> list[int]:
        """Return equal numbers of rows."""
        return _divide_rows(len(numbers), experts)

    def exchanged(self, counts: Tensor, rows: int, rank: int) -> tuple[list[int], list[int], list[int]]:
        """Return what the skew says, and no choice that is no expert."""
        size = counts.shape[1]
        busiest = round(rows * self.skew / size)
        sent = _divide_rows(rows - busiest, size - 1)
        sent.insert(rank, busiest)
        return sent, [busiest] * size, []


def _divide_rows(rows: int, parts: int) -> list[int]:
    """Return numbers of rows that differ by at most one."""
    return [rows * (number + 1) // parts - rows * number // parts for number in range(parts)]


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
    counts = counted()
    sent, received, outside = routing.exchanged(counts, len(expert), group.rank())
    if any(outside):
        ranks = ", ".join(str(rank) for rank, beyond in enumerate(outside) if beyond)
        raise ParallelError(
            f"{sum(outside)} chosen experts of rank(s) {ranks} of ep are no experts, expected numbers from 0 to "
            f"{count - 1}; choose expert 0 with weight 0 for a slot that is dropped, or use a mesh without ep"
        )
    repeats = counts[1, :, :-1].flatten().to(expert.device, non_blocking=True)
    numbers = torch.arange(count // group.size(), device=expert.device).repeat(group.size())
    numbers = numbers.repeat_interleave(repeats, output_size=sum(received))
    if joined is not None:  # one exchange instead of two
        rows, scales = _send(joined, received, sent, group).split([x.shape[1], 1], 1)
    else:
        rows, scales = (_send(tensor, received, sent, group) for tensor in (rows, scales))
    arrived = len(rows)
    # one row, so that the same modules run and the same collectives follow in backward; no zeros, which may divide
    # something
    if not arrived:
        ramp = torch.linspace(-1, 1, x.shape[1], device=x.device, dtype=rows.dtype)[None]
        rows, scales, numbers = torch.cat([rows, ramp]), F.pad(scales, (0, 0, 0, 1), value=1.0), numbers.new_zeros(1)
    computed = run(rows, numbers[:, None], scales)[:arrived]
    back = _send(computed, sent, received, group)
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


def _begin_count(expert: Tensor, count: int, group: Any) -> Callable[[], Tensor]:
    """Start to exchange how many rows chose each expert, or no expert; return a function that waits for the counts."""
    size, columns = group.size(), count // group.size() + 1
    with beside(expert.device) as to_host:
        exists = (expert >= 0) & (expert < count)
        chosen = torch.zeros(count, dtype=torch.int64, device=expert.device)
        chosen.index_add_(0, expert.clamp(0, count - 1), exists.long())
        sent = torch.cat([chosen.view(size, columns - 1), (~exists).sum().expand(size, 1)], 1)
        received = _all_to_all(sent.flatten(), [columns] * size, [columns] * size, group).view(size, columns)
        return to_host(torch.stack([sent, received]))


def _send(x: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
    """Send rows to the ranks, in their order; gradients come back the same way."""
    return link(x, _all_to_all, _send_back, received, sent, group)


def _send_back(grad: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
    return _send(grad, sent, received, group)


def average_gradient(x: Tensor, size: int) -> Tensor:
    """Return a weight that sees the tokens of ``size`` ranks: its gradient is their mean, as that of data ranks."""
    return link(x, _view, _divide, size)


def _divide(grad: Tensor, size: int) -> Tensor:
    return grad / size
