"""The token loss, also over logits whose vocabulary is sharded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.tensor import DTensor

from meshpar._torch.calls import assert_async
from meshpar._torch.in_parts import parts_on
from meshpar.core import runtime
from meshpar.core.errors import MeshparError
from meshpar.same_bits.trees import sum_over, tree_sum

IGNORE_INDEX = -100

Form = tuple[bool, torch.dtype, list[tuple[str, tuple[int, ...], torch.dtype]]]
"""A flag that values come with losses, the dtype of these, and the names, shapes and dtypes of the values."""
Found = Tensor | tuple[Tensor, Mapping[str, Tensor]]
"""A loss, or a loss and values to report beside it."""


@final
class Totals:
    """The sums over the micro-batches of a step of losses and values by name; ``sums``: of a row a micro-batch."""

    def __init__(self, device: torch.device, sums: Callable[[Tensor], Tensor] | None = None) -> None:
        self.loss, self.values = torch.zeros((), device=device), dict[str, Tensor]()
        self._several, self._sums, self._rows = False, sums, list[dict[str, Tensor]]()

    def add(self, result: Found) -> Tensor:
        """Add those of a micro-batch, and return its loss."""
        loss, values = result if isinstance(result, tuple) else (result, {})
        self._several = self._several or isinstance(result, tuple)
        if self._sums is not None:
            self._rows.append({"": loss.detach(), **{name: value.detach() for name, value in values.items()}})
            return loss
        self.loss = self.loss + loss.detach()  # in float64 where a loss is
        for name, value in values.items():
            self.values[name] = self.values[name] + value.detach() if name in self.values else value.detach()
        return loss

    def close(self) -> None:
        """Add up what ``sums`` adds up. Collective where that is."""
        rows, self._rows = self._rows, []
        if self._sums is None or not rows:
            return
        self.values = {name: torch.zeros_like(value) for row in rows for name, value in row.items()}
        for name, none in self.values.items():
            self.values[name] = self._sums(torch.stack([row.get(name, none) for row in rows])).to(none.dtype)
        self.loss = self.values.pop("")

    def returned(self) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Return the sums in the form in which the losses came."""
        self.close()
        return (self.loss, self.values) if self._several else self.loss

    def form(self) -> Form:
        """Return what another rank needs to know before it gets the sums."""
        return (
            self._several,
            self.loss.dtype,
            [(name, tuple(value.shape), value.dtype) for name, value in self.values.items()],
        )

    def flat(self) -> Tensor:
        """Return all values in one tensor of the widest dtype that the device has."""
        dtype = torch.float32 if self.loss.device.type == "mps" else torch.float64
        flat = [value.reshape(-1).to(self.loss.device, dtype) for value in self.values.values()]
        return torch.cat([self.loss.new_empty(0, dtype=dtype), *flat])

    def take(self, loss: Tensor, form: Form, flat: Tensor) -> None:
        """Take the sums of another rank."""
        self._several, dtype, parts = form
        self.loss = loss.to(dtype)
        sizes = [math.prod(shape) for _, shape, _ in parts]
        self.values = {
            name: part.view(shape).to(kind) for (name, shape, kind), part in zip(parts, flat.split(sizes), strict=True)
        }


def token_loss(
    logits_BLV: Tensor,
    labels_BL: Tensor,
    *,
    ignore_index: int = IGNORE_INDEX,
    reduction: str = "mean",
    z_loss: float = 0.0,
) -> Tensor:
    """Return the cross entropy of every token, in float32.

    >>> import torch
    >>> from meshpar import token_loss
    >>> token_loss(torch.zeros(1, 2, 4), torch.tensor([[1, -100]]))
    tensor(1.3863)

    Args:
        logits_BLV: scores over the vocabulary, any floating dtype; plain, or a DTensor sharded over the vocabulary
            (from a head under ``TensorParallel(loss_parallel=True)``), which no rank ever holds whole.
        labels_BL: the correct token of each position; positions with ``ignore_index`` do not count.
        reduction: ``"sum"``, or ``"mean"`` over the tokens that count (NaN if none counts, like torch).
        z_loss: weight of the squared log of the softmax's denominator, added for each token that counts; it keeps
            logits near zero (PaLM, arXiv 2204.02311, section 5, which uses 1e-4).

    Returns:
        A float32 scalar, equal on every rank of the vocabulary's axis.

    Raises:
        MeshparError: another reduction.

    Collective over the vocabulary's axis when the logits are sharded.
    """
    reduced = reduction_of(reduction, labels_BL, ignore_index)
    labels_N, width = labels_BL.reshape(-1), logits_BLV.shape[-1]
    if not isinstance(logits_BLV, DTensor):
        return reduced(_TokenLoss.apply(logits_BLV.reshape(-1, width), labels_N, ignore_index, z_loss))
    mesh, (placement,) = logits_BLV.device_mesh, logits_BLV.placements
    assert placement.is_shard(logits_BLV.ndim - 1) or placement.is_shard(-1), (
        f"logits are {placement}, expected sharded over the vocabulary"
    )
    valid = ((labels_N >= 0) & (labels_N < width)) | (labels_N == ignore_index)
    assert_async(valid.all(), "a label is outside of the vocabulary")
    start = mesh.get_local_rank() * -(-width // mesh.size())
    local_NV, group, parts = logits_BLV.to_local().flatten(0, -2), mesh.get_group(), parts_on(mesh) // mesh.size()
    return reduced(_VocabularyParallelLoss.apply(local_NV, labels_N, start, ignore_index, group, z_loss, parts))


@contextmanager
def token_losses() -> Iterator[list[Tensor]]:
    """Collect the losses of tokens that are summed meanwhile: (N,) float32 a call or chunk, without ``z_loss``."""
    losses: list[Tensor] = []
    token = _collected.set(losses)
    try:
        yield losses
    finally:
        _collected.reset(token)
        if (outer := _collected.get()) is not None:
            outer += losses


_collected: ContextVar[list[Tensor] | None] = ContextVar("_collected", default=None)


def _summed(losses_N: Tensor) -> Tensor:
    """Return the sum of the tokens' losses, which are collected where somebody asked for them."""
    if (collected := _collected.get()) is not None:
        collected.append(losses_N.detach())
    return losses_N.sum()


def reduction_of(reduction: str, labels: Tensor, ignore_index: int) -> Callable[[Tensor], Tensor]:
    """Return what makes of the sum over tokens what ``reduction`` says."""
    if reduction not in ("sum", "mean"):
        raise MeshparError(f"reduction={reduction!r} is not known; use 'sum', or 'mean' over the tokens that count")
    return lambda total: total if reduction == "sum" else total / (labels != ignore_index).sum()


class _TokenLoss(torch.autograd.Function):
    """Cross entropy that takes rows in turn: large are the logits and their gradient, in their dtype, alone."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits_NV: Tensor, labels_N: Tensor, ignore_index: int, z_loss: float) -> Tensor:
        counted_N = labels_N != ignore_index
        index_N1 = torch.where(counted_N, labels_N, 0)[:, None]
        rows = zip(logits_NV.split(_rows(logits_NV)), index_N1.split(_rows(logits_NV)))
        chosen_N1 = torch.cat(
            [logits_nV.log_softmax(-1, torch.float32).gather(1, index_n1) for logits_nV, index_n1 in rows]
        )
        loss, slope = _summed(-torch.where(counted_N, chosen_N1[:, 0], 0.0)), list[Tensor]()
        if z_loss:
            z_N1 = torch.cat([part.float().logsumexp(-1, True) for part in logits_NV.split(_rows(logits_NV))])
            loss, slope = loss + z_loss * (z_N1[:, 0].square() * counted_N).sum(), [2 * z_loss * z_N1]
        ctx.save_for_backward(logits_NV, index_N1, counted_N, *slope)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, upstream: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        logits_NV, index_N1, counted_N, *slope = ctx.saved_tensors  # type: ignore[attr-defined]
        scale_N1 = (counted_N * upstream)[:, None]
        if logits_NV.dtype == torch.float32:
            return _gradient(logits_NV, index_N1, scale_N1, *slope), None, None, None
        grad_NV = torch.empty_like(logits_NV)
        for grad_nV, *rows in zip(
            *(tensor.split(_rows(logits_NV)) for tensor in (grad_NV, logits_NV, index_N1, scale_N1, *slope))
        ):
            grad_nV.copy_(_gradient(*rows))
        return grad_NV, None, None, None


def _gradient(logits_nV: Tensor, index_n1: Tensor, scale_n1: Tensor, slope_n1: Tensor | None = None) -> Tensor:
    grad_nV = logits_nV.softmax(-1, torch.float32)
    # One is subtracted before the scales: where a probability is near to one, the difference is exact.
    grad_nV.scatter_add_(1, index_n1, grad_nV.new_full((1, 1), -1.0).expand(index_n1.shape))
    if slope_n1 is not None:  # (p - 1) (1 + slope) + slope = p (1 + slope) - 1
        grad_nV.mul_(1 + slope_n1).scatter_add_(1, index_n1, slope_n1)
    return grad_nV.mul_(scale_n1)


def _rows(logits_NV: Tensor) -> int:
    """Return how many rows to take at a time: what stays in a core's cache, or keeps a device busy."""
    return max(16, ((1 << 25) if runtime.queues(logits_NV.device) else (1 << 17)) // logits_NV.shape[-1])


class _VocabularyParallelLoss(torch.autograd.Function):
    """Cross entropy over vocabulary shards: only a maximum and two sums cross (arXiv 1909.08053, 3)."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        local_NV: Tensor,
        labels_N: Tensor,
        start: int,
        ignore_index: int,
        group: dist.ProcessGroup,
        z_loss: float,
        parts: int,
    ) -> Tensor:
        scores_NV = local_NV.float()
        width = scores_NV.shape[-1]
        top_N = scores_NV.amax(-1)
        dist.all_reduce(top_N, dist.ReduceOp.MAX, group)
        scores_NV = scores_NV - top_N[:, None]
        here_N = (labels_N >= start) & (labels_N < start + width)
        index_N = (labels_N - start).clamp(0, width - 1)
        picked_N = scores_NV.gather(1, index_N[:, None])[:, 0] * here_N
        if parts:
            powers = [part_NV.contiguous().exp_() for part_NV in scores_NV.chunk(parts, -1)]
            scores_NV = torch.cat(powers, -1)
            sums_2N = sum_over(torch.stack([tree_sum([part_NV.sum(-1) for part_NV in powers]), picked_N]), group)
        else:
            sums_2N = torch.stack([scores_NV.exp_().sum(-1), picked_N])
            dist.all_reduce(sums_2N, dist.ReduceOp.SUM, group)
        counted_N = labels_N != ignore_index
        loss, slope = _summed((sums_2N[0].log() - sums_2N[1]) * counted_N), list[Tensor]()
        if z_loss:
            z_N = top_N + sums_2N[0].log()
            loss, slope = loss + z_loss * (z_N.square() * counted_N).sum(), [2 * z_loss * z_N]
        ctx.save_for_backward(scores_NV, sums_2N[0], index_N, here_N, counted_N, *slope)
        ctx.dtype = local_NV.dtype  # type: ignore[attr-defined]
        return loss

    @staticmethod
    def backward(ctx: FunctionCtx, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        exp_NV, sum_N, index_N, here_N, counted_N, *slope = ctx.saved_tensors  # type: ignore[attr-defined]
        grad_NV = exp_NV / sum_N[:, None]
        here_N1 = here_N[:, None].to(grad_NV.dtype)
        grad_NV.scatter_add_(1, index_N[:, None], -here_N1)
        if slope:  # as in _gradient
            slope_N1 = slope[0][:, None]
            grad_NV.mul_(1 + slope_N1).scatter_add_(1, index_N[:, None], here_N1 * slope_N1)
        grad_NV = grad_NV * (counted_N * upstream[0])[:, None]
        return grad_NV.to(ctx.dtype), *(None,) * 6  # type: ignore[attr-defined]
