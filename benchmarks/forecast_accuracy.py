"""The forecast against published training runs: speed and memory of every row, on pages that were fitted and pages that
were held back.

    python benchmarks/forecast_accuracy.py [--fit] [--traces FILE]

The rows and their conditions: benchmarks/published.yaml. The constants in meshpar/forecasting/profiles/*.yaml that are
not data-sheet numbers were fitted to the fitted pages, all Hopper profiles sharing them (their meaning:
meshpar.forecasting.hardware.Hardware).
"""

from __future__ import annotations

import argparse
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from meshpar import ActivationCheckpoint, Compile, Float8, FullyShard, HybridShard, MeshSpec, Plan, TensorParallel
from meshpar.forecasting import Batch, Hardware, Trace, cost
from meshpar.forecasting.api import probes
from meshpar.forecasting.extrapolate import deepened
from meshpar.forecasting.simulate import Depths, Simulation, simulate
from meshpar.models import Transformer, TransformerConfig

FITTED = {
    "matmul": (0.55, 0.95),
    "attention_forward": (0.3, 0.7),
    "memory_fraction": (0.6, 0.95),
    "node_fraction": (0.4, 0.9),
    "network_fraction": (0.6, 0.95),
    "contention": (0.0, 0.4),
    "clock": (0.65, 1.0),
}
"""The fitted constants and the ranges that their meaning leaves them."""

LOOP: dict[str, Tensor] = {}
"""The variables of a training loop that live on."""

BACKWARD_OVER_FORWARD = 0.78
"""Fused attention's backward against its forward, from FlashAttention-2's published kernel speeds (arXiv
2307.08691).
"""

LLAMA2 = {"vocab_size": 32_000, "rope_theta": 10_000.0, "max_positions": 4096}
MODELS = {
    # KempnerForge's: the feed-forward layer is 1.3 x 8/3 of the width, in steps of 256.
    "7b": ("llama-8b", {}),
    "13b": ("llama-8b", {"dim": 5120, "layers": 40, "heads": 40, "hidden": 17_920}),
    "llama2-7b": ("llama-8b", {**LLAMA2, "kv_heads": 32, "hidden": 11_008}),
    "llama2-13b": ("llama-8b", {**LLAMA2, "dim": 5120, "layers": 40, "heads": 40, "kv_heads": 40, "hidden": 13_824}),
    "llama2-70b": ("llama-70b", LLAMA2),
}


@dataclass(frozen=True)
class Row:
    """A published run: what it was, its tokens a second and rank, its memory in GiB, and two probes of its step."""

    page: str
    url: str
    fitted: bool
    said: Mapping[str, Any]
    hardware: Hardware
    depth: int
    probes: tuple[Trace, Trace]

    @property
    def title(self) -> str:
        said = self.said
        words = [
            said["model"],
            said["mesh"],
            f"{said['micro_batch']}x{said['sequence']}",
            f"recompute {said['recompute']}",
        ]
        words += [f"accumulate {count}" for count in [said.get("accumulate", 1)] if count > 1]
        words += [name for name in ("compile", "float8") if said.get(name)]
        return ", ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--fit", action="store_true", help="fit the constants and print them, instead of using the profiles'"
    )
    parser.add_argument("--traces", type=Path, help="keep the simulations in this file, and read them if it is there")
    arguments = parser.parse_args()
    rows = read(Path(__file__).with_name("published.yaml"), arguments.traces)
    chosen = fit([row for row in rows if row.fitted]) if arguments.fit else {}
    errors: dict[str, list[float]] = {}
    print(
        "| run | tokens/s a GPU | forecast | error | GiB | forecast | error |\n| --- | --- | --- | --- | --- | --- | "
        "--- |"
    )
    for page in dict.fromkeys(row.page for row in rows):
        own = [row for row in rows if row.page == page]
        part = "fitted" if own[0].fitted else "held back"
        print(f"| **[{page}]({own[0].url})**, {part} | | | | | | |")
        for row in own:
            cells = compared(
                row.said["tokens"],
                throughput(row, row_hardware(row, chosen)),
                errors.setdefault(f"{part}, tokens/s", []),
            )
            if "gib" in row.said:
                peak = deepened(*row.probes, row.depth).memory().peak / 2**30
                cells += compared(
                    row.said["gib"], peak, errors.setdefault(f"{part}, memory {row.said['memory']}", []), 1
                )
            print("| " + " | ".join([row.title, *cells, *[""] * (6 - len(cells))]) + " |")
    print()
    for what, misses in sorted(errors.items()):
        sizes = list(map(abs, misses))
        print(f"{what}: {len(misses)} rows, median error {median(sizes):.1%}, largest {max(sizes):.1%}")
    if arguments.fit:
        print("fitted:", {name: round(value, 3) for name, value in chosen.items()})


def compared(published: float, forecast: float, errors: list[float], digits: int = 0) -> list[str]:
    """Return a published value, the forecast and its error as cells, and note the error."""
    errors.append(forecast / published - 1)
    return [f"{published:,.{digits}f}", f"{forecast:,.{digits}f}", f"{errors[-1]:+.1%}"]


def read(path: Path, kept: Path | None) -> list[Row]:
    """Simulate every run of the pages."""
    known: dict[str, tuple[Trace, Trace]] = (
        pickle.loads(kept.read_bytes()) if kept is not None and kept.exists() else {}
    )
    rows = [
        (page, page.get("conditions", {}) | row) for page in yaml.safe_load(path.read_text()) for row in page["rows"]
    ]
    jobs = [job_of(said) for _, said in rows]
    keys = [
        repr(sorted(item for item in said.items() if item[0] not in ("tokens", "gib", "hardware", "memory")))
        for _, said in rows
    ]
    missing = [place for place, key in enumerate(keys) if key not in known]
    pairs = [probes(jobs[place], Depths(jobs[place].model, jobs[place].model.meshpar_layout())) for place in missing]
    traces = simulate([job for pair in pairs for job in pair], workers=2)
    known |= {keys[place]: (traces[2 * number], traces[2 * number + 1]) for number, place in enumerate(missing)}
    if kept is not None and missing:
        kept.write_bytes(pickle.dumps(known))
    return [
        Row(
            page=page["page"],
            url=page["url"],
            fitted=page.get("fitted", False),
            said=said,
            hardware=hardware_of(said.get("hardware") or page["hardware"]),
            depth=len(job.model.layers),
            probes=known[key],
        )
        for (page, said), job, key in zip(rows, jobs, keys)
    ]


def hardware_of(said: Mapping[str, Any]) -> Hardware:
    changes = dict(said)
    return replace(Hardware.load(changes.pop("profile")), **changes)


def job_of(said: Mapping[str, Any]) -> Simulation:
    """Return the run as meshpar would plan it, with its own framework's loss."""
    preset, changes = MODELS.get(said["model"], (said["model"], {}))
    mesh, passes = MeshSpec(said["mesh"]), list[Any]()
    forge = said.get("tp") == "forge"
    if "tp" in mesh.axes:
        # KempnerForge gathers for each projection, gathers logits, and keeps the embedding whole, which plans refuse
        # without data shards.
        whole = {"embed": "sequence"} if "dp_shard" in mesh.axes else {}
        own = {"layers.*.attn": None, "layers.*.mlp": None, **whole} if forge else {}
        passes.append(TensorParallel(sequence_parallel=True, loss_parallel=not forge, styles=own))
    passes += [Float8()] * said.get("float8", False)
    if said["recompute"] != "none":
        every = said["recompute"] == "every second block"
        passes.append(
            ActivationCheckpoint(mode="full", every=2) if every else ActivationCheckpoint(mode=said["recompute"])
        )
    passes += [Compile()] * said.get("compile", False)
    if "dp_shard" not in mesh.axes:
        mesh = MeshSpec({"dp_shard": 1} | dict(mesh.axes))  # for its precision
    sharding = HybridShard if "dp_replicate" in mesh.axes else FullyShard
    reduced = getattr(torch, said.get("reduce", "float32"))
    passes.append(sharding(param_dtype=torch.bfloat16, reduce_dtype=reduced))
    with torch.device("meta"):
        model = Transformer(
            TransformerConfig.preset(preset, **(changes | {"max_positions": max(said["sequence"], 8192)}))
        )
    if said.get("norm") == "composed":
        for block in (*model.layers, model):
            for name, child in list(block.named_children()):
                if isinstance(child, nn.RMSNorm):
                    block.register_module(name, ComposedNorm(child.weight))
    model.to(getattr(torch, said.get("dtype", "float32")))
    batch = Batch(sequence=said["sequence"], micro_batch=said["micro_batch"], accumulate=said.get("accumulate", 1))
    job = Simulation(plan=Plan(mesh, passes), model=model, batch=batch, world_size=mesh.size)
    own_loss = {"float32": float32_loss, "held bfloat16": bfloat16_loss}.get(said["loss"])
    # Compiled, and over vocabulary shards, a loss is about what meshpar's own is.
    return job if own_loss is None or ("tp" in mesh.axes and not forge) else replace(job, loss=own_loss)


class ComposedNorm(nn.Module):
    """RMS normalisation in float32, operator by operator, as torchtitan (2024) and KempnerForge write it."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def float32_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Cross entropy of all logits in float32, as torchtitan computed it in 2024."""
    logits = model(input_ids=batch["input_ids"]).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), reduction="sum")


def bfloat16_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Cross entropy of all logits in the head's dtype, as KempnerForge and fms-fsdp do it; their loops hold the
    logits until the next.
    """
    LOOP["logits"] = logits = model(input_ids=batch["input_ids"]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


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
        misses = [math.log(throughput(row, row_hardware(row, constants)) / row.said["tokens"]) for row in rows]
        # A weak pull to the middle of each range keeps a constant that few rows tell about from running to its end.
        pull = sum(((constants[name] - (low + high) / 2) / (high - low)) ** 2 for name, (low, high) in FITTED.items())
        return sum(miss**2 for miss in misses) + 2e-4 * pull

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
