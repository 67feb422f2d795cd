"""A test of an optimizer's rule: whether the step of one parameter is the same whether others are stepped or not."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any, cast

import torch
from torch import Tensor, nn

from meshpar.core.errors import MeshparError, brief

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
