"""Compile: torch.compile, block by block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshpar.core.errors import ParallelError
from meshpar.core.layout import ModelLayout
from meshpar.core.mesh import MeshSpec
from meshpar.core.passes import Facts, Pass, Stage, block_problems, find_blocks
from meshpar.passes.experts.routing import DividedModules


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Compile(Pass):
    """Compile each block in place with ``torch.compile``. Names are kept, and equal blocks are compiled once.

    >>> from meshpar import Compile, FullyShard, Plan
    >>> print(Plan("dp_shard=8", [Compile(), FullyShard()]))
    dp_shard=8 [Compile -> FullyShard]

    Args:
        backend: a ``torch.compile`` backend.
        fullgraph: raise an error if a block does not compile as one graph.
        dynamic: the argument of ``torch.compile``.
        options: options of the backend.
        blocks: name patterns or class names of the modules to compile. Defaults to the layout's blocks.
    """

    backend: str = "inductor"
    fullgraph: bool = False
    dynamic: bool | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    blocks: tuple[str, ...] | None = None

    name = "Compile"
    stage = Stage.COMPILE
    computes_in_parts = False
    compiles = True

    def problems(self, module: nn.Module, layout: ModelLayout, mesh: MeshSpec) -> Iterator[str]:
        yield from block_problems(self.name, module, layout, self.blocks)

    def install(self, module: nn.Module, layout: ModelLayout, mesh: DeviceMesh, facts: Facts) -> None:
        if self.fullgraph and facts.find(DividedModules) is not None:
            raise ParallelError(
                "Compile(fullgraph=True) got blocks with divided experts, whose exchange of tokens breaks the graph; "
                "drop fullgraph=True, or use a mesh without ep"
            )
        for _, block in find_blocks(module, layout, self.blocks):
            block.compile(
                backend=self.backend, fullgraph=self.fullgraph, dynamic=self.dynamic, options=dict(self.options) or None
            )
