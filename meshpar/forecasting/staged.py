"""Traces of many stages and micro-batches, put together from three stages of few blocks and four micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple, final

from meshpar.core.errors import MeshparError
from meshpar.core.layout import ModelLayout
from meshpar.core.mesh import MeshSpec
from meshpar.forecasting.cost import Clock
from meshpar.forecasting.extrapolate import deepened
from meshpar.forecasting.hardware import Hardware
from meshpar.forecasting.simulate import ONE_BY_ONE, Depths, Simulation
from meshpar.forecasting.trace import Collective, Event, Phase, Trace
from meshpar.passes import PipelineParallel
from meshpar.passes.pipeline.cuts import even_cuts, examine
from meshpar.passes.pipeline.schedule import actions
from meshpar.plan import Plan

FEWEST = 2  # blocks of a stage of the smaller probe: a first and a last one
_STAGES, _MICRO_BATCHES = 3, 4
_SHARDED, _DIRECTIONS = ("parameters", "gradients", "optimizer"), ("forward", "backward")


def probes(job: Simulation, depths: Depths) -> list[Simulation]:
    """Return two jobs of few stages and blocks for :class:`Stages`; raises MeshparError if blocks are few or differ."""
    mesh = job.plan.mesh
    assert isinstance(mesh, MeshSpec)
    stages = min(_STAGES, mesh.axes["pp"])
    least = FEWEST + max(0, max(pass_.blocks_ahead for pass_ in job.plan.passes) - 1)
    if depths.blocks < (needed := stages * (least + 1)):
        few = f"{depths.blocks} blocks are too few to estimate stages from probes of {needed}"
        raise MeshparError(f"{few}; {ONE_BY_ONE}")
    if any(pass_.period > 1 for pass_ in job.plan.passes):
        raise MeshparError("a pass treats blocks differently, so that few do not represent a stage")
    spec = MeshSpec({**mesh.axes, "pp": stages}, ranks_per_node=mesh.ranks_per_node)
    size, batch = job.world_size // mesh.axes["pp"] * stages, replace(job.batch, accumulate=_MICRO_BATCHES)

    def probe(blocks: int) -> Simulation:
        passes = [
            replace(pass_, stages=(blocks,) * stages) if isinstance(pass_, PipelineParallel) else pass_
            for pass_ in job.plan.passes
        ]
        plan, model = Plan(spec, passes, same_bits=job.plan.same_bits), depths.shallow(stages * blocks)
        return replace(job, plan=plan, model=model, batch=batch, world_size=size)

    return [probe(least), probe(least + 1)]


class Shape(NamedTuple):
    """How layers are divided: blocks of each stage, the schedule, micro-batches of a step, and ranks of a stage."""

    blocks: tuple[int, ...]
    schedule: str
    micro_batches: int
    stride: int


def shape_of(job: Simulation, layout: ModelLayout) -> Shape:
    """Return how a job divides layers; raises MeshparError where its stages cannot be estimated from probes."""
    (cut,) = (pass_ for pass_ in job.plan.passes if isinstance(pass_, PipelineParallel))
    assert isinstance(job.plan.mesh, MeshSpec)
    ranks = job.plan.mesh.axes["pp"]
    if cut.virtual > 1 or job.batch.accumulate < 2:
        raise MeshparError("several stages a rank, or one micro-batch, cannot be estimated")
    blocks, count = cut.stages or even_stages(costs_of_blocks(job, layout), ranks), job.batch.accumulate
    return Shape(blocks=blocks, schedule=cut.schedule, micro_batches=count, stride=job.world_size // ranks)


def costs_of_blocks(job: Simulation, layout: ModelLayout) -> tuple[int, ...]:
    """Return the costs by which ``PipelineParallel`` cuts a model."""
    anatomy, problems = examine(job.model, layout)
    if anatomy is None:
        raise MeshparError("; ".join(problems))
    return anatomy.costs


def even_stages(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return the numbers of blocks of stages of which the dearest costs least."""
    firsts = even_cuts(costs, stages)
    return tuple(end - begin for begin, end in zip(firsts, [*firsts[1:], len(costs)]))


@final
class Stages:
    """Traces of stages of any number of blocks, from the traces of the two :func:`probes`."""

    def __init__(self, few: Trace, more: Trace) -> None:
        self.few, self.more = few, more
        self._known, self._brief = dict[tuple[int, int], Trace](), dict[tuple[int, int], Trace]()

    def trace(self, kind: int, blocks: int) -> Trace:
        """Return four micro-batches of a stage at the model's beginning (``kind`` 0), middle (1) or end (-1)."""
        if (kind, blocks) not in self._known:
            few, more = self.few.stages[kind], self.more.stages[kind]
            if blocks < few.depth:
                raise MeshparError(f"a stage of {blocks} blocks is too short to be estimated from {few.depth}")
            self._known[kind, blocks] = few if blocks == few.depth else deepened(few, more, blocks)
        return self._known[kind, blocks]

    def estimates(self, hardware: Hardware, on_mesh: Callable[[Trace], Trace]) -> Callable[[int, int], Trace]:
        """Return what makes a stage's trace on another mesh, condensed, with times on a line through the probes."""

        @cache
        def probed(kind: int) -> tuple[Trace, Trace]:
            few, more = (condensed(on_mesh(trace.stages[kind]), hardware) for trace in (self.few, self.more))
            return few, more

        def of(kind: int, blocks: int) -> Trace:
            if (kind, blocks) not in self._brief:
                self._brief[kind, blocks] = condensed(self.trace(kind, blocks), hardware)
            few, more = probed(kind)
            brief, times = self._brief[kind, blocks], (blocks - few.depth) / (more.depth - few.depth)
            part = brief.axes["dp_shard"] / few.axes["dp_shard"]

            def resize(sizes: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
                return tuple((holder, int(size * part) if holder in _SHARDED else size) for holder, size in sizes)

            def estimate(phase: Phase, first: Phase, second: Phase) -> Phase:
                events = list[Event]()
                for event, a, b in zip(phase.events, first.events, second.events, strict=True):
                    moved = int(a.moved + times * (b.moved - a.moved))
                    events.append(replace(event, moved=moved, memory=resize(event.memory)))
                return Phase(name=phase.name, events=tuple(events))

            phases = tuple(map(estimate, brief.phases, few.phases, more.phases))
            return replace(few, depth=blocks, held=dict(resize(brief.held.items())), phases=phases)

        return of

    def times(self, of: Callable[[int, int], Trace], blocks: int) -> list[float]:
        """Return the times of a model's blocks in one unit; what runs around them is the first's and the last's."""
        few, more = self.few.stages[0].depth, self.more.stages[0].depth

        def one(kind: int, depth: int) -> int:
            # The second forward and backward: the first backward makes gradients.
            names = [[phase for phase in of(kind, depth).phases if phase.name == name] for name in _DIRECTIONS]
            return sum(event.moved for alike in names for event in alike[1].events)

        middle = 1 if len(self.few.stages) > 2 else 0
        block = (one(middle, more) - one(middle, few)) / (more - few)
        times = [block] * blocks
        times[0] += one(0, few) - few * block
        times[-1] += one(-1, few) - few * block
        return times

    def joined(self, shape: Shape, of: Callable[[int, int], Trace] | None = None) -> Trace:
        """Return the trace of all stages; ``of`` makes the four micro-batches of a kind and a number of blocks."""
        ranks = len(shape.blocks)
        stages = list[Trace]()
        for rank, blocks in enumerate(shape.blocks):
            kind = 0 if rank == 0 else -1 if rank == ranks - 1 else 1
            trace = (of or self.trace)(kind, blocks)
            sizes = (trace.held["inputs"], trace.tokens)
            inputs, tokens = (size * shape.micro_batches // _MICRO_BATCHES for size in sizes)
            phases = _order(trace, shape, rank, kind % len(self.few.stages))
            sizes_held, axes = {**trace.held, "inputs": inputs}, {**trace.axes, "pp": ranks}
            stages.append(replace(trace, held=sizes_held, phases=phases, tokens=tokens, axes=axes))
        fullest = max(stages, key=lambda stage: stage.memory().peak)
        whole = sum(of_blocks(self.few, self.more, blocks) for blocks in shape.blocks)
        whole += self.few.parameters - sum(of_blocks(self.few, self.more, stage.depth) for stage in self.few.stages)
        stages = [replace(stage, parameters=whole) for stage in stages]
        return replace(fullest, parameters=whole, stages=tuple(stages))


def of_blocks(few: Trace, more: Trace, blocks: int) -> int:
    """Return the number of parameters of some blocks, from the traces of probes."""
    between = sum(stage.depth for stage in more.stages) - sum(stage.depth for stage in few.stages)
    return blocks * (more.parameters - few.parameters) // between


def _order(trace: Trace, shape: Shape, rank: int, probed: int) -> tuple[Phase, ...]:
    """Return the phases of a rank's step, from those of four micro-batches of stage ``probed`` of the probe."""
    ranks, at, before = len(shape.blocks), 0, ""
    begins, parts = dict[int, int](), dict[tuple[str, str], list[Phase]]()
    for phase in trace.phases:
        begins[id(phase)] = at
        at += len(phase.events)
        parts.setdefault((phase.name, before), []).append(phase)
        before = phase.name
    chosen = [trace.phases[0]]
    forwards, backwards = ([phase for phase in trace.phases if phase.name == name] for name in _DIRECTIONS)
    todo = actions(shape.schedule, rank, ranks, shape.micro_batches)
    for count, action in enumerate(todo, 1):
        name, every = ("forward", forwards) if action.kind == "F" else ("backward", backwards)
        ends = (id(every[0]), id(backwards[-1]))
        alike = [phase for phase in parts.get((name, chosen[-1].name), ()) if id(phase) not in ends]
        if action.number == 0:
            alike = every
        elif count == len(todo):
            alike = every[-1:]
        chosen.append((alike or every[1:-1])[0])
    chosen.append(trace.phases[-1])
    phases, now = list[Phase](), 0

    @cache
    def rewire(sent: Collective) -> Collective:
        steps = sent.peer - probed
        peer = rank + steps if abs(steps) == 1 else ranks - 1 - rank  # a neighbour, or the other end
        size = sent.size // sent.ranks * ranks if sent.kind == "all_gather" else sent.size
        return replace(sent, ranks=ranks, stride=shape.stride, peer=peer if sent.peer >= 0 else -1, size=size)

    for phase in chosen:
        begin, events = begins[id(phase)], list[Event]()
        for event in phase.events:
            if event.kind == "wait":  # for what came in another phase, nobody waits any more
                event = replace(event, target=event.target - begin + now if event.target >= begin else 0)
            elif event.collective is not None and event.collective.axis == "pp":
                event = replace(event, collective=rewire(event.collective))
            events.append(event)
        phases.append(Phase(name=phase.name, events=tuple(events)))
        now += len(events)
    return tuple(phases)


def condensed(trace: Trace, hardware: Hardware) -> Trace:
    """Return a trace with one event for all that a stage does between two messages of ``pp``, as if it never waited."""
    clock, phases = Clock(trace, hardware), list[Phase]()
    rate = hardware.memory_bandwidth * hardware.memory_fraction
    for phase in trace.phases:
        events, begin, changes = list[Event](), clock.free["compute"], list[tuple[str, int]]()
        for event in (*phase.events, None):
            if event is not None:
                changes += event.memory
                if event.collective is None or event.collective.axis != "pp":
                    clock.step(phase.name, event)
                    continue
                clock.exchange(event)
            moved = max(1, int((clock.free["compute"] - begin - hardware.launch) * rate))
            events.append(Event(kind="compute", name=phase.name, moved=moved, fused=moved, memory=_at_peak(changes)))
            events += [] if event is None else [replace(event, memory=())]
            begin, changes = clock.free["compute"], []
        phases.append(Phase(name=phase.name, events=tuple(events)))
    return replace(trace, phases=tuple(phases))


def _at_peak(changes: Sequence[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Return changes joined to those up to the highest sum, and those behind it; within each, what falls first."""
    total = highest = cut = 0
    for count, (_, size) in enumerate(changes, 1):
        total += size
        if total > highest:
            highest, cut = total, count
    joined = list[tuple[str, int]]()
    for some in (changes[:cut], changes[cut:]):
        sums = dict[str, int]()
        for holder, size in some:
            sums[holder] = sums.get(holder, 0) + size
        joined += sorted(((holder, size) for holder, size in sums.items() if size), key=lambda item: item[1])
    return tuple(joined)
