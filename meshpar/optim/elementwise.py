"""Whether an optimizer's step of whole tensors is that of their parts, which makes it exact on shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from meshpar.core import runtime
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
def use_evaluation_values(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Give the parameters an optimizer's values for evaluation inside of the ``with`` block; most have no others."""
    if not isinstance(optimizer, HasModes):
        yield
        return
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()


def check_elementwise(make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    """Raise MeshparError if an optimizer that ``make`` returns does not step shards as it steps whole tensors."""
    before, name = _draw(torch.Generator().manual_seed(0)), ""
    try:
        name = type(make(nn.ParameterList(map(nn.Parameter, before)))).__name__
        whole, *parts = (_train(make, partial(_part, number)) for number in (None, 0, 1))
        differs = any(
            not float((result - torch.cat(halves)).abs().max()) <= _TOLERANCE * float((result - start).abs().max())
            for start, result, *halves in zip(before, whole, *parts, strict=True)
        )
        if not differs:
            with nullcontext() if dist.is_initialized() else runtime.simulated(1):
                mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("trial",))
                _train(make, lambda _, value: DTensor.from_local(value, mesh, [Shard(0)]))
    except Exception as error:
        raise MeshparError(
            f"the optimizer {name} cannot be tried on a few numbers, whole and as shards ({brief(error)}), which shows "
            "whether its step on shards is exact; use another, such as torch.optim.AdamW"
        ) from error
    if differs:
        raise MeshparError(
            f"the step of {name} on a whole tensor differs from its step on two parts of the tensor: an element "
            "depends on others, or on random numbers, so training would depend on the mesh; use a rule for each "
            "element alone, torch.optim.Adafactor, or meshpar.optim (class: muon, small_adamw)"
        )


def _draw(draw: torch.Generator) -> list[Tensor]:
    return [torch.randn(shape, generator=draw) for shape in _SHAPES]


def _part(number: int | None, cut: int, value: Tensor) -> Tensor:
    return value if number is None else value.tensor_split([cut])[number].clone()


def _train(make: Callable[[nn.Module], torch.optim.Optimizer], placed: Callable[[int, Tensor], Tensor]) -> list[Tensor]:
    """Return tensors, as ``placed`` makes them of a place to cut and a value, after some steps of an optimizer."""
    draw = torch.Generator().manual_seed(0)
    module = nn.ParameterList(nn.Parameter(value) for value in map(placed, _CUTS, _draw(draw)))
    optimizer = make(module)
    if isinstance(optimizer, HasModes):
        optimizer.train()
    for _ in range(_STEPS):
        for parameter, grad in zip(module, map(placed, _CUTS, _draw(draw)), strict=True):
            parameter.grad = grad
        optimizer.step()
    return [parameter.detach() for parameter in module]
