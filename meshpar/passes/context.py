"""ContextParallel: each rank holds a part of every sequence, and attention sees the whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshpar.layout import ModelLayout
from meshpar.mesh import MeshSpec
from meshpar.passes.base import Pass, Role, Stage, unmatched
from meshpar.passes.exchange import Exchange, Transport, runs
from meshpar.passes.installed import record
from meshpar.patterns import find_modules


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallel(Pass):
    """Split sequences over ``cp``: each rank holds a part of the positions of the same samples, so that longer sequences fit.

    The batch comes from ``par.split(batch)``. Everything but attention works on a rank's own positions. Attention is the model's own:
    transformers' models attend through its attention interface, others call :func:`meshpar.attention`. The first forward tries whether
    anything else mixes positions, and names it.

    >>> from meshpar import ContextParallel, FullyShard, Plan
    >>> print(Plan("dp_shard=2,cp=4", [ContextParallel(), FullyShard()]))
    dp_shard=2,cp=4 [ContextParallel -> FullyShard]

    Args:
        transport: ``gather`` gives every rank the keys and values of all positions, and divides their gradients; ``heads`` exchanges
            positions for heads (Ulysses), and needs a number of heads that ``cp`` divides.
        balance: give each rank a piece of the head of a sequence and one of its tail, because late positions see more keys. Sequences
            that 2 x ``cp`` does not divide are cut in consecutive parts.
    """

    transport: Transport = "gather"
    balance: bool = True

    name = "ContextParallel"
    stage = Stage.TENSOR
    roles = MappingProxyType({"cp": Role.POSITIONS})

    def problems(self, module: nn.Module, layout: ModelLayout, mesh: MeshSpec) -> Iterator[str]:
        if self.transport not in ("gather", "heads"):
            yield f"ContextParallel(transport={self.transport!r}) must be 'gather' or 'heads'"
        if "cp" in layout.refusals:
            yield layout.refusals["cp"]
        elif layout.exchange is None and not layout.attention:
            yield (
                f"nothing says where {type(module).__name__} attends: let its attention call meshpar.attention(self, q, k, v, mask), and "
                "give ModelLayout(attention=('layers.*.attn',)), or drop ContextParallel"
            )
        for pattern in layout.attention:
            if not any(True for _ in find_modules(module, pattern)):
                yield unmatched(f"layout attention {pattern!r}", pattern, module)

    def positions(self, length: int, size: int, index: int) -> Tensor:
        return torch.cat([torch.arange(each.start, each.stop) for each in runs(length, size, index, balance=self.balance)])

    def apply(self, module: nn.Module, layout: ModelLayout, mesh: DeviceMesh) -> None:
        axis = mesh["cp"]
        if axis.size() == 1:
            return
        exchange = Exchange(
            group=axis.get_group(), size=axis.size(), rank=axis.get_local_rank(), transport=self.transport, balance=self.balance
        )
        attending = [child for pattern in layout.attention for _, child in find_modules(module, pattern)]
        for each in (module, *attending):
            record(each).exchange = exchange
        if layout.exchange is not None:
            layout.exchange(module, exchange)
