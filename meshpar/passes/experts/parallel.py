"""ExpertParallel: ranks hold whole experts and exchange tokens (GShard, arXiv 2006.16668, 3), without a capacity."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from meshpar._torch.calls import eager
from meshpar.core import runtime
from meshpar.core.layout import ModelLayout
from meshpar.core.mesh import MeshSpec, sizes_text
from meshpar.core.passes import Installed, Pass, Role, Stage, unmatched
from meshpar.core.patterns import find_modules
from meshpar.passes.data.whole_parameters import part_of
from meshpar.passes.experts.routing import (
    IN_ORDER,
    INTERFACE,
    Chosen,
    DividedModules,
    InOrder,
    Routing,
    average_gradient,
    by_all_ranks,
    calling,
    counted_by,
)
from meshpar.passes.tensor.parts import local_parameters, with_own
from meshpar.step.inner_calls import set_forward


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParallel(Pass):
    """Divide whole experts over ``ep``, whose ranks get different samples; each token is sent to the ranks of its
    experts.

    All other parameters are sharded over ``dp_shard`` and ``ep`` together, the experts of a rank over ``dp_shard``
    alone. No token is dropped. ``tp`` then splits the features of each expert.

    Attributes:
        skew: rows of the busiest rank of ``ep`` relative to equal routing. The forecast assumes them for this rank;
            training ignores the value.

    >>> from meshpar import ExpertParallel, FullyShard, Plan
    >>> print(Plan("dp_shard=2,ep=4", [ExpertParallel(), FullyShard()]))
    dp_shard=2,ep=4 [ExpertParallel -> FullyShard]
    """

    name = "ExpertParallel"
    stage = Stage.EXPERTS
    roles = MappingProxyType({"ep": Role.SAMPLES})

    skew: float = 1.0

    def problems(self, module: nn.Module, layout: ModelLayout, mesh: MeshSpec) -> Iterator[str]:
        if layout.experts.refusal:
            yield layout.experts.refusal
        elif not layout.experts.modules:
            yield (
                f"ExpertParallel has nothing to divide: the layout of {type(module).__name__} names no experts; give "
                "ModelLayout(experts=('layers.*.moe.experts',)), or drop ExpertParallel and ep from the mesh"
            )
        size, owners = mesh.axes["ep"], dict[nn.Parameter, list[str]]()
        if not 1 <= self.skew <= size:
            yield (
                f"ExpertParallel(skew={self.skew}) is expected to be from 1, equal routing, to ep={size}, all rows to "
                "one rank; change it"
            )
        for name, child in module.named_modules():
            for leaf, parameter in child.named_parameters(recurse=False, remove_duplicate=False):
                owners.setdefault(parameter, []).append(f"{name}.{leaf}")
        divided, tied = self.shards(module, layout), [names for names in owners.values() if len(names) > 1]
        for names in (group for group in tied if not divided.isdisjoint(group)):
            yield (
                f"{' and '.join(names)} are one parameter, which ExpertParallel would divide separately for each "
                "module; use one experts module for both layers, untie them, or use a mesh without ep"
            )
        for pattern in layout.experts.modules:
            matched = list(find_modules(module, pattern))
            if not matched:
                yield unmatched(f"layout experts {pattern!r}", pattern, module)
            for name, child in matched:
                counts = {
                    leaf: len(parameter) if parameter.ndim else 0
                    for leaf, parameter in child.named_parameters(recurse=False)
                }
                if isinstance(child, nn.ModuleList):
                    yield (
                        f"{name} is a list of {len(child)} modules, expected one module with their parameters "
                        f"stacked, and {INTERFACE} into its forward; stack them, or use a mesh without ep"
                    )
                elif len(set(counts.values())) != 1:
                    got = ", ".join(f"{leaf} {tuple(getattr(child, leaf).shape)}" for leaf in counts) or "no parameter"
                    yield (
                        f"{name} must hold parameters whose first dim counts its experts, got {got}; take it out of "
                        "ModelLayout.experts"
                    )
                else:
                    count = next(iter(counts.values()))
                    if count % size:
                        yield f"{name} has {count} experts, which ep={size} does not divide; {sizes_text('ep', count)}"
                    yield from _undivided_problems(name, child, count, calling(name, layout) is InOrder)

    def warnings(self, module: nn.Module, layout: ModelLayout, mesh: MeshSpec) -> Iterator[str]:
        if mesh.spans_nodes("ep"):
            yield (
                f"axis 'ep' (size {mesh.axes['ep']}) spans nodes of {mesh.ranks_per_node} ranks: every layer of "
                "experts then sends its tokens between nodes four times a step; keep ep x tp within a node, and use "
                "dp_shard across nodes"
            )

    def shards(self, module: nn.Module, layout: ModelLayout) -> set[str]:
        matched = [pair for pattern in layout.experts.modules for pair in find_modules(module, pattern)]
        return {f"{name}.{leaf}" for name, child in matched for leaf, _ in child.named_parameters(recurse=False)}

    def apply(self, module: nn.Module, layout: ModelLayout, mesh: DeviceMesh) -> Installed | None:
        axis, axes = mesh["ep"], mesh.mesh_dim_names or ()
        if axis.size() == 1:
            return None
        submesh, routing = mesh[axes[axes.index("ep") :]], runtime.standing_in(Routing(self.skew))
        placements = [Shard(0), *[Replicate()] * (submesh.ndim - 1)]
        parts: dict[nn.Parameter, nn.Parameter] = {}
        names = {child: name for pattern in layout.experts.modules for name, child in find_modules(module, pattern)}
        for child, name in names.items():
            for leaf, parameter in child.named_parameters(recurse=False):
                if parameter not in parts:
                    part = parameter.detach().chunk(axis.size())[axis.get_local_rank()]
                    parts[parameter] = part_of(parameter, part.clone(), submesh, placements)
                child._parameters[leaf] = parts[parameter]
            _install(calling(name, layout)(name, child, routing), axis.get_group())
        return Installed(facts=[routing, DividedModules(dict.fromkeys(names, mesh))])


def _undivided_problems(name: str, module: nn.Module, count: int, in_order: bool) -> Iterator[str]:
    """Yield what a module of ``count`` experts has beside its own parameters that a rank would have to divide, too."""
    remedy = "make it a parameter of the module's own, or use a mesh without ep"
    of_children = [(leaf, parameter) for leaf, parameter in module.named_parameters() if "." in leaf]
    for leaf, tensor in [*module.named_buffers(), *of_children]:
        if tensor.ndim and len(tensor) == count:
            kind = "parameter of a child module" if isinstance(tensor, nn.Parameter) else "buffer"
            yield (
                f"{name}.{leaf} {tuple(tensor.shape)} is a {kind} whose first dim counts experts, and it would stay "
                f"whole; {remedy}"
            )
    if len(numbers := counted_by(module, count)) > 1:
        yield (
            f"{name} stores its number of experts as {' and as '.join(numbers)}, expected one attribute, such as "
            "num_experts; keep one"
        )
    arguments = list(inspect.signature(module.forward).parameters.values())
    fits = len(arguments) in (1, 2) if in_order else len(arguments) > 2
    if not fits or any(argument.kind == argument.VAR_POSITIONAL for argument in arguments):
        got, want = ", ".join(map(str, arguments)), IN_ORDER if in_order else INTERFACE
        remedy = "take it out of ModelLayout.experts, or use a mesh without ep"
        yield f"{name} has forward({got}), expected {want}; {remedy}"


def _install(call: Chosen, group: Any) -> None:
    """Let a module of experts compute with those of this rank, on the rows of all ranks that chose them."""
    module = call.module

    @eager
    def forward(*args: Any, **kwargs: Any) -> Any:
        parts = local_parameters(module)
        if len(next(iter(parts.values()))) == call.count:  # all of them, in a test against the unsplit module
            return with_own(module, parts, lambda: call.inner(*args, **kwargs))
        bound, hidden, chosen, weights = call.read(*args, **kwargs)
        parts = {leaf: average_gradient(parameter, group.size()) for leaf, parameter in parts.items()}
        return by_all_ranks(partial(call.compute, bound, parts), call, call.count, group)(hidden, chosen, weights)

    set_forward(module, forward, reads_parameters=True)
