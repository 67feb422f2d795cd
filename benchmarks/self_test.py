"""What the test of the split costs: time of the first step and peak memory, with it and without, in turn.

    python benchmarks/self_test.py [--layers 8] [--dim 512] [--rounds 5] [--tp 2]

Gloo processes on this machine. Each round starts fresh processes for a plan with ``verify=False`` and for one with the
test, and measures the first step (forward, backward, AdamW) and the second. Printed: medians and their ratio, the
growth of the process's peak memory beside the bytes of one block, and what the test tried.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from meshpar import Plan, TensorParallel
from meshpar.models import Transformer, TransformerConfig
from meshpar.testing import launch, random_tokens


def first_steps(layers: int, dim: int, tp: int, verify: bool, folder: str) -> None:
    """Time two steps on this rank and write rank 0's numbers."""
    config = TransformerConfig(
        vocab_size=4096, dim=dim, layers=layers, heads=8, kv_heads=4, hidden=3 * dim, max_positions=512
    )
    with torch.device("meta"):
        module = Transformer(config)
    par = Plan(f"tp={tp}", [TensorParallel()], verify=verify).apply(module).materialize(seed=0)
    optimizer = torch.optim.AdamW(par.module.parameters(), lr=1e-4)
    batch = random_tokens(4096, 4, 256, seed=0)
    seconds = []
    for _ in range(2):
        dist.barrier()
        start = time.perf_counter()
        par.module(input_ids=batch["input_ids"]).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        block = sum(parameter.numel() * parameter.element_size() for parameter in par.module.layers[0].parameters())  # type: ignore[index, union-attr]
        result = {
            "seconds": seconds,
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "block": block / 2**20,
        }
        (Path(folder) / "told.json").write_text(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    found: dict[bool, list[dict]] = {False: [], True: []}
    for _ in range(args.rounds):
        for verify in found:
            with TemporaryDirectory() as folder:
                launch(
                    __name__, "first_steps", args.tp, (args.layers, args.dim, args.tp, verify, folder), timeout_s=300
                )
                found[verify].append(json.loads((Path(folder) / "told.json").read_text()))
    first = {verify: statistics.median(row["seconds"][0] for row in rows) for verify, rows in found.items()}
    second = statistics.median(row["seconds"][1] for rows in found.values() for row in rows)
    peak = {verify: statistics.median(row["peak"] for row in rows) for verify, rows in found.items()}
    print(f"first step: {first[True]:.2f} s with the test, {first[False]:.2f} s without; a later step {second:.2f} s")
    print(f"the test takes {(first[True] - first[False]) / second:.1f} steps")
    print(f"peak memory of a rank: {peak[True]:.0f} MiB with, {peak[False]:.0f} MiB without; a rank's part of one "
        f"block is {found[True][0]['block']:.1f} MiB")  # fmt: skip


if __name__ == "__main__":
    import self_test

    self_test.main()
