"""The trace of one training step on one rank: what it computed, moved, sent and held, as data without times."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal, final

HELD = (
    *("parameters", "gradients", "optimizer", "buffers", "inputs"),
    *("gathered", "activations", "recomputed", "logits and loss", "temporaries"),
)
"""Owners of memory; ``gathered``: whole parameters of a unit, and buffers in which these and gradients travel."""

Kind = Literal["compute", "collective", "async", "wait"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of one group of ranks on ``axis``, or a message to ``peer`` (``send``, ``recv``).

    ``stride`` is the distance between neighbours in rank numbers. ``size`` is in bytes: of a gather's result, of a
    reduce-scatter's input, the larger of what a rank puts in and gets in an all-to-all or a send, else what it puts in.
    """

    kind: str
    axis: str
    ranks: int
    stride: int
    size: int
    dtype: str
    peer: int = -1
    tag: int = 0


def all_reduce(axis: str, ranks: int, stride: int, size: int, dtype: str) -> Collective:
    """Return a sum over the ranks of an axis, of ``size`` bytes."""
    return Collective(kind="all_reduce", axis=axis, ranks=ranks, stride=stride, size=size, dtype=dtype)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something a rank does, in the order in which the host issues it.

    ``async``: its result is waited for later, by a ``wait`` whose stream goes on when event ``target`` is done.
    ``moved``: bytes read and written by this operator alone; ``fused``: where a compiler joins neighbours, by the last.
    ``shape``: (batch, m, k, n) of a matrix product, (batch x heads, queries, keys, channels) of attention.
    ``memory``: (holder, bytes more or less), in order.
    """

    kind: Kind
    name: str
    stream: str = "compute"
    scope: str = ""
    recomputed: bool = False
    flops: int = 0
    moved: int = 0
    fused: int = 0
    shape: tuple[int, ...] = ()
    dtype: str = ""
    memory: tuple[tuple[str, int], ...] = ()
    collective: Collective | None = None
    target: int = -1


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of the step: ``start``, ``forward``, ``backward``, ``optimizer``, in the order of the step."""

    name: str
    events: tuple[Event, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Record one step of one rank.

    Attributes:
        axes: the mesh, name -> size, outermost first.
        depth: number of equal blocks of the model.
        tokens: tokens that this rank's data axis sees in the step (its micro-batches).
        data_size: number of different batches of the ranks at a time.
        held: holder -> bytes at the start of the step.
        exact: ``parameters``, ``gradients``, ``optimizer``, ``buffers`` -> bytes of this rank, not rounded up.
        parameters: number of parameters of the whole model.
        phases: the events of each phase.
        compiled: blocks are compiled, so their element-wise operators are joined.
        stages: where ranks have different layers, a trace of each stage, in order; this trace is the fullest's.
    """

    axes: Mapping[str, int]
    depth: int
    tokens: int
    data_size: int
    held: Mapping[str, int]
    exact: Mapping[str, int]
    parameters: int
    phases: tuple[Phase, ...]
    compiled: bool = False
    stages: tuple[Trace, ...] = ()

    def events(self) -> Iterator[tuple[str, Event]]:
        """Yield (phase, event) in order; ``target`` counts in this order."""
        for phase in self.phases:
            for event in phase.events:
                yield phase.name, event

    def collectives(self) -> list[tuple[str, Collective]]:
        """Return (phase, collective) in the order in which they are issued."""
        return [(phase, event.collective) for phase, event in self.events() if event.collective is not None]

    def flops(self, *, recomputed: bool = True) -> int:
        """Return the floating-point operations of this rank, with or without those that are done again."""
        return sum(event.flops for _, event in self.events() if recomputed or not event.recomputed)

    def live(self) -> int:
        """Return the most micro-batches whose activations are held at a time."""
        return max(
            accumulate((phase.name == "forward") - (phase.name == "backward") for phase in self.phases), default=0
        )

    def memory(self) -> StepMemory:
        """Return the memory that is held over the step."""
        total = peak = sum(self.held.values())
        when, curve, changes, at_peak = 0, [total], [], 0
        for index, (_, event) in enumerate(self.events()):
            highest = total
            for change in event.memory:
                changes.append(change)
                total += change[1]
                highest = max(highest, total)
                if total > peak:
                    peak, when, at_peak = total, index, len(changes)
            curve.append(highest)
        sizes = dict.fromkeys(HELD, 0) | dict(self.held)
        for holder, amount in changes[:at_peak]:
            sizes[holder] += amount
        sizes_at_peak = {name: size for name, size in sizes.items() if size}
        return StepMemory(peak=peak, held=sizes_at_peak, event=when, curve=tuple(curve), end=total)

    def to_json(self) -> str:
        """Return the trace as text; ``Trace.from_json`` reads it."""
        data = asdict(replace(self, stages=(), phases=()))
        data["stages"] = [stage.to_json() for stage in self.stages]
        data["phases"] = [{"name": phase.name, "events": [*map(_pack, phase.events)]} for phase in self.phases]
        return json.dumps(data, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """Read a text of :meth:`to_json`."""
        data = json.loads(text)
        phases = [Phase(name=phase["name"], events=tuple(map(_unpack, phase["events"]))) for phase in data["phases"]]
        return cls(**data | {"phases": tuple(phases), "stages": tuple(map(cls.from_json, data["stages"]))})


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Report the memory of a rank over the step.

    Attributes:
        peak: most bytes at any moment.
        held: holder -> bytes at that moment.
        event: index of the event with the peak.
        curve: bytes after the start and at each event (the highest within it).
        end: bytes after the step.
    """

    peak: int
    held: Mapping[str, int] = field(default_factory=dict)
    event: int
    curve: tuple[int, ...]
    end: int


_DEFAULTS = asdict(Event(kind="compute", name="")) | {"kind": ""}


def _pack(event: Event) -> dict[str, Any]:
    return {name: value for name, value in asdict(event).items() if value != _DEFAULTS[name] or name == "name"}


def _unpack(data: dict[str, Any]) -> Event:
    sent = data.get("collective")
    memory, shape = tuple(map(tuple, data.get("memory", ()))), tuple(data.get("shape", ()))
    return Event(**data | {"memory": memory, "shape": shape, "collective": sent and Collective(**sent)})
