"""FSDP2's shards on CPUs travel by all-to-alls: gloo's reduce-scatter is an all-reduce, which sends twice the bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshpar._torch.fsdp import units_with_parameters
from meshpar._torch.groups import all_gather, reduce_scatter
from meshpar.core import runtime
from meshpar.core.errors import MeshparError

_SWAPPED = 8 << 20
"""Bytes up to which a swap is the quicker sum: 0.91 of gloo's time at 8 MiB, 1.53 at 32 (benchmarks/exchanges.py)."""


class Allocates:
    """How FSDP2 gets the memory of a collective."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


@final
class _Gather(Allocates):
    """The all-gather of a unit's shards, of which FSDP2 has put this rank's into the output."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        gather = swap_shards if group.size() == 2 else all_gather
        return gather(output_tensor, input_tensor, group, async_op)


@final
class _Scatter(Allocates):
    """The reduce-scatter of a unit's gradients."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        scatter_sums([output_tensor], [input_tensor], op, group, exchanges=True)


def exchange_directly(module: nn.Module) -> None:
    """Let the units of a module, whose ranks compute on CPUs, exchange their shards by all-to-alls."""
    gather: Any = _Gather()  # FSDP2 names the classes of its collectives in private modules alone
    scatter: Any = _Scatter()
    for unit in units_with_parameters(module):
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(scatter)


def swaps(x: Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether two ranks on CPUs sum ``x`` by a swap and an addition; a large one costs less by gloo's ring."""
    return group.size() == 2 and runtime.over_hosts(x.device) and x.nbytes <= _SWAPPED


def to_the_other(length: int, group: dist.ProcessGroup) -> list[int]:
    """Return the sizes of an all-to-all in which two ranks swap ``length`` rows."""
    return [0, length] if group.rank() == 0 else [length, 0]


def swap_shards(output: Tensor, shard: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> dist.Work | None:
    """Fill the other half of an output whose own half is this rank's shard, for two ranks."""
    sizes = to_the_other(len(shard), group)
    return dist.all_to_all_single(output.chunk(2)[1 - group.rank()], shard, sizes, sizes, group, async_op)


def gather_shards(outputs: Sequence[Tensor], shards: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """All-gather several tensors at once."""
    pairs = list(zip(outputs, shards))
    if group.size() != 2:
        wait_all(all_gather(output, shard, group, async_op=True) for output, shard in pairs)
        return
    for output, shard in pairs:
        output.chunk(2)[group.rank()].copy_(shard)
    wait_all(swap_shards(output, shard, group, async_op=True) for output, shard in pairs)


def scatter_sums(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: Any, group: dist.ProcessGroup, *, exchanges: bool
) -> None:
    """Reduce-scatter (SUM or AVG) each ``inputs``, contiguous, into ``outputs``; ``exchanges``: by all-to-alls."""
    if exchanges and op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise MeshparError(
            f"ranks on CPUs cannot reduce gradients by {op}, which FSDP2 uses after set_gradient_divide_factor; call "
            "set_force_sum_reduction_for_comms(True) on the same modules"
        )
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
