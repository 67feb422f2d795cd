"""The protocol of a parallel module that is saved and restored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

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


class Averages(Protocol):
    """A moving average of the module's parameters: a :class:`meshpar.state.averaging.Averaged`."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def mesh_axes(mesh: DeviceMesh) -> dict[str, int]:
    """Return axis name -> size."""
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape))
