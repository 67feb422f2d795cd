"""A test of an optimizer's rule: whether the step of a whole tensor is the step of its parts, which makes it exact on
shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from meshpar.core.errors import MeshparError, brief

_SHAPES, _CUTS = ((64, 128), (4000,)), (37, 1300)  # small and large parts: some quantise tensors from 4,096 elements
_STEPS = 3
_TOLERANCE = 1e-5  # of the largest change: kernels round the ends of a vector in another way


@runtime_checkable
class HasModes(Protocol):
    """An optimizer whose parameters have other values in evaluation than in training, as those of schedulefree."""

    def train(self) -> Any: ...  # noqa: ANN401 - returned by nobody
    def eval(self) -> Any: ...  # noqa: ANN401


@contextmanager
def evaluated(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Give the parameters the values that an optimizer has for evaluation inside of the ``with`` block; most have no
    others.
    """
    if not isinstance(optimizer, HasModes):
        yield
        return
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()


def check_elementwise(make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    """Check on small tensors in this process that a step of whole tensors is the step of their parts.

    Args:
        make: returns the optimizer of a module's parameters.

    Raises:
        MeshparError: the steps differ, or the optimizer cannot be tried.
    """
    name = ""
    try:
        whole, parts = (nn.ParameterList(_drawn(torch.Generator().manual_seed(0), cut)) for cut in (False, True))
        before = [parameter.detach().clone() for parameter in whole]
        for module in (whole, parts):
            name = _train(make(module), module)
    except Exception as error:
        raise MeshparError(
            f"the optimizer {name or ''} cannot be tried on a few numbers ({type(error).__name__}: {brief(error)}), "
            "which shows whether its step on shards is exact; use another, such as torch.optim.AdamW"
        ) from error
    joined = [torch.cat([parts[2 * place].detach(), parts[2 * place + 1].detach()]) for place in range(len(_SHAPES))]
    for start, one, other in zip(before, (value.detach() for value in whole), joined, strict=True):
        if not float((one - other).abs().max()) <= _TOLERANCE * float((one - start).abs().max()):
            raise MeshparError(
                f"the step of {name} on a whole tensor differs from its step on two parts of the tensor: an element "
                "depends on others, or on random numbers, so training would depend on the mesh; use a rule for each "
                "element alone, torch.optim.Adafactor, or meshpar.optim (class: muon, small_adamw)"
            )


def _drawn(draw: torch.Generator, cut: bool) -> list[nn.Parameter]:
    found: list[Tensor] = []
    for shape, at in zip(_SHAPES, _CUTS, strict=True):
        value = torch.randn(shape, generator=draw)
        found += [value[:at].clone(), value[at:].clone()] if cut else [value]
    return [nn.Parameter(value) for value in found]


def _train(optimizer: torch.optim.Optimizer, module: nn.ParameterList) -> str:
    """Step with gradients that are the same for whole tensors and parts; return the name of the optimizer."""
    draw = torch.Generator().manual_seed(1)
    if isinstance(optimizer, HasModes):
        optimizer.train()
    for _ in range(_STEPS):
        grads = [torch.randn(shape, generator=draw) for shape in _SHAPES]
        if len(module) > len(grads):
            grads = [part for grad, at in zip(grads, _CUTS, strict=True) for part in (grad[:at], grad[at:])]
        for parameter, grad in zip(module, grads, strict=True):
            parameter.grad = grad.clone()
        optimizer.step()
    return type(optimizer).__name__
