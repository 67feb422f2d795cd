"""What a sequence over several ranks costs: a rank's peak memory for activations and its step, beside one process with
the whole sequence.

    python benchmarks/context.py [--length 8192] [--sizes 2,4] [--rounds 3]

A small Transformer (kept in float32, two documents a row) trains on one long sequence: on one process, then on ``cp``
ranks by each transport. Activations are the growth of a process's resident memory from the start of a step to its peak,
the median of the rounds. glibc gives freed tensors back to the system at once: by default it keeps hundreds of MiB of
the step before, which would not count as growth. All ranks share this machine's cores, so their seconds are those of
all the work, not of one device.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import meshpar
from meshpar.models import Transformer, TransformerConfig


def resident(field: str) -> float:
    """Return a figure of this process's memory in MiB: VmRSS now, VmHWM the most since :func:`forget`."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) / 1024


def forget() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def rank(length: int, transport: str, rounds: int) -> None:
    """Train on one rank, and print a median from rank 0."""
    torch.set_num_threads(1)
    with meshpar.distributed("cpu"):
        size = dist.get_world_size()
        config = TransformerConfig(
            vocab_size=512, dim=256, layers=6, heads=8, kv_heads=2, hidden=768, max_positions=length
        )
        with torch.device("meta"):
            model = Transformer(config)
        passes = [meshpar.ContextParallel(transport=transport)] if size > 1 else []  # type: ignore[arg-type]
        plan = meshpar.Plan(
            f"dp_shard=1,cp={size}" if size > 1 else "dp_shard=1", [*passes, meshpar.FullyShard()], verify=False
        )
        par = plan.apply(model).materialize(seed=0)
        optimizer = torch.optim.SGD(par.module.parameters(), lr=0.01)
        ids = torch.randint(0, 512, (1, length), generator=torch.Generator().manual_seed(0))
        positions = torch.cat([torch.arange(length // 4), torch.arange(length - length // 4)])[None]
        batch = par.split({"input_ids": ids, "position_ids": positions, "labels": ids.roll(-1, 1)})
        labels = batch.pop("labels")
        seconds, mebibytes = [], []
        for _ in range(rounds + 1):
            dist.barrier()
            forget()
            before, began = resident("VmRSS"), time.perf_counter()
            loss = meshpar.chunked_token_loss(par.module, batch, labels, chunk=1024)
            loss.backward()
            seconds.append(time.perf_counter() - began)
            mebibytes.append(resident("VmHWM") - before)
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"{statistics.median(mebibytes[1:]):.1f} {statistics.median(seconds[1:]):.3f}")


def measured(ranks: int, options: argparse.Namespace, transport: str) -> tuple[float, float]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        __file__,
        "--rank",
        transport,
    ]
    command += ["--length", str(options.length), "--rounds", str(options.rounds)]
    settings = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | settings)
    mebibytes, seconds = done.stdout.split()
    return float(mebibytes), float(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192, help="tokens of the sequence")
    parser.add_argument("--sizes", default="2,4", help="sizes of cp, comma separated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.length, options.rank, options.rounds)
        return
    whole, alone = measured(1, options, "gather")
    print(f"one process, {options.length:,} tokens: {whole:.0f} MiB of activations, {alone:.1f} s\n")
    print("| ranks | transport | activations of a rank, MiB | of one process | seconds | of one process |")
    print("| --- | --- | --- | --- | --- | --- |")
    for ranks in map(int, options.sizes.split(",")):
        for transport in ("gather", "heads"):
            mebibytes, seconds = measured(ranks, options, transport)
            print(
                f"| {ranks} | {transport} | {mebibytes:.0f} | {mebibytes / whole:.2f} | {seconds:.1f} | "
                f"{seconds / alone:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
