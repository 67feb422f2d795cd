"""A summary page of the time and memory of a few steps, from torch's trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

Interval = tuple[float, float]

DATA = "data"
"""Name of the wait for a batch in the trace."""

WARM, STEPS = 3, 3
"""Warm-up steps before the profile, which also allocate, compile and tune, and profiled steps. One more records memory."""
LEAST = WARM + STEPS + 2
"""Least number of steps of a run with a profile, which is written when the step after it begins."""

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of the profiled steps on one rank.

    Attributes:
        total: seconds from the first to the last event.
        compute: seconds in which the device (on a CPU: the training thread) computed.
        communication: axis -> seconds in which its collectives ran.
        exposed: axis -> seconds of its collectives without overlapping computation.
        data: seconds of waiting for batches.
        idle: remaining seconds, in which the device had no work, mostly because the host was late.
    """

    total: float
    compute: float
    communication: Mapping[str, float]
    exposed: Mapping[str, float]
    data: float
    idle: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The content of the summary page.

    Attributes:
        title: the plan, and the device.
        steps: number of profiled steps.
        times: times of rank 0.
        ranks: each rank's seconds a step, seconds of waiting for data a step, and peak memory in bytes.
        holders: holder of memory at the peak -> bytes; empty if unknown.
        unseen: why the holders are unknown, and where to find them.
        files: name of each file beside the page -> description.
    """

    title: str
    steps: int
    times: Times
    ranks: Sequence[Mapping[str, float]]
    holders: Mapping[str, int] = field(default_factory=dict)
    unseen: str = ""
    files: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join([*self._time(), *self._memory(), *self._advice()]) + "\n"

    def _time(self) -> Iterable[str]:
        times = self.times
        yield f"# Profile: {self.title}"
        yield ""
        yield f"{self.steps} steps of {times.total / self.steps * 1e3:,.1f} ms on rank 0, with the profiler's own cost."
        yield ""
        yield "| of a step | ms | share |"
        yield "|---|---:|---:|"
        yield self._row("compute", times.compute)
        for axis in times.communication:
            yield self._row(f"exposed communication, {axis}", times.exposed[axis])
        yield self._row("waiting for data", times.data)
        yield self._row("gaps: nothing computed, sent or read", times.idle)
        for axis, seconds in times.communication.items():
            hidden = 1 - times.exposed[axis] / seconds if seconds else 1.0
            yield f"\nCollectives of {axis}: {seconds / self.steps * 1e3:,.1f} ms a step, {hidden:.0%} of it behind compute."
        yield ""
        yield "| rank | ms a step | waiting for data, ms | peak memory, MiB |"
        yield "|---|---:|---:|---:|"
        for rank, one in enumerate(self.ranks):
            yield f"| {rank} | {one['seconds'] * 1e3:,.1f} | {one['data'] * 1e3:,.2f} | {one['memory'] / 2**20:,.0f} |"

    def _row(self, name: str, seconds: float) -> str:
        return f"| {name} | {seconds / self.steps * 1e3:,.2f} | {seconds / self.times.total:.1%} |"

    def _memory(self) -> Iterable[str]:
        if self.holders:
            total = sum(self.holders.values())
            yield f"\n| at the peak of live tensors: {total / 2**20:,.1f} MiB | MiB | share |"
            yield "|---|---:|---:|"
            for name, size in sorted(self.holders.items(), key=lambda item: -item[1]):
                yield f"| {name} | {size / 2**20:,.1f} | {size / total:.0%} |"
        elif self.unseen:
            yield f"\nUse of the memory at its peak: {self.unseen}"
        yield ""
        yield from (f"- `{name}`: {what}" for name, what in self.files.items())

    def _advice(self) -> Iterable[str]:
        yield "\nWhat it suggests:\n"
        found = list(self._suggestions())
        yield from (f"- {each}" for each in found or ["nothing stands out: the step computes for most of its time"])

    def _suggestions(self) -> Iterable[str]:
        times = self.times
        for axis, seconds in times.exposed.items():
            share = seconds / times.total
            if share > 0.05 and axis == "tp":
                yield f"{share:.0%} of the step waits for tp: a smaller tp, or sequence_parallel, sends less"
            elif share > 0.05:
                yield f"{share:.0%} of the step waits for {axis}: a larger micro-batch, prefetch_forward=1 or bfloat16 gathers"
        if times.data > 0.02 * times.total:
            yield f"{times.data / times.total:.0%} of the step waits for data: data.workers=2 reads ahead"
        if times.idle > 0.1 * times.total:
            yield f"{times.idle / times.total:.0%} of the step is gaps: the Compile pass, or a larger micro-batch, gives more to do at once"
        slowest, fastest = (pick(one["seconds"] for one in self.ranks) for pick in (max, min))
        if slowest > 1.1 * fastest:
            yield f"the slowest rank takes {slowest / fastest:.2f} times the fastest's: look at its machine (meshpar doctor)"
        if self.holders.get("activations", 0) > 0.5 * sum(self.holders.values()):
            yield "activations hold most of the memory: ActivationCheckpoint (mode: selective costs less time)"
        if self.holders.get("logits and loss", 0) > 0.3 * sum(self.holders.values()):
            yield "logits hold much of the memory: training.objective_options={chunk: 1024}"


def times_of(trace: Mapping[str, Any], threads: Mapping[int, str] | None = None) -> Times:
    """Return the times in a Chrome trace of torch's profiler.

    Args:
        trace: the parsed JSON.
        threads: for a trace without a GPU: gloo's threads -> the axis whose collectives the thread runs. Threads with an empty axis are
            left out.
    """
    events = [each for each in trace["traceEvents"] if each.get("ph") == "X" and "dur" in each]
    on_device = [each for each in events if each.get("cat") in _DEVICE]
    if on_device:
        compute = _spans(each for each in on_device if "nccl" not in each["name"].lower())
        sent = _by_axis((_described(each), each) for each in on_device if "nccl" in each["name"].lower())
    else:
        main = _busiest(events)
        compute = _spans(each for each in events if each["tid"] == main and each["name"].startswith("aten::"))
        sent = _gloo(events, threads or {})
    data = _spans(each for each in events if each["name"] == DATA and each.get("cat") == "user_annotation")
    joined = {axis: _union(spans) for axis, spans in sent.items()}
    everything = _union([*compute, *data, *(span for spans in joined.values() for span in spans)])
    window = (everything[0][0], everything[-1][1]) if everything else (0.0, 0.0)
    busy = _union(compute)
    return Times(
        total=_seconds([window]),
        compute=_seconds(busy),
        communication={axis: _seconds(spans) for axis, spans in joined.items()},
        exposed={axis: _seconds(_union([*busy, *spans])) - _seconds(busy) for axis, spans in joined.items()},
        data=_seconds(_union([*busy, *data])) - _seconds(busy),
        idle=_seconds([window]) - _seconds(everything),
    )


def _described(event: Mapping[str, Any]) -> str:
    text = event.get("args", {}).get("Process Group Description", "") or "unnamed group"
    return str(text).removeprefix("mesh_")


def _gloo(events: Sequence[Mapping[str, Any]], threads: Mapping[int, str]) -> dict[str, list[Interval]]:
    """Return the spans of gloo's collectives by axis; all under one name if a thread is unknown."""
    mine = [each for each in events if each["name"].startswith("gloo:")]
    if any(each["tid"] not in threads for each in mine):
        return _by_axis(("all axes", each) for each in mine)
    return _by_axis((threads[each["tid"]], each) for each in mine if threads[each["tid"]])


def _by_axis(pairs: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, list[Interval]]:
    found: dict[str, list[Interval]] = {}
    for axis, event in pairs:
        found.setdefault(axis, []).extend(_spans([event]))
    return found


def _busiest(events: Sequence[Mapping[str, Any]]) -> object:
    counts: dict[object, int] = {}
    for each in events:
        if each["name"].startswith("aten::"):
            counts[each["tid"]] = counts.get(each["tid"], 0) + 1
    return max(counts, key=lambda thread: counts[thread], default=None)


def _spans(events: Iterable[Mapping[str, Any]]) -> list[Interval]:
    return [(each["ts"], each["ts"] + each["dur"]) for each in events]


def _union(spans: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _seconds(spans: Iterable[Interval]) -> float:
    return sum(end - start for start, end in spans) / 1e6
