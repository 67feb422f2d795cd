"""The modules whose own parameters an axis of samples divides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh


@final
@dataclass(frozen=True, slots=True)
class DividedModules:
    """A fact: modules -> the mesh of their parameters, which has that axis apart from the data axes."""

    meshes: Mapping[nn.Module, DeviceMesh]
