"""What the tensor-parallel styles of one application share, and their protocol."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, final, runtime_checkable

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshpar.errors import PlanError
from meshpar.passes.collectives import copy_to, gather_partial, reduce_from, reduce_scatter

if TYPE_CHECKING:
    from meshpar.passes.styles import Region

SEQUENCE_DIM = 1
"""Activations are (batch, sequence, features)."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What every style of one application shares.

    Attributes:
        mesh: the tensor axis, 1-D.
        sequence_parallel: activations between regions are split along the sequence.
        loss_parallel: the head leaves its logits split over the vocabulary.
        dropout: random state must follow the axis.
        inputs: keyword names under which a region may receive its hidden states.
        sharded: id of a parameter as it was -> the DTensor parameter that took its place, so that tied ones stay tied.
        regions: name -> the region that a module stands in.
    """

    mesh: DeviceMesh
    sequence_parallel: bool
    loss_parallel: bool
    dropout: bool
    inputs: tuple[str, ...]
    sharded: dict[int, nn.Parameter] = field(default_factory=dict)
    regions: dict[str, Region] = field(default_factory=dict)

    def region_of(self, name: str) -> Region | None:
        """Return the innermost region around the module called ``name``."""
        parts = name.split(".")
        return next((self.regions[outer] for n in range(len(parts), 0, -1) if (outer := ".".join(parts[:n])) in self.regions), None)

    def enter(self, x: Tensor) -> Tensor:
        """Bring hidden states from between the regions to a computation that is split over the axis."""
        group = self.mesh.get_group()
        return gather_partial(x, SEQUENCE_DIM, group) if self.sequence_parallel else copy_to(x, group)

    def leave(self, x: Tensor) -> Tensor:
        """Bring the axis's partial sums back to hidden states between the regions.

        Raises:
            PlanError: under sequence parallelism, a sequence length that the axis does not divide.
        """
        group = self.mesh.get_group()
        if not self.sequence_parallel:
            return reduce_from(x, group)
        if x.shape[SEQUENCE_DIM] % group.size():
            raise PlanError(
                [
                    f"sequence length {x.shape[SEQUENCE_DIM]} is not divided by tp={group.size()}, over which sequence parallelism "
                    "splits it; pad the batch to a multiple, or use TensorParallel(sequence_parallel=False)"
                ]
            )
        return reduce_scatter(x, SEQUENCE_DIM, group)


@runtime_checkable
class Style(Protocol):
    """How one kind of module is split. A layout may bring its own."""

    def problems(self, name: str, module: nn.Module, size: int) -> Iterator[str]:
        """Yield why ``module`` cannot be split over ``size`` ranks; pure."""

    def shard(self, name: str, module: nn.Module, context: Context) -> None:
        """Replace the parameters that are split by DTensors on ``context.mesh``."""

    def install(self, name: str, module: nn.Module, context: Context) -> None:
        """Make the module compute with its shards."""
