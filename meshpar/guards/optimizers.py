"""Refuse optimizers of parameters that the module no longer has, and those that torch cannot run on its parameters."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshpar._torch.dtensor import flattens
from meshpar.core.errors import MeshparError
from meshpar.core.passes import Role
from meshpar.step.moment import Guard, Guarded
from meshpar.tensors.placements import unevenly_split
from meshpar.trials.separable import check_separable


@final
class Optimizers(Guard):
    """Look at the parameters that an optimizer holds, before each of its steps."""

    def __init__(self, guarded: Guarded) -> None:
        self._stages = bool(guarded.resolved.divided(Role.LAYERS))
        self._tried: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._replaced = guarded.replaced

    def before_step(self, optimizer: Optimizer, *, trains: bool) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        ids, replaced = set(map(id, parameters)), (reference() for reference in self._replaced)
        if old := sum(id(parameter) in ids for parameter in replaced if parameter is not None):
            raise MeshparError(
                f"{type(optimizer).__name__} holds {old} parameters from before plan.apply, which the module no "
                "longer has, so it would train nothing; build the optimizer after plan.apply, from "
                "par.module.parameters()"
            )
        if trains and self._stages and optimizer not in self._tried:
            check_separable(optimizer)
            self._tried.add(optimizer)
        if trains and isinstance(optimizer, torch.optim.LBFGS):
            _refuse_flattening(parameters)


def _refuse_flattening(parameters: Sequence[Tensor]) -> None:
    """Refuse parameters of which torch cannot make the one vector that LBFGS steps."""
    if any(map(unevenly_split, parameters)):
        raise MeshparError(
            "LBFGS flattens all parameters into one vector, which torch cannot do with parameters that are split "
            "unevenly over ranks; use Replicate(), or another optimizer, such as AdamW or SGD"
        )
    if not all(map(flattens, parameters)):
        raise MeshparError(
            "LBFGS flattens all parameters into one vector, which torch before 2.13 cannot do with parameters "
            "that are split along another dimension than the first; use a mesh without tp, or another optimizer, "
            "such as AdamW or SGD, or install a newer torch"
        )
    if len({parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)}) > 1:
        raise MeshparError(
            "LBFGS flattens all parameters into one vector, which torch cannot do with parameters on several "
            "meshes, such as divided experts and the rest; use a mesh without ep, or another optimizer, such as "
            "AdamW or SGD"
        )
