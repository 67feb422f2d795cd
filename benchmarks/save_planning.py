"""Planning a save on many ranks: seconds on rank 0 and bytes that it exchanges, for the first save and for a later one.

    python benchmarks/save_planning.py [--ranks 1024] [--layers 80] [--replicas 1] [--commit]

With ``--commit`` also the commit: all that rank 0 does after the files are written, up to the manifest's bytes in a
file.

One process is rank 0, with the parameters of Llama 3 (70B has 80 layers) as DTensors on a mesh of all ranks and AdamW's
state of them, all without memory. Its save is planned by meshpar's own code. The other ranks' messages are made here,
pickled, and unpickled by rank 0. Seconds are those of rank 0's thread, and do not contain the network. Bytes are
counted as torch's gather and scatter send them: each rank's message is padded to the longest.
"""

from __future__ import annotations

import argparse
import math
import os
import pickle
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshpar import ModelLayout
from meshpar.checkpoints import CheckpointManager, Manifest
from meshpar.checkpoints.format.manifest import SavedPart
from meshpar.checkpoints.format.writing import Layout, WriteReport, WrittenFile, layout_of, pack
from meshpar.checkpoints.steps.planning import Alike, Described, Planning
from meshpar.checkpoints.steps.saving import Noted, Saving
from meshpar.checkpoints.storage.place import Place
from meshpar.exchange.host_messages import FAN_OUT
from meshpar.tensors.placements import local_index


@dataclass
class Peer:
    """One of the ranks."""

    rank: int
    size: int


class SimulatedRanks(Peer):
    """Rank 0's view of many ranks; stands in for ``meshpar.checkpoints.steps.ranks.Ranks``.

    Attributes:
        bytes: bytes that rank 0 has sent and received.
        aside: CPU seconds in which this process was the other ranks.
        given: the item of each rank in the last scatter.
    """

    def __init__(self, size: int, answer: Callable[[int, Any], Any]) -> None:
        super().__init__(0, size)
        self._answer = answer
        self.bytes, self.aside = 0, 0.0
        self.given: Sequence[Any] = ()

    def collect(self, step: str, act: Callable[[], Any]) -> list[Any]:
        mine = act()
        began = time.thread_time()
        sent = [pickle.dumps(self._answer(rank, mine)) for rank in range(1, self.size)]
        self.aside += time.thread_time() - began
        self.bytes += sum(map(len, sent))
        return [mine, *(pickle.loads(data) for data in sent)]

    def agree(
        self, step: str, act: Callable[[], Any], decide: Callable[[list[Any]], Any], *, deciding: str = ""
    ) -> Any:
        results = self.collect(step, act)
        return self.share(step, lambda: decide(results))

    def share(self, step: str, act: Callable[[], Any]) -> Any:
        sent = pickle.dumps(act())
        self.bytes += FAN_OUT * len(sent)
        return pickle.loads(sent)

    def spread(self, step: str, act: Callable[[], Sequence[Any]]) -> Any:
        self.given = act()
        sent = [pickle.dumps(value) for value in self.given]
        self.bytes += sum(map(len, sent))
        return self.given[0]


def llama(layers: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of Llama 3 70B's parameters, with another number of layers."""
    layer = {
        "self_attn.q_proj": (8192, 8192),
        "self_attn.k_proj": (1024, 8192),
        "self_attn.v_proj": (1024, 8192),
        "self_attn.o_proj": (8192, 8192),
        "mlp.gate_proj": (28672, 8192),
        "mlp.up_proj": (28672, 8192),
        "mlp.down_proj": (8192, 28672),
        "input_layernorm": (8192,),
        "post_attention_layernorm": (8192,),
    }
    shapes = {f"model.layers.{at}.{name}.weight": shape for at in range(layers) for name, shape in layer.items()}
    return shapes | {
        "model.embed_tokens.weight": (128256, 8192),
        "lm_head.weight": (128256, 8192),
        "model.norm.weight": (8192,),
    }


def sharded(shape: tuple[int, ...], mesh: DeviceMesh) -> DTensor:
    """Return rank 0's part of a tensor whose first dim is split over the last axis of the mesh; one element stands
    for all of them.
    """
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    held = local_index(shape, placements, mesh.shape, [0] * mesh.ndim)
    local = torch.zeros(()).expand([span.stop - span.start for span in held])
    stride = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride))


class Held(nn.Module):
    """A module of some parameters, under names with dots."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.held = parameters

    def state_dict(self, **_: Any) -> dict[str, Tensor]:
        return dict(self.held)


@dataclass
class Job:
    """What a save reads of a parallel module."""

    module: nn.Module
    mesh: DeviceMesh
    plan: str = "simulated"
    layout: ModelLayout = ModelLayout()
    device: torch.device = torch.device("cpu")


def job(layers: int, ranks: int, replicas: int) -> tuple[Job, torch.optim.Optimizer]:
    mesh = init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=("dp_replicate", "dp_shard"))
    parameters = {name: nn.Parameter(sharded(shape, mesh)) for name, shape in llama(layers).items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-4)
    for parameter in parameters.values():
        moments = {key: sharded(tuple(parameter.shape), mesh) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.zeros(()), **moments}
    return Job(Held(parameters), mesh), optimizer


def of_rank(mine: Described, rank: int, shards: int) -> Described:
    """Return the description of another rank."""

    def part(alike: Alike) -> Alike:
        names = alike.names
        if names[0].startswith("random."):
            alike = alike._replace(
                packed=pack([name.replace("random.rank-0.", f"random.rank-{rank}.") for name in names])
            )
        if alike.sizes == alike.shape:
            return alike
        held = local_index(alike.shape, [Shard(0)], [shards], [rank % shards])
        return alike._replace(offsets=tuple(at.start for at in held), sizes=tuple(at.stop - at.start for at in held))

    return replace(mine, alike=[part(entry) for entry in mine.alike], rank_extra={"position": rank})


def load(share: Sequence[Sequence[int]], parts: Sequence[Alike]) -> int:
    """Return the bytes that a rank writes."""
    return sum(len(claim) * math.prod(part.sizes) * part.dtype.itemsize for claim, part in zip(share, parts))


def files_of(rank: int, parts: Sequence[tuple[Alike, Sequence[int]]], folder: str) -> list[WrittenFile]:
    """Return two files with a rank's parts; on the disk they are holes."""
    written: list[list[tuple[str, SavedPart]]] = [[], []]
    for alike, positions in parts:
        names, length = alike.names, math.prod(alike.sizes) * alike.dtype.itemsize // 64 * 64 + 1024
        for position in positions:
            mine = written[position % 2]
            start = mine[-1][1].position + mine[-1][1].length if mine else 0
            file = f"__{rank}_{position % 2}.distcp"
            mine.append((names[position], SavedPart(alike.offsets, alike.sizes, file, start, length)))
    files = []
    for number, parts_of_file in enumerate(written):
        name, size = f"__{rank}_{number}.distcp", sum(part.length for _, part in parts_of_file)
        with open(f"{folder}/{name}", "wb") as hole:
            hole.truncate(size)
        files.append(WrittenFile(name, size, 0, None, tuple(parts_of_file), 0))
    return files


def plan_saves(layers: int, ranks: int, replicas: int, *, commit: bool = False) -> list[dict[str, float]]:
    """Return seconds and bytes on rank 0 of the first save and of a later one; needs a fake process group of
    ``ranks``.
    """
    par, optimizer = job(layers, ranks, replicas)
    plans, others, figures = [Planning() for _ in range(ranks)], dict[int, Described](), []

    def answer(rank: int, mine: Any) -> Any:
        if isinstance(mine, Layout):
            return reported[rank][0]
        if isinstance(mine, WriteReport):
            if rank not in reported:
                files = files_of(rank, list(zip(others[rank].alike, plans[rank]._share)), folder)
                reported[rank] = layout_of(files), layout_of(files).report(files)
            report = reported[rank][1]
            files = tuple((size, *struct.unpack("II", os.urandom(8)), None) for size, *_ in report.files)
            return report._replace(files=files)
        if isinstance(mine, tuple):  # the parts of each rank, for a new plan
            return others[rank].alike, others[rank].tied, None
        if rank not in others:
            others[rank] = of_rank(noticed[0], rank, ranks // replicas)
        return plans[rank]._greet(others[rank], Peer(rank, ranks))

    noticed: list[Described] = []
    reported: dict[int, tuple[Layout, WriteReport]] = {}

    def write(self: Saving) -> list[WrittenFile]:
        return files_of(0, list(zip(noticed[-1].alike, plans[0]._share)), folder)

    def put(manifest: Manifest) -> Place:
        (place / "meshpar.json").write_durably(manifest.to_json().encode())
        return place

    describe = Saving._describe

    def notice(self: Saving, *given: Any) -> Described:
        noticed.append(describe(self, *given))
        return noticed[-1]

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(Saving, "_describe", notice),
        mock.patch.object(Saving, "_write", write),
        mock.patch("shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 60)),
    ):
        place = CheckpointManager(folder).root
        for step in (1, 2):
            simulated = SimulatedRanks(ranks, answer)
            saving = Saving(
                simulated, place, Noted(step=step, extra={}, metrics={}, rank_extra={"position": 0}), plans[0]
            )
            began = time.thread_time()
            saving.plan(par, optimizer)
            seconds = time.thread_time() - began - simulated.aside
            for rank in range(1, ranks if simulated.given else 0):
                plans[rank].keep(simulated.given[rank], others[rank], Peer(rank, ranks))
            shares = [share for _, share in simulated.given]
            loads = [load(share, (others | {0: noticed[0]})[rank].alike) for rank, share in enumerate(shares)]
            held = sum(group.nbytes for group in plans[0]._agreed.groups)
            figures.append(
                {
                    "seconds": seconds,
                    "bytes": simulated.bytes,
                    "held": held,
                    "written": sum(loads),
                    "most": max(loads, default=0),
                }
            )
            if commit:
                simulated.bytes, simulated.aside, began = 0, 0.0, time.thread_time()
                saving.finish(put)
                seconds = time.thread_time() - began - simulated.aside
                figures[-1] |= {"commit_seconds": seconds, "commit_bytes": simulated.bytes}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--commit", action="store_true", help="measure the commit, too")
    options = parser.parse_args()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.ranks)
    first, later = plan_saves(options.layers, options.ranks, options.replicas, commit=options.commit)
    print(f"{options.ranks} ranks, {options.replicas} replicas, {options.layers} layers    first save   later saves")
    print(f"rank 0 plans, s                        {first['seconds']:10.2f} {later['seconds']:13.2f}")
    print(f"rank 0 exchanges, MiB                  {first['bytes'] / 2**20:10.2f} {later['bytes'] / 2**20:13.2f}")
    if options.commit:
        print(f"rank 0 commits, s                      {first['commit_seconds']:10.2f} {later['commit_seconds']:13.2f}")
        print(
            f"rank 0 exchanges, MiB                  {first['commit_bytes'] / 2**20:10.2f} "
            f"{later['commit_bytes'] / 2**20:13.2f}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
