"""The protocol of a parallel module that is saved and restored."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshpar.core.layout import ModelLayout


class Checkpointable(Protocol):
    """A module on a mesh: a :class:`meshpar.Parallelized`."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def mesh(self) -> DeviceMesh: ...
    @property
    def plan(self) -> object: ...
    @property
    def layout(self) -> ModelLayout: ...
    @property
    def device(self) -> torch.device: ...
    def manual_seed(self, seed: int) -> object: ...


def mesh_axes(mesh: DeviceMesh) -> dict[str, int]:
    """Return axis name -> size."""
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape))
