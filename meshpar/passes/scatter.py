"""How a rank gets its part of the ranks' sums: on a CPU by an all-to-all and a sum, which takes half the time of gloo's
reduce-scatter, because that is an all-reduce and sends twice the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshpar._torch.fsdp import units_with_parameters
from meshpar._torch.groups import reduce_scatter
from meshpar.core import runtime


class Allocates:
    """How FSDP2 gets the memory of a collective."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


@final
class _Exchange(Allocates):
    """The reduce-scatter of a unit on a CPU."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        scatter_sums([output_tensor], [input_tensor], op, group, exchanges=True)


def scatter_as_on(module: nn.Module, device_type: str) -> None:
    """Let the units of a module reduce their gradients as on devices of this type: FSDP2's own way on an
    accelerator.
    """
    if runtime.queues(device_type):
        return
    comm: Any = _Exchange()  # FSDP2 names the classes of its collectives in private modules alone
    for unit in units_with_parameters(module):
        unit.set_custom_reduce_scatter(comm)


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
