"""Bring each matrix of sharded parameters whole to one rank, and its result back as parts.

The layout of a parameter says which part of a matrix each rank holds, so no rank asks another: a round is one
all-to-all to the owners and one back.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshpar._torch.calls import without_modes
from meshpar._torch.groups import flattened
from meshpar.placements import local_index, shard_dim

Place = tuple[slice, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One matrix of a parameter.

    Attributes:
        parameter: number of the parameter.
        place: where the matrix is in the whole parameter.
        shape: its rows and columns.
        held: which part of the whole parameter each of the ranks holds, in the order of the group.
    """

    parameter: int
    place: Place
    shape: tuple[int, int]
    held: Sequence[Place]

    @property
    def cost(self) -> int:
        """Multiplications of one product."""
        return self.shape[0] * self.shape[1] * min(self.shape)

    def of_rank(self, rank: int) -> Place | None:
        """Return the part of the matrix that a rank holds, in the whole parameter; None: no part."""
        both = [slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(self.place, self.held[rank])]
        return tuple(both) if all(span.start < span.stop for span in both) else None

    def local_to(self, part: Place, rank: int | None) -> Place:
        """Return ``part`` as a slice of what a rank holds; None: of the matrix."""
        origin = self.place if rank is None else self.held[rank]
        return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(part, origin))


@final
class Owners:
    """The ranks among which one parameter is split.

    Args:
        ranks: global ranks, in the order of ``group``.
        group: their process group; None: this rank alone.

    Attributes:
        rank: this rank's place in the group.
    """

    def __init__(self, ranks: Sequence[int], group: dist.ProcessGroup | None) -> None:
        self.ranks, self.group = tuple(ranks), group
        self.rank = 0 if group is None else group.rank()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def rounds(self, pieces: Sequence[Piece], most: int) -> list[list[tuple[int, Piece]]]:
        """Return the matrices of each round with their owners: the largest first, round robin.

        Args:
            pieces: all matrices, in the same order on every rank.
            most: elements that an owner gets in a round, except that a single matrix may be larger.
        """
        order = sorted(range(len(pieces)), key=lambda number: (-pieces[number].cost, number))
        found: list[list[tuple[int, Piece]]] = []
        load = [0] * self.size
        for turn, number in enumerate(order):
            piece, owner = pieces[number], turn % self.size
            elements = math.prod(piece.shape)
            if not found or (load[owner] and load[owner] + elements > most):
                found.append([])
                load = [0] * self.size
            found[-1].append((owner, piece))
            load[owner] += elements
        return found

    def run(
        self,
        work: Sequence[tuple[int, Piece]],
        part_of: Callable[[Piece, Place], Tensor],
        compute: Callable[[Piece, Tensor], Tensor],
        put: Callable[[Piece, Place, Tensor], None],
        like: Tensor,
    ) -> None:
        """Compute the matrices of one round, each on its owner. Collective over the group.

        Args:
            work: the matrices with their owners.
            part_of: returns the part of a matrix at a place of this rank's share.
            compute: returns the result for a whole matrix, of its shape.
            put: takes the part of a result at a place of this rank's share.
            like: has the dtype of the parts, and the device of the exchange.
        """
        mine = [(owner, piece, part) for owner, piece in work if (part := piece.of_rank(self.rank)) is not None]
        owned = [piece for owner, piece in work if owner == self.rank]
        parts = [[(piece, part) for piece in owned if (part := piece.of_rank(rank))] for rank in range(self.size)]
        going = [(piece, part) for rank in range(self.size) for owner, piece, part in mine if owner == rank]
        to_owners = [sum(_count(part) for owner, _, part in mine if owner == rank) for rank in range(self.size)]
        to_me = [sum(_count(part) for _, part in of_rank) for of_rank in parts]
        sent = [part_of(piece, piece.local_to(part, self.rank)) for piece, part in going]
        received = self._exchange(sent, to_owners, to_me, like)
        whole = {id(piece): like.new_empty([span.stop - span.start for span in piece.place]) for piece in owned}
        came = [(piece, part) for of_rank in parts for piece, part in of_rank]
        for (piece, part), values in zip(came, received.split([_count(part) for _, part in came])):
            place = whole[id(piece)][piece.local_to(part, None)]
            place.copy_(values.view(place.shape))
        for piece in owned:
            found = compute(piece, whole.pop(id(piece)).view(piece.shape))
            whole[id(piece)] = found.reshape([span.stop - span.start for span in piece.place])
        back = [whole[id(piece)][piece.local_to(part, None)] for piece, part in came]
        results = self._exchange(back, to_me, to_owners, like)
        for (piece, part), values in zip(going, results.split([_count(part) for _, part in going])):
            put(piece, piece.local_to(part, self.rank), values.view([span.stop - span.start for span in part]))

    def _exchange(self, parts: Sequence[Tensor], outgoing: list[int], incoming: list[int], like: Tensor) -> Tensor:
        flat = torch.cat([tensor.reshape(-1) for tensor in parts]) if parts else like.new_empty(0)
        if self.group is None:
            return flat
        received = like.new_empty(sum(incoming))
        dist.all_to_all_single(received, flat, incoming, outgoing, group=self.group)
        return received


def _count(place: Place) -> int:
    return math.prod(span.stop - span.start for span in place)


def shares(parameter: Tensor, groups: dict[tuple[int, ...], Any]) -> tuple[Owners, list[Place]]:
    """Return the ranks among which a parameter is split, and the part of the whole that each holds.

    Args:
        parameter: replicas of its parts have owners of their own.
        groups: made for several axes so far, by their ranks; a new one is added. Collective over the mesh then.
    """
    whole = tuple(slice(0, size) for size in parameter.shape)
    if not isinstance(parameter, DTensor):
        return Owners((0,), None), [whole]
    mesh, here = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    assert here is not None, "this rank is not in the tensor's mesh"
    split = [
        axis
        for axis, placement in enumerate(parameter.placements)
        if shard_dim(placement) is not None and mesh.shape[axis] > 1
    ]
    if not split:
        return Owners((0,), None), [whole]
    names = mesh.mesh_dim_names
    assert names is not None, "meshpar's meshes have names"
    with without_modes():  # in a simulation, too, ranks are numbers
        every = mesh.mesh.flatten().tolist()
    places = dict(zip(every, itertools.product(*map(range, mesh.shape)), strict=True))
    ranks = tuple(
        sorted(
            rank
            for rank, place in places.items()
            if all(place[axis] == here[axis] for axis in range(mesh.ndim) if axis not in split)
        )
    )
    if len(split) == 1:
        group = mesh.get_group(split[0])
    else:
        if ranks not in groups:
            axes = tuple(names[axis] for axis in split)
            groups[ranks] = flattened(mesh if len(axes) == mesh.ndim else mesh[axes]).get_group()
        group = groups[ranks]
    order = dist.get_process_group_ranks(group)
    held = [local_index(parameter.shape, parameter.placements, mesh.shape, places[rank]) for rank in order]
    return Owners(order, group), held
