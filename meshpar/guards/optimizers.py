"""Refuse optimizers of parameters that the module no longer has, and those that torch cannot run on its parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
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
        self._replaced = {
            id(parameter): reference for reference in guarded.replaced if (parameter := reference()) is not None
        }

    def before_step(self, optimizer: Optimizer, *, trains: bool) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._refuse_replaced(optimizer, parameters)
        if trains and self._stages and optimizer not in self._tried:
            check_separable(optimizer)
            self._tried.add(optimizer)
        if trains:
            _refuse_flattening(optimizer, parameters)

    def _refuse_replaced(self, optimizer: Optimizer, held: list[Tensor]) -> None:
        """Refuse an optimizer of parameters that the module no longer has."""
        if old := _count(held, self._replaced):
            raise MeshparError(
                f"{type(optimizer).__name__} holds {old} parameters from before plan.apply, which the module no "
                "longer has, so it would train nothing; build the optimizer after plan.apply, from "
                "par.module.parameters()"
            )


def _refuse_flattening(optimizer: Optimizer, held: list[Tensor]) -> None:
    """Refuse LBFGS on parameters of which torch cannot make one vector."""
    if isinstance(optimizer, torch.optim.LBFGS) and any(unevenly_split(parameter) for parameter in held):
        raise MeshparError(
            "LBFGS flattens all parameters into one vector, which torch cannot do with parameters that are split "
            "unevenly over ranks; use Replicate(), or another optimizer, such as AdamW or SGD"
        )
    if isinstance(optimizer, torch.optim.LBFGS) and not all(map(flattens, held)):
        raise MeshparError(
            "LBFGS flattens all parameters into one vector, which torch before 2.13 cannot do with parameters "
            "that are split along another dimension than the first; use a mesh without tp, or another optimizer, "
            "such as AdamW or SGD, or install a newer torch"
        )
    if (
        isinstance(optimizer, torch.optim.LBFGS)
        and len({parameter.device_mesh for parameter in held if isinstance(parameter, DTensor)}) > 1
    ):
        raise MeshparError(
            "LBFGS flattens all parameters into one vector, which torch cannot do with parameters on several "
            "meshes, such as divided experts and the rest; use a mesh without ep, or another optimizer, such as "
            "AdamW or SGD"
        )


def _count(parameters: Iterable[Tensor], known: Mapping[int, weakref.ref[Tensor]]) -> int:
    """Return how many of ``parameters`` are ``known``; a number of an object that is gone may be another's."""
    return sum(1 for parameter in parameters if (one := known.get(id(parameter))) is not None and one() is parameter)
