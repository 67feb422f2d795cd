"""Modules that compute with this rank's part of their parameters: what the tensor-parallel styles are made of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from meshpar.mesh import divisors
from meshpar.passes.collectives import copy_to
from meshpar.passes.context import Context


def set_forward(module: Any, forward: Callable[..., Any]) -> None:
    """Let ``module`` compute by ``forward``, which keeps the signature of the one before."""
    module.forward = functools.update_wrapper(forward, module.forward)


def is_transposed(module: nn.Module) -> bool:
    """Tell GPT-2's Conv1D, whose weight is (in, out), from a linear layer, whose weight is (out, in)."""
    return type(module).__name__ == "Conv1D"


def features_of(module: nn.Module) -> tuple[int, int] | None:
    """Return (input features, output features) of a linear layer, None for anything else."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not (isinstance(module, nn.Linear) or is_transposed(module)):
        return None
    rows, columns = weight.shape
    return (rows, columns) if is_transposed(module) else (columns, rows)


def empty_problems(name: str, what: str, count: int, size: int) -> Iterator[str]:
    """Yield a split that leaves ranks with nothing; one that leaves the last rank less is exact."""
    if -(-count // size) * (size - 1) >= count:
        yield f"{name} has {count} {what}, which tp={size} splits so that some ranks would hold none; tp in {divisors(count) or 1} would do"


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def set_product(module: nn.Linear, product: Product) -> None:
    """Let a linear layer multiply by ``(x, weight, bias) -> y``, also where tensor parallelism has given it another forward."""
    module._meshpar_product = product  # type: ignore[assignment]
    if type(module).forward is nn.Linear.forward and "forward" not in module.__dict__:
        set_forward(module, lambda x: product(x, module.weight, module.bias))


def linear(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a layer with another weight and bias than its own."""
    product = module.__dict__.get("_meshpar_product")
    if product is not None:
        return product(x, weight, bias)
    return F.linear(x, weight.t() if is_transposed(module) else weight, bias)


def local(parameter: Any) -> Any:
    """Return this rank's part of a parameter, as autograd knows it; None stays None."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def strides(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of ``shape``."""
    return torch.empty(shape, device="meta").stride()


def shard_parameter(module: nn.Module, name: str, dim: int, context: Context) -> None:
    """Replace a parameter by a DTensor split along ``dim``; one that was replaced already, under another name, stays the same."""
    parameter = module._parameters.get(name)
    if parameter is None:
        return
    taken = context.sharded.get(id(parameter))
    if taken is None:
        part = parameter.detach().chunk(context.mesh.size(), dim)[context.mesh.get_local_rank()]
        whole = DTensor.from_local(
            part.clone(memory_format=torch.contiguous_format),
            context.mesh,
            [Shard(dim)],
            run_check=False,
            shape=parameter.shape,
            stride=strides(parameter.shape),
        )
        taken = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        taken.__dict__.update(parameter.__dict__)
        context.sharded[id(parameter)] = context.sharded[id(taken)] = taken
    module._parameters[name] = taken


def sum_gradients(module: nn.Module, context: Context) -> None:
    """Let the module's own parameters be seen through ``copy_to``, so that their partial gradients are summed inside autograd.

    A hook on the parameter would sum what earlier micro-batches accumulated once more.
    """
    inner, group = module.forward, context.mesh.get_group()

    def forward(*args: Any, **kwargs: Any) -> Any:
        own = {name: value for name, value in module._parameters.items() if value is not None}
        try:
            for name, value in own.items():
                module._parameters[name] = copy_to(value, group)  # type: ignore[assignment]
            return inner(*args, **kwargs)
        finally:
            module._parameters.update(own)

    set_forward(module, forward)
