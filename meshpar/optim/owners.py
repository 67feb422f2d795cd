"""Bring each matrix of sharded parameters whole to one rank, and its result back as parts.

The layout of a parameter says which part of a matrix each rank holds, so no rank asks another: a round is one
all-to-all to the owners and one back.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshpar._torch.calls import without_modes
from meshpar._torch.groups import flattened
from meshpar.placements import held_by_this_rank, local_index, shard_dim

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

    def of_rank(self, rank: int) -> Place | None:
        """Return the part of the matrix that a rank holds, in the whole parameter; None: no part."""
        both = [slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(self.place, self.held[rank])]
        return tuple(both) if all(span.start < span.stop for span in both) else None


Round = list[list[Piece]]
"""The matrices of each owner that are computed at a time."""


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
        self.ranks, self.group, self.rank = tuple(ranks), group, 0 if group is None else group.rank()

    def rounds(self, pieces: Sequence[Piece], most: int) -> list[Round]:
        """Return the matrices of each round: the largest first, round robin.

        Args:
            pieces: all matrices, in the same order on every rank.
            most: elements that an owner gets in a round, except that a single matrix may be larger.
        """
        found, load = list[Round](), [0] * len(self.ranks)
        # by the multiplications of one product
        for turn, piece in enumerate(sorted(pieces, key=lambda piece: -math.prod(piece.shape) * min(piece.shape))):
            owner, elements = turn % len(load), math.prod(piece.shape)
            if not found or (load[owner] and load[owner] + elements > most):
                found.append([[] for _ in load])
                load = [0] * len(load)
            found[-1][owner].append(piece)
            load[owner] += elements
        return found

    def run(
        self,
        work: Round,
        part_of: Callable[[Piece, Place], Tensor],
        compute: Callable[[Piece, Tensor], Tensor],
        put: Callable[[Piece, Place, Tensor], None],
        like: Tensor,
    ) -> None:
        """Compute the matrices of one round, each on its owner. Collective over the group.

        Args:
            work: the matrices of each owner.
            part_of: returns the part of a matrix at a place of this rank's share.
            compute: returns the result for a whole matrix, of its shape.
            put: takes the part of a result at a place of this rank's share.
            like: has the dtype of the parts, and the device of the exchange.
        """
        here, owned = self.rank, work[self.rank]
        theirs = [[(piece, part) for piece in owned if (part := piece.of_rank(rank))] for rank in range(len(work))]
        mine = [[(piece, part) for piece in pieces if (part := piece.of_rank(here))] for pieces in work]
        to_me, to_owners = ([sum(_count(part) for _, part in parts) for parts in side] for side in (theirs, mine))
        came, going = (list(itertools.chain.from_iterable(side)) for side in (theirs, mine))
        sent = [part_of(piece, _within(part, piece.held[here])).to(like) for piece, part in going]
        received = self._exchange(sent, to_owners, to_me, like)
        whole = {id(piece): like.new_empty(_shape(piece.place)) for piece in owned}
        for (piece, part), values in zip(came, received.split([_count(part) for _, part in came])):
            whole[id(piece)][_within(part, piece.place)] = values.view(_shape(part))
        for piece in owned:
            found = compute(piece, whole.pop(id(piece)).view(piece.shape))
            whole[id(piece)] = found.reshape(_shape(piece.place))
        back = [whole[id(piece)][_within(part, piece.place)] for piece, part in came]
        results = self._exchange(back, to_me, to_owners, like)
        for (piece, part), values in zip(going, results.split([_count(part) for _, part in going])):
            put(piece, _within(part, piece.held[here]), values.view(_shape(part)))

    def _exchange(self, parts: Sequence[Tensor], outgoing: list[int], incoming: list[int], like: Tensor) -> Tensor:
        flat = torch.cat([tensor.reshape(-1) for tensor in parts]) if parts else like.new_empty(0)
        if self.group is None:
            return flat
        received = like.new_empty(sum(incoming))
        dist.all_to_all_single(received, flat, incoming, outgoing, group=self.group)
        return received


def _shape(place: Place) -> list[int]:
    return [span.stop - span.start for span in place]


def _count(place: Place) -> int:
    return math.prod(_shape(place))


def _within(part: Place, origin: Place) -> Place:
    """Return ``part`` as a slice of the tensor at ``origin``."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(part, origin))


def shares(parameter: Tensor) -> tuple[Owners, list[Place]]:
    """Return the ranks among which a parameter is split, and the part of the whole that each holds; replicas of its
    parts have owners of their own. Collective over the mesh where several axes split it for the first time.
    """
    if not isinstance(parameter, DTensor):
        return Owners((0,), None), [held_by_this_rank(parameter)]
    mesh, placements = parameter.device_mesh, parameter.placements
    split = [axis for axis, how in enumerate(placements) if shard_dim(how) is not None and mesh.shape[axis] > 1]
    if not split:
        return Owners((0,), None), [held_by_this_rank(parameter)]
    if len(split) == 1:
        group = mesh.get_group(split[0])
    else:
        axes = tuple((mesh.mesh_dim_names or ())[axis] for axis in split)
        group = flattened(mesh if len(axes) == mesh.ndim else mesh[axes]).get_group()
    with without_modes():  # in a simulation, too, ranks are numbers
        every = mesh.mesh.flatten().tolist()
    places = dict(zip(every, itertools.product(*map(range, mesh.shape)), strict=True))
    ranks = dist.get_process_group_ranks(group)
    return Owners(ranks, group), [local_index(parameter.shape, placements, mesh.shape, places[rank]) for rank in ranks]
