"""The tensor-parallel styles' protocol, and the context that the styles of one application share."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshpar._torch.autograd import in_backward
from meshpar._torch.in_parts import in_parts, parts_of
from meshpar.core.errors import ParallelError, PlanError
from meshpar.exchange.ranks import Looks, same
from meshpar.passes.tensor.collectives import copy_to, gather_partial, reduce_from, reduce_scatter
from meshpar.passes.tensor.random import SplitState
from meshpar.step.inner_calls import set_forward

SEQUENCE_DIM = 1
"""Activations are (batch, sequence, features)."""


@final
class Arrivals:
    """Check that the ranks of an axis reach the same modules: on a CPU each time if ``always``, else at first."""

    def __init__(self, *, always: bool) -> None:
        self._looks = Looks(always=always)

    def agree(self, name: str, x: Tensor, group: dist.ProcessGroup) -> None:
        """Check that every rank of ``group`` comes to ``name`` now, with a tensor of the shape of ``x``."""
        if not self._looks.now(name, x.device):
            return
        (together,) = same(torch.tensor([zlib.crc32(f"{name} {tuple(x.shape)}".encode())], device=x.device), [group])
        if not together:
            raise ParallelError(
                f"ranks of the tensor axis run different modules at a time, this one {name}: under sequence_parallel "
                "each sees its own positions, and a branch or a router in between decides by them; give the module "
                "around it the style 'region', which sees all positions, or use "
                "TensorParallel(sequence_parallel=False)"
            )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The context that all styles of one application share."""

    mesh: DeviceMesh
    group: dist.ProcessGroup
    # what collectives of split features take: the group, or a PartsGroup of it
    features: Any
    rank: int
    root: nn.Module
    sequence_parallel: bool
    loss_parallel: bool
    # None where nothing is drawn
    random: SplitState | None
    inputs: tuple[str, ...]
    # None where nothing is looked at
    arrivals: Arrivals | None = None
    # id of a parameter before or after -> both, so that tied ones stay tied
    placed: dict[int, tuple[weakref.ref[nn.Parameter], weakref.ref[nn.Parameter]]] = field(default_factory=dict)
    regions: dict[str, Style] = field(default_factory=dict)
    styles: dict[str, Style] = field(default_factory=dict)
    # at whose end random state is shared again
    joining: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)

    @property
    def size(self) -> int:
        """How many ranks the axis has."""
        return self.mesh.size()

    @property
    def parts(self) -> int:
        """In how many parts features are computed."""
        return self.features.size()  # type: ignore[no-any-return]

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of the parts that this rank computes."""
        count = self.parts // self.group.size()
        return range(self.rank * count, (self.rank + 1) * count)

    def of_each_part(self, run: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Return ``run(number, *parts)`` of each part that this rank computes, by its number among all."""
        return in_parts([run(*part) for part in zip(self.numbers, *map(parts_of, tensors))])

    def part(self, module: nn.Module, x: Tensor) -> None:
        """Tell that what ``module`` computes of ``x`` from here on is split over the axis."""
        if self.random is not None and module.training:
            self.random.part(x.device, *self.numbers)

    def join(self) -> None:
        """Tell that activations are replicated from here on."""
        if self.random is not None:
            self.random.join()

    def sum_of(self, module: nn.Module, x: Tensor, run: Callable[[], Tensor]) -> Tensor:
        """Return the sum over the axis of ``run()``, by which ``module`` computes its part from ``x``."""
        self.part(module, x)
        try:
            output = run()
        finally:  # a recomputation may stop inside
            self.join()
        return self.leave(output)

    def join_after(self, name: str) -> None:
        """Count activations as replicated after the region of ``name``, or the module around it, also on errors."""
        region = self.region_of(name)
        around = name.rpartition(".")[0] if region is None else region
        module: Any = self.root.get_submodule(around)
        if self.random is None or module in self.joining:
            return
        self.joining.add(module)
        inner = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                return inner(*args, **kwargs)
            finally:
                self.join()

        set_forward(module, forward)

    def arrive(self, name: str, x: Tensor) -> None:
        """Check that all ranks of the axis come to the module ``name``; under sequence parallelism each may branch."""
        if not (self.sequence_parallel and self.arrivals is not None) or torch.compiler.is_compiling() or in_backward():
            return
        self.arrivals.agree(name, x, self.group)

    def region_of(self, name: str) -> str | None:
        """Return the name of the innermost region around the module called ``name``."""
        parts = name.split(".")
        return next((outer for n in range(len(parts), 0, -1) if (outer := ".".join(parts[:n])) in self.regions), None)

    def enter(self, x: Tensor) -> Tensor:
        """Bring hidden states from between the regions to a computation that is split over the axis."""
        group = self.features
        return gather_partial(x, SEQUENCE_DIM, group) if self.sequence_parallel else copy_to(x, group)

    def leave(self, x: Tensor) -> Tensor:
        """Bring the axis's partial sums back to hidden states between the regions."""
        group = self.features
        if not self.sequence_parallel:
            return reduce_from(x, group)
        self.positions_each(x.shape[SEQUENCE_DIM])
        return reduce_scatter(x, SEQUENCE_DIM, group)

    def positions_each(self, length: int) -> int:
        """Return how many of a sequence's positions each rank has between the regions."""
        if length % self.parts:
            size = f"tp={self.size}" if self.features is self.group else f"parts={self.parts}"
            raise PlanError(
                f"sequence length {length} is not divided by {size}, over which sequence parallelism "
                "splits it; pad the batch to a multiple, or use TensorParallel(sequence_parallel=False)"
            )
        return length // self.size


class Style:
    """Define how one kind of module is split: inherit this class, override defaults, and define ``install``.

    Attributes:
        splits: each rank holds a part of the module's own parameters.
        is_region: each rank computes a part inside of the module, between one preparation of its input and one
            reduction.
        sums_gradients: ranks use parameters whole on their part of heads or features, so that gradients are summed over
            the axis.
        splits_logits: the output may stay split over the vocabulary for the loss.
        splits_positions: the module, an embedding, can return this rank's positions of the sequence.
        stands_alone: input and output are not split, so the module can be tested by itself.
        computes_in_parts: the module also computes in the equal parts of ``TensorParallel(parts=...)``.
        local_inputs: keyword names of a region's inputs that hold this rank's heads already.
    """

    __slots__ = ()

    splits: bool = False
    is_region: bool = False
    sums_gradients: bool = False
    splits_logits: bool = False
    splits_positions: bool = False
    stands_alone: bool = False
    computes_in_parts: bool = False
    local_inputs: tuple[str, ...] = ()

    def problems(self, name: str, module: nn.Module, size: int) -> Iterator[str]:
        """Yield why ``module`` cannot be split over ``size`` ranks. Pure."""
        return iter(())

    def split_dims(self, module: nn.Module) -> Mapping[str, int]:
        """Return the parameters of the module's own that are split, and along which dim; others are whole."""
        return {}

    def shard(self, name: str, module: nn.Module, context: Context) -> None:
        """Change what ``split_dims`` cannot say, such as attributes that count heads."""

    def install(self, name: str, module: nn.Module, context: Context) -> None:
        """Make the module compute with its shards."""
        raise NotImplementedError
