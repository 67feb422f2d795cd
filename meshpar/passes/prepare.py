"""Prepare a module for the passes of any plan: what has to be put on it whichever passes there are."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshpar.core.mesh import MeshSpec
from meshpar.core.passes import Stage
from meshpar.core.resolved import Resolved
from meshpar.passes.data.batch_norm import synchronize_batch_norm
from meshpar.passes.data.whole_parameters import keep_unpacked


def prepare(module: nn.Module, resolved: Resolved, meshes: Mapping[MeshSpec, DeviceMesh]) -> None:
    """Let batch norm see the whole batch, once where blocks are recomputed; keep recurrent layers' weights apart."""
    if resolved.averaged or any(pass_.stage == Stage.RECOMPUTE for pass_ in resolved.passes):
        synchronize_batch_norm(module, meshes[resolved.held], resolved.averaged)
    keep_unpacked(module)
