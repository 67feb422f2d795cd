"""AdamW for a parallel module's parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, final

import torch
from torch import nn

from meshpar.errors import RecipeError
from meshpar.training.bounds import Bound, Part, bound_problems

_FUSED_DEVICES = ("cpu", "cuda", "xpu", "hpu", "mps", "mtia")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWSettings:
    """Configure AdamW (Loshchilov and Hutter, 2019).

    >>> from meshpar.training import AdamWSettings
    >>> AdamWSettings(lr=1e-3).betas
    (0.9, 0.95)

    Attributes:
        lr: learning rate, until a schedule sets another.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decay of parameters with two dims or more; biases and norms do not decay.
        fused: one kernel for many parameters; None: if the device supports it.
    """

    lr: Annotated[float, Bound(gt=0)] = 3e-4
    betas: tuple[Part, Part] = (0.9, 0.95)
    eps: Annotated[float, Bound(gt=0)] = 1e-8
    weight_decay: Annotated[float, Bound(ge=0)] = 0.1
    fused: bool | None = None

    def __post_init__(self) -> None:
        if problems := list(bound_problems(self)):
            raise RecipeError("; ".join(problems))


def build_adamw(module: nn.Module, settings: AdamWSettings) -> torch.optim.AdamW:
    """Return AdamW over the trainable parameters of the module; build it after ``plan.apply`` and ``materialize``.

    There are two groups at most, which differ in nothing but ``weight_decay``.

    Raises:
        RecipeError: no parameter requires a gradient.
    """
    groups = parameter_groups(module, settings.weight_decay)
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    fused = settings.fused if settings.fused is not None else devices <= set(_FUSED_DEVICES)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=fused)


def parameter_groups(module: nn.Module, weight_decay: float | None) -> list[dict[str, Any]]:
    """Return the parameters that want a gradient, for an optimizer: those with two dims or more decay, the others do not.

    Args:
        module: the parallel module.
        weight_decay: of the parameters that decay; None: one group, without a word on decay.

    Raises:
        RecipeError: no parameter requires a gradient.
    """
    groups: dict[float, dict[str, Any]] = {}
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        decay = 0.0 if weight_decay is None or parameter.ndim < 2 else weight_decay
        group = groups.setdefault(decay, {"params": []} | ({} if weight_decay is None else {"weight_decay": decay}))
        group["params"].append(parameter)
    if not groups:
        raise RecipeError("no parameter of the model requires a gradient; there is nothing to train")
    return list(groups.values())
