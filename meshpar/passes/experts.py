"""ExpertParallel: each rank of an axis holds whole experts, and tokens travel to the experts that they chose and back.

Expert parallelism of GShard (arXiv 2006.16668, section 3) without a capacity: the ranks send one another as many rows as were chosen
(arXiv 2211.15841), so that nothing is dropped and the result is that of one process.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshpar._torch import eager
from meshpar.errors import ParallelError
from meshpar.layout import ModelLayout
from meshpar.mesh import MeshSpec, sizes_text
from meshpar.passes.applied import applied
from meshpar.passes.base import Pass, Role, Stage, unmatched
from meshpar.passes.installed import set_forward
from meshpar.passes.local import local, part_of
from meshpar.passes.tensor.collectives import _all_to_all
from meshpar.passes.tensor.parts import with_own
from meshpar.patterns import find_modules

Inner = Callable[[Tensor, Tensor, Tensor], Tensor]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParallel(Pass):
    """Divide whole experts over ``ep``, whose ranks get different samples; each token travels to the ranks that hold its experts.

    Everything that is no expert is sharded over ``dp_shard`` and ``ep`` together, the experts of a rank over ``dp_shard`` alone. No token
    is dropped. ``tp`` then splits the features of each expert.

    >>> from meshpar import ExpertParallel, FullyShard, Plan
    >>> print(Plan("dp_shard=2,ep=4", [ExpertParallel(), FullyShard()]))
    dp_shard=2,ep=4 [ExpertParallel -> FullyShard]
    """

    name = "ExpertParallel"
    stage = Stage.EXPERTS
    roles = MappingProxyType({"ep": Role.SAMPLES})

    def problems(self, module: nn.Module, layout: ModelLayout, mesh: MeshSpec) -> Iterator[str]:
        if "ep" in layout.refusals:
            yield layout.refusals["ep"]
        elif not layout.experts:
            yield (
                f"ExpertParallel has nothing to divide: the layout of {type(module).__name__} names no experts; give "
                "ModelLayout(experts=('layers.*.moe.experts',)), or drop ExpertParallel and ep from the mesh"
            )
        size = mesh.axes["ep"]
        for pattern in layout.experts:
            found = list(find_modules(module, pattern))
            if not found:
                yield unmatched(f"layout experts {pattern!r}", pattern, module)
            for name, child in found:
                counts = {leaf: len(each) if each.ndim else 0 for leaf, each in child.named_parameters(recurse=False)}
                if name.endswith(".base_layer"):
                    yield f"{name.rpartition('.')[0]} puts adapters on experts, which ExpertParallel does not divide; use a mesh without ep"
                elif len(set(counts.values())) != 1:
                    held = ", ".join(f"{leaf} {tuple(getattr(child, leaf).shape)}" for leaf in counts) or "no parameter"
                    yield f"{name} must hold parameters whose first dim counts its experts, got {held}; take it out of ModelLayout.experts"
                elif (count := next(iter(counts.values()))) % size:
                    yield f"{name} has {count} experts, which ep={size} does not divide; {sizes_text('ep', count)}"

    def warnings(self, module: nn.Module, layout: ModelLayout, mesh: MeshSpec) -> Iterator[str]:
        if mesh.spans_nodes("ep"):
            yield (
                f"axis 'ep' (size {mesh.axes['ep']}) spans nodes of {mesh.ranks_per_node} ranks: every layer of experts then sends its "
                "tokens between nodes four times a step; keep ep x tp within a node, and use dp_shard across nodes"
            )

    def shards(self, module: nn.Module, layout: ModelLayout) -> set[str]:
        found = [pair for pattern in layout.experts for pair in find_modules(module, pattern)]
        return {f"{name}.{leaf}" for name, child in found for leaf, _ in child.named_parameters(recurse=False)}

    def apply(self, module: nn.Module, layout: ModelLayout, mesh: DeviceMesh) -> None:
        axis, names = mesh["ep"], mesh.mesh_dim_names or ()
        if axis.size() == 1:
            return
        inside = mesh[names[names.index("ep") :]]
        placements = [Shard(0), *[Replicate()] * (inside.ndim - 1)]
        placed: dict[int, nn.Parameter] = {}
        for child in dict.fromkeys(each for pattern in layout.experts for _, each in find_modules(module, pattern)):
            for leaf, parameter in child.named_parameters(recurse=False):
                if id(parameter) not in placed:
                    mine = parameter.detach().chunk(axis.size())[axis.get_local_rank()]
                    placed[id(parameter)] = part_of(parameter, mine.clone(), inside, placements)
                child._parameters[leaf] = placed[id(parameter)]
            _install(child, axis.get_group())
            applied(module).divided[child] = mesh


def _install(module: nn.Module, group: Any) -> None:
    """Let a module of experts compute with those of this rank, on the rows of all ranks that chose them."""
    inner = module.forward
    bind, count = inspect.signature(inner).bind, len(next(module.parameters(recurse=False)))
    numbers = {name: count // group.size() for name, value in vars(module).items() if "experts" in name and value == count}

    @eager
    def forward(*args: Any, **kwargs: Any) -> Any:
        own = {leaf: local(each) if isinstance(each, DTensor) else each for leaf, each in module._parameters.items() if each is not None}
        if len(next(iter(own.values()))) == count:  # all of them, in a test against the unsplit module
            return with_own(module, own, lambda: inner(*args, **kwargs))
        own = {leaf: _Mean.apply(each, group.size()) for leaf, each in own.items()}
        bound = bind(*args, **kwargs)
        first, *rest = bound.arguments
        index = next(key for key in rest if not bound.arguments[key].is_floating_point())
        weight = next(key for key in rest if bound.arguments[key].is_floating_point())

        def run(rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            bound.arguments |= {first: rows, index: chosen, weight: weights}
            return with_own(module, own, lambda: inner(*bound.args, **bound.kwargs), numbers)

        return by_experts(run, bound.arguments[first], bound.arguments[index], bound.arguments[weight], count, group)

    set_forward(module, forward, reads_parameters=True)


def by_experts(run: Inner, hidden: Tensor, chosen: Tensor, weights: Tensor, count: int, group: Any) -> Tensor:
    """Compute each token by the experts that it chose, which the ranks of ``group`` hold in consecutive equal parts.

    The host waits for the device once: the ranks' counts decide how many rows arrive.

    Args:
        run: computes (R, D) rows by this rank's experts, numbered from 0: (R, 1) int64, with weights (R, 1). Returns (R, D).
        hidden: this rank's tokens, (..., D).
        chosen: each token's experts, (..., K) int64 below ``count``.
        weights: their weights, (..., K).
        count: experts of all ranks.
        group: process group of the axis.

    Returns:
        Each token's sum over its experts, (..., D).

    Raises:
        ParallelError: weights of another shape than the chosen experts.

    Collective: every rank of ``group`` calls it, also one without tokens.
    """
    if weights.shape != chosen.shape:
        raise ParallelError(
            f"experts got weights {tuple(weights.shape)} for chosen experts {tuple(chosen.shape)}, expected one weight for each; "
            "use a mesh without ep for this model"
        )
    x, slots = hidden.reshape(-1, hidden.shape[-1]), chosen.shape[-1]
    expert = chosen.reshape(-1)
    order = expert.argsort(stable=True)
    sent, received, numbers = _routed(expert, count, group)
    rows, scales = x.index_select(0, order // slots), weights.reshape(-1, 1).index_select(0, order)
    if rows.dtype == scales.dtype:  # one exchange instead of two
        rows, scales = _Exchange.apply(torch.cat([rows, scales], 1), received, sent, group).split([x.shape[1], 1], 1)
    else:
        rows, scales = (_Exchange.apply(each, received, sent, group) for each in (rows, scales))
    arrived = len(rows)
    if not arrived:  # one row of zeros, so that the same modules run and the same collectives follow in backward
        rows, scales, numbers = F.pad(rows, (0, 0, 0, 1)), F.pad(scales, (0, 0, 0, 1)), numbers.new_zeros(1)
    computed = run(rows, numbers[:, None], scales)[:arrived]
    back = _Exchange.apply(computed, sent, received, group)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return back.index_select(0, places).view(-1, slots, back.shape[-1]).sum(1).view(*hidden.shape[:-1], back.shape[-1])


def _routed(expert: Tensor, count: int, group: Any) -> tuple[list[int], list[int], Tensor]:
    """Return how many rows go to each rank, how many come from each, and by which of this rank's experts each that comes is computed."""
    size, held = group.size(), count // group.size()
    mine = torch.zeros(count, dtype=torch.int64, device=expert.device).index_add_(0, expert, torch.ones_like(expert))
    theirs = _all_to_all(mine, [held] * size, [held] * size, group)
    if dist.get_backend(group) == "fake":  # simulated ranks, which route equally
        total, me = len(expert), group.rank()
        sent = [total * (rank + 1) // size - total * rank // size for rank in range(size)]
        rows = sent[me] * size
        return sent, [sent[me]] * size, torch.arange(rows, device=expert.device) * held // max(1, rows)
    sent, received = torch.stack([mine, theirs]).view(2, size, held).sum(2).tolist()
    numbers = torch.arange(held, device=expert.device).repeat(size)
    return sent, received, numbers.repeat_interleave(theirs, output_size=sum(received))


class _Exchange(torch.autograd.Function):
    """Rows to the ranks, in the order of ranks; their gradients come back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return _all_to_all(x.contiguous(), received, sent, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.apply(grads[0], ctx.sent, ctx.received, ctx.group), None, None, None


class _Mean(torch.autograd.Function):
    """A weight that saw the tokens of ``size`` ranks: its gradient is their sum, of which data ranks want the mean, as of every other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        ctx.size = size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / ctx.size, None
