"""A test of an optimizer's rule: whether the step of whole tensors is that of their parts, each by an optimizer of its
own, which makes it exact on shards.
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
        before, name = _trained(make, None, steps=0)
        whole, *parts = (_trained(make, part)[0] for part in (None, 0, 1))
    except Exception as error:
        raise MeshparError(
            f"the optimizer {name} cannot be tried on a few numbers ({type(error).__name__}: {brief(error)}), "
            "which shows whether its step on shards is exact; use another, such as torch.optim.AdamW"
        ) from error
    for start, one, *other in zip(before, whole, *parts, strict=True):
        if not float((one - torch.cat(other)).abs().max()) <= _TOLERANCE * float((one - start).abs().max()):
            raise MeshparError(
                f"the step of {name} on a whole tensor differs from its step on two parts of the tensor: an element "
                "depends on others, or on random numbers, so training would depend on the mesh; use a rule for each "
                "element alone, torch.optim.Adafactor, or meshpar.optim (class: muon, small_adamw)"
            )


def _trained(
    make: Callable[[nn.Module], torch.optim.Optimizer], part: int | None, *, steps: int = _STEPS
) -> tuple[list[Tensor], str]:
    """Return tensors, or the first or second part of each, after some steps of an optimizer that has no others, and the
    name of the optimizer.
    """
    draw = torch.Generator().manual_seed(0)

    def drawn() -> list[Tensor]:
        whole = [torch.randn(shape, generator=draw) for shape in _SHAPES]
        return whole if part is None else [value.tensor_split([cut])[part].clone() for value, cut in zip(whole, _CUTS)]

    module = nn.ParameterList(nn.Parameter(value) for value in drawn())
    optimizer = make(module)
    if isinstance(optimizer, HasModes):
        optimizer.train()
    for _ in range(steps):
        for parameter, grad in zip(module, drawn(), strict=True):
            parameter.grad = grad
        optimizer.step()
    return [parameter.detach() for parameter in module], type(optimizer).__name__
