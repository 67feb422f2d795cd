"""Profile a few steps of a job: torch's trace, a memory snapshot and a summary page."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from meshpar import _torch
from meshpar.forecasting.recorder import Recorder
from meshpar.forecasting.step import axis_groups
from meshpar.forecasting.trace import Phase
from meshpar.parallelized import Parallelized
from meshpar.passes.applied import applied
from meshpar.placements import local_tensor
from meshpar.training.data import Batches, TensorBatch
from meshpar.training.metrics import peak_memory
from meshpar.training.profile_summary import DATA, STEPS, WARM, Page, times_of

TRACE, SNAPSHOT, SUMMARY = "trace.json", "memory.pickle", "summary.md"


@final
class Profiled:
    """Wrap a job's batches and profile the steps between them: the loop requests the next batch when a step is complete.

    Rank 0 writes to ``folder``: the trace (Chrome's format), a memory snapshot (of a GPU: https://pytorch.org/memory_viz), and the summary.
    Nothing is written if training ends before ``LEAST`` steps.
    """

    def __init__(self, data: Batches, par: Parallelized, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        """Wrap ``data``. Collective: every rank wraps its batches and iterates over them."""
        self._data, self._par, self._optimizer, self._folder = data, par, optimizer, folder
        self._waited = 0.0

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as the data's
        return getattr(self._data, name)

    def __iter__(self) -> Iterator[list[TensorBatch]]:
        """Yield the steps of the data."""
        batches = iter(self._data)
        for _ in range(WARM):
            yield next(batches)
        yield from self._traced(batches)
        yield from batches

    def _traced(self, batches: Iterator[list[TensorBatch]]) -> Iterator[list[TensorBatch]]:
        device = self._par.device
        gpu = device.type == "cuda"
        tracer = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]) if dist.get_rank() == 0 else None
        if tracer is not None:
            tracer.start()
        start = time.perf_counter()
        try:
            for _ in range(STEPS):
                yield self._next(batches)
            if gpu:
                torch.cuda.synchronize(device)
            seconds = time.perf_counter() - start
        finally:
            if tracer is not None:
                tracer.stop()
        axes = {_torch.group_title(group): axis for axis, group in self._par.groups()}
        threads = {number: axes.get(title, "") for number, title in _torch.gloo_threads().items()}
        ranks: list[Any] = [None] * dist.get_world_size()
        mine = {"seconds": seconds / STEPS, "data": self._waited / STEPS, "memory": float(peak_memory(device))}
        holders: dict[str, int] = {}
        if gpu:
            yield from self._snapshot(batches)
        elif not any(each.compiles for each in self._par.plan.passes):
            yield from self._watched(batches, holders)
        dist.all_gather_object(ranks, mine)
        if tracer is not None:
            self._write(tracer, threads, ranks, holders)

    def _next(self, batches: Iterator[list[TensorBatch]]) -> list[TensorBatch]:
        start = time.perf_counter()
        with record_function(DATA):
            step = next(batches)
        self._waited += time.perf_counter() - start
        return step

    def _snapshot(self, batches: Iterator[list[TensorBatch]]) -> Iterator[list[TensorBatch]]:
        torch.cuda.memory._record_memory_history(max_entries=200_000)
        yield next(batches)
        if dist.get_rank() == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(self._folder / SNAPSHOT))
        torch.cuda.memory._record_memory_history(enabled=None)

    def _watched(self, batches: Iterator[list[TensorBatch]], holders: dict[str, int]) -> Iterator[list[TensorBatch]]:
        """Record the live tensors of one step, and their holders at the peak."""
        module, optimizer = self._par.module, self._optimizer
        recorder = Recorder(axis_groups(self._par))
        state = [each for states in optimizer.state.values() for each in states.values() if isinstance(each, torch.Tensor)]
        shards = applied(module).replica_shards
        parameters = [*map(local_tensor, module.parameters()), *([] if shards is None else shards.tensors())]
        held = {
            "parameters": recorder.hold(iter(parameters), "parameters"),
            "optimizer": recorder.hold((local_tensor(each) for each in state), "optimizer"),
            "buffers": recorder.hold(iter(module.buffers()), "buffers"),
        }
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
        holders |= at_the_peak(held, phases)

    def _write(self, tracer: profile, threads: Mapping[int, str], ranks: list[Any], holders: Mapping[str, int]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        tracer.export_chrome_trace(str(self._folder / TRACE))
        times = times_of(json.loads((self._folder / TRACE).read_text(encoding="utf-8")), threads)
        files = {TRACE: "open in https://ui.perfetto.dev"}
        with suppress(FileNotFoundError):
            files |= {SNAPSHOT: f"{(self._folder / SNAPSHOT).stat().st_size >> 10} KiB, open in https://pytorch.org/memory_viz"}
        title = f"{self._par.plan} on {len(ranks)} ranks ({self._par.device.type})"
        where = f"`{SNAPSHOT}` shows it" if SNAPSHOT in files else "compiled blocks do not show it; `meshpar plan` forecasts it"
        page = Page(title=title, steps=STEPS, times=times, ranks=ranks, holders=holders, unseen=where, files=files)
        (self._folder / SUMMARY).write_text(str(page), encoding="utf-8")


def at_the_peak(held: Mapping[str, int], phases: tuple[Phase, ...]) -> dict[str, int]:
    """Return the bytes of each holder at the peak."""
    now, most = dict(held), sum(held.values())
    found = dict(now)
    for event in (event for phase in phases for event in phase.events):
        for holder, change in event.memory:
            now[holder] = now.get(holder, 0) + change
        if sum(now.values()) > most:
            most, found = sum(now.values()), dict(now)
    return {name: size for name, size in found.items() if size > 0}
