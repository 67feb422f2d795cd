"""PipelineParallel beside torch.distributed.pipelining: seconds of a step and the peak of memory, with the same model,
schedule and micro-batches, over four ranks.

    python benchmarks/pipeline.py [--steps 20] [--schedule 1f1b] [--layers 8] [--dim 256]

Both train in the same processes, step by step in turn; torch's stages are modules cut by hand. Prints medians and
their ratio, the processor time that all ranks use, which other work on the machine changes less, the calls of Python
and C functions in a step, which it does not change, and the peak of each rank: bytes of all tensors of a step above
those before it, with the buffers for messages that torch keeps from step to step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import meshpar
from meshpar.models import Transformer, TransformerConfig
from meshpar.testing import launch, measure_memory

RANKS, MICRO_BATCHES, SAMPLES, LENGTH = 4, 16, 2, 128
TORCHS = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class Part(nn.Module):
    """Layers of one stage, with what stands before or behind them, cut by hand."""

    def __init__(self, whole: Transformer, first: int, end: int) -> None:
        super().__init__()
        self.embed = whole.embed if first == 0 else None
        self.layers = whole.layers[first:end]
        self.behind = nn.Sequential(whole.norm, whole.head) if end == len(whole.layers) else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embed is None else self.embed(x)
        positions = torch.arange(LENGTH, device=x.device)[None]
        for layer in self.layers:
            x = layer(x, positions, None)
        return x if self.behind is None else self.behind(x)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return meshpar.token_loss(logits, labels, reduction="sum") / (MICRO_BATCHES * SAMPLES * LENGTH)


def rank_main(steps: int, schedule: str, layers: int, dim: int, out: str) -> None:
    """Train both ways in turn; rank 0 writes the medians, the peaks and the losses."""
    shape = TransformerConfig(vocab_size=1024, dim=dim, layers=layers, heads=4, hidden=3 * dim, max_positions=LENGTH)
    torch.manual_seed(0)
    par = meshpar.Plan(f"pp={RANKS}", [meshpar.PipelineParallel(schedule=schedule, stages=(layers // RANKS,) * RANKS)])
    ours = par.apply(Transformer(shape))
    torch.manual_seed(0)
    rank = dist.get_rank()
    part = Part(Transformer(shape), rank * layers // RANKS, (rank + 1) * layers // RANKS)
    stage = PipelineStage(part, rank, RANKS, torch.device("cpu"))
    theirs = TORCHS[schedule](stage, MICRO_BATCHES, loss_fn=loss_of, scale_grads=False)

    def with_torch(ids: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        target = ids if rank == RANKS - 1 else None
        theirs.step(*([ids] if rank == 0 else []), target=target, losses=losses, return_outputs=False)
        return torch.stack(losses).sum().detach() if losses else torch.zeros(())

    def with_meshpar(ids: torch.Tensor) -> torch.Tensor:
        return ours.backward(ids.split(SAMPLES), lambda module, part: loss_of(module(part).logits, part))

    ways = {"meshpar": (with_meshpar, ours.module), "torch": (with_torch, part)}
    optimizers = {way: torch.optim.SGD(module.parameters(), lr=0.1) for way, (_, module) in ways.items()}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    used: dict[str, list[float]] = {way: [] for way in ways}  # of a processor, by this rank
    calls = {way: Counter[str]() for way in ways}
    peaks, losses = dict[str, int](), dict[str, list[float]](meshpar=[], torch=[])
    for number in range(steps + 4):
        ids = torch.randint(0, 1024, (MICRO_BATCHES * SAMPLES, LENGTH), generator=torch.Generator().manual_seed(number))
        for way in ways if number % 2 else reversed(ways):
            run, optimizer = ways[way][0], optimizers[way]
            dist.barrier()
            start, began = time.perf_counter(), time.process_time()
            if number == 3:  # measured apart, as memory is: to look at every call and tensor takes time
                counted: Counter[str] = calls[way]
                sys.setprofile(lambda frame, event, arg, counted=counted: counted.update([event]))  # type: ignore[misc]
                total = run(ids)
                sys.setprofile(None)
            elif number == 2:
                total, peaks[way], _ = measure_memory(partial(run, ids))
            else:
                total = run(ids)
            optimizer.step()
            optimizer.zero_grad()
            if number > 3:
                used[way].append(time.process_time() - began)
            dist.barrier()
            if number > 3:
                seconds[way].append(time.perf_counter() - start)
            losses[way].append(float(total))
    every: list[Any] = [None] * RANKS
    infos = (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
    buffers = {id(one.buffer): one.buffer for infos_of_one in infos for one in infos_of_one if one.buffer is not None}
    peaks["torch"] += sum(buffer.nbytes for buffer in buffers.values())
    numbers = {way: calls[way]["call"] + calls[way]["c_call"] for way in ways}
    dist.all_gather_object(every, (peaks, losses, used, numbers))
    if rank == 0:
        last = every[-1][1]
        apart = max(abs(one - other) / other for one, other in zip(last["meshpar"], last["torch"], strict=True))
        found = {
            "seconds": seconds,
            "peaks": [one for one, *_ in every],
            "losses apart": apart,
            "used": {way: [sum(all_ranks) for all_ranks in zip(*(one[way] for *_, one, _ in every))] for way in ways},
            "calls": {way: [one[way] for *_, one in every] for way in ways},
        }
        Path(out).write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--schedule", choices=TORCHS, default="1f1b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=256)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        given = (options.steps, options.schedule, options.layers, options.dim, str(out))
        launch("pipeline", "rank_main", RANKS, given, timeout_s=1200.0, fresh="a benchmark")
        found = json.loads(out.read_text())
    medians = {way: statistics.median(times) for way, times in found["seconds"].items()}
    ratios = [one / other for one, other in zip(found["seconds"]["meshpar"], found["seconds"]["torch"], strict=True)]
    print(f"losses apart by {found['losses apart']:.1e}")
    for way, median in medians.items():
        print(f"{way:8} {median * 1e3:8.1f} ms a step (least {min(found['seconds'][way]) * 1e3:.1f})")
    used = {way: statistics.median(times) for way, times in found["used"].items()}
    print(f"processor time of all ranks: meshpar {used['meshpar']:.3f} s a step, torch {used['torch']:.3f} s, ratio "
          f"{used['meshpar'] / used['torch']:.3f}")  # fmt: skip
    calls = {way: f"{statistics.mean(numbers):,.0f}" for way, numbers in found["calls"].items()}
    print(f"calls of Python and C functions a step and rank: meshpar {calls['meshpar']}, torch {calls['torch']}")
    of_medians = medians["meshpar"] / medians["torch"]
    print(f"ratio of the medians {of_medians:.3f}, median of the ratios {statistics.median(ratios):.3f}")
    for rank, peaks in enumerate(found["peaks"]):
        print(f"rank {rank}: peak {peaks['meshpar'] / 2**20:.2f} MiB, torch {peaks['torch'] / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
