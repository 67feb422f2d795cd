"""Seconds to bring the weights of a sharded model to rank 0: the stream, full_tensor() for each parameter, a full state
dict, and the bare all-gathers of the shards.

    torchrun --nproc-per-node 2 benchmarks/published.py [--megabytes 1000] [--repeats 5]

Ranks take turns at each way in the same run. Printed are medians, their ratio to the bare all-gathers, and the largest
resident memory of any rank above what it held before, as a table in Markdown. It exits with 1 where the stream takes
more than a bucket and the largest tensor.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import meshpar

WIDTH = 2048
BYTES = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


class Stack(nn.Module):
    """Square layers of 16 MiB."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def status_bytes(field: str) -> int:
    """Return a size from /proc/self/status in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


class Peak:
    """The largest resident memory of this process in a block, above that at its beginning."""

    def __enter__(self) -> Peak:
        Path("/proc/self/clear_refs").write_text("5")
        self.before, self.most = status_bytes("VmRSS"), 0
        return self

    def __exit__(self, *error: object) -> None:
        self.most = status_bytes("VmHWM") - self.before


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
        shards = [parameter.to_local() for parameter in parameters]  # type: ignore[attr-defined]
        room = torch.empty(size * shards[0].numel())

        def stream() -> None:
            for _name, tensor in par.published(bucket=options.bucket):
                del tensor  # or the loop holds it while the next one is made

        def each_parameter() -> None:
            for parameter in parameters:
                parameter.full_tensor()  # type: ignore[attr-defined]

        def state_dict() -> None:
            get_model_state_dict(par.module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

        def bare() -> None:
            for shard in shards:
                dist.all_gather_into_tensor(room, shard.detach().flatten())

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
                if len(times[name]) > 1:  # the first opens connections
                    peaks[name] = max(peaks.get(name, 0), peak.most)
        every: list[dict[str, int]] = [{}] * size
        dist.all_gather_object(every, peaks)
        bound = BYTES[options.bucket.lstrip("0123456789.")] * float(options.bucket.rstrip("KMGiB")) + WIDTH * WIDTH * 4
        most = {name: max(rank[name] for rank in every) for name in ways}
        if dist.get_rank() == 0:
            medians = {name: statistics.median(measured[1:]) for name, measured in times.items()}
            base = medians["the bare all-gathers"]
            print(f"{layers * WIDTH * WIDTH * 4 / 1e9:.2f} GB over {size} ranks, a bucket of {options.bucket}\n")
            print("| way | seconds | of the bare all-gathers | memory, MB |\n| --- | ---: | ---: | ---: |")
            for name, median in medians.items():
                print(f"| {name} | {median:.2f} | {median / base:.2f} | {most[name] / 1e6:.0f} |")
            print(f"\na bucket and the largest tensor: {bound / 1e6:.0f} MB")
    if most["par.published()"] > bound:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
