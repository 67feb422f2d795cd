"""What the same bits on every mesh cost: a plan with ``same_bits`` and without it, step by step in turn.

    python benchmarks/same_bits.py [--plan fsdp hsdp replicate pp pp-fsdp] [--micro-batches 8] [--steps 12]

Gloo processes on this machine, one thread each. Printed: the median of the steps of each way, by the clock and by
the first rank's processors, and their ratios, of the same steps in the same processes. ``each`` is the plan without
``same_bits`` that reduces each micro-batch, as the mode has to.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from meshpar import FullyShard, HybridShard, MeshSpec, PipelineParallel, Plan, Replicate
from meshpar.models import Transformer, TransformerConfig
from meshpar.testing import launch, random_tokens, token_loss_sum

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
}
WAYS = ("plain", "each", "same bits")
SAMPLES, LENGTH, WARMUP = 2, 256, 2


def prepare(way: str, mesh: str, passes: Sequence[Any], micro_batches: int) -> Callable[[int], tuple[float, float]]:
    """Return what makes a step and returns its seconds, and those of this rank's processors."""
    with torch.device("meta"):
        module = Transformer(CONFIG)
    par = Plan(mesh, passes, same_bits=way == "same bits").apply(module).materialize(seed=0)
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

    return step


def compare(out: str, plan: str, micro_batches: int, steps: int) -> None:
    """Make the steps of all ways in turn, and write this plan's row."""
    mesh, passes = PLANS[plan]
    ways = {way: prepare(way, mesh, passes, micro_batches) for way in WAYS}
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(steps + WARMUP):
        for way, step in ways.items():
            took = step(number)
            seconds[way] += [took] if number >= WARMUP else []
    if dist.get_rank() == 0:
        Path(out).write_text(
            json.dumps({way: list(map(statistics.median, zip(*every))) for way, every in seconds.items()})
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", nargs="*", default=list(PLANS), choices=PLANS)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args(arguments)
    print(
        f"{'plan':10} {'':10} {'plain, ms':>10} {'each, ms':>10} {'same bits, ms':>14} {'of plain':>9} {'of each':>9}"
    )
    with TemporaryDirectory() as folder:
        for plan in options.plan:
            out = Path(folder) / plan
            mesh, _ = PLANS[plan]
            work = str(out), plan, options.micro_batches, options.steps
            launch("same_bits", "compare", MeshSpec(mesh).size, work, timeout_s=3600)
            row = json.loads(out.read_text())
            for number, kind in enumerate(("wall", "processor")):
                plain, reducing, same = (1e3 * row[way][number] for way in WAYS)
                times = f"{plain:10.1f} {reducing:10.1f} {same:14.1f} {same / plain:9.3f} {same / reducing:9.3f}"
                print(f"{plan:10} {kind:10} {times}")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
