"""How ranks on CPUs exchange, beside gloo's own collectives: reduce-scatter, all-gather, sum and comparison, in turn.

    python benchmarks/exchanges.py [--ranks 2 4] [--numbers 131072 1048576] [--rounds 40]

Gloo processes on this machine, one thread each. Printed: the medians of both ways on rank 0, and the median of the
rounds' ratios. Two ranks swap in an all-gather and in a sum; more use gloo's own, and are not listed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor

from meshpar._torch.groups import all_gather
from meshpar.exchange.ranks import Largest
from meshpar.passes.data.instead_of_fsdp2 import scatter_sums, swap_shards
from meshpar.passes.tensor.collectives import reduce_from
from meshpar.testing import launch

Way = Callable[[], object]
CALLS = 3
"""Calls of a way in one round, between two barriers."""


def ways(count: int) -> dict[str, tuple[Way, Way]]:
    """Return what is exchanged -> by gloo's own collective, and as meshpar does; ``count`` numbers of float32."""
    ranks, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    whole, part = torch.randn(count), torch.empty(count // ranks)
    gathered = torch.empty(count)
    mine = gathered.chunk(ranks)[dist.get_rank()]
    places = torch.zeros(6, dtype=torch.int64)

    def scatter(exchanges: bool) -> None:
        scatter_sums([part], [whole], dist.ReduceOp.SUM, group, exchanges=exchanges)

    def largest() -> Tensor:
        most = places.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return most

    def added() -> Tensor:
        total = whole.clone()
        dist.all_reduce(total)
        return total

    found: dict[str, tuple[Way, Way]] = {
        "reduce-scatter": (lambda: scatter(False), lambda: scatter(True)),
        "largest of 6 numbers": (largest, lambda: Largest(places, group).read()),
    }
    if ranks == 2:
        found["all-gather"] = (lambda: all_gather(gathered, mine), lambda: swap_shards(gathered, mine, group))
        found["sum"] = (added, lambda: reduce_from(whole, group))
    return found


def rank(counts: list[int], rounds: int, folder: str) -> None:
    """One rank; rank 0 leaves the rows of the table in a file."""
    torch.set_num_threads(1)
    rows = list[tuple[str, int, float, float, float]]()
    for count in counts:
        for name, pair in ways(count).items():
            seconds: tuple[list[float], list[float]] = [], []
            for _ in range(rounds):
                for way, times in zip(pair, seconds, strict=True):
                    dist.barrier()
                    start = time.perf_counter()
                    for _ in range(CALLS):
                        way()
                    times.append((time.perf_counter() - start) / CALLS)
            own, ours = seconds
            ratios = [mine / theirs for mine, theirs in zip(ours, own, strict=True)]
            rows.append((name, count, *map(statistics.median, (own, ours, ratios))))  # type: ignore[arg-type]
    if dist.get_rank() == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--numbers", type=int, nargs="+", default=[1 << 17, 1 << 20])
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    print("| ranks | exchange | numbers | gloo, ms | meshpar, ms | ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
    for ranks in options.ranks:
        with TemporaryDirectory() as folder:
            launch("exchanges", "rank", ranks, (options.numbers, options.rounds, folder), timeout_s=600)
            rows = json.loads((Path(folder) / "rows.json").read_text())
        for name, count, own, ours, ratio in rows:
            print(f"| {ranks} | {name} | {count:,} | {own * 1e3:.2f} | {ours * 1e3:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
