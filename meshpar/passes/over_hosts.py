"""How FSDP2's shards travel between ranks on CPUs: by all-to-alls, which send straight to the rank that needs a part.

Gloo's reduce-scatter is an all-reduce and sends twice the bytes; its all-gather copies this rank's part, too, and two
ranks that swap theirs take half the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshpar._torch.fsdp import units_with_parameters
from meshpar._torch.groups import all_gather, reduce_scatter
from meshpar.core import runtime


class Allocates:
    """How FSDP2 gets the memory of a collective."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


@final
class _Swap(Allocates):
    """The all-gather of a unit's shards, of which FSDP2 has put this rank's into the output."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if group.size() != 2:
            return all_gather(output_tensor, input_tensor, group, async_op)
        other = output_tensor.chunk(2)[1 - group.rank()]
        sizes = to_the_other(len(input_tensor), group)
        return dist.all_to_all_single(other, input_tensor, sizes, sizes, group, async_op)


@final
class _Scatter(Allocates):
    """The reduce-scatter of a unit's gradients."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        scatter_sums([output_tensor], [input_tensor], op, group, exchanges=True)


def exchange_directly(module: nn.Module) -> None:
    """Let the units of a module, whose ranks compute on CPUs, exchange their shards by all-to-alls."""
    gather: Any = _Swap()  # FSDP2 names the classes of its collectives in private modules alone
    scatter: Any = _Scatter()
    for unit in units_with_parameters(module):
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(scatter)


def swaps(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Tell whether two ranks on CPUs are all that exchange tensors of a device."""
    return group.size() == 2 and runtime.over_hosts(device)


def to_the_other(length: int, group: dist.ProcessGroup) -> list[int]:
    """Return the sizes of an all-to-all in which two ranks swap ``length`` rows."""
    return [0, length] if group.rank() == 0 else [length, 0]


def scatter_sums(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: Any, group: dist.ProcessGroup, *, exchanges: bool
) -> None:
    """Reduce-scatter several tensors at once: each output gets this rank's part of the sum, or average, of the ranks'
    inputs.

    Args:
        outputs: contiguous tensors of n elements.
        inputs: as many, contiguous, of ranks x n elements.
        op: ``ReduceOp.SUM`` or ``AVG``.
        group: the ranks.
        exchanges: use all-to-alls and sums.
    """
    if not exchanges:
        wait_all(reduce_scatter(output, source, op, group, async_op=True) for output, source in zip(outputs, inputs))
        return
    received = [torch.empty_like(source) for source in inputs]
    wait_all(dist.all_to_all_single(got, source, group=group, async_op=True) for got, source in zip(received, inputs))
    for output, got in zip(outputs, received):
        torch.sum(got.view(group.size(), -1), 0, out=output)
        if op == dist.ReduceOp.AVG:
            output /= group.size()


def wait_all(works: Iterable[dist.Work | None]) -> None:
    """Start collectives, then wait for them all."""
    for work in list(works):
        if work is not None:
            work.wait()
