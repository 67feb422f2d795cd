"""Bring each matrix of sharded parameters whole to one rank, and its result back as parts.

Layouts say who holds what, so a round is one all-to-all to the owners and one back; replicas compute different ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from meshpar._torch.calls import without_modes
from meshpar._torch.groups import all_gather, flattened
from meshpar.tensors.placements import local_index, shard_dim

Place = tuple[slice, ...]
_Group = dist.ProcessGroup
_LEAST = 1 << 17  # elements that a replica sends in a turn, so that many replicas do not make many turns


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedMatrix:
    """One matrix: its parameter's number, its place and shape there, and the part that each rank of the group holds."""

    parameter: int
    place: Place
    shape: tuple[int, int]
    parts: Sequence[Place]

    def of_rank(self, rank: int) -> Place | None:
        """Return the part of the matrix that a rank holds, in the whole parameter; None: no part."""
        overlap = [slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(self.place, self.parts[rank])]
        return tuple(overlap) if all(span.start < span.stop for span in overlap) else None


Parts = list[tuple[OwnedMatrix, Place]]  # parts of matrices, each a place in the whole parameter


class Round(NamedTuple):
    """Matrices computed at a time, and the parts and elements that this rank gets, sends and gathers for them."""

    owned: list[OwnedMatrix]
    incoming: Parts
    going: Parts
    to_me: list[int]
    to_owners: list[int]
    turns: list[list[Parts]]


@final
class Owners:
    """The ranks that divide a parameter's computation: those of ``group`` (None: this one), in each of its replicas."""

    def __init__(self, ranks: Sequence[int], group: _Group | None, replicas: _Group | None) -> None:
        self.ranks, self.group, self.rank = tuple(ranks), group, 0 if group is None else group.rank()
        self.replicas = replicas
        self.replica, self.copies = (0, 1) if replicas is None else (replicas.rank(), replicas.size())

    def rounds(self, pieces: Sequence[OwnedMatrix], limit: int) -> list[Round]:
        """Return rounds, largest matrices first, the same on all ranks; an owner gets ``limit`` elements, or one."""
        rounds, load = list[list[list[OwnedMatrix]]](), [0] * (len(self.ranks) * self.copies)
        # by the multiplications of one product
        for turn, piece in enumerate(sorted(pieces, key=lambda piece: -math.prod(piece.shape) * min(piece.shape))):
            owner, elements = turn % len(load), math.prod(piece.shape)
            if not rounds or (load[owner] and load[owner] + elements > limit):
                rounds.append([[] for _ in load])
                load = [0] * len(load)
            rounds[-1][owner].append(piece)
            load[owner] += elements
        return [self._round(work, limit) for work in rounds]

    def _round(self, work: list[list[OwnedMatrix]], limit: int) -> Round:
        """Return a round of the matrices of each owner: the first rank's in every replica, the second one's, ..."""
        owned, copies = work[self.rank * self.copies + self.replica], range(self.copies)
        theirs = [_parts(owned, rank) for rank in range(len(self.ranks))]
        own_parts = [[_parts(pieces, self.rank) for pieces in work[copy :: self.copies]] for copy in copies]
        few = max(limit // self.copies, _LEAST)
        turns = itertools.zip_longest(*(_in_turns(_join(parts), few) for parts in own_parts), fillvalue=Parts())
        to_me, to_owners = ([*map(_total, parts)] for parts in (theirs, own_parts[self.replica]))
        going = _join(own_parts[self.replica])
        return Round(owned, _join(theirs), going, to_me, to_owners, [*map(list, turns)])

    def run(
        self,
        work: Round,
        part_of: Callable[[OwnedMatrix, Place], Tensor],
        compute: Callable[[OwnedMatrix, Tensor], Tensor],
        put: Callable[[OwnedMatrix, Place, Tensor], None],
        like: Tensor,
    ) -> None:
        """Compute one round: ``part_of`` gives parts, ``put`` takes results. Collective over the parameters' ranks."""
        here = self.rank
        sent = [part_of(piece, _within(part, piece.parts[here])).to(like) for piece, part in work.going]
        received = self._exchange(sent, work.to_owners, work.to_me, like)
        whole = {id(piece): like.new_empty(_shape(piece.place)) for piece in work.owned}
        for (piece, part), values in zip(work.incoming, received.split([_count(part) for _, part in work.incoming])):
            whole[id(piece)][_within(part, piece.place)] = values.view(_shape(part))
        for piece in work.owned:
            result = compute(piece, whole.pop(id(piece)).view(piece.shape))
            whole[id(piece)] = result.reshape(_shape(piece.place))
        back = [whole[id(piece)][_within(part, piece.place)] for piece, part in work.incoming]
        results = self._exchange(back, work.to_me, work.to_owners, like)
        for turn, results_here in zip(work.turns, results.split([_total(turn[self.replica]) for turn in work.turns])):
            for parts, values in zip(turn, self._over_replicas(results_here, max(map(_total, turn)))):
                sizes = [_count(part) for _, part in parts]
                for (piece, part), update in zip(parts, values[: sum(sizes)].split(sizes)):
                    put(piece, _within(part, piece.parts[here]), update.view(_shape(part)))

    def _exchange(self, parts: Sequence[Tensor], outgoing: list[int], incoming: list[int], like: Tensor) -> Tensor:
        flat = torch.cat([tensor.reshape(-1) for tensor in parts]) if parts else like.new_empty(0)
        if self.group is None:
            return flat
        received = like.new_empty(sum(incoming))
        dist.all_to_all_single(received, flat, incoming, outgoing, group=self.group)
        return received

    def _over_replicas(self, own: Tensor, longest: int) -> Sequence[Tensor]:
        """Return what each replica gives, ``longest`` elements of each where there are several."""
        if self.replicas is None:
            return (own,)
        every = own.new_empty(self.copies * longest)
        all_gather(every, torch.cat([own, own.new_zeros(longest - len(own))]), group=self.replicas)
        return every.view(self.copies, longest).unbind()


def _in_turns(parts: Parts, limit: int) -> list[Parts]:
    """Divide parts, in order, among turns of ``limit`` elements, or of one row."""
    turns, room = list[Parts](), 0
    for piece, part in parts:
        # what is before the first dim of several has one element: consecutive rows of it have consecutive elements
        dim = next((dim for dim, size in enumerate(_shape(part)) if size > 1), 0)
        start, stop, row = part[dim].start, part[dim].stop, _count(part[dim + 1 :])
        while start < stop:
            if room < row:
                turns.append([])
                room = max(limit, row)
            end = min(stop, start + room // row)
            turns[-1].append((piece, (*part[:dim], slice(start, end), *part[dim + 1 :])))
            start, room = end, room - (end - start) * row
    return turns


def _parts(pieces: Sequence[OwnedMatrix], rank: int) -> Parts:
    """Return the parts of matrices that a rank holds."""
    return [(piece, part) for piece in pieces if (part := piece.of_rank(rank))]


def _join(parts: Iterable[Parts]) -> Parts:
    return [*itertools.chain.from_iterable(parts)]


def _shape(place: Place) -> list[int]:
    return [span.stop - span.start for span in place]


def _count(place: Place) -> int:
    return math.prod(_shape(place))


def _total(parts: Parts) -> int:
    return sum(_count(part) for _, part in parts)


def _within(part: Place, origin: Place) -> Place:
    """Return ``part`` as a slice of the tensor at ``origin``."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(part, origin))


def shares(shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[Owners, list[Place]]:
    """Return who divides a DTensor's computation, and each one's part. Collective for a first split by several axes."""
    several = [axis for axis, size in enumerate(mesh.shape) if size > 1]
    split = [axis for axis in several if shard_dim(placements[axis]) is not None]
    repeats = max((axis for axis in several if axis not in split), key=lambda axis: mesh.shape[axis], default=None)
    replicas = None if repeats is None else mesh.get_group(repeats)
    if not split:
        return Owners((0,), None, replicas), [tuple(slice(0, size) for size in shape)]
    if len(split) == 1:
        group = mesh.get_group(split[0])
    else:
        axes = tuple((mesh.mesh_dim_names or ())[axis] for axis in split)
        group = flattened(mesh if len(axes) == mesh.ndim else mesh[axes]).get_group()
    with without_modes():  # in a simulation, too, ranks are numbers
        every = mesh.mesh.flatten().tolist()
    places = dict(zip(every, itertools.product(*map(range, mesh.shape)), strict=True))
    ranks = dist.get_process_group_ranks(group)
    return Owners(ranks, group, replicas), [local_index(shape, placements, mesh.shape, places[rank]) for rank in ranks]
