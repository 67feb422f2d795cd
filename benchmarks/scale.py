"""What grows with the number of ranks: groups, peers, sockets of hosts, collectives and bytes of a step, simulated at 8
to 8,192 ranks.

    python benchmarks/scale.py [--ranks 8 1024 8192] [--layers 32]

An 8B Llama in bfloat16 on nodes of 8 devices, one micro-batch of 4,096 tokens a data rank. The real passes make the
groups of rank 0 and run its step on a device without memory; nothing is sent, and nothing here measures a device or a
network.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Sequence

import torch

from meshpar import FullyShard, HybridShard, MeshSpec, Plan, TensorParallel
from meshpar._torch.groups import open_groups
from meshpar.core.runtime import simulated
from meshpar.exchange.host_messages import FAN_OUT, hops
from meshpar.forecasting import Batch, Trace
from meshpar.forecasting.simulate import Simulation, simulate
from meshpar.models import Transformer, TransformerConfig

PER_NODE, LENGTH = 8, 4096
BF16 = {"param_dtype": torch.bfloat16}
PLANS = {
    "FullyShard": ("dp_shard=-1", [FullyShard(**BF16)]),
    "HybridShard": ("dp_replicate=-1,dp_shard=8", [HybridShard(**BF16)]),
    'HybridShard(optimizer="world")': ("dp_replicate=-1,dp_shard=8", [HybridShard(**BF16, optimizer="world")]),
    "TensorParallel, FullyShard": (
        "dp_shard=-1,tp=8",
        [TensorParallel(sequence_parallel=True, loss_parallel=True), FullyShard(**BF16)],
    ),
}
SENT = {"all_reduce": 2.0, "broadcast": 1.0}
"""Times its size x (ranks - 1) / ranks that a rank sends in a ring; 1 for all others."""


def model(layers: int) -> Transformer:
    with torch.device("meta"):
        return Transformer(
            TransformerConfig(
                vocab_size=128256,
                dim=4096,
                layers=layers,
                heads=32,
                kv_heads=8,
                hidden=14336,
                max_positions=LENGTH,
                rope_theta=5e5,
            )
        )


def groups_of(plan: Plan, size: int) -> tuple[list[int], float]:
    """Return the sizes of rank 0's groups of several ranks, and the seconds of `apply`."""
    with simulated(size):
        start = time.perf_counter()
        plan.apply(model(2), device_type="cpu")
        return [group.size() for group in open_groups() if group.size() > 1], time.perf_counter() - start


def traces_of(plans: Sequence[Plan], layers: int) -> list[Trace]:
    """Return a step of rank 0 of each plan, whose meshes are resolved."""
    batch = Batch(sequence=LENGTH)
    return simulate(
        [Simulation(plan=plan, model=model(layers), batch=batch, world_size=plan.mesh.size) for plan in plans]
    )


def sent_in(trace: Trace) -> tuple[Counter[str], Counter[str], int]:
    """Return the collectives of a step by axis, the bytes that rank 0 sends by place, and the largest group."""
    calls, sent, largest = Counter[str](), Counter[str](), 1
    for _, collective in trace.collectives():
        if collective.ranks == 1:
            continue
        calls[collective.axis] += 1
        place = "inside" if collective.ranks * collective.stride <= PER_NODE else "across"
        sent[place] += round(
            SENT.get(collective.kind, 1.0) * collective.size * (collective.ranks - 1) / collective.ranks
        )
        largest = max(largest, collective.ranks)
    return calls, sent, largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 1024, 8192])
    parser.add_argument("--layers", type=int, default=32)
    given = parser.parse_args()
    print(
        "| plan | ranks | mesh | groups of a rank | peers in them | collectives of a step | GB inside nodes | GB "
        "across | hops of a ring |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, (mesh, passes) in PLANS.items():
        plans = [Plan(MeshSpec(mesh, ranks_per_node=PER_NODE).resolve(size), passes) for size in given.ranks]
        for size, plan, trace in zip(given.ranks, plans, traces_of(plans, given.layers), strict=True):
            groups, _ = groups_of(plan, size)
            calls, sent, largest = sent_in(trace)
            listed = ", ".join(f"{count} {axis}" for axis, count in calls.items())
            gigabytes = " | ".join(f"{sent[place] / 1e9:.1f}" for place in ("inside", "across"))
            row = (
                f"{name} | {size} | {plan.mesh} | {len(groups)} | {sum(groups) - len(groups)} | {listed} | "
                f"{gigabytes} | {largest - 1}"
            )
            print(f"| {row} |", flush=True)
    print()
    print("| ranks | sockets of a rank between hosts: every group connected | now | hops to compare: a ring | now |")
    print("| --- | --- | --- | --- | --- |")
    for size in given.ranks:
        peers = {one % size for hop in hops(size) for far in hop for one in (far, -far)}
        now = size - 1 if size <= FAN_OUT else 2 + math.ceil(math.log2(size)) + len(peers)
        print(f"| {size} | {3 * (size - 1)} | {now} | {2 * (size - 1)} | {len(hops(size))} |")


if __name__ == "__main__":
    main()
