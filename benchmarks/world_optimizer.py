"""HybridShard(optimizer="world") against plain hybrid sharding, on two hosts of two ranks: bytes of optimizer state,
and seconds of a step.

    sudo python benchmarks/world_optimizer.py [--rate 200mbit] [--steps 8]

Two hosts are two network namespaces on this machine (root is needed). Both ways train in the same processes, step by
step in turn, once with an unshaped link between the hosts and once with a slow one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.hybrid_vs_full import HYBRID, on_hosts
from tests.support.hosts import Hosts, Unavailable

WAYS = ("replica", "world")


def rank_main(steps: int, out: str) -> None:
    """Train both ways in turn; rank 0 writes the medians and its bytes."""
    import torch
    import torch.distributed as dist

    import meshpar
    from meshpar.models import Transformer, TransformerConfig

    shape = TransformerConfig(vocab_size=512, dim=256, layers=6, heads=4, hidden=768, max_positions=64)
    with meshpar.distributed("cpu"):
        jobs: dict[str, tuple[Any, Any]] = {}
        for way in WAYS:
            with torch.device("meta"):
                model = Transformer(shape)
            par = (
                meshpar.Plan(HYBRID, [meshpar.HybridShard(optimizer=way)])
                .apply(model, device_type="cpu")
                .materialize(seed=0)
            )
            jobs[way] = par, torch.optim.AdamW(par.module.parameters())
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(steps + 1):
            for way in WAYS if number % 2 else reversed(WAYS):
                par, optimizer = jobs[way]
                dist.barrier()
                start = time.perf_counter()
                ids = torch.randint(0, shape.vocab_size, (1, 64))
                par.module(input_ids=ids, labels=ids).loss.backward()
                par.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                dist.barrier()
                seconds[way].append(time.perf_counter() - start)
        found = {}
        for way, (_, optimizer) in jobs.items():
            held = [value.to_local() for state in optimizer.state.values() for value in state.values() if value.ndim]
            found[way] = {
                "seconds": statistics.median(seconds[way][1:]),
                "bytes": sum(tensor.untyped_storage().nbytes() for tensor in held),
            }
        if dist.get_rank() == 0:
            Path(out).write_text(json.dumps(found))


def measured(hosts: Hosts, steps: int, port: int) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        job = ["run", f"--logs={folder}/logs", __file__, "--rank", "--steps", str(steps), "--out", str(out)]
        outputs, codes = on_hosts(hosts, ("n1", "n2"), 2, job, port)
        if any(codes):
            sys.exit(f"the ranks ended with {codes}:\n{outputs}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.rank:
        rank_main(options.steps, options.out)
        return 0
    late = False
    try:
        with Hosts(2) as hosts:
            for number, rate in enumerate((None, options.rate)):
                hosts.shape(rate)
                found = measured(hosts, options.steps, 29511 + number)
                plain, world = (found[way] for way in WAYS)
                held, slower = world["bytes"] / plain["bytes"], world["seconds"] / plain["seconds"]
                late |= held > 1.02 / 2 or slower > 1.05
                print(
                    f"{HYBRID}, link between the hosts: {rate or 'unshaped'}; median of {options.steps} steps in turn"
                )
                print(
                    f"  optimizer state a rank: {world['bytes']:,} of {plain['bytes']:,} bytes, {held:.3f} (at most "
                    "0.510)"
                )
                print(
                    f"  step: {world['seconds']:.3f} s, plain {plain['seconds']:.3f} s, {slower:.3f} (at most 1.050)",
                    flush=True,
                )
    except Unavailable as reason:
        sys.exit(f"world_optimizer needs network namespaces: {reason}")
    return int(late)


if __name__ == "__main__":
    sys.exit(main())
