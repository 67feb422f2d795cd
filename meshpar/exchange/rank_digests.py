"""The comparison of ranks that should hold the same values."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshpar._torch.groups import all_gather
from meshpar.core import runtime
from meshpar.core.errors import MeshparError
from meshpar.core.mesh import MeshSpec
from meshpar.tensors.digests import digest
from meshpar.tensors.placements import local_tensor, sharded_axes


def check_equal(
    tensors: Mapping[str, Tensor],
    groups: Mapping[str, Sequence[int]],
    what: str,
    *,
    remedy: str = "",
    guards: Sequence[str] = (),
) -> None:
    """Compare ranks' tensors by digest through the hosts. Collective: every rank of the world calls it.

    ``groups``: name -> a number for every rank; ranks of one number must hold equal values. ``guards``: the guards of
    installed packages, compared in the same exchange. ``remedy``: the end of the message, which names what differs.
    """
    _check_same_names(tensors, what, guards)
    if not tensors:
        return
    digests = [digest(tensor) for tensor in tensors.values()]
    # some may be offloaded
    device = max((value.device for value in digests), key=lambda candidate: not runtime.on_host(candidate))
    table = _gathered(torch.stack([value.to(device) for value in digests]).cpu())
    differing = []
    for column, name in enumerate(tensors):
        first: dict[int, int] = {}
        places = [first.setdefault(number, rank) for rank, number in enumerate(groups[name])]
        references = torch.tensor(places, device="cpu")
        odd = (table[:, column] != table[references, column]).nonzero()[:, 0].tolist()
        against: dict[int, list[int]] = {}
        for rank in odd:
            against.setdefault(int(references[rank]), []).append(rank)
        differing += [f"{name}: rank {reference} against ranks {ranks}" for reference, ranks in against.items()]
    if differing:
        shown = "\n  ".join(differing[:20]) + (f"\n  and {len(differing) - 20} more" if len(differing) > 20 else "")
        raise MeshparError(
            f"{what} differ between ranks that must hold the same:\n  {shown}" + (f"\n{remedy}" if remedy else "")
        )


def check_replicas(state: Mapping[str, Tensor], held: MeshSpec, *, other_names: bool) -> None:
    """Compare every tensor along the axes of ``held`` that do not divide it. Collective: every rank of the world.

    ``other_names``: ranks have tensors of different names.
    """
    tensors = {name: local_tensor(tensor) for name, tensor in state.items()}
    places = [held.coordinates(rank) for rank in range(held.size)]
    split: dict[str, Collection[str]] = {name: sharded_axes(tensor) for name, tensor in state.items()}
    has = dict[str, list[bool]]()
    if other_names:
        tensors, split, has = _of_all_ranks(tensors, split)
    groups = dict[str, list[int]]()
    for name, axes in split.items():
        parts = [tuple(coordinates[axis] for axis in axes if axis in coordinates) for coordinates in places]
        groups[name] = [hash((part, *has.get(name, ())[rank : rank + 1])) for rank, part in enumerate(parts)]
    check_equal(tensors, groups, "parameters or buffers")


def _of_all_ranks(
    tensors: Mapping[str, Tensor], split: Mapping[str, Collection[str]]
) -> tuple[dict[str, Tensor], dict[str, Collection[str]], dict[str, list[bool]]]:
    """Return tensors and their split axes under all ranks' names, and which ranks have each. Collective."""
    own_kinds = {name: (tensor.dtype, tuple(split[name])) for name, tensor in tensors.items()}
    every: list[dict[str, tuple[torch.dtype, tuple[str, ...]]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, own_kinds, group=runtime.hosts())
    kinds = {name: kind for rank in every for name, kind in rank.items()}
    named = {name: tensors.get(name, torch.empty(0, dtype=dtype)) for name, (dtype, _) in kinds.items()}
    axes: dict[str, Collection[str]] = {name: axes for name, (_, axes) in kinds.items()}
    return named, axes, {name: [name in rank for rank in every] for name in kinds}


def _gathered(mine: Tensor) -> Tensor:
    """Return the numbers (N,) of all ranks, (ranks, N), which the hosts exchange."""
    every = mine.new_empty(dist.get_world_size() * len(mine))
    all_gather(every, mine, runtime.hosts())
    return every.view(-1, len(mine))


def _check_same_names(tensors: Mapping[str, Tensor], what: str, guards: Sequence[str]) -> None:
    """Refuse names that differ between ranks, and guards of some ranks alone, which would wait for others."""
    listed = "\n".join(f"{name} {tensor.dtype}" for name, tensor in tensors.items()), "\n".join(guards)
    own_bytes = [byte for text in listed for byte in hashlib.blake2b(text.encode(), digest_size=8).digest()]
    every = _gathered(torch.tensor(own_bytes, device="cpu"))
    names, offered = (every != every[0]).split(8, dim=1)
    if offered.any():
        _refuse_guards(guards)
    if odd := names.any(1).nonzero()[:, 0].tolist():
        raise MeshparError(
            f"{what} have other names or dtypes on ranks {odd} than on rank 0; build the same model on every rank, "
            "everywhere on the meta device or everywhere with weights"
        )


def _refuse_guards(guards: Sequence[str]) -> None:
    """Raise an error that names the guards that some ranks alone have. Collective."""
    every: list[Sequence[str]] = [()] * dist.get_world_size()
    dist.all_gather_object(every, list(guards), group=runtime.hosts())
    lines = []
    for guard in sorted({guard for rank in every for guard in rank}):
        has = [rank for rank, offered in enumerate(every) if guard in offered]
        if len(has) < len(every):
            lines.append(f"guard {guard}: on ranks {has}, and not on {sorted(set(range(len(every))) - set(has))}")
    listed = "\n  ".join(lines)
    raise MeshparError(
        f"the installed packages offer guards on some ranks and not on others:\n  {listed}\n"
        "ranks of a guard that exchanges values would wait for the others; install the same packages on every host, or "
        "leave guards out by Plan(guards='off')"
    )
