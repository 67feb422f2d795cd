"""What meshpar costs on top of torch: a hand-written loop and meshpar's, same model, mesh and settings, step by step in
turn.

    python benchmarks/step_overhead.py [--plan fsdp|tp|both|calls] [--steps 40] [--rounds 5]

Two gloo processes on this machine. Every step of meshpar's own training loop (data, objective, clipping, schedule,
metrics, stop signal, everything) is followed by one of the hand-written loop on the same batch. Printed: the medians
and their ratio.

``calls`` counts the calls of Python and C functions in a step of 80 tiny blocks on one rank, which no other work on the
machine changes, and the processor time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

import meshpar
from meshpar.models import Transformer, TransformerConfig
from meshpar.testing import launch
from meshpar.training import (
    AdamWSettings,
    Batches,
    CausalLM,
    PackedTokens,
    Schedule,
    Trainer,
    TrainSettings,
    build_adamw,
    write_tokens,
)

CONFIG = TransformerConfig(vocab_size=4096, dim=256, layers=4, heads=8, kv_heads=4, hidden=768, max_positions=256)
TINY = TransformerConfig(vocab_size=256, dim=32, layers=80, heads=4, hidden=64, max_positions=8)
WAYS = ("by hand", "off", "always")
"""FSDP2 by hand, and plans by their guards."""
LENGTH, MICRO_BATCH, WARMUP = 256, 4, 5
SETTINGS = AdamWSettings(lr=3e-4)


def by_hand(plan: str, config: TransformerConfig = CONFIG) -> nn.Module:
    """The model as a careful user of torch parallelizes it."""
    with torch.device("meta"):
        module = Transformer(config)
    if plan == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
        for layer in module.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
    else:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        table: dict[str, Any] = {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        for number in range(CONFIG.layers):
            prefix = f"layers.{number}"
            table[f"{prefix}.attn"] = PrepareModuleInput(
                input_layouts=(Replicate(), None, None),
                desired_input_layouts=(Replicate(), None, None),
                use_local_output=False,
            )
            table[f"{prefix}.mlp"] = PrepareModuleInput(
                input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=False
            )
            table |= {f"{prefix}.attn.{name}": ColwiseParallel() for name in "qkv"} | {
                f"{prefix}.attn.o": RowwiseParallel()
            }
            table |= {f"{prefix}.mlp.{name}": ColwiseParallel() for name in ("gate", "up")} | {
                f"{prefix}.mlp.down": RowwiseParallel()
            }
        parallelize_module(module, mesh, table)
    module.to_empty(device="cpu")
    torch.manual_seed(0)
    for child in module.modules():
        if hasattr(child, "reset_parameters"):
            child.reset_parameters()
    return module


class InTurn:
    """The training data, which between two of meshpar's steps runs a hand-written one on the same batch."""

    def __init__(self, data: Batches, module: nn.Module, sharded: bool) -> None:
        self.data, self.module, self.sharded = data, module, sharded
        self.optimizer = build_adamw(module, SETTINGS)
        self.ours: list[float] = []
        self.theirs: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.data, name)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.data)
        while True:
            start = time.perf_counter()
            batch = next(batches)
            yield batch
            # The loop asks for its next batch when everything that belongs to its step is done.
            self.ours.append(time.perf_counter() - start)
            dist.barrier()
            start = time.perf_counter()
            self._step(batch[0])
            self.theirs.append(time.perf_counter() - start)
            dist.barrier()

    def _step(self, batch: dict[str, torch.Tensor]) -> None:
        logits = self.module(input_ids=batch["input_ids"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())
        loss.backward()
        if self.sharded:
            float(torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0).full_tensor())
        else:
            # torch's own refuses plain parameters beside DTensors; by hand one clips them apart, which is not even the
            # right norm.
            for kind in (True, False):
                together = [
                    p for p in self.module.parameters() if isinstance(p, torch.distributed.tensor.DTensor) is kind
                ]
                torch.nn.utils.clip_grad_norm_(together, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def rank(plan: str, steps: int, folder: str) -> None:
    """One rank of one round; rank 0 leaves the medians in a file."""
    with torch.device("meta"):
        module = Transformer(CONFIG)
    passes: list[Any] = [meshpar.FullyShard()] if plan == "fsdp" else [meshpar.TensorParallel()]
    par = meshpar.Plan("dp_shard=2" if plan == "fsdp" else "tp=2", passes).apply(module).materialize(seed=0)
    path = Path(folder) / f"tokens-{dist.get_rank()}.bin"
    documents = (
        np.random.default_rng(0).integers(1, CONFIG.vocab_size, (1, 200 * LENGTH * MICRO_BATCH * 2)).astype(np.uint16)
    )
    tokens = write_tokens(path, documents, vocab_size=CONFIG.vocab_size, eos_id=0)
    data = Batches(
        PackedTokens(tokens, LENGTH), micro_batch=MICRO_BATCH, data_rank=par.data_rank, data_size=par.data_size, seed=0
    )
    turns = InTurn(data, by_hand(plan), plan == "fsdp")
    total = steps + WARMUP
    schedule = Schedule(name="cosine", lr=SETTINGS.lr, steps=total)
    settings = TrainSettings(steps=total, log_every=10)
    Trainer(par, CausalLM(), turns, build_adamw(par.module, SETTINGS), schedule, settings).run()  # type: ignore[arg-type]
    if dist.get_rank() == 0:
        result = {"ours": statistics.median(turns.ours[WARMUP:]), "theirs": statistics.median(turns.theirs[WARMUP:])}
        (Path(folder) / "result.json").write_text(json.dumps(result))


def count(way: str, steps: int, folder: str) -> None:
    """Take steps of 80 tiny blocks on one rank; leave the calls of one, and the median of processor time, in a file."""
    if way == "by hand":
        module = by_hand("fsdp", TINY)
        clip: Any = partial(torch.nn.utils.clip_grad_norm_, list(module.parameters()))
    else:
        with torch.device("meta"):
            whole = Transformer(TINY)
        par = meshpar.Plan("dp_shard=1", [meshpar.FullyShard()], guards=way).apply(whole).materialize(seed=0)
        module, clip = par.module, par.clip_grad_norm_
    optimizer, ids = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True), torch.zeros(1, 8, dtype=torch.int64)

    def step() -> None:
        F.cross_entropy(module(ids).logits.flatten(0, 1), ids.flatten()).backward()
        clip(1.0)
        optimizer.step()
        optimizer.zero_grad()

    used, calls = [], Counter[str]()
    for _ in range(steps + WARMUP):
        began = time.process_time()
        step()
        used.append(time.process_time() - began)
    sys.setprofile(lambda frame, event, arg: calls.update([event]))
    step()
    sys.setprofile(None)
    found = {"calls": calls["call"] + calls["c_call"], "used": statistics.median(used[WARMUP:])}
    (Path(folder) / "result.json").write_text(json.dumps(found))


def count_calls(steps: int) -> None:
    found = {}
    for way in WAYS:
        with TemporaryDirectory() as folder:
            launch("step_overhead", "count", 1, (way, steps, folder), timeout_s=600, fresh="a benchmark")
            found[way] = json.loads((Path(folder) / "result.json").read_text())
        calls, used = (found[way][key] / found["by hand"][key] for key in ("calls", "used"))
        print(f"{way:8} {found[way]['calls']:8,} calls of Python and C a step ({calls:.3f}), "
              f"{found[way]['used'] * 1e3:.0f} ms of a processor ({used:.3f})")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=["fsdp", "tp", "both", "calls"], default="both")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.plan == "calls":
        count_calls(options.steps)
        return
    for plan in ("fsdp", "tp") if options.plan == "both" else (options.plan,):
        ratios = []
        for number in range(options.rounds):
            with TemporaryDirectory() as folder:
                launch("step_overhead", "rank", 2, (plan, options.steps, folder), timeout_s=600)
                result = json.loads((Path(folder) / "result.json").read_text())
            ratios.append(result["ours"] / result["theirs"])
            ours, theirs = result["ours"] * 1e3, result["theirs"] * 1e3
            print(f"{plan} round {number + 1}: meshpar {ours:.1f} ms, by hand {theirs:.1f} ms, ratio {ratios[-1]:.3f}")
        print(
            f"{plan}: ratio of medians {statistics.median(ratios):.3f} (lowest {min(ratios):.3f}, highest "
            f"{max(ratios):.3f})"
        )


if __name__ == "__main__":
    main()
