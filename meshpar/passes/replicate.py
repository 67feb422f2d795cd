"""Replicate: every rank of an axis holds the whole model and sees different data (DDP)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshpar import _torch
from meshpar.layout import ModelLayout
from meshpar.mesh import MeshSpec
from meshpar.passes.base import Pass, Role, Stage
from meshpar.passes.shard import Precision, cast_buffers, unit_content_problems
from meshpar.passes.whole import kept_whole


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Replicate(Precision, Pass):
    """Replicate the model on every rank of ``dp_replicate`` (DDP). Gradients are averaged block by block while backward runs.

    Composes with :class:`TensorParallel`. For replicas of a sharded model use :class:`HybridShard`.

    Parameters and optimizer state keep the dtype of the model: build the model in float32 for float32 master weights.

    >>> from meshpar import Plan, Replicate
    >>> print(Plan("dp_replicate=4", [Replicate()]))
    dp_replicate=4 [Replicate]

    Args:
        param_dtype: dtype of gathered parameters and of the computation. Defaults to the dtype of the parameters.
        reduce_dtype: dtype in which gradients are reduced. Defaults to the dtype of the parameters.
        output_dtype: dtype of the outermost module's floating-point outputs. Defaults to no cast.
        cast_forward_inputs: cast floating-point inputs to ``param_dtype``.
        buffer_dtype: dtype of floating-point buffers. Defaults to no cast.
        blocks: name patterns or class names of the units. Defaults to the layout's blocks.
        whole: patterns of parameters that every rank stores whole, in their own dtype (``("logit_scale",)``). Scalars are always
            whole. Their gradients are averaged at the end of each backward.
    """

    name = "Replicate"
    stage = Stage.DATA
    roles = MappingProxyType({"dp_replicate": Role.SAMPLES})

    def problems(self, module: nn.Module, layout: ModelLayout, mesh: MeshSpec) -> Iterator[str]:
        yield from self.common_problems(self.name, module, layout)
        units = [(name, unit) for unit, _, name in self.units(module, layout)]
        yield from unit_content_problems(units, module, set(kept_whole(module, self.whole)))
        if mesh.axes.get("dp_shard", 1) > 1:
            yield "Replicate keeps whole replicas and cannot be combined with dp_shard; use HybridShard() for replicas of a sharded model"

    def apply(self, module: nn.Module, layout: ModelLayout, mesh: DeviceMesh) -> None:
        cast_buffers(module, self.buffer_dtype)
        ignored = self.keep_whole(module, mesh, self.axes)
        for unit, policy, _ in self.units(module, layout):
            _torch.replicate(unit, mesh=mesh["dp_replicate"], mp_policy=policy, ignored_params=ignored)
