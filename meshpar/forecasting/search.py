"""Every legal mesh and setting for the ranks given, ranked: each kind of block is simulated once, the rest is added up."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import torch
from torch import nn

from meshpar.errors import MeshparError, PlanError
from meshpar.forecasting.api import Forecast, evaluated, probes
from meshpar.forecasting.cost import cost, sending_time
from meshpar.forecasting.extrapolate import deepened, widened
from meshpar.forecasting.hardware import Hardware
from meshpar.forecasting.simulate import Simulation, like_blocks, simulate
from meshpar.forecasting.step import Batch
from meshpar.forecasting.trace import Collective, Event, Memory, Phase, Trace
from meshpar.layout import ModelLayout
from meshpar.mesh import MeshSpec, divisors
from meshpar.passes import ActivationCheckpoint, ContextParallel, ExpertParallel, FullyShard, HybridShard, Pass, Replicate, TensorParallel
from meshpar.plan import Plan

RECOMPUTE = ("none", "selective", "full")
MICRO_BATCHES = (1, 2, 4, 8)
LONG = 16384
"""Tokens of a sample from which the search also splits sequences over ``cp``."""
VARIED = (TensorParallel, ActivationCheckpoint, FullyShard, HybridShard, Replicate)
"""The passes that a search chooses itself, with their options."""
_Family = tuple[int, str, bool]
"""The degree of tensor parallelism, the way of recomputation, and whether parameters are resharded."""
_Simulate = Callable[[Sequence[Simulation]], list[Trace]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One way to train.

    Attributes:
        replicas, shards, tp: sizes of the axes.
        reshard: free gathered parameters after forward.
        world: the replicas split one optimizer (``HybridShard(optimizer="world")``).
        recompute: ``none``, ``selective`` or ``full``.
        micro_batch: samples in one forward pass.
        beside: passes that are not varied.
        fixed: sizes of their axes that are not varied.
        copies: the replicas are jobs of their own, of which so many hold each parameter's optimizer state where ``world``; 0: one job.
    """

    replicas: int
    shards: int
    tp: int
    reshard: bool
    recompute: str
    micro_batch: int
    beside: tuple[Pass, ...]
    fixed: Mapping[str, int]
    world: bool = False
    copies: int = 0

    def mesh(self) -> MeshSpec:
        """Return the mesh, without axes of size 1 other than ``dp_shard``."""
        axes = {"dp_replicate": self.replicas, "dp_shard": self.shards, "tp": self.tp}
        return MeshSpec({name: size for name, size in axes.items() if size > 1 or name == "dp_shard"} | dict(self.fixed))

    def job(self) -> MeshSpec:
        """Return the mesh of one job: of one replica, where each is a job of its own."""
        return MeshSpec({**self.mesh().axes, "dp_replicate": 1}) if self.copies and self.replicas > 1 else self.mesh()

    def passes(self) -> list[Pass]:
        """Return the passes in their order, computing in bfloat16 on float32 parameters."""
        claimed = _claimed(self.beside)
        passes: list[Pass] = [each for each in self.beside if self.tp > 1 or "tp" not in each.axes]
        if self.tp > 1 and "tp" not in claimed:
            passes.append(TensorParallel(sequence_parallel=True, loss_parallel=True))
        if self.recompute != "none":
            passes.append(ActivationCheckpoint(mode="full" if self.recompute == "full" else "selective"))
        if "dp_shard" not in claimed:
            common: dict[str, Any] = {"reshard_after_forward": self.reshard, "param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
            optimizer: Literal["replica", "world"] = "world" if self.world else "replica"
            passes.append(HybridShard(optimizer=optimizer, **common) if self.replicas > 1 else FullyShard(**common))
        return sorted(passes, key=lambda each: each.stage)

    def __str__(self) -> str:
        kept = "" if self.reshard else ", parameters kept gathered"
        again = "no recomputation" if self.recompute == "none" else f"{self.recompute} recomputation"
        return f"{self.mesh()}; micro-batch {self.micro_batch}; {again}{kept}{', optimizer=world' if self.world else ''}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Settings and what they are estimated to do.

    Attributes:
        settings: the way to train.
        tokens_per_second: of all ranks, 0 where it cannot run.
        peak: bytes.
        problem: why it is out; empty for one that fits.
    """

    settings: Settings
    tokens_per_second: float
    peak: int
    problem: str = ""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The results of a search.

    Attributes:
        best: forecasts of the first candidates, each replayed with its own mesh and settings; the fastest first.
        fitting: candidates that fit, the fastest first.
        out: those that do not, with the reason.
    """

    best: tuple[Forecast, ...]
    fitting: tuple[Candidate, ...]
    out: tuple[Candidate, ...]


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
    workers: int = 2,
    told: Callable[[str, int, int], None] | None = None,
    optimizer_copies: int | None = None,
) -> Ranking:
    """Rank every legal mesh and setting.

    Meshes: ``tp`` within a node (with sequence parallelism and a split loss), shards from what is left of a node to all ranks,
    replicas beside them. For each: resharding or not, three ways of recomputation, micro-batches from 1. Where a sample is long (16,384
    tokens or more) and the model allows it, also ``cp`` within a node; where the layout names experts, also ``ep`` within a node.

    Args:
        model: on the meta device, with like blocks.
        layout: its description.
        batch: of a data rank; its micro-batch is varied.
        hardware: the profile.
        world_size: number of ranks; whole nodes.
        plan: has passes that every candidate keeps: those that compile, change the precision, or come from another package. An axis that
            only these claim keeps its size.
        recompute: ways of recomputation to try, of ``none``, ``selective`` and ``full``.
        micro_batches: numbers of samples in one forward to try.
        top: how many of the best are replayed exactly; the very best at its full depth.
        workers: processes that simulate.
        told: called every half second with what is simulated, how many steps of it are done, and how many there are.
        optimizer_copies: the replicas are jobs of their own, each inside of a node, of which so many hold each parameter's optimizer state
            where they divide it; None: one job.

    Raises:
        MeshparError: no mesh is legal, or the model's blocks are not alike.
    """
    given = _given(model, layout, batch, hardware, world_size, plan, optimizer_copies)
    _, depth = like_blocks(model, layout)

    def simulates(what: str) -> _Simulate:
        return functools.partial(simulate, workers=workers, told=None if told is None else functools.partial(told, what))

    degrees, candidates = _degrees(given)
    if not degrees:
        raise MeshparError("no mesh is legal: " + "; ".join(each.problem for each in candidates))
    reshards = (True,) if "dp_shard" in _claimed(given.beside) else (True, False)
    name = given.kept or "meshes of data and tp"
    candidates += _candidates(given, degrees, depth, recompute, reshards, micro_batches, simulates(name))
    for asked in _split_in_nodes(given):  # one long sample is more than enough for a rank
        degrees = [tp for tp in _degrees(asked)[0] if tp * math.prod(asked.fixed.values()) <= hardware.node]
        samples = (1,) if batch.sequence >= LONG else micro_batches
        candidates += _candidates(asked, degrees, depth, recompute, (True,), samples, simulates(asked.kept))
    if not candidates:
        raise MeshparError(
            f"{world_size} ranks are one replica, in nodes of {hardware.node}, and --elastic=replicas needs two; use more nodes"
        )
    fits = sorted((each for each in candidates if not each.problem), key=lambda each: -each.tokens_per_second)
    out = [each for each in candidates if each.problem]
    chosen = [_simulation(given, each.settings, ranks_per_node=hardware.node) for each in fits[:top]]
    best = sorted(
        _replayed(chosen, layout, hardware, simulates("the best")), key=lambda each: (not each.fits, -each.cost.tokens_per_second)
    )
    return Ranking(best=tuple(best), fitting=tuple(fits), out=tuple(out))


def _given(
    model: nn.Module, layout: ModelLayout, batch: Batch, hardware: Hardware, world_size: int, plan: Plan | None, copies: int | None
) -> _Asked:
    """Return the question of a search with the passes and axes of ``plan`` that every candidate keeps.

    Raises:
        MeshparError: these axes do not divide the ranks.
    """
    beside = tuple(each for each in (() if plan is None else plan.passes) if not isinstance(each, VARIED))
    kept = _claimed(beside) - {"dp_replicate", "dp_shard", "tp"}
    fixed = {axis: size for axis, size in _sizes(plan).items() if axis in kept}
    rest, left = divmod(world_size, math.prod(fixed.values()))
    asked = _Asked(
        model=model, layout=layout, batch=batch, hardware=hardware, world_size=rest, beside=beside, fixed=fixed, copies=copies or 0
    )
    if left or min(fixed.values(), default=1) < 1:
        raise MeshparError(f"the search keeps {asked.kept}, which must be sizes that divide {world_size} ranks; write them in the mesh")
    return asked


def _split_in_nodes(given: _Asked) -> Iterator[_Asked]:
    """Yield the question with long sequences, or experts, split inside of a node: these axes send most."""
    claimed, sizes, sequence = _claimed(given.beside), divisors(given.hardware.node), given.batch.sequence
    ways = list[tuple[Pass, str, int]]()
    if sequence >= LONG and "cp" not in claimed:
        ways += [(ContextParallel(), "cp", size) for size in sizes if sequence % (2 * size) == 0]
    if given.layout.experts and "ep" not in claimed:
        ways += [(ExpertParallel(), "ep", size) for size in sizes]
    for each, axis, size in ways:
        rest, left = divmod(given.world_size, size)
        if not left:
            yield replace(given, beside=(*given.beside, each), fixed={**given.fixed, axis: size}, world_size=rest)


def _candidates(
    asked: _Asked,
    degrees: Sequence[int],
    depth: int,
    recompute: Sequence[str],
    reshards: Sequence[bool],
    micro_batches: Sequence[int],
    simulates: _Simulate,
) -> Iterator[Candidate]:
    """Yield every setting of some legal degrees of tensor parallelism, with what it is estimated to do."""
    layout, first = asked.layout, (1, 2) if max(micro_batches) > 1 else (1,)

    def simulated(wanted: Sequence[tuple[_Family, int]]) -> dict[tuple[_Family, int], tuple[Trace, Trace]]:
        pairs = [probes(_typical(asked, *each), layout) for each in wanted]
        if any(len(pair) != 2 for pair in pairs):
            raise MeshparError(f"a model of {depth} blocks has none to spare for probes; forecast its plans one by one")
        traces = iter(simulates([job for pair in pairs for job in pair]))
        return {each: (next(traces), next(traces)) for each in wanted}

    families: list[_Family] = [(tp, way, reshard) for tp in degrees for way in recompute for reshard in reshards]
    known, others = simulated([(family, size) for family in families for size in first]), list[tuple[_Family, int]]()
    for family, size in itertools.product(families, micro_batches):
        if size not in first:
            try:
                few, more = (widened(*pair, size) for pair in zip(known[family, 1], known[family, 2]))
                known[family, size] = few, more
            except MeshparError:  # a pass does other things with one sample than with two
                others.append((family, size))
    known |= simulated(others)
    whole, uneven = {}, list[tuple[_Family, int]]()
    for each in itertools.product(families, micro_batches):
        try:
            whole[each] = deepened(*known[each], depth)
        except MeshparError:  # what the blocks add stands in several places of the step
            uneven.append(each)
    for each, trace in zip(uneven, simulates([_typical(asked, *each) for each in uneven])):
        known[each], whole[each] = (trace, trace), trace
    for family, size in whole:
        yield from _estimates(asked, known[family, size], whole[family, size].memory(), depth, family, size)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The question of a search: the arguments of :func:`search`, and ``world_size`` without the axes that are ``fixed``."""

    model: nn.Module
    layout: ModelLayout
    batch: Batch
    hardware: Hardware
    world_size: int
    beside: tuple[Pass, ...]
    fixed: Mapping[str, int]
    copies: int

    def settings(self, tp: int, recompute: str, reshard: bool, *, replicas: int, shards: int, micro_batch: int) -> Settings:
        return Settings(
            replicas=replicas,
            shards=shards,
            tp=tp,
            reshard=reshard,
            recompute=recompute,
            micro_batch=micro_batch,
            beside=self.beside,
            fixed=self.fixed,
            copies=self.copies,
        )

    @property
    def kept(self) -> str:
        """The axes that are ``fixed``, as text."""
        return ", ".join(f"{axis}={size}" for axis, size in self.fixed.items())

    @property
    def replicates(self) -> bool:
        """Whether the pass that shards parameters also takes ``dp_replicate``."""
        claimed = _claimed(self.beside)
        return "dp_shard" not in claimed or "dp_replicate" in claimed


def _claimed(passes: Sequence[Pass]) -> set[str]:
    return {axis for each in passes for axis in each.axes}


def _sizes(plan: Plan | None) -> Mapping[str, int]:
    return plan.mesh.axes if plan is not None and isinstance(plan.mesh, MeshSpec) else {}


def _degrees(asked: _Asked) -> tuple[list[int], list[Candidate]]:
    """Return the degrees of tensor parallelism that the model and the ranks allow, and why not the others."""
    legal, refused = [], []
    for tp in (size for size in range(1, asked.hardware.node + 1) if asked.hardware.node % size == 0):
        settings = asked.settings(tp, "none", True, replicas=1, shards=max(1, asked.world_size // tp), micro_batch=1)
        try:
            Plan(settings.mesh(), settings.passes()).check(asked.model, asked.layout, asked.world_size * math.prod(asked.fixed.values()))
            legal.append(tp)
        except PlanError as error:
            refused.append(Candidate(settings=settings, tokens_per_second=0.0, peak=0, problem="; ".join(error.problems)))
    return legal, refused


def _simulation(asked: _Asked, settings: Settings, *, ranks_per_node: int | None = None) -> Simulation:
    mesh = settings.job()
    return Simulation(
        plan=Plan(MeshSpec(mesh.axes, ranks_per_node=ranks_per_node), settings.passes()),
        model=asked.model,
        layout=asked.layout,
        batch=replace(asked.batch, micro_batch=settings.micro_batch),
        world_size=mesh.size,
        replicas=settings.mesh().size // mesh.size,
        optimizer_copies=settings.copies or 2,
    )


def _typical(asked: _Asked, family: _Family, size: int) -> Simulation:
    """Return the job that stands for a family: with replicas where there can be any in it, so that their reductions are in the trace."""
    ranks = asked.world_size // family[0]
    replicas = 2 if asked.replicates and not asked.copies and ranks % 2 == 0 and ranks > 2 else 1
    return _simulation(asked, asked.settings(*family, replicas=replicas, shards=ranks // replicas, micro_batch=size))


def _splits(asked: _Asked, tp: int) -> Iterator[tuple[int, int]]:
    """Yield (replicas, shards): shards from what tp leaves of a node up to all, by factors of two."""
    ranks = asked.world_size // tp
    inside = tp * math.prod(asked.fixed.values())
    shards = max(1, min(ranks, asked.hardware.node // inside)) if asked.replicates else ranks
    while shards <= ranks:
        if ranks % shards == 0 and not (asked.copies and (shards == ranks or shards * inside > asked.hardware.node)):
            yield ranks // shards, shards
        shards *= 2


def _estimates(asked: _Asked, pair: tuple[Trace, Trace], memory: Memory, depth: int, family: _Family, size: int) -> Iterator[Candidate]:
    shards_then = pair[0].axes["dp_shard"]
    room = int(asked.hardware.room)
    for replicas, shards in _splits(asked, family[0]):
        settings = asked.settings(*family, replicas=replicas, shards=shards, micro_batch=size)
        state = {name: memory.held.get(name, 0) * shards_then for name in ("parameters", "gradients", "optimizer")}
        others, held = memory.peak - sum(state.values()) // shards_then, sum(state.values()) // shards
        if others + held > room and replicas > 1:
            # Replicas that cannot have an optimizer each share one, and keep shards of the parameters in bfloat16.
            settings, width = replace(settings, world=True), next(asked.model.parameters()).itemsize
            if asked.copies:  # each of which has whole parameters and gradients
                held -= state["optimizer"] * (replicas - min(asked.copies, replicas)) // (shards * replicas)
            else:
                held = sum(state.values()) // (shards * replicas) + state["parameters"] * torch.bfloat16.itemsize // (width * shards)
        peak = others + held
        if peak > room:
            parts = {name: value for name, value in memory.held.items() if name not in state} | {"model state": held}
            most = max(parts, key=lambda name: parts[name])
            problem = f"needs {peak / 2**30:.0f} GiB of {room / 2**30:.0f}, most of it {most}"
            yield Candidate(settings=settings, tokens_per_second=0.0, peak=peak, problem=problem)
            continue
        few, more = (cost(_on_mesh(trace, replicas, shards), asked.hardware).seconds for trace in pair)
        seconds = more + (depth - pair[1].depth) * (more - few) / max(1, pair[1].depth - pair[0].depth)
        seconds += _between_jobs(settings, state["parameters"] // shards, asked.hardware) if asked.copies else 0.0
        beside = pair[0].data_size // (pair[0].axes.get("dp_replicate", 1) * shards_then)  # batches over axes of passes that stay
        yield Candidate(settings=settings, tokens_per_second=pair[0].tokens * beside * replicas * shards / seconds, peak=peak)


def _between_jobs(settings: Settings, parameters: int, hardware: Hardware) -> float:
    """Return the seconds in which replicas that are jobs of their own exchange gradients, and new values where they divide state."""
    whole, replicas = "float32", settings.replicas
    sums = Collective(kind="all_reduce", axis="dp_replicate", ranks=replicas, stride=settings.job().size, size=parameters, dtype=whole)
    lacking = parameters * (replicas - min(settings.copies, replicas)) // replicas
    values = sending_time(replace(sums, kind="send", size=lacking), hardware) if settings.world and lacking else 0.0
    return sending_time(sums, hardware) + values


def _on_mesh(trace: Trace, replicas: int, shards: int) -> Trace:
    """Return the trace with its data axes cut another way: groups of other sizes, other strides, shards of other sizes."""
    then = trace.axes["dp_shard"]
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
    return replace(trace, axes=dict(trace.axes) | {"dp_replicate": replicas, "dp_shard": shards}, phases=phases)


def _replayed(chosen: Sequence[Simulation], layout: ModelLayout, hardware: Hardware, simulates: _Simulate) -> Iterator[Forecast]:
    """Yield the forecasts of the chosen with their own meshes: the first with all its blocks, the others from probes of their own."""
    jobs = [[job] if place == 0 else probes(job, layout) for place, job in enumerate(chosen)]
    traces = iter(simulates([each for some in jobs for each in some]))
    _, depth = like_blocks(chosen[0].model, layout) if chosen else ("", 0)
    for job, some in zip(chosen, jobs):
        (trace, *more), replayed = [next(traces) for _ in some], "all"
        try:
            for deeper in more:
                trace, replayed = deepened(trace, deeper, depth), "probes"
        except MeshparError:  # as in _estimates
            (trace,) = simulates([job])
        yield evaluated(trace, hardware, job, replayed)


def ranking_text(ranking: Ranking) -> str:
    """Return the ranking for a terminal; the first ones also have their own reports."""
    lines = [f"{len(ranking.fitting)} settings fit, {len(ranking.out)} do not"]
    lines += [f"  {each.tokens_per_second:12,.0f} tokens/s  {each.peak / 2**30:6.1f} GiB  {each.settings}" for each in ranking.fitting[:10]]
    if ranking.out:
        closest = sorted(ranking.out, key=lambda each: each.peak)[:5]
        lines += ["out, the nearest to fitting first:", *(f"  {each.settings}: {each.problem}" for each in closest)]
    return "\n".join(lines)
