"""PipelineParallel: each rank of an axis computes some of the layers, by the model's own forward."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshpar._torch.tensors import persistent_buffers
from meshpar.core import runtime
from meshpar.core.errors import MeshparError
from meshpar.core.layout import ModelLayout
from meshpar.core.mesh import MeshSpec
from meshpar.core.passes import Installed, Pass, Role, Stage
from meshpar.passes.pipeline import stand_ins
from meshpar.passes.pipeline.cuts import Anatomy, blocks_in_line, check_stages, even_cuts, examine
from meshpar.passes.pipeline.portion import Chunk, OtherLayers, Portion, Rule
from meshpar.passes.pipeline.running import Layers
from meshpar.passes.pipeline.schedule import SCHEDULES
from meshpar.passes.tensor.random import draws_random

_EXAMINED = WeakKeyDictionary[nn.Module, tuple[ModelLayout, Anatomy]]()
"""Modules that can be cut -> their layout and anatomy, which ``problems`` finds by a forward and ``apply`` takes."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineParallel(Pass):  # type: ignore[override]
    """Divide the layers over the ``pp`` axis: each rank runs the model's own forward with its blocks alone (arXiv
    1811.06965).

    Blocks of other ranks are stand-ins without parameters, at the same places, so that everything that the model does
    between its blocks stays its own. All ranks of ``pp`` get the same micro-batches, and train by
    ``par.backward(micro_batches, loss)``, which runs on any mesh.

    >>> from meshpar import FullyShard, PipelineParallel, Plan
    >>> print(Plan("pp=2,dp_shard=4", [PipelineParallel(), FullyShard()]))
    pp=2,dp_shard=4 [PipelineParallel -> FullyShard]

    Args:
        schedule: ``"1f1b"``, or ``"gpipe"``: all forwards, then all backwards.
        stages: number of blocks of each stage, such as ``(3, 5)``. By default the stage that computes for longest does
            so for as short as possible, embedding, head and loss included: one forward without values is counted by
            operators, as the forecast counts them, for sequences of 4,096 tokens.
        virtual: stages of a rank: rank r of p has the stages r, r + p, r + 2 p, ..., so that it waits less for others
            (interleaved 1F1B), and sends more.
    """

    schedule: str = "1f1b"
    stages: tuple[int, ...] | None = None
    virtual: int = 1

    name = "PipelineParallel"
    stage = Stage.LAYERS
    roles = MappingProxyType({"pp": Role.LAYERS})

    def problems(self, module: nn.Module, layout: ModelLayout, mesh: MeshSpec) -> Iterator[str]:
        ranks = mesh.axes["pp"]
        if self.schedule not in SCHEDULES:
            yield f"PipelineParallel(schedule={self.schedule!r}) is not known; use one of {', '.join(SCHEDULES)}"
        anatomy, problems = examine(module, layout) if ranks > 1 else (None, [])
        count = len(blocks_in_line(module, layout) if anatomy is None else anatomy.blocks)
        if self.virtual < 1:
            yield f"PipelineParallel(virtual={self.virtual}) must be a number of stages a rank, 1 or more"
            return
        if count < ranks:
            yield f"pp={ranks} has more stages than the model has blocks ({count}); use pp={max(count, 1)} or fewer"
            return
        if count < ranks * self.virtual:
            yield (
                f"PipelineParallel(virtual={self.virtual}) makes {ranks * self.virtual} stages of {count} blocks; use "
                f"virtual={count // ranks} or fewer"
            )
            return
        if self.stages is not None and (
            len(self.stages) != ranks * self.virtual or sum(self.stages) != count or min(self.stages, default=0) < 1
        ):
            yield (
                f"PipelineParallel(stages={self.stages}) must be {ranks * self.virtual} numbers of blocks that sum to "
                f"{count}; leave it out for an even cut"
            )
            return
        if anatomy is not None and not problems:
            problems = check_stages(module, layout, anatomy, self._firsts(anatomy, ranks * self.virtual))
            problems += _apart(module, anatomy, self._places(anatomy, ranks), ranks)
        for problem in problems:
            yield f"PipelineParallel cannot cut the model: {problem}"
        if anatomy is not None and not problems:
            _EXAMINED[module] = layout, anatomy

    def bits_problems(self, module: nn.Module, layout: ModelLayout, mesh: MeshSpec) -> Iterator[str]:
        ranks, (_, anatomy) = mesh.axes["pp"], _EXAMINED.get(module, (None, None))
        if ranks == 1 or anatomy is None:
            return
        # one process adds up the gradients of both uses of a sample before it adds up samples, and stages after
        places = self._places(anatomy, ranks)
        for name in anatomy.shared:
            if len(_ranks_with(anatomy, name, places, ranks)) > 1:
                yield (
                    f"{name} is used on several stages of pp={ranks}, which add up its gradients after their samples, "
                    "so that same_bits cannot hold; untie it, or use pp=1"
                )

    def apply(self, module: nn.Module, layout: ModelLayout, mesh: DeviceMesh) -> Installed | None:
        group, ranks, rank = mesh["pp"].get_group(), mesh["pp"].size(), mesh["pp"].get_local_rank()
        if ranks == 1:
            return None
        examined, anatomy = _EXAMINED.pop(module, (None, None))
        if anatomy is None or examined is not layout:
            anatomy, _ = examine(module, layout)
        assert anatomy is not None, "problems() has found it"
        bounds = [*self._firsts(anatomy, ranks * self.virtual), len(anatomy.blocks)]
        runtime.among_real_ranks(partial(_compare_cuts, group, anatomy.blocks, bounds))
        rank_of_block = self._places(anatomy, ranks)
        shared = {name: _ranks_with(anatomy, name, rank_of_block, ranks) for name in anatomy.shared}
        shared = {name: having for name, having in shared.items() if len(having) > 1}
        stages_here = range(rank, ranks * self.virtual, ranks)
        blocks_here = {name for stage in stages_here for name in anatomy.blocks[bounds[stage] : bounds[stage + 1]]}
        before = _state_of(module)
        carried, draws = stand_ins.Carried(), layout.dropout or draws_random(module)
        kept = {id(module.get_parameter(name)) for name, having in shared.items() if rank in having}
        outside = _outside(anatomy)
        for name in anatomy.blocks:
            if name not in blocks_here and name not in anatomy.reshaping:
                stand_ins.put(module, name, stand_ins.BlockStandIn(carried, module.get_submodule(name), name))
        away = [name for name, number in outside.items() if rank_of_block[number] != rank]
        away += [name for name in anatomy.blocks if name in anatomy.reshaping and name not in blocks_here]
        for name, old in [(name, module.get_submodule(name)) for name in away]:
            old.twin, old.written = (stand_ins.twin_of(old),), name in anatomy.written  # type: ignore[assignment]
            stand_ins.stand_in(stand_ins.HeadStandIn, old, kept, carried)
        for old in [module.get_submodule(name) for name in anatomy.idle]:
            if rank > 0:
                stand_ins.stand_in(stand_ins.IdleStandIn, old, kept, carried)
            else:
                old.register_forward_pre_hook(stand_ins.refuse_idle)
        for old in [module.get_submodule(name) for name in anatomy.tail if rank < ranks - 1]:
            stand_ins.stand_in(stand_ins.TailStandIn, old, kept, carried)
        carries = ((), *anatomy.carried, ())  # before the first block, behind each, and behind the last one
        chunks = tuple(
            Chunk(tuple(map(module.get_submodule, anatomy.blocks[first:end])), first, carries[first], carries[end])
            for first, end in ((bounds[stage], bounds[stage + 1]) for stage in stages_here)
        )
        portion = Portion(
            module=module,
            chunks=chunks,
            rules=_rules(module, anatomy, chunks, blocks_here, carried),
            group=group,
            rank=rank,
            ranks=ranks,
            carried=carried,
            line=anatomy.blocks,
            draws_random=draws,
        )
        placed = (*anatomy.blocks, *outside, *anatomy.tail, *anatomy.idle)
        common = [name for name in before if not any(name.startswith(f"{other}.") for other in placed)]
        buffers = [name for name in common if not isinstance(before[name], nn.Parameter)]
        layers = Layers(portion, self.schedule, shared, buffers)
        here = _state_of(module)
        elsewhere = OtherLayers(_shapes({name: one for name, one in before.items() if name not in here}))
        layers.edges.end_early()
        return Installed(facts=[layers, elsewhere], outermost=[layers.edges.install])

    def _places(self, anatomy: Anatomy, ranks: int) -> list[int]:
        """Return the rank of each block."""
        firsts = self._firsts(anatomy, ranks * self.virtual)
        return [(bisect_right(firsts, number) - 1) % ranks for number in range(len(anatomy.blocks))]

    def _firsts(self, anatomy: Anatomy, stages: int) -> list[int]:
        if self.stages is not None:
            return [sum(self.stages[:stage]) for stage in range(stages)]
        return even_cuts(anatomy.costs, stages)


def _rules(
    module: nn.Module, anatomy: Anatomy, chunks: Sequence[Chunk], mine: Collection[str], carried: stand_ins.Carried
) -> dict[str, Rule]:
    """Return the names of modules -> what their calls do on this rank, which has the blocks ``mine``."""
    rules = defaultdict[str, Rule](Rule)
    for name in mine:
        outer = name.split(".")[:-1]
        for end in range(1, len(outer) + 1):
            rules[".".join(outer[:end])].has_blocks = True
    for index, chunk in enumerate(chunks):
        if chunk.first:
            rules[anatomy.blocks[chunk.first - 1]].takes = index
        outside_blocks = [name for name, number in _outside(anatomy).items() if chunk.first <= number <= chunk.end]
        ends = anatomy.tail if chunk.end == len(anatomy.blocks) - 1 else ()
        for name in (*anatomy.blocks[chunk.first : chunk.end + 1], *outside_blocks, *ends) if len(chunks) > 1 else ():
            child = module.get_submodule(name)
            if name in anatomy.reshaping or name in outside_blocks:
                otherwise: nn.Module = stand_ins.standing_for(
                    carried, stand_ins.twin_of(child), name in anatomy.written
                )
            else:
                otherwise = stand_ins.TailStandIn() if name in ends else stand_ins.BlockStandIn(carried, child)
            rules[name].only, rules[name].otherwise = index, otherwise
    for result in dict.fromkeys(result for chunk in chunks for result in (*chunk.takes, *chunk.gives)):
        rules[result.module].results += (result,)
    for number, name in enumerate(anatomy.blocks):
        rules[name].number = number
    for name, child in module.named_modules():
        if isinstance(child, stand_ins.TailStandIn):
            rules[name].only, rules[name].otherwise = -1, child
    return dict(rules)


def _outside(anatomy: Anatomy) -> dict[str, int]:
    """Return the names of modules before and between blocks -> the number of the block behind them."""
    return {**dict.fromkeys(anatomy.head, 0), **anatomy.between}


def _compare_cuts(group: dist.ProcessGroup, blocks: Sequence[str], bounds: Sequence[int]) -> None:
    """Refuse stages that ranks begin with different blocks. Collective over the group."""
    cut, every = (list(blocks), list(bounds)), [None] * dist.get_world_size(group)
    dist.all_gather_object(every, cut, group=group)
    if (other := next((rank for rank, other_cut in enumerate(every) if other_cut != every[0]), None)) is not None:
        (first, first_bounds), (second, other_bounds) = every[0] or cut, every[other] or cut
        raise MeshparError(
            f"the ranks of pp cut the model differently: rank 0 cuts {len(first)} blocks at {first_bounds[:-1]}, and "
            f"rank {other} cuts {len(second)} at {other_bounds[:-1]}; build the same model with the same versions on "
            "all ranks, or set PipelineParallel(stages=...)"
        )


def _ranks_with(anatomy: Anatomy, name: str, at: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Return the ranks that have a parameter which several places use: one, the two ends, or all."""
    users = {at[number] for number in anatomy.shared[name]}
    return tuple(sorted(users)) if len(users) == 1 or users == {0, ranks - 1} else tuple(range(ranks))


def _apart(module: nn.Module, anatomy: Anatomy, at: Sequence[int], ranks: int) -> Iterator[str]:
    """Yield parameters of blocks that other stages have, too."""
    of = {id(parameter): name for name in anatomy.blocks for parameter in module.get_submodule(name).parameters()}
    for name in anatomy.shared:
        if (block := of.get(id(module.get_parameter(name)))) and len(_ranks_with(anatomy, name, at, ranks)) > 1:
            yield (
                f"a parameter of {block} ({name}) is tied to one of another stage; put both on one stage by "
                "PipelineParallel(stages=...)"
            )


def _state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a module by all of their names."""
    state: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    for prefix, child in module.named_modules():
        state |= {f"{prefix}.{name}" if prefix else name: buffer for name, buffer in persistent_buffers(child)}
    return state


def _shapes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the same tensors without memory, tied ones tied."""
    twins = dict[int, Tensor]()
    for tensor in tensors.values():
        twin = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        twins.setdefault(id(tensor), nn.Parameter(twin, tensor.requires_grad) if is_parameter else twin)
    return {name: twins[id(tensor)] for name, tensor in tensors.items()}
