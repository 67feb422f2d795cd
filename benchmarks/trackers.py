"""Train the same small model with trackers that fail in different ways, and compare losses and step times.

    python benchmarks/trackers.py [--steps 200] [--rounds 3]

`down`: a service that refuses connections (MLflow, and Weights & Biases with a bad key, where they are installed);
`hangs`: one that never answers; `full`: one that writes to a full disk. Rounds are interleaved, and each prints the
median of its steps, because a busy machine changes step times more than any tracker.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from meshpar import Plan, distributed
from meshpar.models import PRESETS, Transformer
from meshpar.training import (
    AdamWSettings,
    Batches,
    CausalLM,
    PackedTokens,
    Schedule,
    TrackedRun,
    Trackers,
    Trainer,
    TrainSettings,
    build_adamw,
    write_tokens,
)


class Hanging:
    """A tracker that never answers."""

    def __init__(self, run: TrackedRun) -> None: ...

    def send(self, records: Any) -> None:
        """Wait for an hour."""
        time.sleep(3600)

    def close(self) -> None: ...


class FullDisk:
    """A tracker whose disk is full."""

    def __init__(self, run: TrackedRun) -> None: ...

    def send(self, records: Any) -> None:
        """Write to a device that is always full."""
        with open("/dev/full", "wb", buffering=0) as file:
            file.write(repr(records).encode())

    def close(self) -> None: ...


class Warnings(logging.Handler):
    """Count the warnings of trackers."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += "tracker" in record.getMessage()


def train(trackers: dict[str, dict[str, Any]], steps: int) -> tuple[list[float], float, int]:
    """Return the losses, the median step in milliseconds, and the number of warnings."""
    warned = Warnings()
    logging.getLogger("meshpar").addHandler(warned)
    logging.getLogger("meshpar").propagate = False
    with distributed("cpu"), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        tokens = write_tokens(Path(folder) / "tokens.bin", [range(1, 200)] * 40, vocab_size=512, eos_id=0)
        with torch.device("meta"):
            model = Transformer(PRESETS["tiny"])
        par = Plan().apply(model).materialize(seed=0)
        batches = Batches(PackedTokens(tokens, 64), micro_batch=2, data_rank=0, data_size=1, seed=1)
        times, losses = [time.perf_counter()], list[float]()

        class Clock:
            def report(self, record: Any) -> None:
                times.append(time.perf_counter())
                losses.append(record["train/loss"])

            def note(self, text: str) -> None: ...

            def close(self) -> None: ...

        board = Trackers(Path(folder) / "run", trackers)
        settings = TrainSettings(steps=steps, log_every=1)
        optimizer = build_adamw(par.module, AdamWSettings(lr=1e-3))
        Trainer(par, CausalLM(), batches, optimizer, Schedule(lr=1e-3), settings, reporters=[Clock(), board]).run()
        board.close()
    logging.getLogger("meshpar").removeHandler(warned)
    gaps = [after - before for before, after in pairwise(times[1:])]
    return losses, 1000 * statistics.median(gaps), warned.count


def main() -> None:
    """Print a table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--rounds", type=int, default=3)
    asked = arguments.parse_args()
    cases: dict[str, dict[str, dict[str, Any]]] = {"none": {}, "none again": {}, "hangs": {f"{__name__}.Hanging": {}}}
    cases |= {"full": {f"{__name__}.FullDisk": {}}}
    if importlib.util.find_spec("mlflow"):
        cases["mlflow down"] = {"mlflow": {"uri": "http://127.0.0.1:9"}}
    if importlib.util.find_spec("wandb"):
        os.environ |= {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}
        cases["wandb bad key"] = {"wandb": {}}
    found: dict[str, list[float]] = {}
    same: list[float] | None = None
    warnings: dict[str, int] = {}
    differ: dict[str, float] = {}
    for _ in range(asked.rounds):
        for name, trackers in cases.items():
            losses, median, warnings[name] = train(trackers, asked.steps)
            same = same or losses
            apart = max(abs(ours - first) for ours, first in zip(losses, same, strict=True))
            differ[name] = max(differ.get(name, 0.0), apart)
            found.setdefault(name, []).append(median)
    print("| tracker | median step, ms, of each round | warnings | losses differ by |\n| --- | --- | --- | --- |")
    for name, medians in found.items():
        print(f"| {name} | {', '.join(f'{one:.1f}' for one in medians)} | {warnings[name]} | {differ[name]:.1e} |")


if __name__ == "__main__":
    main()
