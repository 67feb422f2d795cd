"""ContextParallel: each rank holds a part of every sequence and of a batch, and attention sees the whole.

``Exchange`` says how the ranks of an axis exchange positions: which of them each holds, and attention over all of them.
``gather``: each rank gets all keys and values, and attends with its queries (Llama 3, arXiv 2407.21783, 3.3.2).
``heads``: ranks exchange positions for heads around attention (DeepSpeed-Ulysses, arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from meshpar._torch.tensors import tree_leaves, tree_map
from meshpar.core.errors import MeshparError, first_line
from meshpar.core.layout import ModelLayout
from meshpar.core.mesh import MeshSpec
from meshpar.core.passes import Pass, Role, Stage, unmatched
from meshpar.core.patterns import find_modules
from meshpar.passes.tensor.collectives import _all_gather, _all_to_all, _reduce_scatter, link
from meshpar.step.inner_calls import record, set_forward
from meshpar.tensors.digests import tensors_in


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallel(Pass):
    """Split sequences over ``cp``: each rank holds a part of the positions of the same samples, so longer sequences
    fit.

    Call the model with ``par.split(batch)``. All layers except attention compute on a rank's own positions.
    transformers' models exchange positions in transformers' attention interface; other models call
    :func:`meshpar.attention`. The first forward checks that no other module mixes positions, and names those that do.

    >>> from meshpar import ContextParallel, FullyShard, Plan
    >>> print(Plan("dp_shard=2,cp=4", [ContextParallel(), FullyShard()]))
    dp_shard=2,cp=4 [ContextParallel -> FullyShard]

    Args:
        transport: ``gather`` gives every rank the keys and values of all positions, and divides their gradients;
            ``heads`` exchanges positions for heads (Ulysses), and needs a number of heads that ``cp`` divides.
        balance: give each rank a piece from the start of a sequence and one from its end, because late positions attend
            to more keys. Sequences that 2 x ``cp`` does not divide are cut in consecutive parts.
        mixers: patterns of modules that mix positions in another way (``"backbone.layers.*.mixer"``), in addition to
            ``AttentionLayout.mixers``. Each rank computes them on the whole sequence, (B, L, D), and keeps its own
            part: this is exact, but does not divide their time and memory.
    """

    transport: Transport = "gather"
    balance: bool = True
    mixers: tuple[str, ...] = ()

    name = "ContextParallel"
    stage = Stage.POSITIONS
    computes_in_parts = False
    roles = MappingProxyType({"cp": Role.POSITIONS})

    def problems(self, module: nn.Module, layout: ModelLayout, mesh: MeshSpec) -> Iterator[str]:
        if self.transport not in ("gather", "heads"):
            yield f"ContextParallel(transport={self.transport!r}) must be 'gather' or 'heads'"
        mixers = self._mixers(layout)
        if layout.attention.refusal:
            yield layout.attention.refusal
        elif layout.attention.mixers_refusal and not mixers:
            yield layout.attention.mixers_refusal
        elif layout.attention.exchange is None and not layout.attention.modules and not mixers:
            yield (
                f"the layout does not name the attention of {type(module).__name__}; call meshpar.attention(self, q, "
                "k, v, mask) in it, and give ModelLayout(attention=('layers.*.attn',)), or drop ContextParallel"
            )
        for pattern in (*layout.attention.modules, *mixers):
            if not any(True for _ in find_modules(module, pattern)):
                yield unmatched(f"{pattern!r}, which mixes positions,", pattern, module)

    def warnings(self, module: nn.Module, layout: ModelLayout, mesh: MeshSpec) -> Iterator[str]:
        names = [name for pattern in self._mixers(layout) for name, _ in find_modules(module, pattern)]
        if mesh.axes["cp"] > 1 and names:
            yield (
                f"ContextParallel: each rank computes {len(names)} modules ({names[0]}, ...) on whole sequences, "
                "because they mix positions in another way: exact, but their time and memory are not divided"
            )

    def positions(self, length: int, size: int, index: int) -> Tensor:
        return torch.cat([torch.arange(run.start, run.stop) for run in runs(length, size, index, balance=self.balance)])

    def apply(self, module: nn.Module, layout: ModelLayout, mesh: DeviceMesh) -> None:
        axis = mesh["cp"]
        if axis.size() == 1:
            return
        exchange = Exchange(
            group=axis.get_group(),
            size=axis.size(),
            rank=axis.get_local_rank(),
            transport=self.transport,
            balance=self.balance,
        )
        attending = [child for pattern in layout.attention.modules for _, child in find_modules(module, pattern)]
        for child in (module, *attending):
            record(child).exchange = exchange
        for mixer in {child for pattern in self._mixers(layout) for _, child in find_modules(module, pattern)}:
            _compute_whole(mixer, exchange)
        if layout.attention.exchange is not None:
            layout.attention.exchange(module, exchange)

    def _mixers(self, layout: ModelLayout) -> tuple[str, ...]:
        return (*layout.attention.mixers, *self.mixers)


def _compute_whole(module: nn.Module, exchange: Exchange) -> None:
    """Let a module that mixes positions compute on the whole sequence; its output is this rank's part."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = _hidden((*args, *kwargs.values()))
        if exchange.alone or hidden is None:
            return inner(*args, **kwargs)
        rows, positions = hidden.shape[:2]
        length = positions * exchange.size

        def whole(value: object) -> object:
            if not isinstance(value, Tensor):
                return value
            if value.ndim == 4 and value.shape[0] == 1:
                # attention of a model's own may insist on a mask for each row
                value = value.expand(rows, *value.shape[1:])
            dim = _dim_of_positions(value, positions)
            if dim is None:
                return value
            if exchange.cut:
                return torch.cat([value] * exchange.size, dim)
            return exchange.whole(value, dim) if value.requires_grad else exchange.values(value, dim)

        def own(value: object) -> object:
            if not (isinstance(value, Tensor) and value.ndim in (2, 3) and value.shape[1] == length):
                return value
            part = value.index_select(1, exchange.rows(length, value.device))
            return torch.zeros_like(part) if exchange.cut else part

        args, kwargs = tree_map(whole, (args, kwargs))
        with exchange.unsplit():
            output = inner(*args, **kwargs)
        result = _hidden(output)
        if result is not None and result.shape[1] != length:
            raise MeshparError(
                f"{type(module).__name__} computes whole sequences of {length} positions under ContextParallel, and "
                f"returned {tuple(result.shape)}: under sequence parallelism its output is split once more; use "
                "TensorParallel(sequence_parallel=False), or a mesh without cp"
            )
        return tree_map(own, output)

    set_forward(module, forward, stays=True)


def _hidden(values: object) -> Tensor | None:
    """Return the first hidden states (B, L, D) of a module's inputs or outputs."""
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return next((tensor for tensor in tensors if tensor.ndim == 3 and tensor.is_floating_point()), None)


def _dim_of_positions(value: Tensor, part: int) -> int | None:
    """Return the dim of positions of (B, L), (L, D), (B, L, D), (B, H, L, any) or (B, H, 1, L)."""
    if value.ndim == 4 and value.shape[2] == 1:
        return 3 if value.shape[3] == part else None
    dims = {2: (1, 0), 3: (1,), 4: (2,)}.get(value.ndim, ())
    return next((dim for dim in dims if value.shape[dim] == part), None)


def with_positions(batch: object, dim: int) -> list[Tensor]:
    """Return the tensors of a batch that have the dimension of positions, all of one length."""
    tensors = [tensor for tensor in tensors_in(batch) if tensor.ndim > dim]
    lengths = sorted({tensor.shape[dim] for tensor in tensors})
    if len(lengths) != 1:
        raise MeshparError(
            f"split requires tensors of one length along dim {dim}, got {lengths or 'none'}; split each length alone"
        )
    return tensors


def positions(splitter: Pass, length: int, axis: str, size: int, index: int) -> Tensor:
    """Return the positions, of ``length`` ones, that a pass gives to the rank at ``index`` of an axis."""
    if length % size:
        raise MeshparError(f"{axis}={size} does not divide {length} positions; pad the batch to a multiple of {size}")
    return splitter.positions(length, size, index)


def selected(values: object, index: Tensor, dim: int) -> object:
    """Return ``values`` with the tensors in it cut to ``index`` along ``dim``. Tensors without such a dim stay."""
    if isinstance(values, Tensor) and values.ndim > dim:
        shape = (*values.shape[:dim], len(index), *values.shape[dim + 1 :])
        # of page-locked memory in such memory, whose copy to a device does not wait
        out = torch.empty(shape, dtype=values.dtype, pin_memory=True) if values.is_pinned() else None
        return torch.index_select(values, dim, index.to(values.device, non_blocking=True), out=out)
    if isinstance(values, Mapping):
        return {name: selected(value, index, dim) for name, value in values.items()}
    if isinstance(values, list | tuple):
        parts = [selected(value, index, dim) for value in values]
        return parts if isinstance(values, list) else tuple(parts)
    return values


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
