"""What the same bits on every mesh cost: a plan with ``same_bits`` and without it, step by step in turn.

    python benchmarks/same_bits.py [--plan fsdp replicate hsdp world pp pp-fsdp tp parts] [--steps 12]

Gloo processes on this machine, one thread each. Printed: the median of the steps of each way, by the clock and by
the first rank's processors, and their ratios, of the same steps in the same processes. ``each`` is the plan without
``same_bits`` that reduces each micro-batch, as the mode has to. Memory, of the first rank's tensors in a step: the
peak that the profiler sees, and that of ``meshpar.forecasting.forecast``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from meshpar import FullyShard, HybridShard, MeshSpec, PipelineParallel, Plan, Replicate, TensorParallel
from meshpar.forecasting import Batch, forecast
from meshpar.models import Transformer, TransformerConfig
from meshpar.testing import launch, measure_memory, random_tokens, token_loss_sum

CONFIG = TransformerConfig(
    vocab_size=4096, dim=256, layers=4, heads=8, kv_heads=4, hidden=768, max_positions=256, tied=False
)
PLANS: dict[str, tuple[str, list[Any]]] = {
    "fsdp": ("dp_shard=2", [FullyShard()]),
    "replicate": ("dp_replicate=2", [Replicate()]),
    "hsdp": ("dp_replicate=2,dp_shard=2", [HybridShard()]),
    "world": ("dp_replicate=2,dp_shard=2", [HybridShard(optimizer="world")]),
    "pp": ("pp=2", [PipelineParallel()]),
    "pp-fsdp": ("pp=2,dp_shard=2", [PipelineParallel(), FullyShard()]),
    "tp": ("tp=2", [TensorParallel()]),
    "parts": ("", []),
}
IN_PARTS = {"tp": [TensorParallel(parts=4)], "parts": [TensorParallel(parts=4)]}
"""The passes of plans that differ under ``same_bits``; ``parts`` computes in equal parts in one process."""
WAYS = ("plain", "each", "same bits")
SAMPLES, LENGTH, WARMUP = 2, 256, 3


def plan_of(way: str, name: str) -> Plan:
    mesh, passes = PLANS[name]
    return Plan(mesh, IN_PARTS.get(name, passes) if way == WAYS[-1] else passes, same_bits=way == WAYS[-1])


def build() -> Transformer:
    with torch.device("meta"):
        return Transformer(CONFIG)


def prepare(way: str, name: str, micro_batches: int) -> tuple[Callable[[int], tuple[float, float]], int]:
    """Return what makes a step and returns its seconds, and those of this rank's processors; and the bytes it holds."""
    par = plan_of(way, name).apply(build()).materialize(seed=0)
    optimizer = torch.optim.AdamW(par.module.parameters(), lr=3e-4)

    def step(number: int) -> tuple[float, float]:
        torch.set_num_threads(1)
        own = range(par.data_rank, micro_batches, par.data_size)
        batches = [random_tokens(CONFIG.vocab_size, SAMPLES, LENGTH, seed=number * 100 + place) for place in own]
        dist.barrier()
        began, used = time.perf_counter(), time.process_time()
        scale = par.token_scale(sum(int((batch["labels"] != -100).sum()) for batch in batches))
        par.backward(batches, lambda module, batch: token_loss_sum(module, batch)[0] * scale, reduce_each=way == "each")
        par.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began, time.process_time() - used

    # AdamW holds two tensors like each parameter
    return step, 3 * sum(
        (one.to_local() if hasattr(one, "to_local") else one).nbytes for one in par.module.parameters()
    )


def compare(out: str, name: str, micro_batches: int, steps: int) -> None:
    """Make the steps of all ways in turn, and write this plan's row."""
    ways = {way: prepare(way, name, micro_batches) for way in WAYS}
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    peaks: dict[str, int] = {}
    for number in range(steps + WARMUP):
        for way, (step, holds) in ways.items():
            # measured apart: to look at every tensor takes time; gloo's threads let go of some late
            if 0 < number < WARMUP:
                peak = holds + measure_memory(partial(step, number))[1]
                peaks[way] = min(peak, peaks.get(way, peak))
                continue
            took = step(number)
            seconds[way] += [took] if number >= WARMUP else []
    if dist.get_rank() == 0:
        medians = {way: [*map(statistics.median, zip(*every)), peaks[way]] for way, every in seconds.items()}
        Path(out).write_text(json.dumps(medians))


def forecast_peaks(name: str, micro_batches: int) -> list[int]:
    """Return the peak of memory of each way by the forecast, bytes."""
    mesh = MeshSpec(PLANS[name][0])
    share = micro_batches // (mesh.axes.get("dp_replicate", 1) * mesh.axes.get("dp_shard", 1))
    batches = [Batch(sequence=LENGTH, micro_batch=SAMPLES, accumulate=share, reduce_each=way == "each") for way in WAYS]
    options: dict[str, Any] = {"hardware": "h100", "world_size": mesh.size, "depth": "all", "device": "cpu"}
    return [forecast(plan_of(way, name), build(), batch, **options).memory.peak for way, batch in zip(WAYS, batches)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", nargs="*", default=list(PLANS), choices=PLANS)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--no-forecast", action="store_true", help="print measured memory alone")
    options = parser.parse_args(arguments)
    print(f"{'plan':10} {'':14} {'plain':>10} {'each':>10} {'same bits':>10} {'of plain':>9} {'of each':>9}")
    with TemporaryDirectory() as folder:
        for plan in options.plan:
            out = Path(folder) / plan
            work = str(out), plan, options.micro_batches, options.steps
            launch("same_bits", "compare", max(1, MeshSpec(PLANS[plan][0]).size), work, timeout_s=3600)
            row = json.loads(out.read_text())
            rows = {"wall, ms": (0, 1e3), "processor, ms": (1, 1e3), "memory, MB": (2, 1e-6)}
            values = {kind: [row[way][at] * unit for way in WAYS] for kind, (at, unit) in rows.items()}
            if not options.no_forecast:
                values["forecast, MB"] = [peak * 1e-6 for peak in forecast_peaks(plan, options.micro_batches)]
            for kind, (plain, each, same) in values.items():
                ratios = f"{same / plain:9.3f} {same / each:9.3f}"
                print(f"{plan:10} {kind:14} {plain:10.1f} {each:10.1f} {same:10.1f} {ratios}")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
