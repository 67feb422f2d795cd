"""The record that the passes of one plan leave on the outermost module, for those that run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshpar.core.errors import MeshparError
from meshpar.core.layout import ModelLayout
from meshpar.core.passes import unmatched
from meshpar.core.patterns import covers
from meshpar.passes.data.replica_shards import ReplicaShards
from meshpar.passes.data.whole_parameters import WholeParameters
from meshpar.passes.experts.routing import Routing
from meshpar.passes.pipeline.running import Layers
from meshpar.passes.tensor.context import Context


@final
@dataclass(slots=True, kw_only=True)
class Applied:
    """The record of one outermost module.

    Attributes:
        layout: the description that the plan used.
        split: what the styles that split features share.
        divided: modules whose own parameters an axis of samples divides -> the mesh, which has that axis apart from the
            data axes.
        routing: what decides how many rows go to which experts.
        whole: the parameters that data ranks keep whole.
        replica_shards: what the ranks of a replica keep of parameters that all data ranks split.
        layers: the layers that this rank computes, where other ranks compute the others.
        elsewhere: tensors that other ranks have, by all their names -> their shapes without memory.
        outermost: called at the end of ``Plan.apply``, to wrap the module's call outside of the guards; stages do.
        recomputed: the blocks whose forward runs once more in backward.
        keeps_gathered: forwards leave weights gathered.
        selective: a recomputation uses results that the forward kept, which torch lets one backward do.
    """

    layout: ModelLayout | None = None
    split: Context | None = None
    divided: dict[nn.Module, DeviceMesh] = field(default_factory=dict)
    routing: Routing = field(default_factory=Routing)
    whole: WholeParameters | None = None
    replica_shards: ReplicaShards | None = None
    layers: Layers | None = None
    elsewhere: dict[str, Tensor] = field(default_factory=dict)
    outermost: list[Callable[[], None]] = field(default_factory=list)
    recomputed: list[nn.Module] = field(default_factory=list)
    keeps_gathered: bool = False
    selective: bool = False

    def __reduce__(self) -> tuple[type[Applied], tuple[()]]:
        return Applied, ()

    @property
    def gathers_once(self) -> bool:
        """The micro-batches of a step share gathered weights: those of a stage, whose forwards and backwards
        alternate, where forwards leave weights gathered.
        """
        return self.keeps_gathered and self.layers is not None and self.replica_shards is None


def all_parameters(module: nn.Module) -> list[Tensor]:
    """Return all parameters of the model, once each: this rank's, and the shapes of those of other ranks."""
    others = [tensor for tensor in applied(module).elsewhere.values() if isinstance(tensor, nn.Parameter)]
    return [*module.parameters(), *{id(tensor): tensor for tensor in others}.values()]


def first_covering(patterns: Sequence[str], module: nn.Module, what: str) -> dict[int, str]:
    """Return by ``id`` of a parameter the first of ``patterns`` that covers one of its names.

    Raises:
        MeshparError: one covers no parameter of the model, also none of other ranks; ``what`` it is.
    """
    found = dict[int, str]()
    every = [*module.named_parameters(remove_duplicate=False), *applied(module).elsewhere.items()]
    for pattern in reversed(patterns):
        fitting = {id(tensor): pattern for name, tensor in every if covers(pattern, name)}
        if not fitting:
            raise MeshparError(unmatched(f"{what} {pattern!r}", pattern, module))
        found |= fitting
    return found


def applied(module: nn.Module) -> Applied:
    """Return the record of ``module``, an empty one where no plan was applied."""
    return module.__dict__.setdefault("_meshpar_applied", Applied())
