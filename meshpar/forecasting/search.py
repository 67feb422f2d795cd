"""Every legal mesh and setting for the ranks given, ranked: each kind of block is simulated once, the rest is added
up.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import nn

import meshpar.forecasting.staged as staged
from meshpar.core.errors import MeshparError, PlanError
from meshpar.core.layout import ModelLayout
from meshpar.core.mesh import MeshSpec, divisors
from meshpar.forecasting.api import Forecast, evaluated, probes
from meshpar.forecasting.cost import cost, sending_time
from meshpar.forecasting.extrapolate import deepened, widened
from meshpar.forecasting.hardware import Hardware, reserved_range
from meshpar.forecasting.ranking import Candidate, Ranking, Settings, alike, axes_of, gib_reserved
from meshpar.forecasting.simulate import ONE_BY_ONE, Depths, Simulation, simulate, stages_of
from meshpar.forecasting.staged import Shape, Stages, costs_of_blocks, even_stages
from meshpar.forecasting.step import Batch
from meshpar.forecasting.trace import Collective, Event, Memory, Phase, Trace
from meshpar.passes import (
    ActivationCheckpoint,
    ContextParallel,
    ExpertParallel,
    FullyShard,
    HybridShard,
    Pass,
    PipelineParallel,
    Replicate,
    TensorParallel,
)
from meshpar.plan import Plan

RECOMPUTE = ("none", "selective", "full")
MICRO_BATCHES = (1, 2, 4, 8)
STAGES = (2, 4, 8, 16)
LONG = 16384
"""Tokens of a sample from which the search also splits sequences over ``cp``."""
VARIED = (PipelineParallel, TensorParallel, ActivationCheckpoint, FullyShard, HybridShard, Replicate)
"""The passes that a search chooses itself, with their options."""
_Family = tuple[int, str, bool]
"""The degree of tensor parallelism, the way of recomputation, and whether parameters are resharded."""
_Simulate = Callable[[Sequence[Simulation]], list[Trace]]


def search(
    model: nn.Module,
    layout: ModelLayout,
    batch: Batch,
    hardware: Hardware,
    world_size: int,
    *,
    plan: Plan | None = None,
    recompute: Sequence[str] = RECOMPUTE,
    micro_batches: Sequence[int] = MICRO_BATCHES,
    top: int = 3,
    workers: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    elastic: bool = False,
    stages: Sequence[int] = STAGES,
) -> Ranking:
    """Rank every legal mesh and setting.

    Meshes: ``tp`` within a node (with sequence parallelism and a split loss), shards from what is left of a node to all
    ranks, replicas beside them. For each: resharding or not, three ways of recomputation, micro-batches from 1. Where a
    sample is long (16,384 tokens or more) and the model allows it, also ``cp`` within a node; where the layout names
    experts, also ``ep`` within a node. Where the model can be cut, also ``pp``, with the smallest micro-batch, ``pp``
    times as many micro-batches as ``batch`` has, which makes a step of the same samples, and the cuts of
    :class:`meshpar.PipelineParallel` or, where they are faster, those by the forecast's own times.

    Args:
        model: on the meta device, with like blocks.
        layout: its description.
        batch: of a data rank; its micro-batch is varied.
        hardware: the profile.
        world_size: number of ranks; whole nodes.
        plan: has passes that every candidate keeps: those that compile, change the precision, or come from another
            package. An axis that only these claim keeps its size.
        recompute: ways of recomputation to try, of ``none``, ``selective`` and ``full``.
        micro_batches: numbers of samples in one forward to try.
        top: how many of the best are replayed on their own meshes.
        workers: processes that simulate; None: one for each core, 8 at most.
        progress: called every half second with what is simulated, how many steps of it are done, and how many
            there are.
        elastic: the replicas are jobs of their own, each inside of a node.
        stages: sizes of ``pp`` to try.

    Raises:
        MeshparError: no mesh is legal, or the model's blocks are not alike.
    """
    given = _given(model, layout, batch, hardware, world_size, plan, elastic=elastic)
    workers = workers or min(8, len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)

    def simulates(what: str) -> _Simulate:
        return functools.partial(
            simulate, workers=workers, progress=None if progress is None else functools.partial(progress, what)
        )

    degrees, candidates = _degrees(given)
    if not degrees:
        raise MeshparError("no mesh is legal: " + "; ".join(candidate.problem for candidate in candidates))
    reshards = (True,) if "dp_shard" in axes_of(given.beside) else (True, False)
    name = given.kept or "meshes of data and tp"
    candidates += _candidates(given, degrees, recompute, reshards, micro_batches, simulates(name))
    for asked in _split_in_nodes(given):  # one long sample is more than enough for a rank
        degrees = [tp for tp in _degrees(asked)[0] if tp * math.prod(asked.fixed.values()) <= hardware.node]
        samples = (1,) if batch.sequence >= LONG else micro_batches
        candidates += _candidates(asked, degrees, recompute, (True,), samples, simulates(asked.kept))
    stages = [size for size in stages if size * staged.FEWEST <= given.depths.blocks and not given.world_size % size]
    stages = [] if elastic else stages
    candidates += _staged(given, _degrees(given)[0], recompute, min(micro_batches), stages, simulates("pp"))
    if not candidates:
        raise MeshparError(
            f"{world_size} ranks are one replica, in nodes of {hardware.node}, and --elastic=replicas needs two; use "
            "more nodes"
        )
    groups = alike(candidate for candidate in candidates if not candidate.problem)
    out = tuple(candidate for candidate in candidates if candidate.problem)
    first = [candidate.settings for group in groups for candidate in group][:top]
    chosen = [_simulation(given, settings, ranks_per_node=hardware.node) for settings in first]
    best = sorted(
        _replayed(chosen, given.depths, layout, hardware, simulates("the best")),
        key=lambda candidate: (not candidate.fits, -candidate.cost.tokens_per_second),
    )
    return Ranking(best=tuple(best), groups=groups, out=out)


def _given(
    model: nn.Module,
    layout: ModelLayout,
    batch: Batch,
    hardware: Hardware,
    world_size: int,
    plan: Plan | None,
    *,
    elastic: bool,
) -> _Asked:
    """Return the question of a search with the passes and axes of ``plan`` that every candidate keeps.

    Raises:
        MeshparError: these axes do not divide the ranks, or the model's blocks are not alike.
    """
    beside = tuple(pass_ for pass_ in (() if plan is None else plan.passes) if not isinstance(pass_, VARIED))
    kept = axes_of(beside) - {"dp_replicate", "dp_shard", "tp"}
    fixed = {axis: size for axis, size in _sizes(plan).items() if axis in kept}
    rest, left = divmod(world_size, math.prod(fixed.values()))
    asked = _Asked(
        model=model,
        layout=layout,
        depths=Depths(model, layout),
        batch=batch,
        hardware=hardware,
        world_size=rest,
        beside=beside,
        fixed=fixed,
        elastic=elastic,
    )
    if left or min(fixed.values(), default=1) < 1:
        raise MeshparError(
            f"the search keeps {asked.kept}, which must be sizes that divide {world_size} ranks; write them in the mesh"
        )
    return asked


def _split_in_nodes(given: _Asked) -> Iterator[_Asked]:
    """Yield the question with long sequences, or experts, split inside of a node: these axes send most."""
    claimed, sizes, sequence = axes_of(given.beside), divisors(given.hardware.node), given.batch.sequence
    ways = list[tuple[Pass, str, int]]()
    if sequence >= LONG and "cp" not in claimed:
        ways += [(ContextParallel(), "cp", size) for size in sizes if sequence % (2 * size) == 0]
    if given.layout.experts.modules and "ep" not in claimed:
        ways += [(ExpertParallel(), "ep", size) for size in sizes]
    for base, axis, size in ways:
        rest, left = divmod(given.world_size, size)
        if not left:
            yield replace(given, beside=(*given.beside, base), fixed={**given.fixed, axis: size}, world_size=rest)


def _candidates(
    asked: _Asked,
    degrees: Sequence[int],
    recompute: Sequence[str],
    reshards: Sequence[bool],
    micro_batches: Sequence[int],
    simulates: _Simulate,
) -> Iterator[Candidate]:
    """Yield every setting of some legal degrees of tensor parallelism, with what it is estimated to do.

    Micro-batches grow, and a family of which nothing fits is not simulated with a larger one, which needs more.
    """
    families: list[_Family] = [(tp, way, reshard) for tp in degrees for way in recompute for reshard in reshards]
    least = {family: _gathered(asked, family) for family in families}
    known = dict[tuple[_Family, int], tuple[Trace, Trace]]()
    for sizes in _grown_together(micro_batches):
        alive = [family for family in families if asked.hardware.verdict(least[family]) != "does not fit"]
        wanted = list(itertools.product(alive, sizes))
        known |= _probed(asked, [family for family in wanted if not _widen(known, *family)], simulates)
        whole = _deepened(asked, wanted, known, simulates)
        for (family, size), trace in whole.items():
            found = list(_estimates(asked, known[family, size], trace.memory(), family, size))
            least[family] = max(least[family], min((candidate.peak for candidate in found), default=0))
            yield from found if size in micro_batches else ()
        for family, size in itertools.product(families, sizes):
            if family not in alive and size in micro_batches:
                yield from _hopeless(asked, family, size, least[family])


def _grown_together(micro_batches: Sequence[int]) -> list[list[int]]:
    """Return groups of micro-batches to simulate: 1 and 2, from which larger ones are widened, and these."""
    larger = sorted(size for size in micro_batches if size > 2)
    return [[size] for size in (1, 2) if larger or size in micro_batches] + ([larger] if larger else [])


def _gathered(asked: _Asked, family: _Family) -> int:
    """Return the bytes of a rank's gathered parameters, in bfloat16, where they stay gathered."""
    tp, _, reshard = family
    count = sum(parameter.numel() for parameter in asked.model.parameters())
    return 0 if reshard else count * torch.bfloat16.itemsize // (tp * math.prod(asked.fixed.values()))


def _hopeless(asked: _Asked, family: _Family, size: int, least: int) -> Iterator[Candidate]:
    """Yield the settings of a family that need more than ``least`` bytes, which are too many."""
    needed, room = reserved_range(least)[0], asked.hardware.room
    for replicas, shards in _splits(asked, family[0]):
        settings = asked.settings(*family, replicas=replicas, shards=shards, micro_batch=size)
        yield _out(settings, least, f"needs more than {needed / 2**30:.0f} GiB of {room / 2**30:.0f}")


def _out(settings: Settings, peak: int, problem: str) -> Candidate:
    return Candidate(settings=settings, tokens_per_second=0.0, peak=peak, verdict="does not fit", problem=problem)


def _widen(known: dict[tuple[_Family, int], tuple[Trace, Trace]], family: _Family, size: int) -> bool:
    """Add the traces of a micro-batch from those of 1 and 2, and return whether that was possible."""
    if size <= 2:
        return False
    try:
        few, more = (widened(one, two, size) for one, two in zip(known[family, 1], known[family, 2]))
    except MeshparError:  # a pass does other things with one sample than with two
        return False
    known[family, size] = few, more
    return True


def _probed(
    asked: _Asked, wanted: Sequence[tuple[_Family, int]], simulates: _Simulate
) -> dict[tuple[_Family, int], tuple[Trace, Trace]]:
    pairs = [probes(_typical(asked, *family), asked.depths) for family in wanted]
    if any(len(pair) != 2 for pair in pairs):
        raise MeshparError(f"a model of {asked.depths.blocks} blocks has none to spare for probes; {ONE_BY_ONE}")
    traces = iter(simulates([job for pair in pairs for job in pair]) if pairs else [])
    return {family: (next(traces), next(traces)) for family in wanted}


def _deepened(
    asked: _Asked,
    wanted: Sequence[tuple[_Family, int]],
    known: dict[tuple[_Family, int], tuple[Trace, Trace]],
    simulates: _Simulate,
) -> dict[tuple[_Family, int], Trace]:
    """Return traces of the whole depth; what cannot be extrapolated is simulated, and joins ``known``."""
    whole, uneven = dict[tuple[_Family, int], Trace](), list[tuple[_Family, int]]()
    for family in wanted:
        try:
            whole[family] = deepened(*known[family], asked.depths.blocks)
        except MeshparError:  # what the blocks add stands in several places of the step
            uneven.append(family)
    for family, trace in zip(uneven, simulates([_typical(asked, *family) for family in uneven]) if uneven else []):
        known[family], whole[family] = (trace, trace), trace
    return whole


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The arguments of :func:`search`, and ``world_size`` without the axes that are ``fixed``."""

    model: nn.Module
    layout: ModelLayout
    depths: Depths
    batch: Batch
    hardware: Hardware
    world_size: int
    beside: tuple[Pass, ...]
    fixed: Mapping[str, int]
    elastic: bool

    def settings(
        self,
        tp: int,
        recompute: str,
        reshard: bool,
        *,
        replicas: int,
        shards: int,
        micro_batch: int,
        stages: int = 1,
        blocks: tuple[int, ...] = (),
    ) -> Settings:
        return Settings(
            stages=stages,
            blocks=blocks,
            micro_batches=self.batch.accumulate * stages,
            replicas=replicas,
            shards=shards,
            tp=tp,
            reshard=reshard,
            recompute=recompute,
            micro_batch=micro_batch,
            beside=self.beside,
            fixed=self.fixed,
            elastic=self.elastic,
        )

    @property
    def kept(self) -> str:
        """The axes that are ``fixed``, as text."""
        return ", ".join(f"{axis}={size}" for axis, size in self.fixed.items())

    @property
    def replicates(self) -> bool:
        """The pass that shards parameters also takes ``dp_replicate``."""
        claimed = axes_of(self.beside)
        return "dp_shard" not in claimed or "dp_replicate" in claimed


def _sizes(plan: Plan | None) -> Mapping[str, int]:
    return plan.mesh.axes if plan is not None and isinstance(plan.mesh, MeshSpec) else {}


def _degrees(asked: _Asked) -> tuple[list[int], list[Candidate]]:
    """Return the degrees of tensor parallelism that the model and the ranks allow, and why not the others."""
    legal, refused = [], []
    for tp in (size for size in range(1, asked.hardware.node + 1) if asked.hardware.node % size == 0):
        settings = asked.settings(tp, "none", True, replicas=1, shards=max(1, asked.world_size // tp), micro_batch=1)
        try:
            Plan(settings.mesh(), settings.passes()).check(
                asked.model, asked.layout, asked.world_size * math.prod(asked.fixed.values())
            )
            legal.append(tp)
        except PlanError as error:
            refused.append(_out(settings, 0, "; ".join(error.problems)))
    return legal, refused


def _simulation(asked: _Asked, settings: Settings, *, ranks_per_node: int | None = None) -> Simulation:
    mesh = settings.job()
    return Simulation(
        plan=Plan(MeshSpec(mesh.axes, ranks_per_node=ranks_per_node), settings.passes()),
        model=asked.model,
        layout=asked.layout,
        batch=replace(asked.batch, micro_batch=settings.micro_batch, accumulate=settings.micro_batches),
        world_size=mesh.size,
        replicas=settings.mesh().size // mesh.size,
    )


def _typical(asked: _Asked, family: _Family, size: int) -> Simulation:
    """Return a family's typical job: with replicas if it may have any, so that the trace has their reductions."""
    ranks = asked.world_size // family[0]
    replicas = 2 if asked.replicates and not asked.elastic and ranks % 2 == 0 and ranks > 2 else 1
    return _simulation(asked, asked.settings(*family, replicas=replicas, shards=ranks // replicas, micro_batch=size))


def _splits(asked: _Asked, tp: int, stages: int = 1) -> Iterator[tuple[int, int]]:
    """Yield (replicas, shards): shards from what tp leaves of a node up to all, by factors of two."""
    ranks = asked.world_size // (tp * stages)
    inside = tp * math.prod(asked.fixed.values())
    shards = max(1, min(ranks, asked.hardware.node // inside)) if asked.replicates else ranks
    while shards <= ranks:
        if ranks % shards == 0 and not (asked.elastic and (shards == ranks or shards * inside > asked.hardware.node)):
            yield ranks // shards, shards
        shards *= 2


def _estimates(
    asked: _Asked, pair: tuple[Trace, Trace], memory: Memory, family: _Family, size: int
) -> Iterator[Candidate]:
    shards_then, hardware = pair[0].axes["dp_shard"], asked.hardware
    for replicas, shards in _splits(asked, family[0]):
        settings = asked.settings(*family, replicas=replicas, shards=shards, micro_batch=size)
        state = {name: memory.held.get(name, 0) * shards_then for name in ("parameters", "gradients", "optimizer")}
        others, held = memory.peak - sum(state.values()) // shards_then, sum(state.values()) // shards
        if hardware.verdict(others + held) == "does not fit" and replicas > 1 and not asked.elastic:
            # Replicas that cannot have an optimizer each share one, and keep shards of the parameters in bfloat16.
            settings, width = replace(settings, world=True), next(asked.model.parameters()).itemsize
            held = sum(state.values()) // (shards * replicas) + state["parameters"] * torch.bfloat16.itemsize // (
                width * shards
            )
        peak = others + held
        if (verdict := hardware.verdict(peak)) == "does not fit":
            parts = {name: value for name, value in memory.held.items() if name not in state} | {"model state": held}
            most = max(parts, key=lambda name: parts[name])
            yield _out(
                settings, peak, f"needs {gib_reserved(peak)} GiB of {hardware.room / 2**30:.0f}, most of it {most}"
            )
            continue
        few, more = (cost(on_mesh(trace, replicas, shards), hardware).seconds for trace in pair)
        seconds = more + (asked.depths.blocks - pair[1].depth) * (more - few) / max(1, pair[1].depth - pair[0].depth)
        seconds += _between_jobs(settings, state["parameters"] // shards, hardware) if asked.elastic else 0.0
        # batches over axes of passes that stay
        beside = pair[0].data_size // (pair[0].axes.get("dp_replicate", 1) * shards_then)
        speed = pair[0].tokens * beside * replicas * shards / seconds
        yield Candidate(settings=settings, tokens_per_second=speed, peak=peak, verdict=verdict)


def _staged(
    asked: _Asked,
    degrees: Sequence[int],
    recompute: Sequence[str],
    size: int,
    stages: Sequence[int],
    simulates: _Simulate,
) -> Iterator[Candidate]:
    """Yield the settings over stages, with what they are estimated to do, or why the model cannot be cut."""
    families = [(tp, way, reshard) for tp in degrees for way in recompute for reshard in (True, False)]
    if not families or not stages:
        return
    jobs, most = list[Simulation](), max(stages)
    for tp, way, reshard in families:
        shards = max(1, asked.world_size // (2 * tp * min(stages)))
        settings = asked.settings(
            tp, way, reshard, replicas=2 if asked.replicates else 1, shards=shards, micro_batch=size, stages=most
        )
        try:
            first = _simulation(asked, replace(settings, replicas=1, shards=1, stages=min(stages)))
            if not jobs:  # whether a model can be cut depends on nothing else
                first.plan.check(asked.model, asked.layout, first.world_size)
                costs = costs_of_blocks(first, asked.layout)
            jobs += staged.probes(_simulation(asked, settings), asked.depths)
        except MeshparError as error:
            why = "; ".join(error.problems) if isinstance(error, PlanError) else str(error)
            yield _out(replace(settings, stages=min(stages)), 0, why)
            return
    traces = iter(simulates(jobs))
    for tp, way, reshard in families:
        known = Stages(next(traces), next(traces))
        for number in (number for number in stages if asked.world_size % (tp * number) == 0):
            for replicas, shards in _splits(asked, tp, number):
                settings = asked.settings(
                    tp, way, reshard, replicas=replicas, shards=shards, micro_batch=size, stages=number
                )
                of = known.estimates(asked.hardware, functools.partial(on_mesh, replicas=replicas, shards=shards))
                found = list(_cuts(asked, settings, known, of, costs))
                yield from sorted(found, key=lambda one: (bool(one.problem), -one.tokens_per_second))[:1]


def _cuts(
    asked: _Asked, settings: Settings, known: Stages, of: Callable[[int, int], Trace], costs: Sequence[float]
) -> Iterator[Candidate]:
    """Yield the settings with the model's own cuts, and with those by the times of this forecast."""
    stages = settings.stages
    default = even_stages(costs, stages) if len(costs) >= stages else ()
    for blocks in dict.fromkeys((default, even_stages(known.times(of, len(costs)), stages) if default else ())):
        here = settings if blocks == default else replace(settings, blocks=blocks)
        shape = Shape(
            blocks=blocks, schedule="1f1b", micro_batches=settings.micro_batches, stride=settings.mesh().size // stages
        )
        try:
            trace = known.joined(shape, of)
        except MeshparError as error:  # stages are too short
            yield _out(here, 0, str(error))
            continue
        peak, timed = trace.memory().peak, cost(trace, asked.hardware)
        if (verdict := asked.hardware.verdict(peak)) == "does not fit":
            yield _out(here, peak, f"needs {gib_reserved(peak)} GiB of {asked.hardware.room / 2**30:.0f}")
        else:
            yield Candidate(settings=here, tokens_per_second=timed.tokens_per_second, peak=peak, verdict=verdict)


def _between_jobs(settings: Settings, parameters: int, hardware: Hardware) -> float:
    """Return the seconds in which replicas that are jobs of their own exchange gradients."""
    sums = Collective(
        kind="all_reduce",
        axis="dp_replicate",
        ranks=settings.replicas,
        stride=settings.job().size,
        size=parameters,
        dtype="float32",
    )
    return sending_time(sums, hardware)


def on_mesh(trace: Trace, replicas: int, shards: int) -> Trace:
    """Return the trace with its data axes cut another way: groups of other sizes, other strides, shards of other
    sizes.
    """
    then, data = trace.axes["dp_shard"], trace.axes["dp_shard"] * trace.axes.get("dp_replicate", 1)
    known: dict[Collective, Collective] = {}

    def moved(event: Event) -> Event:
        sent = event.collective
        if sent is None or sent.axis not in ("dp_replicate", "dp_shard"):
            return event
        if sent not in known:
            if sent.axis == "dp_shard":
                known[sent] = replace(sent, ranks=sent.ranks // then * shards)
            else:
                size = sent.size * then // shards if sent.size > 1024 else sent.size
                known[sent] = replace(sent, ranks=replicas, stride=sent.stride // then * shards, size=size)
        return replace(event, collective=known[sent])

    phases = tuple(Phase(name=phase.name, events=tuple(map(moved, phase.events))) for phase in trace.phases)
    axes = dict(trace.axes) | {"dp_replicate": replicas, "dp_shard": shards}
    return replace(trace, axes=axes, data_size=trace.data_size // data * replicas * shards, phases=phases)


def _replayed(
    chosen: Sequence[Simulation], depths: Depths, layout: ModelLayout, hardware: Hardware, simulates: _Simulate
) -> Iterator[Forecast]:
    """Yield the forecasts of the chosen on their own meshes."""
    jobs = [staged.probes(job, depths) if stages_of(job.plan) > 1 else probes(job, depths) for job in chosen]
    traces = iter(simulates([job for some in jobs for job in some]) if jobs else [])
    for job, some in zip(chosen, jobs):
        (trace, *more), replayed = [next(traces) for _ in some], "all"
        try:
            for deeper in more:
                if trace.stages:
                    trace = Stages(trace, deeper).joined(staged.shape_of(job, layout))
                else:
                    trace = deepened(trace, deeper, depths.blocks)
                replayed = "probes"
        except MeshparError:  # as in _deepened
            (trace,) = simulates([job])
        yield evaluated(trace, hardware, job, replayed)
