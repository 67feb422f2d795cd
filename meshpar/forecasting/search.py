"""Every legal mesh and setting for given ranks, ranked: each kind of block is simulated once, the rest is added up."""

from __future__ import annotations

import functools
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import torch
from torch import nn

import meshpar.forecasting.staged as staged
from meshpar.core.errors import MeshparError, PlanError
from meshpar.core.layout import ModelLayout
from meshpar.core.mesh import MeshSpec, divisors
from meshpar.forecasting.api import Simulate, evaluated, probes, traces_of
from meshpar.forecasting.cost import cost, sending_time
from meshpar.forecasting.extrapolate import deepened, on_mesh, widened
from meshpar.forecasting.hardware import Hardware, reserved_range
from meshpar.forecasting.ranking import VARIED, Candidate, Ranking, Settings, alike, axes_of, gib_reserved
from meshpar.forecasting.simulate import ONE_BY_ONE, Depths, Simulation, simulate
from meshpar.forecasting.staged import Shape, Stages, costs_of_blocks, even_stages
from meshpar.forecasting.step import Batch
from meshpar.forecasting.trace import StepMemory, Trace, all_reduce
from meshpar.passes import ContextParallel, ExpertParallel, Pass
from meshpar.plan import Plan

RECOMPUTE = ("none", "selective", "full")
MICRO_BATCHES = (1, 2, 4, 8)
STAGES = (2, 4, 8, 16)
_SIMULATING = 0.75  # part of a search's time after which it replays the best that it has found
LONG = 16384  # tokens of a sample from which the search also splits sequences over cp


class _Family(NamedTuple):
    """Fields of :class:`Settings` that plans share if their traces follow from one another."""

    tp: int
    recompute: str
    reshard: bool


_SomeTraces = Callable[[Sequence[Simulation]], list[Trace | None]]  # None: the time was up
_Pairs = dict[tuple[_Family, int], tuple[Trace, Trace]]  # a family and a micro-batch -> the traces of its probes


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
    seconds: float | None = None,
) -> Ranking:
    """Rank every legal mesh and setting for ``world_size`` ranks in whole nodes.

    Varied are ``tp`` within a node, shards, replicas, resharding, recomputation and micro-batches; ``cp`` for samples
    of 16,384 tokens or more, ``ep`` where the layout names experts, and ``pp`` by its own cuts or the forecast's.

    Args:
        plan: has passes that every candidate keeps, and the sizes of the axes that only these claim.
        top: how many of the best are replayed on their own meshes.
        workers: processes that simulate; None: one for each core, 8 at most.
        progress: called every half second with what is simulated, the steps done and the steps in all.
        elastic: the replicas are jobs of their own, each inside of a node.
        stages: sizes of ``pp`` to try.
        seconds: bound on the search. A quarter of it is kept to replay the best of what was simulated by then: one of
            them, if the bound was met. None: no bound.

    Raises:
        MeshparError: no mesh is legal, the model's blocks are not alike, or nothing that was simulated in ``seconds``
            fits.
    """
    depths, (rest, base) = Depths(model, layout), _keep(plan, world_size, elastic=elastic)
    question = _Search(model, layout, depths, batch, hardware, rest, base)
    workers = workers or min(8, len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)
    limit = _TimeLimit(seconds, workers, progress)
    simulates = limit.simulates
    degrees, candidates = _degrees(question)
    if not degrees:
        raise MeshparError("no mesh is legal: " + "; ".join(candidate.problem for candidate in candidates))
    reshards = (True,) if "dp_shard" in axes_of(question.base.beside) else (True, False)
    families = itertools.starmap(_Family, itertools.product(degrees, recompute, reshards))
    candidates += _candidates(
        question, families, micro_batches, simulates(question.base.kept or "meshes of data and tp")
    )
    for split in _split_in_nodes(question):  # one long sample is more than enough for a rank
        fitting = [tp for tp in _degrees(split)[0] if tp * split.fixed <= hardware.node]
        families = itertools.starmap(_Family, itertools.product(fitting, recompute, (True,)))
        samples = (1,) if batch.sequence >= LONG else micro_batches
        candidates += _candidates(split, families, samples, simulates(split.base.kept))
    blocks, ranks = question.depths.blocks, question.world_size
    stages = [size for size in stages if size * staged.FEWEST <= blocks and not ranks % size]
    if stages and not elastic:
        families = itertools.starmap(_Family, itertools.product(degrees, recompute, (True, False)))
        candidates += _staged(question, list(families), min(micro_batches), stages, simulates("pp"))
    if limit.is_over and all(candidate.problem for candidate in candidates):
        raise MeshparError(
            f"no setting fits of {limit.done} of {limit.wanted} steps that were simulated in {seconds:g} seconds; give "
            "the search more: --seconds"
        )
    if not candidates:
        raise MeshparError(
            f"{world_size} ranks are one replica, in nodes of {hardware.node}, and --elastic=replicas needs two; use "
            "more nodes"
        )
    groups = alike(candidate for candidate in candidates if not candidate.problem)
    out = tuple(candidate for candidate in candidates if candidate.problem)
    first = [candidate.settings for group in groups for candidate in group][: 1 if limit.is_over else top]
    chosen = [_simulation(question, settings, ranks_per_node=hardware.node) for settings in first]
    traces = traces_of(chosen, layout, question.depths, limit.simulates_all("the best"))
    best = [evaluated(trace, hardware, job, replayed) for job, (trace, replayed) in zip(chosen, traces)]
    best.sort(key=lambda forecast: (not forecast.fits, -forecast.cost.tokens_per_second))
    return Ranking(best=tuple(best), groups=groups, out=out, simulated=limit.done, wanted=limit.wanted)


@final
class _TimeLimit:
    """Simulates until a search's time is up, and counts the steps that it came to."""

    def __init__(self, seconds: float | None, workers: int, progress: Callable[[str, int, int], None] | None) -> None:
        self._until = None if seconds is None else time.monotonic() + _SIMULATING * seconds
        self._workers, self._progress = workers, progress
        self.done = self.wanted = 0

    @property
    def is_over(self) -> bool:
        return self.done < self.wanted

    def simulates(self, what: str) -> _SomeTraces:
        """Return a function that simulates until the time is up; ``what`` is for the progress."""

        def run(jobs: Sequence[Simulation]) -> list[Trace | None]:
            traces = simulate(jobs, workers=self._workers, progress=self._reports(what), until=self._until)
            self.done += sum(trace is not None for trace in traces)
            self.wanted += len(traces)
            return traces

        return run

    def simulates_all(self, what: str) -> Simulate:
        """Return a function that simulates to the end."""
        return functools.partial(simulate, workers=self._workers, progress=self._reports(what))

    def _reports(self, what: str) -> Callable[[int, int], None] | None:
        return None if self._progress is None else functools.partial(self._progress, what)


def _keep(plan: Plan | None, world_size: int, *, elastic: bool) -> tuple[int, Settings]:
    """Return the ranks that are left to the search, and the settings of ``plan`` that every candidate keeps."""
    passes = tuple(pass_ for pass_ in (() if plan is None else plan.passes) if not isinstance(pass_, VARIED))
    sizes = plan.mesh.axes if plan is not None and isinstance(plan.mesh, MeshSpec) else {}
    fixed = {axis: sizes[axis] for axis in sizes if axis in axes_of(passes) - {"dp_replicate", "dp_shard", "tp"}}
    base = Settings(beside=passes, fixed=fixed, elastic=elastic)
    rest, remainder = divmod(world_size, math.prod(fixed.values()))
    if remainder or min(fixed.values(), default=1) < 1:
        raise MeshparError(
            f"the search keeps {base.kept}, which must be sizes that divide {world_size} ranks; write them in the mesh"
        )
    return rest, base


@final
@dataclass(frozen=True, slots=True)
class _Search:
    """The question of a search: ``world_size`` without the fixed axes, and the settings that every candidate keeps."""

    model: nn.Module
    layout: ModelLayout
    depths: Depths
    batch: Batch
    hardware: Hardware
    world_size: int
    base: Settings

    def settings(self, family: _Family, *, stages: int = 1, **rest: Any) -> Settings:
        micro_batches = self.batch.accumulate * stages
        shared: dict[str, Any] = {"tp": family.tp, "recompute": family.recompute, "reshard": family.reshard}
        return replace(self.base, **shared, stages=stages, micro_batches=micro_batches, **rest)

    @property
    def fixed(self) -> int:
        """Ranks of the axes that every candidate keeps."""
        return math.prod(self.base.fixed.values())

    @property
    def replicates(self) -> bool:
        """The pass that shards parameters also takes ``dp_replicate``."""
        claimed = axes_of(self.base.beside)
        return "dp_shard" not in claimed or "dp_replicate" in claimed


def _split_in_nodes(question: _Search) -> Iterator[_Search]:
    """Yield the question with long sequences, or experts, split inside of a node: these axes send most."""
    base, sequence, sizes = question.base, question.batch.sequence, divisors(question.hardware.node)
    ways = list[tuple[Pass, str, int]]()
    if sequence >= LONG and "cp" not in axes_of(base.beside):
        ways += [(ContextParallel(), "cp", size) for size in sizes if sequence % (2 * size) == 0]
    if question.layout.experts.modules and "ep" not in axes_of(base.beside):
        ways += [(ExpertParallel(), "ep", size) for size in sizes]
    for pass_, axis, size in ways:
        rest, remainder = divmod(question.world_size, size)
        if not remainder:
            split = replace(base, beside=(*base.beside, pass_), fixed={**base.fixed, axis: size})
            yield replace(question, base=split, world_size=rest)


def _candidates(
    question: _Search, families: Iterable[_Family], micro_batches: Sequence[int], simulates: _SomeTraces
) -> Iterator[Candidate]:
    """Yield all settings of some families with estimates; if nothing fits, larger micro-batches are not simulated."""
    count = sum(parameter.numel() for parameter in question.model.parameters())
    gathered = count * torch.bfloat16.itemsize  # parameters that stay gathered, over the ranks of tp and fixed axes
    least = {family: 0 if family.reshard else gathered // (family.tp * question.fixed) for family in families}
    probed = _Pairs()
    # 1 and 2 are simulated first, from which larger ones are widened.
    larger = sorted(size for size in micro_batches if size > 2)
    for sizes in [[size] for size in (1, 2) if larger or size in micro_batches] + ([larger] if larger else []):
        alive = [family for family in least if question.hardware.verdict(least[family]) != "does not fit"]
        wanted = list(itertools.product(alive, sizes))
        probed |= _probe(question, [key for key in wanted if not _widen(probed, *key)], simulates)
        in_time = [key for key in wanted if key in probed]
        for (family, size), trace in _deepen(question, in_time, probed, simulates).items():
            estimates = list(_estimates(question, probed[family, size], trace.memory(), family, size))
            least[family] = max(least[family], min((candidate.peak for candidate in estimates), default=0))
            yield from estimates if size in micro_batches else ()
        for family, size in itertools.product(least, sizes):
            if family not in alive and size in micro_batches:
                needed, room = reserved_range(least[family])[0], question.hardware.room
                problem = f"needs more than {needed / 2**30:.0f} GiB of {room / 2**30:.0f}"
                yield from (_out(settings, least[family], problem) for settings in _splits(question, family, size))


def _needed(peak: int, hardware: Hardware) -> str:
    return f"needs {gib_reserved(peak)} GiB of {hardware.room / 2**30:.0f}"


def _out(settings: Settings, peak: int, problem: str) -> Candidate:
    return Candidate(settings=settings, tokens_per_second=0.0, peak=peak, verdict="does not fit", problem=problem)


def _widen(probed: _Pairs, family: _Family, size: int) -> bool:
    """Add the traces of a micro-batch from those of 1 and 2, and return whether that was possible."""
    if size <= 2 or not {(family, 1), (family, 2)} <= probed.keys():
        return False
    try:
        few, more = (widened(single, two, size) for single, two in zip(probed[family, 1], probed[family, 2]))
    except MeshparError:  # a pass does other things with one sample than with two
        return False
    probed[family, size] = few, more
    return True


def _probe(question: _Search, wanted: Sequence[tuple[_Family, int]], simulates: _SomeTraces) -> _Pairs:
    pairs = [probes(_typical(question, *family), question.depths) for family in wanted]
    if any(len(pair) != 2 for pair in pairs):
        raise MeshparError(f"a model of {question.depths.blocks} blocks has none to spare for probes; {ONE_BY_ONE}")
    traces = iter(simulates([job for pair in pairs for job in pair]))
    probed = {family: (next(traces), next(traces)) for family in wanted}
    return {family: (few, more) for family, (few, more) in probed.items() if few is not None and more is not None}


def _deepen(
    question: _Search, wanted: Sequence[tuple[_Family, int]], probed: _Pairs, simulates: _SomeTraces
) -> dict[tuple[_Family, int], Trace]:
    """Return traces of the whole depth; what cannot be extrapolated is simulated, and joins ``probed``."""
    whole, uneven = dict[tuple[_Family, int], Trace](), list[tuple[_Family, int]]()
    for family in wanted:
        try:
            whole[family] = deepened(*probed[family], question.depths.blocks)
        except MeshparError:  # what the blocks add stands in several places of the step
            uneven.append(family)
    for family, trace in zip(uneven, simulates([_typical(question, *family) for family in uneven])):
        if trace is not None:
            probed[family], whole[family] = (trace, trace), trace
    return whole


def _degrees(question: _Search) -> tuple[list[int], list[Candidate]]:
    """Return the degrees of tensor parallelism that the model and the ranks allow, and why not the others."""
    legal, refused = [], []
    for tp in (size for size in range(1, question.hardware.node + 1) if question.hardware.node % size == 0):
        settings = question.settings(_Family(tp, "none", True), shards=max(1, question.world_size // tp))
        try:
            plan = Plan(settings.mesh(), settings.passes())
            plan.check(question.model, question.layout, question.world_size * question.fixed)
            legal.append(tp)
        except PlanError as error:
            refused.append(_out(settings, 0, "; ".join(error.problems)))
    return legal, refused


def _simulation(question: _Search, settings: Settings, *, ranks_per_node: int | None = None) -> Simulation:
    mesh = settings.job()
    plan = Plan(MeshSpec(mesh.axes, ranks_per_node=ranks_per_node), settings.passes())
    batch = replace(question.batch, micro_batch=settings.micro_batch, accumulate=settings.micro_batches)
    model, layout, replicas = question.model, question.layout, settings.mesh().size // mesh.size
    return Simulation(plan=plan, model=model, layout=layout, batch=batch, world_size=mesh.size, replicas=replicas)


def _typical(question: _Search, family: _Family, size: int) -> Simulation:
    """Return a family's typical job: with replicas if it may have any, so that the trace has their reductions."""
    ranks = question.world_size // family.tp
    replicas = 2 if question.replicates and not question.base.elastic and ranks % 2 == 0 and ranks > 2 else 1
    settings = question.settings(family, replicas=replicas, shards=ranks // replicas, micro_batch=size)
    return _simulation(question, settings)


def _splits(question: _Search, family: _Family, size: int, stages: int = 1) -> Iterator[Settings]:
    """Yield settings of a family: shards from what tp leaves of a node up to all ranks, by factors of two."""
    ranks, in_group = question.world_size // (family.tp * stages), family.tp * question.fixed
    node = question.hardware.node
    shards = max(1, min(ranks, node // in_group)) if question.replicates else ranks
    while shards <= ranks:
        in_jobs = shards < ranks and shards * in_group <= node
        if ranks % shards == 0 and (in_jobs or not question.base.elastic):
            yield question.settings(family, replicas=ranks // shards, shards=shards, micro_batch=size, stages=stages)
        shards *= 2


def _estimates(
    question: _Search, pair: tuple[Trace, Trace], memory: StepMemory, family: _Family, size: int
) -> Iterator[Candidate]:
    shards_then, hardware = pair[0].axes["dp_shard"], question.hardware
    for settings in _splits(question, family, size):
        replicas, shards = settings.replicas, settings.shards
        state = {name: memory.held.get(name, 0) * shards_then for name in ("parameters", "gradients", "optimizer")}
        rest, model_state = memory.peak - sum(state.values()) // shards_then, sum(state.values()) // shards
        if hardware.verdict(rest + model_state) == "does not fit" and replicas > 1 and not question.base.elastic:
            # Replicas that cannot have an optimizer each share one, and keep shards of the parameters in bfloat16.
            settings, width = replace(settings, world=True), next(question.model.parameters()).itemsize
            model_state = sum(state.values()) // (shards * replicas)
            model_state += state["parameters"] * torch.bfloat16.itemsize // (width * shards)
        peak = rest + model_state
        if (verdict := hardware.verdict(peak)) == "does not fit":
            parts = {name: value for name, value in memory.held.items() if name not in state}
            parts["model state"] = model_state
            largest = max(parts, key=lambda name: parts[name])
            yield _out(settings, peak, f"{_needed(peak, hardware)}, most of it {largest}")
            continue
        few, more = (cost(on_mesh(trace, replicas, shards), hardware).seconds for trace in pair)
        seconds = more + (question.depths.blocks - pair[1].depth) * (more - few) / max(1, pair[1].depth - pair[0].depth)
        if question.base.elastic:
            sums = all_reduce("dp_replicate", replicas, settings.job().size, state["parameters"] // shards, "float32")
            seconds += sending_time(sums, hardware)
        # batches over axes of passes that stay
        further = pair[0].data_size // (pair[0].axes.get("dp_replicate", 1) * shards_then)
        speed = pair[0].tokens * further * replicas * shards / seconds
        yield Candidate(settings=settings, tokens_per_second=speed, peak=peak, verdict=verdict)


def _staged(
    question: _Search, families: Sequence[_Family], size: int, stages: Sequence[int], simulates: _SomeTraces
) -> Iterator[Candidate]:
    """Yield the settings over stages, with what they are estimated to do, or why the model cannot be cut."""
    jobs, replicas = list[Simulation](), 2 if question.replicates else 1
    for family in families:
        shards = max(1, question.world_size // (2 * family.tp * min(stages)))
        settings = question.settings(family, replicas=replicas, shards=shards, micro_batch=size, stages=max(stages))
        try:
            first = _simulation(question, replace(settings, replicas=1, shards=1, stages=min(stages)))
            if not jobs:  # whether a model can be cut depends on nothing else
                first.plan.check(question.model, question.layout, first.world_size)
                costs = costs_of_blocks(first, question.layout)
            jobs += staged.probes(_simulation(question, settings), question.depths)
        except MeshparError as error:
            why = "; ".join(error.problems) if isinstance(error, PlanError) else str(error)
            yield _out(replace(settings, stages=min(stages)), 0, why)
            return
    traces = iter(simulates(jobs))
    for family in families:
        few, more = next(traces), next(traces)
        if few is None or more is None:
            continue
        probed = Stages(few, more)
        for count in (count for count in stages if question.world_size % (family.tp * count) == 0):
            for settings in _splits(question, family, size, count):
                moved = functools.partial(on_mesh, replicas=settings.replicas, shards=settings.shards)
                cuts = _cuts(question, settings, probed, probed.estimates(question.hardware, moved), costs)
                yield min(cuts, key=lambda candidate: (bool(candidate.problem), -candidate.tokens_per_second))


def _cuts(
    question: _Search, settings: Settings, probed: Stages, of: Callable[[int, int], Trace], costs: Sequence[float]
) -> Iterator[Candidate]:
    """Yield the settings with the model's own cuts, and with those by the times of this forecast."""
    stages, hardware = settings.stages, question.hardware
    default = even_stages(costs, stages) if len(costs) >= stages else ()
    for blocks in dict.fromkeys((default, even_stages(probed.times(of, len(costs)), stages) if default else ())):
        cut = settings if blocks == default else replace(settings, blocks=blocks)
        stride = settings.mesh().size // stages
        shape = Shape(blocks=blocks, schedule="1f1b", micro_batches=settings.micro_batches, stride=stride)
        try:
            trace = probed.joined(shape, of)
        except MeshparError as error:  # stages are too short
            yield _out(cut, 0, str(error))
            continue
        peak, speed = trace.memory().peak, cost(trace, hardware).tokens_per_second
        if (verdict := hardware.verdict(peak)) == "does not fit":
            yield _out(cut, peak, _needed(peak, hardware))
        else:
            yield Candidate(settings=cut, tokens_per_second=speed, peak=peak, verdict=verdict)
