"""Seconds to bring the weights of a sharded model to rank 0: the stream, full_tensor() for each parameter, a full state
dict, and the bare all-gathers of the shards.

    torchrun --nproc-per-node 2 benchmarks/published.py [--megabytes 1000] [--repeats 5]

Ranks take turns at each way in the same run. Printed are medians, their ratio to the bare all-gathers, and the largest
resident memory of rank 0 above what it held before, as a table in Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import meshpar

WIDTH = 2048


class Stack(nn.Module):
    """Square layers of 16 MiB."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Peak:
    """The largest resident memory of this process in a block, above that at its beginning."""

    def __enter__(self) -> Peak:
        self.before = self.most = resident()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.look)
        self.thread.start()
        return self

    def look(self) -> None:
        while not self.over.wait(0.005):
            self.most = max(self.most, resident())

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket", default="256MiB")
    options = parser.parse_args()
    with meshpar.distributed("cpu"):
        layers = max(1, options.megabytes * 1_000_000 // (WIDTH * WIDTH * 4))
        with torch.device("meta"):
            model = Stack(layers)
        par = meshpar.Plan("dp_shard=-1", [meshpar.FullyShard()]).apply(model).materialize(seed=0)
        size, parameters = dist.get_world_size(), list(par.module.parameters())
        shards = [each.to_local() for each in parameters]  # type: ignore[attr-defined]
        room = torch.empty(size * shards[0].numel())

        def stream() -> None:
            for _ in par.published(bucket=options.bucket):
                pass

        def each_parameter() -> None:
            for each in parameters:
                each.full_tensor()  # type: ignore[attr-defined]

        def state_dict() -> None:
            get_model_state_dict(par.module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

        def bare() -> None:
            for each in shards:
                dist.all_gather_into_tensor(room, each.detach().flatten())

        ways: dict[str, Callable[[], None]] = {
            "par.published()": stream,
            "full_tensor() for each parameter": each_parameter,
            "a full state dict": state_dict,
            "the bare all-gathers": bare,
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        peaks: dict[str, int] = {}
        for _ in range(options.repeats + 1):
            for name, way in ways.items():
                dist.barrier()
                with Peak() as peak:
                    start = time.perf_counter()
                    way()
                    dist.barrier()
                    times[name].append(time.perf_counter() - start)
                peaks[name] = max(peaks.get(name, 0), peak.most - peak.before)
        if dist.get_rank() == 0:
            medians = {name: statistics.median(each[1:]) for name, each in times.items()}
            base = medians["the bare all-gathers"]
            print(f"{layers * WIDTH * WIDTH * 4 / 1e9:.2f} GB over {size} ranks, a bucket of {options.bucket}\n")
            print("| way | seconds | of the bare all-gathers | memory of rank 0, MB |\n| --- | ---: | ---: | ---: |")
            for name, median in medians.items():
                print(f"| {name} | {median:.2f} | {median / base:.2f} | {peaks[name] / 1e6:.0f} |")


if __name__ == "__main__":
    main()
