"""ContextParallel: each rank holds a part of every sequence and of a batch, and attention sees the whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshpar._torch.tensors import tree_leaves, tree_map
from meshpar.core.errors import MeshparError
from meshpar.core.layout import ModelLayout
from meshpar.core.mesh import MeshSpec
from meshpar.core.passes import Pass, Role, Stage, unmatched
from meshpar.core.patterns import find_modules
from meshpar.passes.positions.exchange import Exchange, Transport, runs
from meshpar.step.inner_calls import record, set_forward
from meshpar.tensors.digests import leaves


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
    tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim > dim]
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
