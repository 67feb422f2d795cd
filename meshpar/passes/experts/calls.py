"""How a module of experts is called: on rows that chose from its experts, all of them or those of one rank."""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from meshpar.core.errors import ParallelError
from meshpar.core.layout import ModelLayout
from meshpar.core.patterns import class_name, matches
from meshpar.passes.experts.routing import INTERFACE, Inner, Routing, by_experts
from meshpar.passes.tensor.parts import with_own
from meshpar.step.calls import own_forward

IN_ORDER = "(rows (R, D) in the order of experts) or (such rows, the number of each expert's)"

_COUNTS = re.compile(r"_?(moe_)?(n|num)_(local_|routed_|total_)?experts")


def counted_by(module: nn.Module, count: int) -> list[str]:
    """Return the attributes by which a module counts its experts."""
    numbers = {name: value for name, value in vars(module).items() if type(value) is int and value == count}
    return [name for name in numbers if _COUNTS.fullmatch(name)]


class Chosen:
    """How a module of experts is called: with hidden states, chosen experts and weights."""

    dense = False

    def __init__(self, name: str, module: nn.Module, routing: Routing) -> None:
        self.name, self.module, self.inner, self.routing = name, module, module.forward, routing
        self.count = len(next(module.parameters(recurse=False)))
        self.names, self._signature = counted_by(module, self.count), inspect.signature(module.forward)

    def on(self, module: nn.Module) -> Chosen:
        """Return how a copy of the module is called, with the forward of its author."""
        call = copy.copy(self)
        call.module, call.inner = module, own_forward(module) or functools.partial(type(module).forward, module)
        return call

    def read(self, *args: Any, **kwargs: Any) -> tuple[inspect.BoundArguments, Tensor, Tensor, Tensor]:
        """Return the call with its hidden states, chosen experts and weights."""
        bound = self._signature.bind(*args, **kwargs)
        hidden, chosen, weights = (bound.arguments[key] for key in _inputs(self.name, self.module, bound.arguments))
        return bound, hidden, chosen, weights

    def compute(self, bound: inspect.BoundArguments, own: Mapping[str, Tensor], *inputs: Tensor) -> Tensor:
        """Return what experts with the parameters ``own`` make of such inputs, chosen from theirs."""
        bound.arguments.update(zip(_inputs(self.name, self.module, bound.arguments), inputs))
        return self.called(bound, own, inputs[0])

    def called(self, bound: inspect.BoundArguments, own: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        """Call the module with other parameters; see that it returns a row for each of ``hidden``."""
        counts = dict.fromkeys(self.names, len(next(iter(own.values()))))
        output = with_own(self.module, own, lambda: self.inner(*bound.args, **bound.kwargs), counts)
        if isinstance(output, Tensor) and output.shape[:-1] == hidden.shape[:-1]:
            return output
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ParallelError(
            f"{self.name} ({class_name(self.module)}) returned {got}, expected one tensor (N, D) for hidden states "
            f"{tuple(hidden.shape)}; return what else it computes from the module around it, or use a mesh without ep"
        )


@final
class InOrder(Chosen):
    """How experts are called with rows in their order, and with each expert's number of rows, or equally many."""

    def __init__(self, name: str, module: nn.Module, routing: Routing) -> None:
        super().__init__(name, module, routing)
        self.dense = len(self._signature.parameters) == 1

    def read(self, *args: Any, **kwargs: Any) -> tuple[inspect.BoundArguments, Tensor, Tensor, Tensor]:
        bound = self._signature.bind(*args, **kwargs)
        rows, chosen = rows_in_order(bound.arguments, self.count)
        return bound, rows, chosen[:, None], rows.new_ones(len(rows), 1)

    def compute(self, bound: inspect.BoundArguments, own: Mapping[str, Tensor], *inputs: Tensor) -> Tensor:
        rows, chosen, weights = inputs
        experts, order = len(next(iter(own.values()))), chosen[:, 0].argsort(stable=True)
        sizes = self.routing.sizes(chosen[:, 0], experts)
        ordered, numbers = rows[order], torch.arange(len(rows), device=rows.device)
        places = numbers
        if self.dense:  # as many rows for each as for the one with most
            places = torch.cat([numbers[:size] + number * max(sizes) for number, size in enumerate(sizes)])
            ordered = rows.new_zeros(experts * max(sizes), rows.shape[-1]).index_copy(0, places, ordered)
        last: Any = list(bound.arguments.values())[-1]
        counts: Any = sizes
        if isinstance(last, Tensor) and not self.dense:
            counts = torch.tensor(sizes, dtype=last.dtype, device=last.device)
        bound.arguments.update(zip(list(bound.arguments), (ordered, counts)))
        output = self.called(bound, own, ordered)[places]
        return output[torch.empty_like(order).scatter_(0, order, numbers)] * weights


def calling(name: str, layout: ModelLayout) -> type[Chosen]:
    """Return how the module of experts of this name is called."""
    return InOrder if any(matches(pattern, name) for pattern in layout.experts.in_order) else Chosen


def rows_in_order(arguments: Mapping[Any, Any], count: int) -> tuple[Tensor, Tensor]:
    """Return the rows (R, D) of a call of ``count`` experts with rows in their order, and each row's expert (R,)."""
    rows, *sizes = arguments.values()
    numbers = torch.arange(count, device=rows.device)
    if not sizes:
        return rows, numbers.repeat_interleave(len(rows) // count, output_size=len(rows))
    return rows, numbers.repeat_interleave(torch.as_tensor(sizes[0], device=rows.device), output_size=len(rows))


def by_all_ranks(compute: Inner, call: Chosen, count: int, group: Any) -> Inner:
    """Return ``compute`` by this rank's experts, for rows that chose from the ``count`` experts of all ranks."""

    def divided(rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return by_experts(compute, rows, chosen, weights, count, group, call.routing)

    def filled(rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Send no rows of zeros, which give zeros."""
        some = call.routing.filled(rows, call.count)
        computed = divided(rows[some], chosen[some], weights[some])
        return computed.new_zeros(len(rows), computed.shape[-1]).index_copy(0, some, computed)

    return filled if call.dense else divided


def _inputs(name: str, module: nn.Module, arguments: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return under which names a call got hidden states, chosen experts and weights."""
    tensors = {key: value for key, value in arguments.items() if isinstance(value, Tensor)}
    floats = [key for key, tensor in tensors.items() if tensor.is_floating_point()]
    numbers = [key for key, tensor in tensors.items() if not tensor.is_floating_point() and tensor.dtype != torch.bool]
    if len(tensors) == 3 and len(floats) == 2 and len(numbers) == 1 and floats[0] == next(iter(arguments)):
        return floats[0], numbers[0], floats[1]
    got = ", ".join(
        f"{key} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for key, tensor in tensors.items()
    )
    raise ParallelError(
        f"{name} ({class_name(module)}) got the tensors ({got}), expected {INTERFACE} and no other tensor, which "
        "would not travel with its tokens; compute with others outside of the module, or use a mesh without ep"
    )
