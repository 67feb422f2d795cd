"""The matrices of parameters: which parameters have some and decay, where each matrix is, and which rank computes it.

Layouts say who holds what, so a round brings each matrix whole to one rank by one all-to-all, and its result back by
another; replicas compute different ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from meshpar._torch.calls import without_modes
from meshpar._torch.groups import all_gather, flattened
from meshpar.core.errors import MeshparError, RecipeError
from meshpar.core.layout import ModelLayout
from meshpar.core.patterns import covers, matches
from meshpar.passes.data.whole_parameters import is_transposed
from meshpar.passes.tensor.parts import Experts, FeatureTable, Parts
from meshpar.passes.tensor.styles import Colwise, Vocabulary, parse
from meshpar.tensors.placements import local_index, shard_dim

_HEADS = ("lm_head", "head", "output", "classifier", "score", "embed_out", "output_projection")
"""Names of the layers that make logits, outside of the blocks, where no layout names one."""
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
Place = tuple[slice, ...]
_Group = dist.ProcessGroup
_LEAST = 1 << 17  # elements that a replica sends in a turn, so that many replicas do not make many turns


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Matrices:
    """The matrices of a parameter: ``parts`` fused along ``dim``; ``stacked``: some for each index of the first dim."""

    stacked: bool = False
    dim: int = 0
    parts: int | Sequence[int] = 1

    def problem(self, shape: Sequence[int]) -> str | None:
        """Return why a parameter of ``shape`` has no such matrices."""
        if len(shape) < 2 + self.stacked or self.dim not in (0, 1):
            return f"has {len(shape)} dims; expected {2 + self.stacked} or more, and dim to be 0 or 1"
        size, count = shape[self.stacked + self.dim], math.fsum(self._sizes)
        if not self._sizes or min(self._sizes) < 1 or size % count:
            return f"has {size} in dim {self.stacked + self.dim}, which parts={self.parts} do not divide"
        return None

    @property
    def _sizes(self) -> tuple[int, ...]:
        return (1,) * self.parts if isinstance(self.parts, int) else tuple(self.parts)

    def of(self, shape: Sequence[int]) -> Iterator[tuple[slice, ...]]:
        """Yield where each matrix is in a parameter of ``shape``."""
        whole = [slice(0, size) for size in shape]
        split = self.stacked + self.dim
        ends = [shape[split] * end // sum(self._sizes) for end in itertools.accumulate(self._sizes, initial=0)]
        for index in range(shape[0]) if self.stacked else (None,):
            for start, end in itertools.pairwise(ends):
                spans = list(whole)
                spans[split] = slice(start, end)
                if index is not None:
                    spans[0] = slice(index, index + 1)
                yield tuple(spans)

    def shape_of(self, place: Sequence[slice]) -> tuple[int, int]:
        """Return rows and columns of the matrix at ``place``; later dims are columns too."""
        rows, *columns = (span.stop - span.start for span in place[self.stacked :])
        return rows, math.prod(columns)


def matrices_of(
    name: str, parameter: Tensor, module: nn.Module, layout: ModelLayout, *, per_head: bool
) -> Matrices | None:
    """Return the matrices of a parameter; None: AdamW trains it. Raises MeshparError if nothing says what they are."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if parameter.ndim < 2 or isinstance(owner, nn.Embedding | nn.EmbeddingBag) or _is_head(path, layout):
        return None
    parts, dim = _find_fused(path, leaf, parameter.ndim, owner, layout)
    if any(matches(pattern, path) for pattern in layout.experts.modules) and parameter.ndim > 2:
        return Matrices(stacked=True, dim=dim, parts=parts)
    if isinstance(owner, _CONVOLUTIONS):
        return None if parameter.shape[1] == 1 else Matrices()  # depthwise: one filter a channel
    if math.prod(parameter.shape) == max(parameter.shape):
        return None  # a vector with dims of one
    if parameter.ndim > 2:
        raise MeshparError(
            f"{name} has the shape {tuple(parameter.shape)}, and no layout says what its matrices are; use "
            f'groups={{"{name}": {{"stacked": True}}}} if each index of the first dim is a matrix, '
            '{"stacked": False} if later dims are columns, or {"rule": "adamw"}'
        )
    if per_head:
        parts *= next((count for pattern, count in layout.tensor.heads.items() if matches(pattern, path)), 1)
        dim = 1 if is_transposed(owner) else dim
    return Matrices(dim=dim, parts=parts)


def parameter_groups(module: nn.Module, weight_decay: float | None) -> list[dict[str, Any]]:
    """Return the trainable parameters in groups: with two dims or more they decay. Raises RecipeError without any."""
    groups: dict[float, dict[str, Any]] = {}
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        decay = 0.0 if weight_decay is None or parameter.ndim < 2 else weight_decay
        group = groups.setdefault(decay, {"params": []} | ({} if weight_decay is None else {"weight_decay": decay}))
        group["params"].append(parameter)
    if not groups:
        raise RecipeError("no parameter of the model requires a gradient; there is nothing to train")
    return list(groups.values())


def _is_head(path: str, layout: ModelLayout) -> bool:
    """Tell a layer that makes logits, or a table over the vocabulary."""
    style = _style(path, layout)
    if isinstance(style, Vocabulary | FeatureTable) or (isinstance(style, Colwise) and style.gather == "loss"):
        return True
    in_block = any(covers(pattern, path) for pattern in layout.blocks)
    return path == layout.head if layout.head else path.rpartition(".")[2] in _HEADS and not in_block


def _find_fused(path: str, leaf: str, ndim: int, owner: nn.Module, layout: ModelLayout) -> tuple[int, int]:
    """Return how many equal projections a parameter fuses, and along which dim of a matrix."""
    style = _style(path, layout)
    if isinstance(style, Colwise):
        return style.parts, 1 if is_transposed(owner) and style.parts > 1 else 0
    style = style.otherwise if isinstance(style, Experts) else style
    if isinstance(style, Parts) and leaf in style.dims:
        dim, parts = style.dims[leaf]
        return (parts, dim % ndim - (ndim - 2)) if parts > 1 else (1, 0)
    return 1, 0


def _style(path: str, layout: ModelLayout) -> Any:  # noqa: ANN401 - a style, or None
    described = next((style for pattern, style in layout.tensor.styles.items() if matches(pattern, path)), None)
    return None if described is None else parse(described)


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


MatrixParts = list[tuple[OwnedMatrix, Place]]  # parts of matrices, each a place in the whole parameter


class Round(NamedTuple):
    """Matrices computed at a time, and the parts and elements that this rank gets, sends and gathers for them."""

    owned: list[OwnedMatrix]
    incoming: MatrixParts
    going: MatrixParts
    to_me: list[int]
    to_owners: list[int]
    turns: list[list[MatrixParts]]


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
        turns = itertools.zip_longest(*(_in_turns(_join(parts), few) for parts in own_parts), fillvalue=MatrixParts())
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

    def add(self, values: Tensor) -> Tensor:
        """Add values up over these ranks and their replicas, in place, and return them. Collective."""
        for group in (self.group, self.replicas):
            if group is not None:
                dist.all_reduce(values, group=group)
        return values

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


def _in_turns(parts: MatrixParts, limit: int) -> list[MatrixParts]:
    """Divide parts, in order, among turns of ``limit`` elements, or of one row."""
    turns, room = list[MatrixParts](), 0
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


def _parts(pieces: Sequence[OwnedMatrix], rank: int) -> MatrixParts:
    """Return the parts of matrices that a rank holds."""
    return [(piece, part) for piece in pieces if (part := piece.of_rank(rank))]


def _join(parts: Iterable[MatrixParts]) -> MatrixParts:
    return [*itertools.chain.from_iterable(parts)]


def _shape(place: Place) -> list[int]:
    return [span.stop - span.start for span in place]


def _count(place: Place) -> int:
    return math.prod(_shape(place))


def _total(parts: MatrixParts) -> int:
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
