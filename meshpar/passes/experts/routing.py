"""How a module of experts is called, and the way of tokens to the ranks of their experts, and back."""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshpar.core.errors import ParallelError
from meshpar.core.layout import ModelLayout
from meshpar.core.patterns import class_name, matches
from meshpar.passes.host_reads import begin_read, beside
from meshpar.passes.tensor.collectives import _all_to_all, _view, link
from meshpar.passes.tensor.parts import with_own
from meshpar.step.inner_calls import own_forward

Inner = Callable[[Tensor, Tensor, Tensor], Tensor]
INTERFACE = "(hidden states (N, D), chosen experts (N, K) of an integer dtype, their weights (N, K))"


@final
@dataclass(frozen=True, slots=True)
class DividedModules:
    """A fact: modules whose own parameters an axis of samples divides -> the mesh of these, which has that axis."""

    meshes: Mapping[nn.Module, DeviceMesh]


@dataclass(frozen=True, slots=True)
class Routing:
    """Decide by values of tensors how many rows go where; ``skew`` is for simulated ranks."""

    skew: float = 1.0

    def filled(self, rows: Tensor, count: int) -> Tensor:
        """Return which of the rows (R, D) for ``count`` experts are not zeros."""
        return begin_read(lambda: lambda: rows.ne(0).any(1).nonzero()[:, 0])()

    def sizes(self, numbers: Tensor, experts: int) -> list[int]:
        """Return how many of the rows, whose experts ``numbers`` (R,) says, go to each of ``experts``."""
        sizes: list[int] = begin_read(lambda: lambda: torch.bincount(numbers, minlength=experts).tolist())()
        return sizes

    def exchanged(self, counts: Tensor, rows: int, rank: int) -> tuple[list[int], list[int], list[int]]:
        """Return the rows sent to each rank, those received from each, and each rank's choices that are no expert."""
        # (2, ranks, experts of a rank + 1), on the host; the last column counts choices of no expert
        sent, received = counts[:, :, :-1].sum(2).tolist()
        return sent, received, counts[1, :, -1].tolist()

    def simulated(self) -> Routing:
        """Return what decides where ranks are simulated, whose tensors have no values."""
        return Assumed(self.skew)


@final
class Assumed(Routing):
    """As many rows for the busiest rank, which this one is, as its skew says; the others' share the rest equally."""

    __slots__ = ()

    def filled(self, rows: Tensor, count: int) -> Tensor:
        """Return as many rows as one expert would have."""
        return torch.arange(len(rows) // count, device=rows.device)

    def sizes(self, numbers: Tensor, experts: int) -> list[int]:
        """Return equal numbers of rows."""
        return _divide_rows(len(numbers), experts)

    def exchanged(self, counts: Tensor, rows: int, rank: int) -> tuple[list[int], list[int], list[int]]:
        """Return what the skew says, and no choice that is no expert."""
        size = counts.shape[1]
        busiest = round(rows * self.skew / size)
        sent = _divide_rows(rows - busiest, size - 1)
        sent.insert(rank, busiest)
        return sent, [busiest] * size, []


def _divide_rows(rows: int, parts: int) -> list[int]:
    """Return numbers of rows that differ by at most one."""
    return [rows * (number + 1) // parts - rows * number // parts for number in range(parts)]


def by_experts(
    run: Inner, hidden: Tensor, chosen: Tensor, weights: Tensor, count: int, group: Any, routing: Routing
) -> Tensor:
    """Return for each of this rank's tokens (..., D) the sum over its experts, which ``group`` holds. Collective."""
    # The host waits once, for the exchange of counts on a stream of its own. ``run`` computes (R, D) rows by this
    # rank's experts, numbered from 0: (R, 1) int64, with weights (R, 1). All raise if one chose no expert.
    x, expert = hidden.reshape(-1, hidden.shape[-1]), chosen.reshape(-1).long()
    refuse_shapes(hidden, chosen, weights)
    slots = chosen.shape[-1]
    counted = begin_read(partial(_begin_count, expert, count, group))
    order = expert.argsort(stable=True)  # meanwhile
    rows, scales = x.index_select(0, order // slots), weights.reshape(-1, 1).index_select(0, order)
    joined = torch.cat([rows, scales], 1) if rows.dtype == scales.dtype else None
    counts = counted()
    sent, received, outside = routing.exchanged(counts, len(expert), group.rank())
    if any(outside):
        ranks = ", ".join(str(rank) for rank, beyond in enumerate(outside) if beyond)
        raise ParallelError(
            f"{sum(outside)} chosen experts of rank(s) {ranks} of ep are no experts, expected numbers from 0 to "
            f"{count - 1}; choose expert 0 with weight 0 for a slot that is dropped, or use a mesh without ep"
        )
    repeats = counts[1, :, :-1].flatten().to(expert.device, non_blocking=True)
    numbers = torch.arange(count // group.size(), device=expert.device).repeat(group.size())
    numbers = numbers.repeat_interleave(repeats, output_size=sum(received))
    if joined is not None:  # one exchange instead of two
        rows, scales = _send(joined, received, sent, group).split([x.shape[1], 1], 1)
    else:
        rows, scales = (_send(tensor, received, sent, group) for tensor in (rows, scales))
    arrived = len(rows)
    # one row, so that the same modules run and the same collectives follow in backward; no zeros, which may divide
    # something
    if not arrived:
        ramp = torch.linspace(-1, 1, x.shape[1], device=x.device, dtype=rows.dtype)[None]
        rows, scales, numbers = torch.cat([rows, ramp]), F.pad(scales, (0, 0, 0, 1), value=1.0), numbers.new_zeros(1)
    computed = run(rows, numbers[:, None], scales)[:arrived]
    back = _send(computed, sent, received, group)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    # The sum comes last: a view cannot be changed in place behind an FSDP2 unit.
    return back.index_select(0, places).view(*hidden.shape[:-1], slots, back.shape[-1]).sum(-2)


def refuse_shapes(hidden: Tensor, chosen: Tensor, weights: Tensor) -> None:
    """Refuse other shapes than each token's chosen experts and their weights."""
    if (
        weights.shape != chosen.shape
        or chosen.ndim < 2
        or chosen.numel() != hidden.numel() // hidden.shape[-1] * chosen.shape[-1]
    ):
        raise ParallelError(
            f"experts got chosen experts {tuple(chosen.shape)} and weights {tuple(weights.shape)} for hidden states "
            f"{tuple(hidden.shape)}, expected {INTERFACE}; use a mesh without ep for this model"
        )


def _begin_count(expert: Tensor, count: int, group: Any) -> Callable[[], Tensor]:
    """Start to exchange how many rows chose each expert, or no expert; return a function that waits for the counts."""
    size, columns = group.size(), count // group.size() + 1
    with beside(expert.device) as to_host:
        exists = (expert >= 0) & (expert < count)
        chosen = torch.zeros(count, dtype=torch.int64, device=expert.device)
        chosen.index_add_(0, expert.clamp(0, count - 1), exists.long())
        sent = torch.cat([chosen.view(size, columns - 1), (~exists).sum().expand(size, 1)], 1)
        received = _all_to_all(sent.flatten(), [columns] * size, [columns] * size, group).view(size, columns)
        return to_host(torch.stack([sent, received]))


def _send(x: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
    """Send rows to the ranks, in their order; gradients come back the same way."""
    return link(x, _all_to_all, _send_back, received, sent, group)


def _send_back(grad: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
    return _send(grad, sent, received, group)


def average_gradient(x: Tensor, size: int) -> Tensor:
    """Return a weight that sees the tokens of ``size`` ranks: its gradient is their mean, as that of data ranks."""
    return link(x, _view, _divide, size)


def _divide(grad: Tensor, size: int) -> Tensor:
    return grad / size


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
