"""What a library's trainer costs on top of a loop of one's own: the same plan, model and batches, step by step in turn.

    python benchmarks/integrations.py [accelerate] [--mesh dp_shard=2] [--steps 30]

Two gloo processes on this machine. Each step of the library's script is followed by one of the loop on the same batch.
Printed: the medians, and the median of the ratios of neighbours.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshpar import FullyShard, Pass, Plan, Replicate, TensorParallel
from meshpar.models import Transformer, TransformerConfig
from meshpar.testing import launch

CONFIG = TransformerConfig(vocab_size=4096, dim=256, layers=4, heads=8, kv_heads=4, hidden=768, max_positions=128)
LENGTH, BATCH, WARMUP = 128, 4, 5
MESHES: dict[str, list[Pass]] = {
    "dp_shard=2": [FullyShard()], "dp_replicate=2": [Replicate()], "tp=2": [TensorParallel()],
}  # fmt: skip

Step = Callable[[Tensor], float]


def model() -> nn.Module:
    torch.manual_seed(0)
    return Transformer(CONFIG)


def loop_of_ones_own(mesh: str) -> Step:
    par = Plan(mesh, MESHES[mesh]).apply(model())
    optimizer = torch.optim.AdamW(par.module.parameters(), lr=1e-3)

    def step(tokens: Tensor) -> float:
        loss = par.module(tokens, labels=tokens).loss
        loss.backward()
        par.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def accelerate(mesh: str) -> Step:
    from meshpar.integrations.accelerate import Accelerator

    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ["OMP_NUM_THREADS"] = "1"
    accelerator = Accelerator(plan=Plan(mesh, MESHES[mesh]))
    net = model()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3))

    def step(tokens: Tensor) -> float:
        with accelerator.accumulate(net):
            loss = net(tokens, labels=tokens).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.detach())

    return step


LIBRARIES: dict[str, Callable[[str], Step]] = {"accelerate": accelerate}


def compare(library: str, mesh: str, steps: int) -> None:
    """Train both in turn, on one rank of the group."""
    ways = {"loop": loop_of_ones_own(mesh), library: LIBRARIES[library](mesh)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(WARMUP + steps):
        draw = torch.Generator().manual_seed(number * 2 + (dist.get_rank() if mesh.startswith("dp") else 0))
        tokens = torch.randint(CONFIG.vocab_size, (BATCH, LENGTH), generator=draw)
        losses = []
        for name in (*ways,) if number % 2 else (*reversed(ways),):
            dist.barrier()
            begin = time.perf_counter()
            losses.append(ways[name](tokens))
            dist.barrier()
            seconds[name].append(time.perf_counter() - begin)
        assert abs(losses[0] - losses[1]) < 1e-4, f"step {number}: {losses}"
    if dist.get_rank() == 0:
        pairs = list(zip(*(seconds[name][WARMUP:] for name in (library, "loop")), strict=True))
        medians = [statistics.median(side) * 1e3 for side in zip(*pairs, strict=True)]
        ratio = statistics.median(one / other for one, other in pairs)
        print(
            f"{library} on {mesh}: {medians[0]:.1f} ms a step, the loop {medians[1]:.1f} ms; ratio {ratio:.3f} "
            f"(median of {steps} pairs)",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", nargs="?", choices=LIBRARIES, default="accelerate")
    parser.add_argument("--mesh", choices=MESHES, default="dp_shard=2")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    launch(
        "integrations", "compare", 2, (options.library, options.mesh, options.steps), timeout_s=600, fresh="accelerate"
    )


if __name__ == "__main__":
    main()
