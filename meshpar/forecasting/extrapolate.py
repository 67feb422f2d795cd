"""Traces of deep models from two of shallow ones, of large micro-batches from small ones, and on other data axes.

Two probes differ by one stretch of events a pass, and in amounts that grow linearly; where they do not fit, raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from meshpar.core.errors import MeshparError
from meshpar.forecasting.trace import Collective, Event, Phase, Trace


def deepened(shallow: Trace, deeper: Trace, depth: int) -> Trace:
    """Return the trace of ``depth`` blocks from two of fewer; raises MeshparError unless whole blocks differ."""
    step = deeper.depth - shallow.depth
    if step < 1 or depth < deeper.depth or (depth - shallow.depth) % step:
        raise MeshparError(f"cannot extrapolate {depth} blocks from probes of {shallow.depth} and {deeper.depth}")
    times = (depth - shallow.depth) // step
    phases, places, start = [], list[int](), 0
    for few, more in _pairs(shallow, deeper):
        phases.append(Phase(name=more.name, events=_stretch(few.events, more.events, times, places, start)))
        start += len(phases[-1].events)
    return replace(
        deeper,
        depth=depth,
        held=_line(shallow.held, deeper.held, times),
        exact=_line(shallow.exact, deeper.exact, times),
        parameters=shallow.parameters + times * (deeper.parameters - shallow.parameters),
        phases=tuple(phases),
    )


def widened(one: Trace, two: Trace, times: int) -> Trace:
    """Return the trace of ``times`` samples from those of one and two, exact but for the allocator's rounding."""
    phases = []
    for first, second in _pairs(one, two):
        if len(first.events) != len(second.events):
            raise MeshparError(f"the {first.name} of one sample and of two differ in more than amounts")
        events = tuple(_grow(a, b, times - 1) for a, b in zip(first.events, second.events))
        phases.append(Phase(name=first.name, events=events))
    return replace(one, tokens=one.tokens * times, held=_line(one.held, two.held, times - 1), phases=tuple(phases))


def on_mesh(trace: Trace, replicas: int, shards: int) -> Trace:
    """Return the trace with its data axes cut another way: groups, strides and shards of other sizes."""
    then, data = trace.axes["dp_shard"], trace.axes["dp_shard"] * trace.axes.get("dp_replicate", 1)

    @cache
    def cut(sent: Collective) -> Collective:
        if sent.axis == "dp_shard":
            return replace(sent, ranks=sent.ranks // then * shards)
        if sent.axis == "dp_replicate":
            size = sent.size * then // shards if sent.size > 1024 else sent.size
            return replace(sent, ranks=replicas, stride=sent.stride // then * shards, size=size)
        return sent

    def moved(event: Event) -> Event:
        return event if event.collective is None else replace(event, collective=cut(event.collective))

    phases = tuple(Phase(name=phase.name, events=tuple(map(moved, phase.events))) for phase in trace.phases)
    axes = dict(trace.axes) | {"dp_replicate": replicas, "dp_shard": shards}
    return replace(trace, axes=axes, data_size=trace.data_size // data * replicas * shards, phases=phases)


def _pairs(one: Trace, other: Trace) -> list[tuple[Phase, Phase]]:
    if [phase.name for phase in one.phases] != [phase.name for phase in other.phases]:
        raise MeshparError("two probes ran different phases")
    return list(zip(one.phases, other.phases))


def _stretch(
    few: Sequence[Event], more: Sequence[Event], times: int, places: list[int], start: int
) -> tuple[Event, ...]:
    """Repeat a phase's stretch; ``places``: where the deeper probe's events stand in the trace, from ``start`` on."""
    period = len(more) - len(few)
    if period < 0:
        raise MeshparError("more blocks ran fewer operators, which cannot be extrapolated")
    cut = _cut(few, more, period) if period else len(few)
    base = len(places)
    head = [_grow(a, b, times) for a, b in zip(few[:cut], more[:cut])]
    body = list(more[cut : cut + period])
    tail = [_grow(a, b, times) for a, b in zip(few[cut:], more[cut + period :])]
    extra = (times - 1) * period if period else 0
    # Later events wait for the last repetition of the stretch that repeats.
    places += [start + at + (extra if at >= cut else 0) for at in range(len(more))]

    def moved(event: Event, at: int, repetition: int) -> Event:
        if event.kind != "wait":
            return event
        local, shift = event.target - base, repetition * period
        if local >= cut - period and at < cut + period and repetition:
            target = start + local + shift
        elif 0 <= local < cut + period and at < cut + period:
            target = start + local
        else:
            target = places[event.target]
        return replace(event, target=target)

    events = [moved(event, at, 0) for at, event in enumerate(head)]
    for repetition in range(times if period else 0):
        events += [moved(event, cut + at, repetition) for at, event in enumerate(body)]
    events += [moved(event, cut + period + at, 0) for at, event in enumerate(tail)]
    return tuple(events)


def _cut(few: Sequence[Event], more: Sequence[Event], period: int) -> int:
    """Return where the ``period`` events stand in ``more`` that ``few`` lacks: where the rest fits best."""
    count = len(few)
    alike_head = _misfits(zip(few, more))
    alike_tail = _misfits(zip(reversed(few), reversed(more)))
    best = min(range(count + 1), key=lambda cut: (alike_head[cut] + alike_tail[count - cut], cut))
    if alike_head[best] + alike_tail[count - best] >= _IMPOSSIBLE:
        raise MeshparError("two probes differ by more than whole blocks")
    return best


_IMPOSSIBLE = 1 << 40
_AMOUNTS = ("memory", "collective", "flops", "moved", "shape")


def _misfits(pairs: Any) -> list[int]:
    """Return for each length how many first pairs differ in amounts; one of other kinds rules it out."""
    total, counts = 0, [0]
    for a, b in pairs:
        if _kind(a) != _kind(b):
            total += _IMPOSSIBLE
        else:
            total += any(getattr(a, name) != getattr(b, name) for name in _AMOUNTS)
        counts.append(total)
    return counts


def _kind(event: Event) -> tuple[Any, ...]:
    """Return what two events must share for one to be the other in a larger model."""
    sent = event.collective
    what = None if sent is None else (sent.kind, sent.axis, sent.dtype)
    holders = tuple(holder for holder, _ in event.memory)
    return event.kind, event.name, event.stream, event.recomputed, what, holders, len(event.shape)


def _grow(a: Event, b: Event, times: int) -> Event:
    """Return ``a`` after ``times`` of the steps that make it ``b``."""
    if _kind(a) != _kind(b):
        raise MeshparError(f"two probes do different things: {a.name} and {b.name}")
    changed = {name: getattr(a, name) for name in (*_AMOUNTS, "fused") if getattr(a, name) != getattr(b, name)}
    for name, value in changed.items():
        other = getattr(b, name)
        if isinstance(value, Collective):
            changed[name] = replace(other, size=value.size + times * (other.size - value.size))
        elif name == "memory":
            changed[name] = tuple((holder, x + times * (y - x)) for (holder, x), (_, y) in zip(value, other))
        elif name == "shape":
            changed[name] = tuple(x + times * (y - x) for x, y in zip(value, other))
        else:
            changed[name] = value + times * (other - value)
    return replace(b, **changed) if changed else b


def _line(a: Mapping[str, int], b: Mapping[str, int], times: int) -> dict[str, int]:
    return {name: a[name] + times * (b[name] - a[name]) for name in a}
