"""Every legal mesh and setting for the ranks given, ranked: each kind of block is simulated once, the rest is added up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import nn

from meshpar.errors import MeshparError, PlanError
from meshpar.forecasting.api import Forecast, evaluated, probes
from meshpar.forecasting.cost import cost
from meshpar.forecasting.extrapolate import deepened, widened
from meshpar.forecasting.hardware import Hardware
from meshpar.forecasting.simulate import Simulation, like_blocks, simulate
from meshpar.forecasting.step import Batch
from meshpar.forecasting.trace import Collective, Event, Phase, Trace
from meshpar.layout import ModelLayout
from meshpar.mesh import MeshSpec
from meshpar.passes import ActivationCheckpoint, Compile, FullyShard, HybridShard, Pass, TensorParallel
from meshpar.plan import Plan

RECOMPUTE = ("none", "selective", "full")
MICRO_BATCHES = (1, 2, 4, 8)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One way to train.

    Attributes:
        replicas, shards, tp: sizes of the axes.
        reshard: free gathered parameters after forward.
        recompute: ``none``, ``selective`` or ``full``.
        micro_batch: samples in one forward pass.
    """

    replicas: int
    shards: int
    tp: int
    reshard: bool
    recompute: str
    micro_batch: int

    def mesh(self) -> MeshSpec:
        """Return the mesh, without axes of size 1 other than ``dp_shard``."""
        axes = {"dp_replicate": self.replicas, "dp_shard": self.shards, "tp": self.tp}
        return MeshSpec({name: size for name, size in axes.items() if size > 1 or name == "dp_shard"})

    def passes(self, compiled: bool) -> list[Pass]:
        """Return the passes, computing in bfloat16 on float32 parameters."""
        passes: list[Pass] = [TensorParallel(sequence_parallel=True, loss_parallel=True)] if self.tp > 1 else []
        if self.recompute != "none":
            passes.append(ActivationCheckpoint(mode="full" if self.recompute == "full" else "selective"))
        if compiled:
            passes.append(Compile())
        sharding = HybridShard if self.replicas > 1 else FullyShard
        return [*passes, sharding(reshard_after_forward=self.reshard, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)]

    def __str__(self) -> str:
        kept = "" if self.reshard else ", parameters kept gathered"
        again = "no recomputation" if self.recompute == "none" else f"{self.recompute} recomputation"
        return f"{self.mesh()}; micro-batch {self.micro_batch}; {again}{kept}"


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
    """What a search found.

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
    compiled: bool = False,
    top: int = 3,
    workers: int = 2,
) -> Ranking:
    """Rank every legal mesh and setting.

    Meshes: ``tp`` within a node (with sequence parallelism and a split loss), shards from what is left of a node to all ranks,
    replicas beside them. For each: resharding or not, three ways of recomputation, micro-batches from 1.

    Args:
        model: on the meta device, with like blocks.
        layout: its description.
        batch: of a data rank; its micro-batch is varied.
        hardware: the profile.
        world_size: number of ranks; whole nodes.
        compiled: blocks are compiled.
        top: how many of the best are replayed exactly; the very best at its full depth.
        workers: processes that simulate.

    Raises:
        MeshparError: no mesh is legal, or the model's blocks are not alike.
    """
    _, depth = like_blocks(model, layout)
    degrees, refused = _degrees(model, layout, hardware, world_size)
    if not degrees:
        raise MeshparError("no mesh is legal: " + "; ".join(each.problem for each in refused))
    families = [(tp, recompute, reshard) for tp in degrees for recompute in RECOMPUTE for reshard in (True, False)]
    jobs = [_job(model, layout, batch, hardware, world_size, compiled, family, size) for family in families for size in (1, 2)]
    pairs = [probes(job, layout) for job in jobs]
    if any(len(pair) != 2 for pair in pairs):
        raise MeshparError(f"a model of {depth} blocks has none to spare for probes; forecast its plans one by one")
    traces = simulate([job for pair in pairs for job in pair], workers=workers)
    candidates: list[Candidate] = []
    for place, family in enumerate(families):
        few, more, few_two, more_two = traces[4 * place : 4 * place + 4]
        for size in MICRO_BATCHES:
            grown = (few, more) if size == 1 else (widened(few, few_two, size), widened(more, more_two, size))
            candidates += _estimates(grown, depth, family, size, hardware, world_size)
    fits = sorted((each for each in candidates if not each.problem), key=lambda each: -each.tokens_per_second)
    out = [*refused, *(each for each in candidates if each.problem)]
    chosen = [_chosen(model, layout, batch, hardware, world_size, compiled, each.settings) for each in fits[:top]]
    best = sorted(_replayed(chosen, layout, hardware, workers), key=lambda each: (not each.fits, -each.cost.tokens_per_second))
    return Ranking(best=tuple(best), fitting=tuple(fits), out=tuple(out))


def _degrees(model: nn.Module, layout: ModelLayout, hardware: Hardware, world_size: int) -> tuple[list[int], list[Candidate]]:
    """Return the degrees of tensor parallelism that the model and the ranks allow, and why not the others."""
    legal, refused = [], []
    for tp in (size for size in range(1, hardware.node + 1) if hardware.node % size == 0):
        settings = Settings(replicas=1, shards=max(1, world_size // tp), tp=tp, reshard=True, recompute="none", micro_batch=1)
        try:
            Plan(settings.mesh(), settings.passes(False)).check(model, layout, world_size)
            legal.append(tp)
        except PlanError as error:
            refused.append(Candidate(settings=settings, tokens_per_second=0.0, peak=0, problem="; ".join(error.problems)))
    return legal, refused


def _job(
    model: nn.Module,
    layout: ModelLayout,
    batch: Batch,
    hardware: Hardware,
    world_size: int,
    compiled: bool,
    family: tuple[int, str, bool],
    size: int,
) -> Simulation:
    """Return the job that stands for a family: with replicas, so that their reductions are in the trace."""
    tp, recompute, reshard = family
    ranks = world_size // tp
    replicas = 2 if ranks % 2 == 0 and ranks > 2 else 1
    settings = Settings(replicas=replicas, shards=ranks // replicas, tp=tp, reshard=reshard, recompute=recompute, micro_batch=size)
    return Simulation(
        plan=Plan(settings.mesh(), settings.passes(compiled)),
        model=model,
        layout=layout,
        batch=replace(batch, micro_batch=size),
        world_size=world_size,
    )


def _splits(ranks: int, tp: int, node: int) -> Iterator[tuple[int, int]]:
    """Yield (replicas, shards): shards from what tp leaves of a node up to all, by factors of two."""
    shards = max(1, min(ranks, node // tp))
    while shards <= ranks:
        if ranks % shards == 0:
            yield ranks // shards, shards
        shards *= 2


def _estimates(
    pair: tuple[Trace, Trace], depth: int, family: tuple[int, str, bool], size: int, hardware: Hardware, world_size: int
) -> Iterator[Candidate]:
    tp, recompute, reshard = family
    memory = deepened(*pair, depth).memory()
    shards_then = pair[0].axes["dp_shard"]
    room = int(hardware.memory - hardware.reserved)
    for replicas, shards in _splits(world_size // tp, tp, hardware.node):
        settings = Settings(replicas=replicas, shards=shards, tp=tp, reshard=reshard, recompute=recompute, micro_batch=size)
        split = sum(memory.held.get(name, 0) for name in ("parameters", "gradients", "optimizer"))
        peak = memory.peak - split + split * shards_then // shards
        if peak > room:
            held = dict(memory.held) | {"model state": split * shards_then // shards}
            most = max((name for name in held if name not in ("parameters", "gradients", "optimizer")), key=lambda name: held[name])
            problem = f"needs {peak / 2**30:.0f} GiB of {room / 2**30:.0f}, most of it {most}"
            yield Candidate(settings=settings, tokens_per_second=0.0, peak=peak, problem=problem)
            continue
        few, more = (cost(_on_mesh(trace, replicas, shards), hardware).seconds for trace in pair)
        seconds = more + (depth - pair[1].depth) * (more - few) / (pair[1].depth - pair[0].depth)
        yield Candidate(settings=settings, tokens_per_second=pair[0].tokens * world_size // tp / seconds, peak=peak)


def _on_mesh(trace: Trace, replicas: int, shards: int) -> Trace:
    """Return the trace with its data axes cut another way: groups of other sizes, other strides, shards of other sizes."""
    then, tp = trace.axes["dp_shard"], trace.axes.get("tp", 1)
    known: dict[Collective, Collective] = {}

    def moved(event: Event) -> Event:
        sent = event.collective
        if sent is None or sent.axis == "tp":
            return event
        if sent not in known:
            if sent.axis == "dp_shard":
                known[sent] = replace(sent, ranks=shards, stride=tp)
            else:
                size = sent.size * then // shards if sent.size > 1024 else sent.size
                known[sent] = replace(sent, ranks=replicas, stride=tp * shards, size=size)
        return replace(event, collective=known[sent])

    phases = tuple(Phase(name=phase.name, events=tuple(map(moved, phase.events))) for phase in trace.phases)
    axes: Mapping[str, int] = {"dp_replicate": replicas, "dp_shard": shards, "tp": tp}
    return replace(trace, axes=axes, phases=phases)


def _chosen(
    model: nn.Module, layout: ModelLayout, batch: Batch, hardware: Hardware, world_size: int, compiled: bool, settings: Settings
) -> Simulation:
    spec = MeshSpec(settings.mesh().axes, ranks_per_node=hardware.node)
    return Simulation(
        plan=Plan(spec, settings.passes(compiled)),
        model=model,
        layout=layout,
        batch=replace(batch, micro_batch=settings.micro_batch),
        world_size=world_size,
    )


def _replayed(chosen: Sequence[Simulation], layout: ModelLayout, hardware: Hardware, workers: int) -> Iterator[Forecast]:
    """Yield the forecasts of the chosen with their own meshes: the first with all its blocks, the others from probes of their own."""
    jobs = [job for place, job in enumerate(chosen) for job in ([job] if place == 0 else probes(job, layout))]
    traces = iter(simulate(jobs, workers=workers))
    _, depth = like_blocks(chosen[0].model, layout) if chosen else ("", 0)
    for place, job in enumerate(chosen):
        trace = next(traces) if place == 0 else deepened(next(traces), next(traces), depth)
        yield evaluated(trace, hardware, job, "all" if place == 0 else "probes")


def ranking_text(ranking: Ranking, shown: int = 10) -> str:
    """Return the ranking for a terminal; the first ones also have their own reports."""
    lines = [f"{len(ranking.fitting)} settings fit, {len(ranking.out)} do not"]
    lines += [
        f"  {each.tokens_per_second:12,.0f} tokens/s  {each.peak / 2**30:6.1f} GiB  {each.settings}" for each in ranking.fitting[:shown]
    ]
    lines += _reasons(ranking.out)
    return "\n".join(lines)


def _reasons(out: Sequence[Candidate], shown: int = 5) -> list[str]:
    closest = sorted(out, key=lambda each: each.peak)[:shown]
    return ["out, the nearest to fitting first:"] + [f"  {each.settings}: {each.problem}" for each in closest] if out else []
