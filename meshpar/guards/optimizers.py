"""Refuse optimizers of replaced parameters, those that torch cannot run, and steps that need other stages."""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshpar._torch.calls import check_empty, check_loads, check_scalers, while_lives
from meshpar._torch.dtensor import flattens
from meshpar.core.errors import MeshparError, brief
from meshpar.core.passes import Role
from meshpar.step.forward import held_by, holds_some
from meshpar.step.moment import Guard, Guarded
from meshpar.tensors.placements import unevenly_split


@final
class Optimizers(Guard):
    """Look at the parameters that an optimizer holds, before each of its steps."""

    _of_stages: Final[weakref.WeakSet[Optimizers]] = weakref.WeakSet()

    def __init__(self, guarded: Guarded) -> None:
        self._module, self._units, self._replaced = guarded.module, guarded.units, guarded.replaced
        self._stages = bool(guarded.resolved.divided(Role.LAYERS))
        self._tried: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        if self._stages:
            self._of_stages.add(self)
            while_lives(guarded.module, "empty optimizers", lambda: check_empty(_refuse_empty))
            while_lives(guarded.module, "scalers", lambda: check_scalers(_refuse_scaled))
            while_lives(guarded.module, "optimizers' states", lambda: check_loads(_refuse_loaded))

    def holds(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer holds parameters of the module."""
        return holds_some(optimizer, self._module, self._units)

    def before_step(self, optimizer: Optimizer, *, trains: bool) -> None:
        parameters = held_by(optimizer)
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


_TRIALS = 3


def check_separable(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose step of a parameter depends on others, tried on small tensors unless it is known."""
    kind, lbfgs = type(optimizer), isinstance(optimizer, torch.optim.LBFGS)
    if kind.__module__.startswith(("torch.optim.", "meshpar.optim.")) and not lbfgs:
        return
    remedy = "each stage of pp has the parameters of its own layers; use an optimizer such as AdamW"
    try:
        together, alone = ((), ()) if lbfgs else (_tried(optimizer, alone=by_itself) for by_itself in (False, True))
    except Exception as error:
        raise MeshparError(
            f"{kind.__name__} cannot be tried on a few numbers ({brief(error)}), which shows whether its step of one "
            f"parameter depends on others, and {remedy}"
        ) from error
    if lbfgs or not all(map(torch.equal, together, alone)):
        raise MeshparError(
            f"the step that {kind.__name__} makes of one parameter depends on all others, expected one that each "
            f"parameter has alone: {remedy}"
        )


def _tried(optimizer: torch.optim.Optimizer, *, alone: bool) -> list[Tensor]:
    """Return one small tensor of each group after some steps, with a second one in each group or ``alone``."""
    other: Any = copy.copy(optimizer)
    for name, value in vars(optimizer).items():
        if name not in vars(other) and not callable(value):  # schedules wrap methods of the optimizer's own
            setattr(other, name, copy.copy(value))
    other.state, other.param_groups = defaultdict(dict), []
    draw = torch.Generator().manual_seed(0)

    def drawn(like: Tensor) -> Tensor:
        return torch.randn((4,) * like.ndim, generator=draw, dtype=torch.float64).to(
            "cpu" if like.is_meta else like.device, like.dtype
        )

    for group in optimizer.param_groups:
        first = next((parameter for parameter in group["params"] if parameter.requires_grad), None)
        if first is not None:
            options = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            other.param_groups.append({**options, "params": [nn.Parameter(drawn(first)) for _ in range(2)]})
    for _ in range(_TRIALS):
        for group in other.param_groups:
            for number, parameter in enumerate(group["params"]):
                grad = drawn(parameter)
                parameter.grad = None if number and alone else grad
        cast("Any", type(other)).step(other)
    return [group["params"][0].detach() for group in other.param_groups]


def _refuse_scaled(optimizer: Optimizer) -> None:
    if any(guard.holds(optimizer) for guard in list(Optimizers._of_stages)):
        raise MeshparError(
            "torch.amp.GradScaler looks for infinite gradients in this stage of pp alone, and the other stages would "
            "step; scale by meshpar.training.LossScaler"
        )


def _refuse_empty(kind: str) -> None:
    if Optimizers._of_stages:
        raise MeshparError(
            f"{kind} gets no parameters: this stage of pp has none of those that it is to train; pass them as a group, "
            "which may be empty: [{'params': parameters}]"
        )


def _refuse_loaded(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    stored = [len(group["params"]) for group in state.get("param_groups", ())]
    fitting = [len(group["params"]) for group in optimizer.param_groups]
    # torch tells of other groups of as many
    if sum(stored) != sum(fitting) and any(guard.holds(optimizer) for guard in list(Optimizers._of_stages)):
        raise MeshparError(
            f"this optimizer's state is of {sum(stored)} parameters, expected {sum(fitting)}, those of this stage of "
            "pp; save and restore it by meshpar.checkpoints.CheckpointManager, which any mesh can read"
        )
