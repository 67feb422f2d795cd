"""Where stages win over shards and tensor parallelism, by forecast: Llama 70B and 405B, the same samples in each step.

    python -m benchmarks.stages [--samples 512] [--network 12.5] [--traces FILE] [llama-70b llama-405b]

Each step has ``samples`` of 8,192 tokens, one in a micro-batch, with full recomputation, in bfloat16 on float32
parameters. Without stages gradients are reduced in each micro-batch.
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from meshpar import ActivationCheckpoint, HybridShard, MeshSpec, PipelineParallel, Plan, TensorParallel
from meshpar.forecasting import Batch, Hardware, Trace, cost
from meshpar.forecasting.api import probes
from meshpar.forecasting.extrapolate import deepened
from meshpar.forecasting.search import on_mesh
from meshpar.forecasting.simulate import Depths, Simulation, simulate
from meshpar.forecasting.staged import Shape, Stages, costs_of_blocks, even_stages
from meshpar.forecasting.staged import probes as staged_probes
from meshpar.models import Transformer, TransformerConfig

SIZES, STAGES = (64, 256, 1024, 4096), (2, 4, 8, 16)
KINDS = [(staged, tp, reshard) for staged in (False, True) for tp in (1, 8) for reshard in (True, False)]
"""With stages or without, the degree of tensor parallelism, whether forwards free weights."""
GIB = 1 << 30


@dataclass(frozen=True)
class Found:
    """A plan's forecast: its mesh, seconds of a step, bytes of the fullest rank, the part of a step in which stages
    wait for others, and whether weights stay gathered.
    """

    mesh: str
    seconds: float
    peak: int
    waiting: float = 0.0
    kept: bool = False


def job(model: torch.nn.Module, tp: int, reshard: bool, *, staged: bool) -> Simulation:
    """Return the job whose probes stand for all meshes with so much tensor parallelism.

    Args:
        model: on the meta device.
        tp: degree of tensor parallelism.
        reshard: forwards free weights; False: they stay gathered, with stages until a step ends.
        staged: with stages.
    """
    spec = MeshSpec({**({"pp": max(STAGES)} if staged else {}), "dp_replicate": 2, "dp_shard": 8, "tp": tp})
    passes: list[Any] = [PipelineParallel()] if staged else []
    passes += [TensorParallel(sequence_parallel=True, loss_parallel=True)] if tp > 1 else []
    sharded = HybridShard(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, reshard_after_forward=reshard)
    passes += [ActivationCheckpoint(), sharded]
    return Simulation(plan=Plan(spec, passes), model=model, batch=Batch(sequence=8192), world_size=spec.size)


def splits(ranks: int, tp: int) -> Iterator[tuple[int, int]]:
    """Yield (replicas, shards), shards from a node's up."""
    shards = max(1, min(ranks, 8 // tp))
    while shards <= ranks:
        yield ranks // shards, shards
        shards *= 2


def resized(peak: int, held: dict[str, int], then: int, shards: int) -> int:
    """Return the peak with state over other numbers of shards."""
    state = sum(held.get(name, 0) for name in ("parameters", "gradients", "optimizer"))
    return peak - state + state * then // shards


def plain(trace: Trace, tp: int, size: int, samples: int, hardware: Hardware) -> Iterator[Found]:
    """Yield plans without stages."""
    ranks, memory = size // tp, trace.memory()
    for replicas, shards in splits(ranks, tp):
        if samples % ranks:
            continue
        here = on_mesh(trace, replicas, shards)
        timed, times = cost(here, hardware), samples // ranks
        ends = dict.fromkeys(("start", "forward", "backward"), 0.0)
        for (phase, event), end in zip(here.events(), timed.ends, strict=True):
            if phase in ends and event.stream == "compute":
                ends[phase] = max(ends[phase], end)
        seconds = timed.seconds + (times - 1) * (ends["backward"] - ends["start"])
        peak = resized(memory.peak, dict(memory.held), 8, shards)
        yield Found(str(MeshSpec(dp_replicate=replicas, dp_shard=shards, tp=tp)), seconds, peak)


def with_stages(
    known: Stages, costs: Sequence[float], tp: int, size: int, samples: int, hardware: Hardware
) -> Iterator[Found]:
    """Yield plans with stages."""
    for stages in STAGES:
        ranks = size // tp // stages
        for replicas, shards in splits(ranks, tp) if ranks else ():
            if samples % ranks or (many := samples // ranks) < stages:
                continue
            of = known.estimates(hardware, lambda trace, data=(replicas, shards): on_mesh(trace, *data))
            for blocks in {even_stages(costs, stages), even_stages(known.times(of, len(costs)), stages)}:
                shape = Shape(blocks=blocks, schedule="1f1b", micro_batches=many, stride=size // stages)
                trace = known.joined(shape, of)
                timed = cost(trace, hardware)
                waiting = sum(stage.exposed.get("pp", 0.0) for stage in timed.stages) / stages / timed.seconds
                mesh = str(MeshSpec(pp=stages, dp_replicate=replicas, dp_shard=shards, tp=tp))
                yield Found(mesh, timed.seconds, trace.memory().peak, waiting)


def row(name: str, size: int, found: Sequence[Found], samples: int, hardware: Hardware) -> str:
    """Return the fastest plan that fits, or may fit, as a row of a table."""
    room = [one for one in found if hardware.verdict(one.peak) != "does not fit"]
    if not room:
        why = f"none fits; least {min(one.peak for one in found) / GIB:.0f} GiB" if found else "too few samples"
        return f"| {size:,} | {name} | {why} | | | |"
    best = min(room, key=lambda one: one.seconds)
    rate, kept = samples * 8192 / best.seconds / size, ", gathered" if best.kept else ""
    return (
        f"| {size:,} | {name} | `{best.mesh}`{kept} | {best.seconds:.1f} | {rate:,.0f} | {best.peak / GIB:.0f} "
        f"({hardware.verdict(best.peak)}) |"
    )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=["llama-70b", "llama-405b"])
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--traces", type=Path, help="keep the simulations in a file, or take them from it")
    parser.add_argument("--network", type=float, help="GB/s of a device to other nodes; the profile's: 50")
    options = parser.parse_args()
    hardware = Hardware.load("h100")
    if options.network:
        hardware = replace(hardware, name=f"h100, {options.network:g} GB/s", network_bandwidth=options.network * 1e9)
    traces: dict[Any, Any] = (
        pickle.loads(options.traces.read_bytes()) if options.traces and options.traces.exists() else {}
    )
    for name in options.models:
        with torch.device("meta"):
            model = Transformer(TransformerConfig.preset(name))
        layout = model.meshpar_layout()
        depths = Depths(model, layout)
        costs = costs_of_blocks(job(model, 1, True, staged=True), layout)
        for staged, tp, reshard in KINDS:
            if (name, staged, tp, reshard) not in traces:
                here = job(model, tp, reshard, staged=staged)
                made = simulate((staged_probes if staged else probes)(here, depths), workers=2)
                traces[name, staged, tp, reshard] = made
                if options.traces:
                    options.traces.write_bytes(pickle.dumps(traces))
        print(f"{name}, {options.samples} samples of 8,192 tokens a step, {hardware.name}\n")
        print("| devices | | mesh | s a step | tokens/s a device | GiB |\n| --- | --- | --- | --- | --- | --- |")
        whole = [
            (tp, reshard, deepened(*traces[name, staged, tp, reshard], depths.blocks))
            for staged, tp, reshard in KINDS
            if not staged
        ]
        known = [(tp, reshard, Stages(*traces[name, staged, tp, reshard])) for staged, tp, reshard in KINDS if staged]
        for size in SIZES:
            without = [
                replace(one, kept=not reshard)
                for tp, reshard, trace in whole
                for one in plain(trace, tp, size, options.samples, hardware)
            ]
            print(row("without pp", size, without, options.samples, hardware))
            of_stages = [
                replace(one, kept=not reshard)
                for tp, reshard, stages in known
                for one in with_stages(stages, costs, tp, size, options.samples, hardware)
            ]
            print(row("with pp", size, of_stages, options.samples, hardware), flush=True)


if __name__ == "__main__":
    main()
