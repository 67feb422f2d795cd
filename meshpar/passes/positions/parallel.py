"""ContextParallel: each rank holds a part of every sequence, and attention sees the whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshpar._torch.pytree import tree_leaves, tree_map
from meshpar.core.errors import MeshparError
from meshpar.core.layout import ModelLayout
from meshpar.core.mesh import MeshSpec
from meshpar.core.passes import Pass, Role, Stage, unmatched
from meshpar.core.patterns import find_modules
from meshpar.passes.positions.exchange import Exchange, Transport, runs
from meshpar.step.forwards import record, set_forward


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
    roles = MappingProxyType({"cp": Role.POSITIONS})

    def problems(self, module: nn.Module, layout: ModelLayout, mesh: MeshSpec) -> Iterator[str]:
        if self.transport not in ("gather", "heads"):
            yield f"ContextParallel(transport={self.transport!r}) must be 'gather' or 'heads'"
        mixers = (*layout.attention.mixers, *self.mixers)
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
        found = [
            name for pattern in (*layout.attention.mixers, *self.mixers) for name, _ in find_modules(module, pattern)
        ]
        if mesh.axes["cp"] > 1 and found:
            yield (
                f"ContextParallel: each rank computes {len(found)} modules ({found[0]}, ...) on whole sequences, "
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
        for mixer in {
            child: None
            for pattern in (*layout.attention.mixers, *self.mixers)
            for _, child in find_modules(module, pattern)
        }:
            _compute_whole(mixer, exchange)
        if layout.attention.exchange is not None:
            layout.attention.exchange(module, exchange)


def _compute_whole(module: nn.Module, exchange: Exchange) -> None:
    """Let a module that mixes positions compute on the whole sequence; its output is this rank's part."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = _hidden((*args, *kwargs.values()))
        if exchange.alone or hidden is None:
            return inner(*args, **kwargs)
        rows, part = hidden.shape[:2]
        length = part * exchange.size

        def whole(value: object) -> object:
            if not isinstance(value, Tensor):
                return value
            if value.ndim == 4 and value.shape[0] == 1:
                # attention of a model's own may insist on a mask for each row
                value = value.expand(rows, *value.shape[1:])
            dim = _dim_of_positions(value, part)
            if dim is None:
                return value
            if exchange.cut:
                return torch.cat([value] * exchange.size, dim)
            return exchange.whole(value, dim) if value.requires_grad else exchange.values(value, dim)

        def own(value: object) -> object:
            if not (isinstance(value, Tensor) and value.ndim in (2, 3) and value.shape[1] == length):
                return value
            mine = value.index_select(1, exchange.rows(length, value.device))
            return torch.zeros_like(mine) if exchange.cut else mine

        args, kwargs = tree_map(whole, (args, kwargs))
        with exchange.unsplit():
            output = inner(*args, **kwargs)
        made = _hidden(output)
        if made is not None and made.shape[1] != length:
            raise MeshparError(
                f"{type(module).__name__} computes whole sequences of {length} positions under ContextParallel, and "
                f"returned {tuple(made.shape)}: under sequence parallelism its output is split once more; use "
                "TensorParallel(sequence_parallel=False), or a mesh without cp"
            )
        return tree_map(own, output)

    set_forward(module, forward, stays=True)


def _hidden(values: object) -> Tensor | None:
    """Return the first hidden states (B, L, D) of a module's inputs or outputs."""
    found = (
        leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.ndim == 3 and leaf.is_floating_point()
    )
    return next(found, None)


def _dim_of_positions(value: Tensor, part: int) -> int | None:
    """Return the dim of positions of (B, L), (L, D), (B, L, D), (B, H, L, any) or (B, H, 1, L)."""
    if value.ndim == 4 and value.shape[2] == 1:
        return 3 if value.shape[3] == part else None
    dims = {2: (1, 0), 3: (1,), 4: (2,)}.get(value.ndim, ())
    return next((dim for dim in dims if value.shape[dim] == part), None)
