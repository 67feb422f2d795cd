"""Measure collectives on each axis of a mesh, and the slowest pair of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

FIRST_BYTES, ENOUGH_S, REPEATS = 1 << 18, 0.02, 5
MOST_BYTES = {"cpu": 1 << 24}
_MOST_BYTES = 1 << 28  # on an accelerator


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AxisSpeed:
    """Speed of one collective on an axis, with all its groups running at once as in training; the slowest group counts.

    Attributes:
        axis, operation: the measured axis and collective.
        ranks: number of ranks in a group.
        bytes: size of the whole tensor.
        seconds: duration of one call.
        bus: bus bandwidth in bytes a second: the bytes that every rank sends, divided by the time (as in nccl-tests).
    """

    axis: str
    operation: str
    ranks: int
    bytes: int
    seconds: float
    bus: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PairSpeed:
    """Rate at which rank ``first`` sends to its neighbour ``second`` on an axis, in bytes a second."""

    axis: str
    first: int
    second: int
    rate: float


def measure(mesh: DeviceMesh, device: torch.device) -> tuple[list[AxisSpeed], list[PairSpeed]]:
    """Measure all-reduce, all-gather and the slowest pair of neighbours on each axis of size > 1.

    Collective: every rank of the mesh calls it.
    """
    speeds: list[AxisSpeed] = []
    pairs: list[PairSpeed] = []
    for axis in mesh.mesh_dim_names or ():
        group, size = mesh.get_group(axis), mesh[axis].size()
        if size == 1:
            continue
        speeds += [_collective(axis, operation, group, size, device) for operation in ("all_reduce", "all_gather")]
        pairs.append(_slowest_pair(axis, group, size, device))
    return speeds, pairs


def _collective(axis: str, operation: str, group: dist.ProcessGroup, size: int, device: torch.device) -> AxisSpeed:
    count = FIRST_BYTES // 4
    most = MOST_BYTES.get(device.type, _MOST_BYTES)
    while True:
        run = _prepared(operation, count, group, size, device)
        # Other work may delay one call: a tensor is large enough when none of several calls is quick.
        if count * 8 * 4 > most or all(_slowest(_timed(run, device), device) >= ENOUGH_S for _ in range(REPEATS)):
            break
        count *= 8
    seconds = _slowest(min(_timed(run, device) for _ in range(REPEATS)), device)
    sent = (2 if operation == "all_reduce" else 1) * (size - 1) / size * count * 4
    return AxisSpeed(axis=axis, operation=operation, ranks=size, bytes=count * 4, seconds=seconds, bus=sent / seconds)


def _prepared(operation: str, count: int, group: dist.ProcessGroup, size: int, device: torch.device) -> Callable[[], object]:
    whole = torch.zeros(-(-count // size) * size, device=device)
    if operation == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    part = torch.zeros(whole.numel() // size, device=device)
    return lambda: dist.all_gather(list(whole.chunk(size)), part, group=group)


def _timed(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call that all ranks start together."""
    dist.barrier()
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _slowest(seconds: float, device: torch.device) -> float:
    """Return the largest value of all ranks."""
    value = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def _slowest_pair(axis: str, group: dist.ProcessGroup, size: int, device: torch.device) -> PairSpeed:
    """Time pairs of neighbours: even pairs, odd pairs, then the ring's end, so that a rank is in one pair at a time."""
    ranks = dist.get_process_group_ranks(group)
    mine = ranks.index(dist.get_rank())
    data = torch.zeros((1 << 20) // 4, device=device)
    slowest = (float("inf"), -1, -1)
    for pairs in _rounds(size):
        here = next((pair for pair in pairs if mine in pair), None)
        for timed in (False, True):
            dist.barrier()
            if here is None:
                continue
            start = time.perf_counter()
            if mine == here[0]:
                dist.send(data, ranks[here[1]], group=group)
            else:
                dist.recv(data, ranks[here[0]], group=group)
            _wait(device)
            rate = data.numel() * 4 / (time.perf_counter() - start)
            if timed and mine == here[1] and rate < slowest[0]:
                slowest = (rate, ranks[here[0]], ranks[here[1]])
    found: list[tuple[float, int, int] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, slowest)
    rate, first, second = min(each for each in found if each is not None)
    return PairSpeed(axis=axis, first=first, second=second, rate=rate)


def _rounds(size: int) -> list[list[tuple[int, int]]]:
    even = [(first, first + 1) for first in range(0, size - 1, 2)]
    odd = [(first, first + 1) for first in range(1, size - 1, 2)]
    return [each for each in (even, odd, [(size - 1, 0)] if size > 2 else []) if each]
