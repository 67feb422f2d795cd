"""Optimizers on sharded parameters: time of a step, bytes of state, bytes sent, and the distance from one process.

    torchrun --nproc-per-node 2 benchmarks/optimizers.py [--dim 512] [--blocks 12] [--steps 3]

All train the same model on ``dp_shard`` with the same gradients, step by step in turn. A step is the optimizer's alone.
The distance is the largest difference of a weight from ``torch.optim.Muon`` in one process, as a part of the largest
change. Rows are left out whose package is not installed (muon-fsdp2).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import meshpar
from meshpar.models import Transformer, TransformerConfig
from meshpar.optim import Muon, SmallAdamW

RATE = 0.02


class Sent(TorchDispatchMode):
    """Count the bytes that this rank sends."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its parts come here next
        name, others = str(func), dist.get_world_size() - 1
        tensors = [tensor for tensor in torch.utils._pytree.tree_leaves(args) if isinstance(tensor, Tensor)]
        if "alltoall" in name or "all_to_all" in name or "reduce_scatter" in name:
            self.bytes += tensors[1 if "alltoall_base" in name else 0].nbytes * others // (others + 1)
        elif "allgather" in name or "all_gather" in name:
            self.bytes += min(tensor.nbytes for tensor in tensors) * others
        elif "allreduce" in name or "all_reduce" in name:
            self.bytes += 2 * tensors[0].nbytes * others // (others + 1)
        elif "gather_" in name or "scatter_" in name:
            self.bytes += min(tensor.nbytes for tensor in tensors)
        return func(*args, **(kwargs or {}))


class Gathered:
    """``torch.optim.Muon`` on whole matrices, which every rank gathers and steps."""

    def __init__(self, matrices: list[Any], rest: list[Any]) -> None:
        self.matrices = matrices
        self.whole = [nn.Parameter(tensor.full_tensor().detach().clone()) for tensor in matrices]
        self.muon = torch.optim.Muon(self.whole, lr=RATE)
        self.adamw = torch.optim.AdamW(rest, lr=RATE)

    def step(self) -> None:
        for mine, whole in zip(self.matrices, self.whole, strict=True):
            whole.grad = mine.grad.full_tensor()
        self.muon.step()
        for mine, whole in zip(self.matrices, self.whole, strict=True):
            rank, count = dist.get_rank(), dist.get_world_size()
            with torch.no_grad():
                parts = whole.chunk(count)
                if rank < len(parts):
                    mine.to_local().copy_(parts[rank])
        self.adamw.step()

    @property
    def state(self) -> dict[Any, Any]:
        return {**self.muon.state, **self.adamw.state, "copies": dict(enumerate(self.whole))}


class Two:
    """``torch.optim.Muon`` on DTensors, and AdamW."""

    def __init__(self, matrices: list[Any], rest: list[Any]) -> None:
        self.both = torch.optim.Muon(matrices, lr=RATE), torch.optim.AdamW(rest, lr=RATE)

    def step(self) -> None:
        for optimizer in self.both:
            optimizer.step()

    @property
    def state(self) -> dict[Any, Any]:
        return {**self.both[0].state, **self.both[1].state}


def theirs(matrices: list[Any], rest: list[Any]) -> Any:
    package: Any = importlib.import_module("muon_fsdp2")
    package.nsloop_torch = package.nsloop_torch._torchdynamo_orig_callable  # all iterate without the compiler

    muon = {"weight_decay": 0.1, "rms_scale": False}
    groups = [
        {"params": matrices, "lr": RATE, "use_muon": True, **muon},
        {"params": rest, "lr": RATE, "use_muon": False},
    ]
    return package.Muon(groups)


WAYS: dict[str, Callable[[Any, list[Any], list[Any]], Any]] = {
    "meshpar.optim.Muon": lambda par, matrices, rest: Muon(par, lr=RATE),
    "torch.optim.Muon, gathered matrices": lambda par, matrices, rest: Gathered(matrices, rest),
    "torch.optim.Muon, DTensors": lambda par, matrices, rest: Two(matrices, rest),
    "muon-fsdp2": lambda par, matrices, rest: theirs(matrices, rest),
    "torch.optim.AdamW": lambda par, matrices, rest: torch.optim.AdamW(par.module.parameters(), lr=RATE, fused=True),
    "SmallAdamW, 8bit": lambda par, matrices, rest: SmallAdamW(par, lr=RATE),
    "SmallAdamW, bfloat16": lambda par, matrices, rest: SmallAdamW(par, lr=RATE, states="bfloat16"),
}


def sharded(shape: TransformerConfig) -> tuple[Any, list[Any], list[Any]]:
    with torch.device("meta"):
        model = Transformer(shape)
    par = meshpar.Plan("dp_shard=-1", [meshpar.FullyShard()]).apply(model, device_type="cpu").materialize(seed=0)
    named = list(par.module.named_parameters())
    matrices = [tensor for name, tensor in named if tensor.ndim == 2 and not name.startswith(("embed", "head"))]
    known = {id(tensor) for tensor in matrices}
    return par, matrices, [tensor for _, tensor in named if id(tensor) not in known]


def give(par: Any, step: int) -> None:
    for number, parameter in enumerate(par.module.parameters()):
        draw = torch.Generator().manual_seed(step * 10_000 + number)
        whole = torch.randn(parameter.shape, generator=draw)
        parameter.grad = torch.zeros_like(parameter)
        parts = whole.chunk(dist.get_world_size())
        if dist.get_rank() < len(parts):
            parameter.grad.to_local().copy_(parts[dist.get_rank()])


def held(state: Any) -> int:
    """Bytes of this rank's tensors."""
    leaves = torch.utils._pytree.tree_leaves(list(state.values()))
    local = (
        tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in leaves if isinstance(tensor, Tensor)
    )
    return sum(tensor.nbytes for tensor in local)


def main(options: argparse.Namespace) -> None:
    dim = options.dim
    shape = TransformerConfig(
        vocab_size=1024, dim=dim, layers=options.blocks, heads=dim // 64, hidden=dim * 8 // 3 // 64 * 64
    )
    ways = {name: make for name, make in WAYS.items() if name != "muon-fsdp2" or importlib.util.find_spec("muon_fsdp2")}
    rows: dict[str, tuple[float, int, int]] = {}
    values: dict[str, list[Tensor]] = {}
    jobs = {name: (job := sharded(shape), make(*job)) for name, make in ways.items()}
    start = [whole.detach().clone() for whole in (matrix.full_tensor() for matrix in jobs["meshpar.optim.Muon"][0][1])]
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    sent: dict[str, int] = {}
    for step in range(options.steps + 2):  # the first makes the state, the last counts bytes
        for name in list(jobs) if step % 2 else list(reversed(jobs)):
            (par, _, _), optimizer = jobs[name]
            give(par, step)
            dist.barrier()
            begin, mode = time.perf_counter(), Sent()
            with mode if step > options.steps else nullcontext():
                optimizer.step()
            dist.barrier()
            if 0 < step <= options.steps:
                seconds[name].append(time.perf_counter() - begin)
            sent[name] = mode.bytes
    for name, ((_, matrices, _), optimizer) in jobs.items():
        rows[name] = statistics.median(seconds[name]), held(optimizer.state), sent[name]
        values[name] = [matrix.full_tensor().detach() for matrix in matrices]
    whole = values["torch.optim.Muon, gathered matrices"]
    change = max(float((a - b).abs().max()) for a, b in zip(whole, start, strict=True))
    parameters = sum(math.prod(parameter.shape) for parameter in jobs["meshpar.optim.Muon"][0][0].module.parameters())
    if dist.get_rank() == 0:
        print(f"{parameters / 1e6:.1f} M parameters, {dist.get_world_size()} ranks, medians of {options.steps} steps")
        print("| optimizer | s a step | to AdamW | MiB of state a rank | MiB sent a step | distance |")
        print("| --- | --- | --- | --- | --- | --- |")
        base = rows["torch.optim.AdamW"][0]
        for name, (took, state, traffic) in rows.items():
            far = max(float((a - b).abs().max()) for a, b in zip(whole, values[name], strict=True)) / change
            exact = f"{far:.0e}" if "uon" in name else "-"
            cells = f"{took:.2f} | {took / base:.0f}x | {state / 2**20:.1f} | {traffic / 2**20:.1f} | {exact}"
            print(f"| {name} | {cells} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3)
    with meshpar.distributed("cpu"):
        torch.set_num_threads(1)
        main(parser.parse_args())
