"""Tensors of which ranks hold parts, moved to one rank by buckets, after reads that all ranks note in one order."""

from __future__ import annotations

import bisect
import itertools
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshpar._torch.groups import shared_timeout
from meshpar.checkpoints.format.manifest import in_order
from meshpar.core import runtime
from meshpar.tensors.placements import held_by_this_rank, local_index, local_tensor
from meshpar.weights import TypedSource
from meshpar.weights.rules import Spans, overlap, spans_of, within

PartOwners = list[tuple[Spans, list[int]]]  # parts of a tensor, and the ranks that have each


class DividedTensor(NamedTuple):
    """A tensor of which ranks hold parts, and the dtype that its values have in the module."""

    tensor: Tensor
    dtype: torch.dtype
    owners: PartOwners | None = None  # as other stages sent them; None: by the placements of this rank's tensor


class TensorSlice(NamedTuple):
    """A slice of a module's tensor, and the dtype in which it travels."""

    name: str
    spans: Spans
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return _count(self.spans) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Tile:
    """A slice of a published tensor, in the order of its bytes, and the slices that it is made of."""

    name: str
    spans: Spans
    sources: Sequence[TensorSlice]
    first: bool
    last: bool


class NotingSource:
    """The module's tensors as a source, which notes what is read of them and reads nothing."""

    def __init__(self, tensors: Mapping[str, DividedTensor], device: torch.device) -> None:
        self._tensors, self.device = tensors, device
        self._notes: list[TensorSlice] = []

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(divided.tensor.shape) for name, divided in self._tensors.items()}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {name: divided.dtype for name, divided in self._tensors.items()}

    def read(self, name: str, index: tuple[slice, ...], out: Tensor) -> None:
        divided = self._tensors[name]
        narrow = out.dtype if out.dtype.itemsize < divided.dtype.itemsize else divided.dtype
        self._notes.append(TensorSlice(name, spans_of(index, tuple(divided.tensor.shape)), narrow))

    def take_notes(self) -> list[TensorSlice]:
        """Return what was read since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def whole(self, name: str) -> Tensor:
        divided = self._tensors[name]
        out = torch.empty(divided.tensor.shape, dtype=divided.dtype, device=self.device)
        self.read(name, tuple(slice(0, size) for size in out.shape), out)
        return out


@final
class RenamedSource:
    """Some tensors of a source under other names: new -> the source's."""

    def __init__(self, source: TypedSource, names: Mapping[str, str]) -> None:
        self._source, self._names = source, {name: names[name] for name in in_order(names)}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = self._source.shapes()
        return {name: shapes[source_name] for name, source_name in self._names.items()}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        dtypes = self._source.dtypes()
        return {name: dtypes[source_name] for name, source_name in self._names.items()}

    def read(self, name: str, index: tuple[slice, ...], out: Tensor) -> None:
        self._source.read(self._names[name], index, out)


@final
class OwnersOf:
    """The parts of tensors and their ranks; none where ``to`` gets a tensor from ranks that do not share it."""

    def __init__(self, to: int) -> None:
        self._to, self._by_layout = to, dict[Any, PartOwners]()

    def __call__(self, tensor: Tensor) -> PartOwners:
        if not isinstance(tensor, DTensor):
            return [(tuple((0, size) for size in tensor.shape), [self._to])]
        mesh = tensor.device_mesh
        key = (tuple(tensor.shape), tensor.placements, mesh)
        if key not in self._by_layout:
            ranks: dict[Spans, list[int]] = {}
            members = mesh.mesh
            for coordinate in itertools.product(*map(range, members.shape)) if (members == self._to).any() else ():
                index = local_index(tensor.shape, tensor.placements, tuple(members.shape), coordinate)
                ranks.setdefault(spans_of(index, tuple(tensor.shape)), []).append(int(members[coordinate]))
            self._by_layout[key] = list(ranks.items())
        return self._by_layout[key]


@final
class SortedOwners:
    """The parts of a tensor in the order of the dimension that is cut most often."""

    def __init__(self, owners: PartOwners) -> None:
        cuts = [len({spans[dim] for spans, _ in owners}) for dim in range(len(owners[0][0]))]
        self._dim = cuts.index(max(cuts))
        self._owners = sorted(owners, key=lambda part: part[0][self._dim][0])
        self._starts = [spans[self._dim][0] for spans, _ in self._owners]
        self._widest = max(spans[self._dim][1] - spans[self._dim][0] for spans, _ in owners)

    def near(self, spans: Spans) -> PartOwners:
        """Return the parts that may meet a slice: those whose beginnings are near its own."""
        begin, end = spans[self._dim]
        first = bisect.bisect_right(self._starts, begin - self._widest)
        return self._owners[first : bisect.bisect_left(self._starts, end)]


# the parts of a slice: the sender of each, its spans in the tensor, and its values; None: this rank has them
_Received = list[tuple[int, Spans, Tensor | None]]


@final
class MovedSource(NotingSource):
    """The module's tensors as a source, which reads the parts of other ranks in the order of their notes."""

    def __init__(self, tensors: Mapping[str, DividedTensor], to: int, device: torch.device) -> None:
        super().__init__(tensors, device)
        self._to, self._rank, self._count = to, dist.get_rank(), 0
        self._owners, self._sorted = OwnersOf(to), dict[int, SortedOwners]()  # of lists that live as long as this
        self._buffers = [torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]
        self._waiting: Iterator[tuple[TensorSlice, _Received]] = iter(())
        on_host = all(local_tensor(each.tensor).is_cpu for each in tensors.values() if not each.tensor.is_meta)
        self._group = runtime.hosts() if on_host else stream_group()
        self._buffer_device = torch.device("cpu") if on_host else device

    def read(self, name: str, index: tuple[slice, ...], out: Tensor) -> None:
        wanted, parts = next(self._waiting)
        assert (wanted.name, wanted.spans) == (name, spans_of(index, tuple(self._tensors[name].tensor.shape)))
        for _, spans, values in parts:
            out[within(spans, wanted.spans)].copy_(self._read_here(name, spans) if values is None else values)

    def move(self, buckets: Iterator[list[Tile]]) -> Iterator[list[Tile]]:
        """Yield buckets whose parts can be read until the next one, which is on its way meanwhile."""
        # Hosts wait for the receiver, because sends on a device return at once: a rank begins a bucket when the
        # receiver is through with the last but one.
        ahead, hosts, through = None, runtime.hosts(), torch.zeros(1, dtype=torch.uint8, device="cpu")
        for number, bucket in enumerate(itertools.chain(buckets, (None,))):
            if number > 1 and bucket is not None:
                dist.broadcast(through, src=self._to, group=hosts)
            begun = None if bucket is None else (bucket, *self._begin(bucket))
            if ahead is not None:
                tiles, works, waiting = ahead
                for work in works:
                    work.wait()
                self._waiting = iter(waiting)
                yield tiles
            ahead = begun

    def _begin(self, bucket: list[Tile]) -> tuple[list[Any], list[tuple[TensorSlice, _Received]]]:
        """Send what this rank has of a bucket, or receive what others have."""
        slices = [(wanted, self._parts(wanted)) for tile in bucket for wanted in tile.sources]
        sizes: dict[int, int] = {}
        for wanted, parts in slices:
            for sender, spans in parts:
                if sender != self._to and self._rank in (self._to, sender):
                    sizes[sender] = _aligned(sizes.get(sender, 0)) + _count(spans) * wanted.dtype.itemsize
        rooms = [_aligned(size) for size in sizes.values()]
        self._buffers.reverse()  # the other one is being read
        if self._buffers[0].numel() < sum(rooms):
            self._buffers[0] = torch.empty(0)  # free it first
            self._buffers[0] = torch.empty(sum(rooms), dtype=torch.uint8, device=self._buffer_device)
        buffers = dict(zip(sizes, self._buffers[0][: sum(rooms)].split(rooms)))
        used = dict.fromkeys(buffers, 0)
        waiting: list[tuple[TensorSlice, _Received]] = []
        for wanted, parts in slices:
            received: _Received = []
            for sender, spans in parts:
                values = None
                if sender in buffers:
                    start = _aligned(used[sender])
                    used[sender] = start + _count(spans) * wanted.dtype.itemsize
                    values = buffers[sender][start : used[sender]].view(wanted.dtype).view([b - a for a, b in spans])
                    if sender == self._rank:
                        values.copy_(self._read_here(wanted.name, spans))
                received.append((sender, spans, values))
            waiting.append((wanted, received))
        receives = self._rank == self._to
        calls = [
            dist.P2POp(dist.irecv if receives else dist.isend, buffer, sender if receives else self._to, self._group)
            for sender, buffer in buffers.items()
        ]
        return dist.batch_isend_irecv(calls) if calls else [], waiting if receives else []

    def _read_here(self, name: str, spans: Spans) -> Tensor:
        tensor, dtype, _ = self._tensors[name]
        local_spans = spans_of(held_by_this_rank(tensor), tuple(tensor.shape))
        return local_tensor(tensor)[within(spans, local_spans)].to(dtype)

    def _parts(self, wanted: TensorSlice) -> list[tuple[int, Spans]]:
        """Divide a slice among the ranks that have it: the one that gets it, otherwise one after another."""
        self._count += 1
        divided = self._tensors[wanted.name]
        owners = self._owners(divided.tensor) if divided.owners is None else divided.owners
        if wanted.spans and len(owners) > 1:
            if id(owners) not in self._sorted:
                self._sorted[id(owners)] = SortedOwners(owners)
            owners = self._sorted[id(owners)].near(wanted.spans)
        parts = []
        for spans, ranks in owners:
            if (shared := overlap(wanted.spans, spans)) is not None:
                parts.append((self._to if self._to in ranks else ranks[self._count % len(ranks)], shared))
        return parts


def in_buckets(tiles: Iterable[Tile], limit: int) -> Iterator[list[Tile]]:
    """Group tiles whose slices take at most ``limit`` bytes together, or a tile alone."""
    bucket: list[Tile] = []
    size = 0
    for tile in tiles:
        nbytes = sum(wanted.nbytes for wanted in tile.sources)
        if bucket and size + nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(tile)
        size += nbytes
    if bucket:
        yield bucket


_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def stream_group() -> dist.ProcessGroup:
    """Return the group of all ranks for streams alone; collective where it is called first."""
    # on a device messages of a group wait for its collectives, and the default group may be an axis's
    world: Any = dist.group.WORLD
    if world not in _GROUPS:
        group: Any = dist.new_group(group_desc="published", timeout=shared_timeout())
        _GROUPS[world] = group
    return _GROUPS[world]


def _count(spans: Spans) -> int:
    return math.prod(stop - start for start, stop in spans)


def _aligned(position: int) -> int:
    """Return the next position at which a tensor of any dtype may begin."""
    return -(-position // 16) * 16
