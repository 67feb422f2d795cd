"""Times for a trace on a hardware profile, a pure function of the two.

The host issues events in order; an event starts when its stream, what that waits for, and the host are there.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, final

from meshpar.core.errors import MeshparError
from meshpar.forecasting.hardware import Hardware
from meshpar.forecasting.trace import Collective, Event, Trace

ERROR_RANGE = 0.15
"""Of the step time: 19 of the 21 published runs that ``benchmarks/forecast_accuracy.py`` holds back lie in it."""

CAUSAL = 0.5  # fused causal attention computes this part of the square that its operations are counted for


class Span(NamedTuple):
    """An event in time: seconds from the start of the step, on one lane (a stream, or a group's own queue)."""

    lane: str
    name: str
    phase: str
    start: float
    end: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Report the time of a step.

    Attributes:
        seconds: seconds of the step.
        computing: kind of work -> seconds on the main stream (``matmul``, ``attention``, ``memory``).
        sending: (axis, kind) -> seconds of collectives, hidden behind computing or not.
        exposed: axis -> seconds in which the main stream waited for it.
        idle: seconds in which the main stream waited for the host.
        tokens_per_second: tokens per second of all ranks.
        mfu: model FLOP utilisation, without recomputation and with attention's whole square (as PaLM and torchtitan).
        spans: the timeline.
        ends: end of each event of the trace, in seconds.
        stages: of each stage of a trace with stages, of which this is the fullest's.
    """

    seconds: float
    computing: Mapping[str, float]
    sending: Mapping[tuple[str, str], float]
    exposed: Mapping[str, float]
    idle: float
    tokens_per_second: float
    mfu: float
    spans: tuple[Span, ...]
    ends: tuple[float, ...]
    stages: tuple[Cost, ...] = ()


def cost(trace: Trace, hardware: Hardware) -> Cost:
    """Return the time of one step of ``trace`` on ``hardware``."""
    if trace.stages:
        return _of_stages(trace, hardware)
    clock = Clock(trace, hardware)
    for phase, event in trace.events():
        clock.step(phase, event)
    return _read(clock, trace, max([clock.host, *clock.free.values()]), trace.flops(recomputed=False))


def _of_stages(trace: Trace, hardware: Hardware) -> Cost:
    """Let the stages' clocks run together: each waits for what another sends, and all where they exchange."""
    clocks = [Clock(stage, hardware) for stage in trace.stages]
    waiting = [deque(stage.events()) for stage in trace.stages]
    sent: dict[tuple[int, int, int], deque[float]] = defaultdict(deque)
    (axis,) = {event.collective.axis for _, event in waiting[0] if event.collective and event.collective.peer >= 0}
    while any(waiting):
        before = sum(map(len, waiting))
        for stage, (clock, events) in enumerate(zip(clocks, waiting, strict=True)):
            while events:
                message = events[0][1].collective
                if message is None or message.axis != axis:
                    clock.step(*events.popleft())
                elif message.kind == "send":
                    sent[stage, message.peer, message.tag].append(clock.step(*events.popleft()))
                elif message.kind == "recv" and (come := sent[message.peer, stage, message.tag]):
                    clock.exchange(events.popleft()[1], come.popleft())
                else:
                    break
        if sum(map(len, waiting)) < before:
            continue
        if not all(waiting) or any(events[0][1].collective.kind == "recv" for events in waiting):  # type: ignore[union-attr]
            raise MeshparError("the stages of the trace wait for one another: a message is missing")
        now = max(max(clock.free["compute"], clock.host) for clock in clocks)
        for clock, events in zip(clocks, waiting, strict=True):
            clock.wait_until(now, axis)
            clock.step(*events.popleft())
    seconds = max(max([clock.host, *clock.free.values()]) for clock in clocks)
    flops = sum(stage.flops(recomputed=False) for stage in trace.stages) / len(trace.stages)
    stages = tuple(_read(clock, stage, seconds, flops) for clock, stage in zip(clocks, trace.stages, strict=True))
    fullest = max(range(len(stages)), key=lambda stage: trace.stages[stage].memory().peak)
    return replace(stages[fullest], stages=stages)


def _read(clock: Clock, trace: Trace, seconds: float, flops: float) -> Cost:
    hardware = clock.hardware
    dtypes = [event.dtype for _, event in trace.events() if event.flops]
    peak = hardware.flops(max(set(dtypes), key=dtypes.count)) if dtypes else 1.0
    return Cost(
        seconds=seconds,
        computing=dict(clock.computing),
        sending=dict(clock.sending),
        exposed=dict(clock.exposed),
        idle=clock.idle,
        tokens_per_second=trace.tokens * trace.data_size / seconds,
        mfu=flops / seconds / peak,
        spans=tuple(clock.spans),
        ends=tuple(clock.ends),
    )


@final
class Clock:
    """Work off the events of one rank."""

    def __init__(self, trace: Trace, hardware: Hardware) -> None:
        self.hardware, self.compiled = hardware, trace.compiled
        self.host, self.idle = 0.0, 0.0
        self.free: dict[str, float] = defaultdict(float)
        self.ends: list[float] = []
        self.what: list[str] = []
        self.axis: dict[str, str] = defaultdict(str)
        self.computing: dict[str, float] = defaultdict(float)
        self.sending: dict[tuple[str, str], float] = defaultdict(float)
        self.exposed: dict[str, float] = defaultdict(float)
        self.spans: list[Span] = []
        self.busy_until = 0.0

    def step(self, phase: str, event: Event) -> float:
        """Work off an event; return when it ends."""
        if event.kind == "wait":
            end = self._wait(event)
        elif event.collective is not None:
            end = self._send(phase, event, event.collective)
        else:
            end = self._compute(phase, event)
        self._note(event, end)
        return end

    def exchange(self, event: Event, came: float = 0.0) -> None:
        """Issue a message, and wait until ``came`` for another rank's; the host waits for the numbers of a header."""
        assert event.collective is not None
        self.host += self.hardware.host
        if came:
            self.wait_until(came, event.collective.axis)
        if event.collective.kind == "recv" and event.collective.dtype == "uint8":
            self.host = max(self.host, self.free["compute"])
        self._note(event, self.free["compute"])

    def wait_until(self, time: float, axis: str) -> None:
        """Let the main stream wait for other ranks."""
        self.exposed[axis] += max(0.0, time - max(self.free["compute"], self.host))
        self.free["compute"] = max(self.free["compute"], time)

    def _note(self, event: Event, end: float) -> None:
        self.ends.append(end)
        if event.collective is not None:
            self.axis[event.stream] = event.collective.axis
        # A copy after a collective, on its stream, is part of what it makes others wait for.
        self.what.append(self.axis[event.stream] if event.stream != "compute" or event.collective is not None else "")

    def _wait(self, event: Event) -> float:
        until, free = self.ends[event.target], self.free[event.stream]
        if event.stream == "compute" and until > max(free, self.host):
            self.exposed[self.what[event.target] or "copies"] += until - max(free, self.host)
        self.free[event.stream] = max(free, until)
        return self.free[event.stream]

    def _send(self, phase: str, event: Event, sent: Collective) -> float:
        hardware = self.hardware
        self.host += hardware.host
        lane = f"{sent.axis} {sent.kind}" if event.kind == "async" or sent.peer >= 0 else event.stream
        behind = event.kind == "async" or sent.kind == "send"  # a rank goes on as it sends to another
        queue = f"{sent.axis} {sent.peer}" if sent.peer >= 0 else f"group {sent.axis}" if behind else event.stream
        start = max(self.free[event.stream], self.free[queue], self.host)
        took = sending_time(sent, hardware)
        end = start + took
        self.free[queue] = end
        self.sending[sent.axis, sent.kind] += took
        if event.kind == "collective" and event.stream == "compute" and sent.peer < 0:
            self.exposed[sent.axis] += took
        self.busy_until = max(self.busy_until, end)
        self._draw(lane, f"{sent.kind} {sent.axis}", phase, start, end)
        return end

    def _compute(self, phase: str, event: Event) -> float:
        moved = event.fused if self.compiled and event.scope else event.moved
        issued = not (self.compiled and event.scope and not event.flops and not moved)
        if not event.flops and not event.moved:
            return self.free[event.stream]
        self.host += self.hardware.host if issued else 0.0
        took, kind = computing_time(event, moved, self.hardware)
        if took == 0.0:
            return self.free[event.stream]
        start = self.free[event.stream]
        if self.host > start:
            self.idle += self.host - start if event.stream == "compute" else 0.0
            start = self.host
        overlap = max(0.0, min(start + took, self.busy_until) - start)
        took += overlap * self.hardware.contention
        end = self.free[event.stream] = start + took
        if event.stream == "compute":
            self.computing[kind] += took
        self._draw(event.stream, event.name, phase, start, end)
        return end

    def _draw(self, lane: str, name: str, phase: str, start: float, end: float) -> None:
        self.spans.append(Span(lane=lane, name=name, phase=phase, start=start, end=end))


def computing_time(event: Event, moved: int, hardware: Hardware) -> tuple[float, str]:
    """Return the seconds of one operator and what bounds it; 0 for one that a compiler joined to others."""
    memory = moved / (hardware.memory_bandwidth * hardware.memory_fraction)
    if not event.flops:
        return (memory + hardware.launch, "memory") if moved else (0.0, "memory")
    speed = hardware.flops(event.dtype) * hardware.clock
    if "attention" in event.name:
        fraction = hardware.attention_backward if "backward" in event.name else hardware.attention_forward
        return CAUSAL * event.flops / (speed * fraction) + hardware.launch, "attention"
    fraction = hardware.matmul
    for size in event.shape[1:]:
        fraction *= size / (size + hardware.tile)
    return max(event.flops / (speed * fraction), memory) + hardware.launch, "matmul"


def sending_time(sent: Collective, hardware: Hardware) -> float:
    """Return the seconds of one collective: ring bytes over the slowest link, and a latency that grows with nodes."""
    if sent.ranks <= 1:
        return 0.0
    on_node, nodes = placement(sent, hardware)
    # Without a switch a pair has its own wires and no others.
    wires = 1.0 if hardware.switched or hardware.node == 1 else (on_node - 1) / (hardware.node - 1)
    within = hardware.node_bandwidth * hardware.node_fraction * wires
    if nodes == 1:
        bandwidth, latency = within, hardware.node_latency
    else:
        # The ranks of the group that share a node reach the network through a card each.
        across = on_node * hardware.network_bandwidth * hardware.network_fraction
        bandwidth = min(within, across) if on_node > 1 else across
        latency = hardware.network_latency * (1 + 0.05 * nodes)
    volume = sent.size * (1 if sent.kind == "send" else (sent.ranks - 1) / sent.ranks)
    return latency + volume * (2 if sent.kind == "all_reduce" else 1) / bandwidth


def placement(sent: Collective, hardware: Hardware) -> tuple[int, int]:
    """Return how many ranks of the group share a node, and on how many nodes it lies; ranks fill the nodes in order."""
    on_node = max(1, min(sent.ranks, hardware.node // sent.stride)) if sent.stride < hardware.node else 1
    return on_node, -(-sent.ranks // on_node)
