"""What rows about plans share: small models, the problems of a plan, and a training that two meshes have in common."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from meshpar import FullyShard, MeshSpec, ModelLayout, Pass, Plan, PlanError
from meshpar.core import runtime
from meshpar.models import Transformer
from tests.support import models_for_parity
from tests.support.models_for_parity import on_meta


def transformer(**options: Any) -> Transformer:
    return on_meta(lambda: models_for_parity.transformer(**options))


class TwoLayers(nn.Module):
    """Two layers and a head that no layout describes."""

    def __init__(self, width: int = 8, *, tied: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))
        self.head = nn.Linear(width, width, bias=False, dtype=dtype)
        if tied:
            self.head.weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers[1](self.layers[0](x)))


def problems(
    mesh: str | MeshSpec,
    passes: Sequence[Pass],
    module: nn.Module | None = None,
    layout: ModelLayout | None = None,
    *,
    ranks: int = 0,
) -> tuple[str, ...]:
    """Return what is wrong with a plan for a model; nothing where it is accepted. ``ranks``: as many as the mesh has."""
    spec = mesh if isinstance(mesh, MeshSpec) else MeshSpec(mesh)
    try:
        Plan(mesh, passes).check(transformer() if module is None else module, layout, ranks or spec.size)
    except PlanError as error:
        return error.problems
    return ()


def shard(module: nn.Module | None = None, layout: ModelLayout | None = None, **options: Any) -> tuple[str, ...]:
    """Return what is wrong with a model, or with options of :class:`FullyShard`, on two ranks."""
    return problems("dp_shard=2", [FullyShard(**options)], module, layout)


def warned(mesh: str | MeshSpec, passes: Sequence[Pass], module: nn.Module | None = None, **options: Any) -> tuple[()]:
    """Apply a plan to a model on simulated ranks, for its warnings and for what the ranks of no test meet."""
    with runtime.simulated((mesh if isinstance(mesh, MeshSpec) else MeshSpec(mesh)).size):
        Plan(mesh, passes).apply(transformer() if module is None else module, **options)
    return ()
