"""Profile a few steps of a job: torch's trace, a memory snapshot and a summary page of time and memory."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from meshpar._torch.groups import gloo_threads, group_title
from meshpar._torch.tensors import memory_history
from meshpar.core import runtime
from meshpar.core.errors import brief
from meshpar.forecasting.recorder import Recorder
from meshpar.forecasting.step import axis_groups, hold_state
from meshpar.forecasting.trace import Phase
from meshpar.parallelized import Parallelized
from meshpar.process.leftovers import on_the_way, write_durably
from meshpar.training.data import Batches, TensorBatch
from meshpar.training.metrics import peak_memory

log = logging.getLogger(__name__)

Interval = tuple[float, float]

DATA = "data"
"""Name of the wait for a batch in the trace."""

WARM, STEPS = 3, 3
"""Warm-up steps, which also allocate, compile and tune, and profiled steps; one more records memory."""
LEAST = WARM + STEPS + 2
"""Least number of steps of a run with a profile, which is written when the step after it begins."""

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
TRACE, SNAPSHOT, SUMMARY = "trace.json", "memory.pickle", "summary.md"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of the profiled steps on one rank, by axis; ``exposed``: without overlapping computation."""

    total: float
    compute: float
    communication: Mapping[str, float]
    exposed: Mapping[str, float]
    data: float
    idle: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The content of the summary page about ``steps`` profiled steps; ``unseen``: why the holders are unknown."""

    title: str
    steps: int
    times: Times
    ranks: Sequence[Mapping[str, float]]
    holders: Mapping[str, int] = field(default_factory=dict)
    unseen: str = ""
    files: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        advice = list(self._suggestions()) or ["nothing stands out: the step computes for most of its time"]
        suggests = ["\nWhat it suggests:\n", *(f"- {line}" for line in advice)]
        return "\n".join([*self._time(), *self._memory(), *suggests]) + "\n"

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
            each = f"{seconds / self.steps * 1e3:,.1f} ms a step"
            yield f"\nCollectives of {axis}: {each}, {hidden:.0%} of it behind compute."
        yield ""
        yield "| rank | ms a step | waiting for data, ms | peak memory, MiB |"
        yield "|---|---:|---:|---:|"
        for rank, facts in enumerate(self.ranks):
            seconds, data, memory = facts["seconds"] * 1e3, facts["data"] * 1e3, facts["memory"] / 2**20
            yield f"| {rank} | {seconds:,.1f} | {data:,.2f} | {memory:,.0f} |"

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
            yield f"\nMemory at its peak: {self.unseen}"
        yield ""
        yield from (f"- `{name}`: {what}" for name, what in self.files.items())

    def _suggestions(self) -> Iterable[str]:
        times = self.times
        for axis, seconds in times.exposed.items():
            share = seconds / times.total
            if share > 0.05 and axis == "tp":
                yield f"{share:.0%} of the step waits for tp: a smaller tp, or sequence_parallel, sends less"
            elif share > 0.05:
                yield (
                    f"{share:.0%} of the step waits for {axis}: a larger micro-batch, prefetch_forward=1 or bfloat16 "
                    "gathers"
                )
        if times.data > 0.02 * times.total:
            yield f"{times.data / times.total:.0%} of the step waits for data: data.workers=2 reads ahead"
        if times.idle > 0.1 * times.total:
            yield (
                f"{times.idle / times.total:.0%} of the step is gaps: the Compile pass, or a larger micro-batch, "
                "gives more to do at once"
            )
        slowest, fastest = (pick(facts["seconds"] for facts in self.ranks) for pick in (max, min))
        if slowest > 1.1 * fastest:
            yield (
                f"the slowest rank takes {slowest / fastest:.2f} times the fastest's: look at its machine (meshpar "
                "doctor)"
            )
        if self.holders.get("activations", 0) > 0.5 * sum(self.holders.values()):
            yield "activations hold most of the memory: ActivationCheckpoint (mode: selective costs less time)"
        if self.holders.get("logits and loss", 0) > 0.3 * sum(self.holders.values()):
            yield "logits hold much of the memory: training.objective_options={chunk: 1024}"


def times_of(trace: Mapping[str, Any], threads: Mapping[int, str] | None = None) -> Times:
    """Return the times in a Chrome trace of torch's profiler; ``threads``: gloo's threads -> axis."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    on_device = [event for event in events if event.get("cat") in _DEVICE]
    if on_device:
        compute = _spans(event for event in on_device if "nccl" not in event["name"].lower())
        named = [(event, event.get("args", {}).get("Process Group Description", "")) for event in on_device]
        pairs = [(str(text or "unnamed group").removeprefix("mesh_"), event) for event, text in named]
        sent = _by_axis(pair for pair in pairs if "nccl" in pair[1]["name"].lower())
    else:
        operators = Counter(event["tid"] for event in events if event["name"].startswith("aten::"))
        main = max(operators, key=lambda thread: operators[thread], default=None)
        compute = _spans(event for event in events if event["tid"] == main and event["name"].startswith("aten::"))
        sent = _gloo(events, threads or {})
    data = _spans(event for event in events if event["name"] == DATA and event.get("cat") == "user_annotation")
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


def _gloo(events: Sequence[Mapping[str, Any]], threads: Mapping[int, str]) -> dict[str, list[Interval]]:
    """Return the spans of gloo's collectives by axis; all under one name if a thread is unknown."""
    collectives = [event for event in events if event["name"].startswith("gloo:")]
    if any(event["tid"] not in threads for event in collectives):
        return _by_axis(("all axes", event) for event in collectives)
    return _by_axis((threads[event["tid"]], event) for event in collectives if threads[event["tid"]])


def _by_axis(pairs: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, list[Interval]]:
    spans: dict[str, list[Interval]] = {}
    for axis, event in pairs:
        spans.setdefault(axis, []).extend(_spans([event]))
    return spans


def _spans(events: Iterable[Mapping[str, Any]]) -> list[Interval]:
    return [(event["ts"], event["ts"] + event["dur"]) for event in events]


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


@final
class Profiled:
    """Wrap a job's batches, and profile the steps between them; rank 0 writes the files to ``folder``."""

    def __init__(self, data: Batches, par: Parallelized, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        """Wrap ``data``. Collective: every rank wraps its batches and iterates over them."""
        self._data, self._par, self._optimizer, self._folder = data, par, optimizer, folder
        self._waited = 0.0

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as the data's
        return getattr(self._data, name)

    def __iter__(self) -> Iterator[list[TensorBatch]]:
        batches = iter(self._data)
        for _ in range(WARM):
            yield next(batches)
        yield from self._traced(batches)
        yield from batches

    def _traced(self, batches: Iterator[list[TensorBatch]]) -> Iterator[list[TensorBatch]]:
        device = self._par.device
        gpu = device.type == "cuda"
        tracer: profile | None = None
        if dist.get_rank() == 0:
            tracer = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])])
            tracer.start()
        start = time.perf_counter()
        try:
            for _ in range(STEPS):
                yield self._next(batches)
            if gpu:
                torch.cuda.synchronize(device)
            seconds = time.perf_counter() - start
        finally:
            # Record nothing more: torch writes the end of an exchange in flight into events whose memory a stop frees.
            # All kinds at once: torch warns of a part of them, whatever the machine has.
            if tracer is not None:
                kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA, ProfilerActivity.XPU]
                tracer.toggle_collection_dynamic(False, kinds)
        axes = {group_title(group): axis for axis, group in self._par.groups()}
        threads = {number: axes.get(title, "") for number, title in gloo_threads().items()}
        ranks: list[Any] = [None] * dist.get_world_size()
        rank_times = {"seconds": seconds / STEPS, "data": self._waited / STEPS, "memory": float(peak_memory(device))}
        holders: dict[str, int] = {}
        if gpu:
            yield from self._snapshot(batches)
        elif not any(pass_.compiles for pass_ in self._par.plan.passes):
            yield from self._watched(batches, holders)
        else:
            yield next(batches)
        if tracer is not None:
            tracer.stop()
        dist.all_gather_object(ranks, rank_times, runtime.hosts())
        if tracer is not None:
            try:
                self._write(tracer, threads, ranks, holders)
            except Exception as error:  # noqa: BLE001 - the other ranks write none, and train on
                log.warning("no profile in %s: %s; training continues", self._folder, brief(error))
            finally:
                # The tracer is in a cycle of references: free its events now.
                tracer.profiler = None

    def _next(self, batches: Iterator[list[TensorBatch]]) -> list[TensorBatch]:
        start = time.perf_counter()
        with record_function(DATA):
            step = next(batches)
        self._waited += time.perf_counter() - start
        return step

    def _snapshot(self, batches: Iterator[list[TensorBatch]]) -> Iterator[list[TensorBatch]]:
        with memory_history() as dump:
            yield next(batches)
            if dist.get_rank() == 0:
                with suppress(OSError):  # the page, written later to the same disk, tells of it
                    self._folder.mkdir(parents=True, exist_ok=True)
                    dump(self._folder / SNAPSHOT)

    def _watched(self, batches: Iterator[list[TensorBatch]], holders: dict[str, int]) -> Iterator[list[TensorBatch]]:
        """Record the live tensors of one step, and their holders at the peak."""
        module, optimizer = self._par.module, self._optimizer
        recorder = Recorder(axis_groups(self._par))
        state, _ = hold_state(recorder, self._par, optimizer, batches=(), beside=())
        marks = [
            module.register_forward_pre_hook(lambda *_: recorder.phase("forward"), prepend=True),
            module.register_forward_hook(lambda *_: recorder.phase("backward")),
            optimizer.register_step_pre_hook(lambda *_: recorder.name_gradients(module)),
        ]
        step = next(batches)
        with recorder:
            recorder.phase("start")
            yield step
            phases = recorder.finished()
        for mark in marks:
            mark.remove()
        holders |= at_the_peak(state, phases)

    def _write(self, tracer: profile, threads: Mapping[int, str], ranks: list[Any], holders: Mapping[str, int]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        fresh = on_the_way(self._folder / TRACE, "tmp")
        tracer.export_chrome_trace(str(fresh))
        fresh.replace(self._folder / TRACE)
        times = times_of(json.loads((self._folder / TRACE).read_text(encoding="utf-8")), threads)
        files = {TRACE: "opens in https://ui.perfetto.dev"}
        with suppress(FileNotFoundError):
            kib = (self._folder / SNAPSHOT).stat().st_size >> 10
            files |= {SNAPSHOT: f"{kib} KiB, opens in https://pytorch.org/memory_viz"}
        title = f"{self._par.plan} on {len(ranks)} ranks ({self._par.device.type})"
        unseen = "compiled blocks do not show it; `meshpar plan` forecasts it"
        where = f"`{SNAPSHOT}` shows it" if SNAPSHOT in files else unseen
        page = Page(title=title, steps=STEPS, times=times, ranks=ranks, holders=holders, unseen=where, files=files)
        write_durably(self._folder / SUMMARY, str(page))


def at_the_peak(held: Mapping[str, int], phases: tuple[Phase, ...]) -> dict[str, int]:
    now, peak = Counter(held), Counter(held)
    for event in (event for phase in phases for event in phase.events):
        for holder, change in event.memory:
            now[holder] += change
        if now.total() > peak.total():
            peak = now.copy()
    return {name: size for name, size in peak.items() if size > 0}
