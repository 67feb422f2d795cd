"""How the ranks of an axis exchange positions: which of them each rank holds, and attention over all of them.

``gather``: each rank gets all keys and values, and attends with its queries (Llama 3, arXiv 2407.21783, 3.3.2).
``heads``: ranks exchange positions for heads around attention (DeepSpeed-Ulysses, arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from meshpar.core.errors import MeshparError, first_line
from meshpar.passes.tensor.collectives import _all_gather, _all_to_all, _reduce_scatter, link

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Pieces = Callable[[range, int], Tensor]
Transport = Literal["gather", "heads"]

BLOCK = 1024
"""Queries whose mask is held in memory at a time, where a mask is not held whole."""


def runs(length: int, size: int, rank: int, *, balance: bool) -> list[range]:
    """Return one rank's positions as runs of consecutive ones, a piece of the head and its mirror image if balanced."""
    if balance and length % (2 * size) == 0:
        piece = length // (2 * size)
        return [range(number * piece, (number + 1) * piece) for number in (rank, 2 * size - 1 - rank)]
    part = length // size
    return [range(rank * part, (rank + 1) * part)]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """The exchange of positions over one axis, from one rank's side."""

    group: Any
    size: int
    rank: int
    transport: Transport = "gather"
    balance: bool = True
    # while it is not empty, attention sees no other position
    cut: list[bool] = field(default_factory=list)
    # while it is not empty, nothing is exchanged
    alone: list[bool] = field(default_factory=list)
    # undo what an adapter split
    as_written: list[Callable[[], AbstractContextManager[None]]] = field(default_factory=list)

    def runs(self, length: int, rank: int | None = None) -> list[range]:
        """Return the runs of positions of this rank, or of another, in a sequence of ``length``."""
        return runs(length, self.size, self.rank if rank is None else rank, balance=self.balance)

    def rows(self, length: int, device: torch.device, rank: int | None = None) -> Tensor:
        """Return the positions of this rank, or of another, in a sequence of ``length``: (``length`` / size,) int64."""
        return torch.cat([torch.arange(run.start, run.stop, device=device) for run in self.runs(length, rank)])

    @contextmanager
    def unsplit(self) -> Iterator[None]:
        """Let a module compute on whole sequences, which every rank has, as it does without a plan."""
        with ExitStack() as stack:
            self.alone.append(True)
            stack.callback(self.alone.clear)
            for context in self.as_written:
                stack.enter_context(context())
            yield

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """Return the ranks' parts of ``x`` joined along ``dim`` in order; gradients are summed over the axis."""
        return link(x, self._gather, self._sum_parts, dim)

    def values(self, x: Tensor, dim: int) -> Tensor:
        """Return the ranks' parts of ``x`` joined along ``dim`` in the sequence's order, without a gradient."""
        return self._gather(x.detach(), dim)

    def attend(
        self, inner: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | Pieces | None, *, causal: bool = True
    ) -> Tensor:
        """Attend over all positions by ``inner`` with this rank's q (B, H, M, C), k and v (B, G, M, C)."""
        # ``mask``: (B or 1, 1, M, N) of this rank's queries, for ``heads`` of all queries, or what makes pieces of it
        rows = q.shape[2] if self.transport == "gather" else q.shape[2] * self.size
        if mask is None or (isinstance(mask, Tensor) and mask.shape[-2:] != (rows, q.shape[2] * self.size)):
            got = "none" if mask is None else f"one of {mask.shape[-2]} x {mask.shape[-1]}"
            raise MeshparError(
                f"attention over a part of the positions needs the mask of {rows} queries and "
                f"{q.shape[2] * self.size} keys, that of meshpar.attention_mask, got {got}: a model that makes masks "
                "of its own cannot be split; use a mesh without cp"
            )
        if self.cut:
            alone = q.shape[1] // k.shape[1]
            scores = k.sum(-1, keepdim=True).repeat_interleave(alone, 1)
            return v.repeat_interleave(alone, 1) + q.sum(-1, keepdim=True) + scores
        if k.shape[2] != q.shape[2]:
            raise MeshparError(
                f"ContextParallel splits self-attention, got {q.shape[2]} queries and {k.shape[2]} keys: attention to "
                "another sequence, or a key/value cache, is not supported; use a mesh without cp"
            )
        if self.transport == "heads":
            return self._over_heads(inner, q, k, v, mask, causal)
        k, v = self.whole(torch.cat([k, v], -1), 2).split([k.shape[-1], v.shape[-1]], -1)
        return run_by_run(inner, q, k, v, mask, self.runs(k.shape[2]), causal=causal)

    def _over_heads(
        self, inner: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | Pieces, causal: bool
    ) -> Tensor:
        heads, groups = q.shape[1], k.shape[1]
        if heads % self.size:
            raise MeshparError(
                f"ContextParallel(transport='heads') over cp={self.size} divides the heads, got {heads}; use "
                "transport='gather', or a cp that divides them"
            )
        if groups % self.size:  # every rank needs the keys of its own heads: as many copies as make them divide
            copies = next(
                factor
                for factor in range(2, heads // groups + 1)
                if groups * factor % self.size == 0 and heads // groups % factor == 0
            )
            k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
        q, k, v = map(self._to_heads, (q, k, v))
        try:
            attended = run_by_run(inner, q, k, v, mask, [range(q.shape[2])], causal=causal)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise MeshparError(
                f"attention does not run with {heads // self.size} of its {heads} heads ({first_line(error)}): it has "
                "separate values for each head; use ContextParallel(transport='gather')"
            ) from error
        return self._to_positions(attended)

    def _sum_parts(self, x: Tensor, dim: int) -> Tensor:
        return link(x, self._scatter, self.whole, dim)

    def _to_heads(self, x: Tensor) -> Tensor:
        """Return (B, H / size, N, C) of all positions, of (B, H, M, C) of this rank's positions."""
        return link(x, self._swap_to_heads, self._to_positions)

    def _to_positions(self, x: Tensor) -> Tensor:
        """Return (B, H, M, C) of this rank's positions, of (B, H / size, N, C) of all positions."""
        return link(x, self._swap_to_positions, self._to_heads)

    def _gather(self, x: Tensor, dim: int) -> Tensor:
        return self._in_order(_all_gather(x, 0, self.group), dim)

    def _scatter(self, x: Tensor, dim: int) -> Tensor:
        return _reduce_scatter(self._by_rank(x, dim), 0, self.group)

    def _swap_to_heads(self, x: Tensor) -> Tensor:
        return self._in_order(self._swap(torch.cat(x.chunk(self.size, 1), 0)), 2)

    def _swap_to_positions(self, x: Tensor) -> Tensor:
        return torch.cat(self._swap(self._by_rank(x, 2)).chunk(self.size, 0), 1)

    def _swap(self, x: Tensor) -> Tensor:
        """Send the r-th part along dim 0 to rank r, and return what came, in the order of ranks."""
        rows = [x.shape[0] // self.size] * self.size
        return _all_to_all(x, rows, rows, self.group)

    def _in_order(self, stacked: Tensor, dim: int) -> Tensor:
        """Join what the ranks hold, stacked along dim 0, along ``dim`` in the sequence's order."""
        parts, pieces = stacked.chunk(self.size, 0), dict[int, Tensor]()
        length = sum(part.shape[dim] for part in parts)
        for rank, part in enumerate(parts):
            runs = self.runs(length, rank)
            pieces.update(zip([run.start for run in runs], part.split([len(run) for run in runs], dim)))
        return torch.cat([pieces[start] for start in sorted(pieces)], dim)

    def _by_rank(self, whole: Tensor, dim: int) -> Tensor:
        """Stack along dim 0 what each rank holds of ``whole``."""
        every_run = [self.runs(whole.shape[dim], rank) for rank in range(self.size)]
        return torch.cat(
            [torch.cat([whole.narrow(dim, run.start, len(run)) for run in runs], dim) for runs in every_run], 0
        )


def run_by_run(
    inner: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | Pieces, queries: list[range], *, causal: bool = True
) -> Tensor:
    """Attend with runs of consecutive queries; at most BLOCK at a time, recomputed in backward, by a mask in pieces."""
    if not isinstance(mask, Tensor) and not callable(mask):  # blocks of all queries, for a kernel that holds no scores
        return inner(q, k, v, mask)

    def attend(q: Tensor, k: Tensor, v: Tensor, run: range, seen: int) -> Tensor:
        assert not isinstance(mask, Tensor)
        return inner(q, k, v, mask(run, seen))

    if not isinstance(mask, Tensor):
        queries = [query[begin : begin + BLOCK] for query in queries for begin in range(0, len(query), BLOCK)]
    outputs, begin = [], 0
    for run in queries:
        seen = run.stop if causal else k.shape[2]
        rows = slice(begin, begin + len(run))
        parts = q[:, :, rows], k[:, :, :seen], v[:, :, :seen]
        begin += len(run)
        if isinstance(mask, Tensor):
            outputs.append(inner(*parts, mask[:, :, rows, :seen]))
        else:
            outputs.append(checkpoint(attend, *parts, run, seen, use_reentrant=False))
    return torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]
