"""Replicas that are jobs of their own: what their plan must be, and which of them holds the optimizer state of which
parameters.

As ZeRO-1 (Rajbhandari et al. 2020, arXiv 1910.02054), by whole parameters. The running job and the forecast divide by
the same functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from meshpar.core.mesh import MeshSpec

T = TypeVar("T")

Routes = dict[tuple[int, int], list[int]]
"""(source, destination) -> parameters."""


def plan_problems(spec: MeshSpec, module: nn.Module, optimizer_copies: int = 1) -> Iterator[str]:
    """Yield why the replicas of a plan, each on a mesh of its own, cannot be lost and replaced, one line each."""
    if (inside := spec.axes.get("dp_replicate", 1)) > 1:
        yield (
            f"the mesh has dp_replicate={inside} inside of one replica; write dp_replicate=1: each replica is a job "
            "of its own"
        )
    if (stages := spec.axes.get("pp", 1)) > 1:
        yield f"the mesh has pp={stages}, and a replica that comes back copies all layers; drop pp from the mesh"
    if optimizer_copies < 1:
        yield f"optimizer_copies={optimizer_copies} replicas hold each parameter's optimizer state; expected 1 or more"
    for name, child in module.named_modules():
        if isinstance(child, _BatchNorm):
            yield (
                f"{name} ({type(child).__name__}) uses statistics of the whole batch, and a replica sees a part of "
                "it; use another norm"
            )


def sizes_of(parameters: Sequence[Tensor]) -> list[int]:
    """Return the bytes of whole parameters, by which their state is divided."""
    return [parameter.numel() * parameter.element_size() for parameter in parameters]


def first_shares(parameters: Sequence[Tensor], replicas: int, copies: int) -> list[int]:
    """Return the parameters whose state each of some replicas holds, a bit each, where all of them began together and
    hold all until then.

    Args:
        parameters: those that are trained, in the module's order.
        replicas: number of replicas.
        copies: number of replicas that are to hold each parameter's state; at most all do.
    """
    return assigned(sizes_of(parameters), [(1 << len(parameters)) - 1] * replicas, copies)


def held_of(share: int, parameters: Sequence[T]) -> list[T]:
    """Return the parameters of a share, a bit each."""
    return [parameter for number, parameter in enumerate(parameters) if share >> number & 1]


def assigned(sizes: Sequence[int], held: Sequence[int], copies: int) -> list[int]:
    """Return the parameters whose state each replica is to hold, a bit each: about the same bytes on all, with few
    moves.

    Args:
        sizes: bytes of each parameter.
        held: the parameters whose state each replica holds now, a bit each.
        copies: number of replicas that are to hold each parameter's state; at most all do.
    """
    count = len(held)
    copies = min(copies, count)
    room, loads, found = copies * sum(sizes) / count, [0] * count, [0] * count
    order = sorted(range(len(sizes)), key=lambda number: (-sizes[number], number))
    for number in order:
        places = sorted(range(count), key=lambda place: (not held[place] >> number & 1, loads[place], place))
        for place in places[:copies]:
            found[place] |= 1 << number
            loads[place] += sizes[number]
    for number in order:
        most = max((place for place in range(count) if found[place] >> number & 1), key=lambda place: loads[place])
        least = min(
            (place for place in range(count) if not found[place] >> number & 1),
            key=lambda place: loads[place],
            default=most,
        )
        if loads[most] > room >= loads[least] + sizes[number]:
            for place, sign in ((most, -1), (least, 1)):
                found[place] ^= 1 << number
                loads[place] += sign * sizes[number]
    return found


def routes(sizes: Sequence[int], held: Sequence[int], wanted: Sequence[int]) -> Routes:
    """Return which replica sends which parameters to which other one, so that each gets what it wants and does not
    hold.

    Of the replicas that hold a parameter, the one sends that has the fewest bytes to send.
    """
    sent, found = [0] * len(held), Routes()
    for number, size in enumerate(sizes):
        holders = [place for place, bits in enumerate(held) if bits >> number & 1]
        for place, bits in enumerate(wanted):
            if (bits & ~held[place]) >> number & 1:
                source = min(holders, key=lambda holder: (sent[holder], holder))
                sent[source] += size
                found.setdefault((source, place), []).append(number)
    return found
