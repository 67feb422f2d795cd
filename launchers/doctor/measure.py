"""Measure collectives on each axis of a mesh, and pairs of ranks in both directions."""

from __future__ import annotations

import itertools
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
    """Measure all-reduce, all-gather and all pairs of neighbours on each axis of size > 1; the slowest pair of an axis comes first.

    On ``ep``, over which tokens travel to experts, also all-to-all.

    Collective: every rank of the mesh calls it.
    """
    speeds: list[AxisSpeed] = []
    pairs: list[PairSpeed] = []
    for axis in mesh.mesh_dim_names or ():
        group, size = mesh.get_group(axis), mesh[axis].size()
        if size == 1:
            continue
        operations = ["all_reduce", "all_gather", *(["all_to_all"] if axis == "ep" else [])]
        speeds += [_collective(axis, operation, group, size, device) for operation in operations]
        pairs += _pairs(axis, group, size, device)
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
    if operation == "all_to_all":
        received = torch.zeros_like(whole)
        return lambda: dist.all_to_all_single(received, whole, group=group)
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


def _pairs(axis: str, group: dist.ProcessGroup, size: int, device: torch.device) -> list[PairSpeed]:
    """Time neighbours in both directions: even pairs, odd pairs, then the ring's end, so that a rank is in one pair at a time."""
    ranks = dist.get_process_group_ranks(group)
    mine = ranks.index(dist.get_rank())
    data = torch.zeros((1 << 20) // 4, device=device)
    rates: dict[tuple[int, int], float] = {}
    for pairs in _rounds(size):
        here = next((pair for pair in pairs if mine in pair), None)
        for timed, back in itertools.product((False, True, True), (False, True)):
            dist.barrier()
            if here is None:
                continue
            first, second = here[::-1] if back else here
            start = time.perf_counter()
            if mine == first:
                dist.send(data, ranks[second], group=group)
            else:
                dist.recv(data, ranks[first], group=group)
            _wait(device)
            if timed and mine == second:
                rate = data.numel() * 4 / (time.perf_counter() - start)
                rates[first, second] = max(rate, rates.get((first, second), 0.0))
    own = [(rate, ranks[first], ranks[second]) for (first, second), rate in rates.items()]
    found: list[list[tuple[float, int, int]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, own)
    return [PairSpeed(axis=axis, first=first, second=second, rate=rate) for rate, first, second in sorted(itertools.chain(*found))]


def _rounds(size: int) -> list[list[tuple[int, int]]]:
    even = [(first, first + 1) for first in range(0, size - 1, 2)]
    odd = [(first, first + 1) for first in range(1, size - 1, 2)]
    return [each for each in (even, odd, [(size - 1, 0)] if size > 2 else []) if each]
