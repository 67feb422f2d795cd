"""Gather the weights of units and reduce their gradients where FSDP2's own collectives do not serve.

On CPUs shards travel by all-to-alls: gloo's reduce-scatter is an all-reduce, which sends twice the bytes. Over replicas
in two hops: slices are gathered over replicas once a step, shards inside a replica; gradients go back the same way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from meshpar._torch.calls import assert_async
from meshpar._torch.fsdp import (
    gathered_bytes,
    gathered_inputs,
    is_gathered,
    make_ready,
    reduce_replicas_by,
    units_with_parameters,
)
from meshpar._torch.groups import all_gather, collective_ops, reduce_scatter, share_timeout
from meshpar.core import runtime
from meshpar.core.errors import MeshparError
from meshpar.same_bits.trees import sum_over, to_the_other, tree_sum

_SWAPPED = 8 << 20
"""Bytes up to which a swap is the quicker sum: 0.91 of gloo's time at 8 MiB, 1.53 at 32 (benchmarks/exchanges.py)."""


class Allocates:
    """How FSDP2 gets the memory of a collective."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


@final
class _DirectGather(Allocates):
    """The all-gather of a unit's shards, of which FSDP2 has put this rank's into the output."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        gather = swap_shards if group.size() == 2 else all_gather
        return gather(output_tensor, input_tensor, group, async_op)


@final
class _DirectReduceScatter(Allocates):
    """The reduce-scatter of a unit's gradients; ``by_tree``: a sum in the order of a tree over ranks."""

    def __init__(self, *, by_tree: bool) -> None:
        self._by_tree = by_tree

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        scatter_sums([output_tensor], [input_tensor], op, group, exchanges=True, by_tree=self._by_tree)


@final
class _ReplicaSums(Allocates):
    """The reduce-scatter of one rank, which FSDP2 does by a copy before replicas reduce: a copy into the same memory.

    With memory of its own a step of ``Replicate`` took 1.07 of DistributedDataParallel's, and takes 1.05 with this.
    """

    def __init__(self) -> None:
        self._source: Tensor | None = None  # which FSDP2 asks for first

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        # every second call is for the sum, and gets the memory of the source
        memory, self._source = self._source, None
        if memory is None or (*memory.shape, memory.dtype) != (*size, dtype):
            memory = self._source = super().allocate(size, dtype=dtype, device=device)
        return memory

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: object, op: Any, async_op: bool = False
    ) -> None:
        output_tensor.copy_(input_tensor)


def sum_in_place(module: nn.Module) -> None:
    """Let the units of a module, which no axis shards, hand replicas their gradients without a copy."""
    sums: Any = _ReplicaSums()  # FSDP2 names the classes of its collectives in private modules alone
    for unit in units_with_parameters(module):
        unit.set_custom_reduce_scatter(sums)


def exchange_directly(module: nn.Module, device_type: str, *, by_tree: bool) -> None:
    """Let the units of a module exchange by all-to-alls: shards on CPUs, gradients there or ``by_tree``, undivided."""
    gather: Any = _DirectGather()  # FSDP2 names the classes of its collectives in private modules alone
    scatter: Any = _DirectReduceScatter(by_tree=by_tree)
    for unit in units_with_parameters(module):
        if runtime.over_hosts(device_type):
            unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(scatter)
        if by_tree:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)


def sum_replicas_by_tree(module: nn.Module, replicas: dist.ProcessGroup) -> None:
    """Let the units of a module sum gradients, not average them, over ``replicas`` in the order of a tree."""
    ranks: Any = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    for unit in units_with_parameters(module):
        unit.set_force_sum_reduction_for_comms(True)
        reduce_replicas_by(unit, ranks, lambda sums: sum_over(sums, replicas, in_place=True))


def swaps(x: Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether two ranks on CPUs sum ``x`` by a swap and an addition; a large one costs less by gloo's ring."""
    return group.size() == 2 and runtime.over_hosts(x.device) and x.nbytes <= _SWAPPED


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
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    op: Any,
    group: dist.ProcessGroup,
    *,
    exchanges: bool,
    by_tree: bool = False,
) -> None:
    """Reduce-scatter (SUM or AVG) each ``inputs``, contiguous, into ``outputs``; ``exchanges``: by all-to-alls."""
    exchanges = exchanges or by_tree
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
    add_up: Any = tree_sum if by_tree else partial(torch.sum, dim=0)
    for output, got in zip(outputs, received):
        add_up(got.view(group.size(), -1), out=output)
        if op == dist.ReduceOp.AVG:
            output /= group.size()


def wait_all(works: Iterable[dist.Work | None]) -> None:
    """Start collectives, then wait for them all."""
    for work in list(works):
        if work is not None:
            work.wait()


# units whose slices are gathered before they are needed, on an accelerator; on a CPU they have a group of their own,
# and all are
_AHEAD = 2
# exchanges of one unit that are under way at once, because a link between replicas stands still between one exchange
# and the next
_PARTS = 4
_WRITTEN = (
    "a parameter was written between the micro-batches of one step, which share their weights; write before the first "
    "of them, or after the optimizer's step"
)


@final
class _TwoHopGather(Allocates):
    """The all-gather of one unit: over replicas into the shard that this rank keeps, then over the replica's shards."""

    def __init__(
        self, unit: FSDPModule, replicas: dist.ProcessGroup, shards: dist.ProcessGroup, *, in_parts: bool
    ) -> None:
        self._unit, self._replicas, self._shards, self.in_parts = unit, replicas, shards, in_parts
        self._shard: Tensor | None = None
        # the shard has the values of the slices
        self.fresh = False
        # the gather of a later unit, whose hop over replicas runs while this unit computes
        self.following: _TwoHopGather | None = None

    def begin(self) -> None:
        """Start the hop over replicas, which the next gather waits for, unless the shard is up to date."""
        if not self.fresh and not is_gathered(self._unit):
            self._over_replicas(self._slices())

    def unwritten(self) -> Tensor:
        """Return whether this rank's part of the shard equals its slices, a bool of no dimensions."""
        in_shard = collective_ops.wait_tensor(self.shard()).chunk(self._replicas.size())[self._replicas.rank()]
        return (self._slices().view(torch.uint8) == in_shard.view(torch.uint8)).all()

    def shard(self) -> Tensor:
        """Return the shard; one that was never gathered has memory and no values."""
        return self._shard if self._shard is not None else self._memory(self._slices())

    def _slices(self) -> Tensor:
        return torch.cat(gathered_inputs(self._unit))

    def _memory(self, slices: Tensor) -> Tensor:
        size = self._replicas.size() * slices.numel()
        if self._shard is None or (self._shard.dtype, self._shard.numel()) != (slices.dtype, size):
            self._shard = slices.new_empty(size)
        return self._shard

    def _over_replicas(self, slices: Tensor) -> None:
        count = self._replicas.size()
        memory = collective_ops.wait_tensor(self._memory(slices))
        part = memory.chunk(count)[self._replicas.rank()]
        part.copy_(slices)
        collective_ops.all_gather_into_tensor_out(part, count, self._replicas.group_name, out=memory)
        self.fresh = True

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: object, async_op: bool = False) -> None:
        if not self.fresh:
            self._over_replicas(input_tensor)
        shard, count = collective_ops.wait_tensor(self.shard()), self._replicas.size()
        if self.following is not None:
            self.following.begin()
        if self.in_parts:
            gather_shards(output_tensor.chunk(count), shard.chunk(count), self._shards)
            return
        # One call and a copy cost an accelerator less than the launches of a call for each replica. They give
        # shard after shard, and FSDP2 reads the slices of one replica after those of another
        by_shard = torch.empty_like(output_tensor)
        all_gather(by_shard, shard, self._shards)
        by_replica = by_shard.view(self._shards.size(), count, -1).transpose(0, 1)
        output_tensor.view(count, self._shards.size(), -1).copy_(by_replica)


@final
class _Reduce(Allocates):
    """The reduce-scatter of a unit: over the replica's shards, then over replicas."""

    def __init__(
        self, replicas: dist.ProcessGroup, shards: dist.ProcessGroup, *, exchanges: bool, by_tree: bool
    ) -> None:
        self._replicas, self._shards, self.exchanges = replicas, shards, exchanges
        self._scatter = partial(scatter_sums, by_tree=by_tree)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: object, op: Any, async_op: bool = False
    ) -> None:
        count = self._replicas.size()
        sums = input_tensor.new_empty(count * output_tensor.numel())
        outputs, inputs = [output_tensor], [sums]
        if not self.exchanges:
            by_shard = input_tensor.view(count, self._shards.size(), -1).transpose(0, 1).reshape(-1)
            self._scatter([sums], [by_shard], op, self._shards, exchanges=False)
        else:
            chunks = list(sums.chunk(count)), list(input_tensor.chunk(count))
            self._scatter(*chunks, op, self._shards, exchanges=True)
            parts = max(1, min(_PARTS, output_tensor.numel()))
            outputs = list(output_tensor.tensor_split(parts))
            inputs = [part.contiguous() for part in sums.view(count, -1).tensor_split(parts, dim=1)]
        again = op if op == dist.ReduceOp.AVG else dist.ReduceOp.SUM
        self._scatter(outputs, inputs, again, self._replicas, exchanges=self.exchanges)


def _slices_group(axis: str, group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return another group of the same ranks, for slices alone, where collectives wait for earlier ones (gloo)."""
    # What ranks compare before each unit would wait for the slices of later units, and those for the comparison.
    if dist.get_backend(group) != dist.Backend.GLOO:
        return group
    ranks = dist.get_process_group_ranks(group)
    slices: Any = dist.new_group(ranks, use_local_synchronization=True, group_desc=f"{axis} slices")
    share_timeout([slices])
    return slices


@final
class ReplicaShards:
    """The shards that the ranks of a replica keep of parameters that are split over all data ranks.

    Rank (r, s) stores and trains slice (r, s) of a unit. One hop gathers the slices (0..R, s) over replicas into a
    shard in the computing dtype, once in each forward, or in the first of those that accumulate gradients. The other
    gathers the shards, and is each of FSDP2's all-gathers: the secondary partition of ZeRO++ (arXiv 2306.10209).
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        divided: Mapping[nn.Module, DeviceMesh],
        replicas: str,
        shards: str,
        *,
        by_tree: bool,
    ) -> None:
        self._module, self._replicas = module, mesh[replicas].size()
        self._gathers, alone = list[_TwoHopGather](), runtime.over_hosts(mesh.device_type)
        slices_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
        unit: Any  # FSDP2 names the classes of its collectives in private modules alone
        for unit in units_with_parameters(module):
            unit_mesh = divided.get(unit, mesh)
            axis = unit_mesh.get_group(replicas)
            if axis not in slices_groups:
                slices_groups[axis] = _slices_group(replicas, axis)
            groups = slices_groups[axis], unit_mesh.get_group(shards)
            self._gathers.append(_TwoHopGather(unit, *groups, in_parts=alone))
            unit.set_custom_all_gather(self._gathers[-1])
            unit.set_custom_reduce_scatter(_Reduce(*groups, exchanges=alone, by_tree=by_tree))
        self.groups = [(replicas, group) for axis, group in slices_groups.items() if group is not axis]
        self._ahead = len(self._gathers) if alone else _AHEAD
        for gather, following in itertools.zip_longest(self._gathers, self._gathers[self._ahead :]):
            gather.following = following

    def changed(self) -> None:
        """Forget the shards: slices may have other values."""
        for gather in self._gathers:
            gather.fresh = False

    def check_unwritten(self) -> None:
        """Refuse slices that are not what was gathered; on an accelerator the device ends by an assertion."""
        looked_at = [gather.unwritten() for gather in self._gathers if gather.fresh]
        if looked_at and not runtime.queues(looked_at[0].device) and not all(looked_at):
            raise MeshparError(_WRITTEN)
        for same in looked_at:
            assert_async(same, _WRITTEN)

    def begin(self) -> None:
        """Start to gather the first units' shards; each unit starts a later one's. Collective over replicas."""
        for gather in self._gathers[: self._ahead]:
            gather.begin()

    def tensors(self) -> list[Tensor]:
        """Return the shards of all units, of which those that were never gathered have no values yet."""
        make_ready(self._module)
        return [gather.shard() for gather in self._gathers]

    def held(self) -> list[Tensor]:
        """Return the shards that have memory: those of units that were gathered."""
        return [gather._shard for gather in self._gathers if gather._shard is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of the shards, also of a module on the meta device."""
        return sum(gathered_bytes(unit) for unit in units_with_parameters(self._module)) * self._replicas
