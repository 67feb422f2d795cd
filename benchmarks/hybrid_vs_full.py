"""FSDP over all ranks against hybrid sharding, on two hosts with a slow link between them; and what the doctor says of
a misplaced mesh.

    sudo python benchmarks/hybrid_vs_full.py [--rate 200mbit] [--steps 4] [--no-doctor]

Two hosts are two network namespaces on this machine (root is needed), two ranks each; what one sends to the other is
shaped, what stays inside a host is not. Printed: seconds of a step for FSDP over all four ranks, for hybrid sharding as
it should be (shards inside a host), and for hybrid sharding on ranks that are numbered across the hosts in turn; their
ratios; and the doctor's findings on that misplaced mesh, at full speed and with the slow link.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.support.hosts import Hosts, Unavailable
from tests.support.patience import patient

HYBRID, FULL = "dp_replicate=2,dp_shard=2", "dp_shard=4"
MESHPAR = [sys.executable, "-m", "meshpar.launchers"]


def train(mesh: str, steps: int) -> float:
    """Return the median seconds of a step; the first, which sets connections up, does not count."""
    import torch
    import torch.distributed as dist

    import meshpar
    from meshpar.models import Transformer, TransformerConfig

    shape = TransformerConfig(vocab_size=512, dim=256, layers=6, heads=4, hidden=768, max_positions=64)
    with torch.device("meta"):
        model = Transformer(shape)
    sharding = meshpar.HybridShard() if "dp_replicate" in mesh else meshpar.FullyShard()
    par = meshpar.Plan(mesh, [sharding]).apply(model, device_type="cpu").materialize(seed=0)
    optimizer = torch.optim.AdamW(par.module.parameters())
    seconds = []
    for _ in range(steps + 1):
        dist.barrier()
        start = time.perf_counter()
        ids = torch.randint(0, shape.vocab_size, (1, 64))
        par.module(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        print(
            f"{sum(parameter.numel() for parameter in par.module.parameters()):,} parameters, {mesh}", file=sys.stderr
        )
    return statistics.median(seconds[1:])


def rank_main(meshes: Sequence[str], steps: int, out: str) -> None:
    import torch.distributed as dist

    import meshpar

    with meshpar.distributed("cpu"):
        found = {mesh: train(mesh, steps) for mesh in meshes}
        if dist.get_rank() == 0:
            Path(out).write_text(json.dumps(found))


def on_hosts(
    hosts: Hosts, places: Sequence[str], nproc: int, arguments: Sequence[str], port: int
) -> tuple[str, list[int]]:
    """Start a launcher for each place, in the order of node ranks; return what the first said and all exit codes."""
    placement = [f"--nodes={len(places)}", f"--nproc={nproc}", f"--head={places[0]}:{port}"]
    command, *rest = arguments
    started = [
        subprocess.Popen(
            hosts.command(place, [*MESHPAR, command, *placement, f"--node-rank={node}", *rest]),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for node, place in enumerate(places)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=patient(280))[0] for process in started]
    return outputs[0], [process.returncode for process in started]


def step_times(
    hosts: Hosts, places: Sequence[str], nproc: int, meshes: Sequence[str], steps: int, port: int
) -> dict[str, float]:
    with TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        job = [
            "run",
            f"--logs={folder}/logs",
            __file__,
            "--rank",
            "--meshes",
            *meshes,
            "--steps",
            str(steps),
            "--out",
            str(out),
        ]
        outputs, codes = on_hosts(hosts, places, nproc, job, port)
        if any(codes):
            sys.exit(f"the ranks ended with {codes}:\n{outputs}")
        found: dict[str, float] = json.loads(out.read_text())
        return found


def examine(hosts: Hosts, places: Sequence[str], nproc: int, port: int) -> tuple[str, int]:
    """Run the doctor; return its report and exit code."""
    outputs, codes = on_hosts(hosts, places, nproc, ["doctor", "--mesh", HYBRID], port)
    return outputs, max(codes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--no-doctor", action="store_true")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--meshes", nargs="+", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.rank:
        rank_main(options.meshes, options.steps, options.out)
        return 0
    in_order, in_turn = ("n1", "n2"), ("n1", "n2", "n1", "n2")
    try:
        with Hosts(2) as hosts:
            if not options.no_doctor:
                report(hosts, in_turn, "full speed", 29501)
            hosts.shape(options.rate)
            if not options.no_doctor:
                report(hosts, in_turn, options.rate, 29502)
            times = step_times(hosts, in_order, 2, (FULL, HYBRID), options.steps, 29503)
            misplaced = step_times(hosts, in_turn, 1, (HYBRID,), options.steps, 29504)[HYBRID]
    except Unavailable as reason:
        sys.exit(f"hybrid_vs_full needs network namespaces: {reason}")
    print(f"link between the hosts: {options.rate}; seconds of a step, median of {options.steps}")
    print(f"  FSDP over all ranks      {FULL:26} {times[FULL]:.2f} s")
    print(f"  hybrid, shards in a host {HYBRID:26} {times[HYBRID]:.2f} s")
    print(f"  hybrid, misplaced        {HYBRID:26} {misplaced:.2f} s")
    print(f"FSDP / hybrid: {times[FULL] / times[HYBRID]:.2f}    misplaced / hybrid: {misplaced / times[HYBRID]:.2f}")
    return 0


def report(hosts: Hosts, places: Sequence[str], link: str, port: int) -> None:
    outputs, code = examine(hosts, places, 1, port)
    print(f"--- doctor on the misplaced mesh, {link} (exit code {code})\n{outputs}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
