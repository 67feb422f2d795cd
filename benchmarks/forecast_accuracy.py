"""The forecast against published training runs: the error of every row, the median, and the leave-one-out error.

    python benchmarks/forecast_accuracy.py PUBLISHED.csv [--fit]

The constants in meshpar/forecasting/profiles/*.yaml that are not data-sheet numbers were fitted to these rows, all Hopper profiles sharing
them (their meaning: meshpar.forecasting.hardware.Hardware). Leave-one-out fits them again without the row that is predicted.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from meshpar import ActivationCheckpoint, Compile, FullyShard, MeshSpec, Plan, TensorParallel
from meshpar.forecasting import Batch, Hardware, Trace, cost
from meshpar.forecasting.api import probes
from meshpar.forecasting.extrapolate import deepened
from meshpar.forecasting.simulate import Simulation, simulate
from meshpar.models import Transformer, TransformerConfig

FITTED = {
    "matmul": (0.55, 0.95),
    "attention_forward": (0.3, 0.7),
    "memory_fraction": (0.6, 0.95),
    "node_fraction": (0.4, 0.9),
    "clock": (0.65, 1.0),
}
"""The fitted constants and the ranges that their meaning leaves them."""

BACKWARD_OVER_FORWARD = 0.78
"""Fused attention's backward against its forward, from FlashAttention-2's published kernel speeds (arXiv 2307.08691)."""


@dataclass(frozen=True)
class Row:
    """A published run: what it was, its tokens a second and rank, its memory, and two probes of its step."""

    title: str
    hardware: Hardware
    depth: int
    tokens: float
    memory: tuple[float, str] | None
    probes: tuple[Trace, Trace]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("published", type=Path)
    parser.add_argument("--fit", action="store_true", help="fit the constants to all rows and print them, instead of using the profiles'")
    arguments = parser.parse_args()
    rows = read(arguments.published)
    chosen = fit(rows) if arguments.fit else {}
    print(f"{'run':58} {'tok/s/GPU':>10} {'forecast':>10} {'error':>8}   peak GiB: published, forecast")
    errors = []
    for row in rows:
        got = throughput(row, row_hardware(row, chosen))
        errors.append(got / row.tokens - 1)
        memory = deepened(*row.probes, row.depth).memory().peak / 2**30
        said = f"{row.memory[0]:.1f} {row.memory[1]}" if row.memory else "-"
        print(f"{row.title:58} {row.tokens:10,.0f} {got:10,.0f} {errors[-1]:+8.1%}   {said}, {memory:.1f}")
    left_out = []
    for place, row in enumerate(rows):
        constants = fit([*rows[:place], *rows[place + 1 :]])
        left_out.append(throughput(row, row_hardware(row, constants)) / row.tokens - 1)
    print(f"median error {median(map(abs, errors)):.1%}, largest {max(map(abs, errors)):.1%}")
    print("leave-one-out: " + ", ".join(f"{each:+.1%}" for each in left_out))
    print(f"leave-one-out error: median {median(map(abs, left_out)):.1%}, largest {max(map(abs, left_out)):.1%}")
    if arguments.fit:
        print("fitted:", {name: round(value, 3) for name, value in chosen.items()})


def read(path: Path) -> list[Row]:
    """Simulate every run of the table."""
    with path.open() as lines:
        table = list(csv.DictReader(lines))
    for place, line in enumerate(table):
        if line["hardware"] == "same":
            line["hardware"] = table[place - 1]["hardware"]
    jobs = [job_of(line) for line in table]
    pairs = [probes(job, job.model.meshpar_layout()) for job in jobs]
    traces = simulate([job for pair in pairs for job in pair], workers=2)
    return [
        Row(
            title=f"{line['model']} {line['mesh']} {line['recompute']}{', compiled' if line['compile'] == 'yes' else ''} {place}",
            hardware=hardware_of(line),
            depth=len(job.model.layers),
            tokens=float(line["tokens_per_s_per_gpu"]),
            memory=(float(line["memory_gib"]), line["memory_kind"]) if line["memory_gib"] else None,
            probes=(traces[2 * place], traces[2 * place + 1]),
        )
        for place, (line, job) in enumerate(zip(table, jobs))
    ]


def hardware_of(line: Mapping[str, str]) -> Hardware:
    if line["hardware"].startswith("H100"):
        return Hardware.load("h100-500w")
    # Four on a board are wired pair by pair, without a switch (NVIDIA HGX 4-GPU).
    return replace(Hardware.load("h200"), node=4, switched=False)


def job_of(line: Mapping[str, str]) -> Simulation:
    """Return the run as meshpar would plan it."""
    titan = line["source"].startswith("torchtitan")
    config = TransformerConfig.preset("llama-70b" if "70B" in line["model"] else "llama-8b")
    if line["model"].startswith("7B"):
        config = replace(config, vocab_size=32_000)
    mesh = MeshSpec(line["mesh"])
    passes: list[Any] = []
    if "tp" in mesh.axes:
        # KempnerForge gathers for each projection: without the regions each prepares its own input.
        alone = {} if titan else {"layers.*.attn": None, "layers.*.mlp": None}
        passes.append(TensorParallel(sequence_parallel=True, loss_parallel=titan, styles=alone))
    passes.append(ActivationCheckpoint(mode="full" if line["recompute"] == "full" else "selective"))
    if line["compile"] == "yes":
        passes.append(Compile())
    if "dp_shard" not in mesh.axes:
        mesh = MeshSpec({"dp_shard": 1} | dict(mesh.axes))  # for its mixed precision: float32 parameters, computing in bfloat16
    passes.append(FullyShard(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    with torch.device("meta"):
        model = Transformer(config)
    batch = Batch(sequence=int(line["seq_len"]), micro_batch=int(line["local_batch"]), accumulate=int(line["accumulation"]))
    return Simulation(plan=Plan(mesh, passes), model=model, batch=batch, world_size=mesh.size)


def row_hardware(row: Row, constants: Mapping[str, float]) -> Hardware:
    if not constants:
        return row.hardware
    limited = row.hardware.clock < 1.0
    constants = {**constants, "clock": constants["clock"] if limited else 1.0}
    return replace(row.hardware, **constants, attention_backward=constants["attention_forward"] * BACKWARD_OVER_FORWARD)


def throughput(row: Row, hardware: Hardware) -> float:
    """Return tokens a second and rank; the step's time grows by the same with every block."""
    few, more = (cost(trace, hardware).seconds for trace in row.probes)
    step = row.probes[1].depth - row.probes[0].depth
    seconds = more + (row.depth - row.probes[1].depth) / step * (more - few)
    ranks = math.prod(row.probes[0].axes.values())
    return row.probes[0].tokens * row.probes[0].data_size / seconds / ranks


def fit(rows: Sequence[Row]) -> dict[str, float]:
    """Return the constants with the least squared relative error, by coordinate search within their ranges."""

    def error(constants: Mapping[str, float]) -> float:
        misses = [math.log(throughput(row, row_hardware(row, constants)) / row.tokens) for row in rows]
        # A weak pull to the middle of each range keeps a constant that few rows tell about from running to its end.
        pull = sum(((constants[name] - (low + high) / 2) / (high - low)) ** 2 for name, (low, high) in FITTED.items())
        return sum(each**2 for each in misses) + 2e-4 * pull

    best = {name: (low + high) / 2 for name, (low, high) in FITTED.items()}
    least, step = error(best), 0.25
    while step > 0.02:
        improved = False
        for name, (low, high) in FITTED.items():
            for sign in (1, -1):
                tried = best | {name: min(high, max(low, best[name] + sign * step * (high - low)))}
                if (found := error(tried)) < least:
                    best, least, improved = tried, found, True
        step *= 1.0 if improved else 0.5
    return best


if __name__ == "__main__":
    main()
