"""The weights of a running job as whole tensors under their published names, a bucket at a time."""

from __future__ import annotations

import bisect
import itertools
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshpar._torch.groups import shared_timeout
from meshpar.checkpoints.export.merging import Factors, Merged
from meshpar.checkpoints.export.published import Digest, bytes_of, clean_name, in_files, in_order
from meshpar.checkpoints.export.quantizing import Quantization, Quantized
from meshpar.checkpoints.export.safetensors import MAX_SHARD_BYTES, ExportOptions, convert, tiles_of
from meshpar.checkpoints.steps.checkpointable import Checkpointable
from meshpar.checkpoints.steps.state import check_have_memory, model_state
from meshpar.core import runtime
from meshpar.core.errors import CheckpointError, MeshparError
from meshpar.core.waiting import reads_of
from meshpar.passes.applied import applied
from meshpar.step.placements import local_index, local_tensor
from meshpar.training.lora import NAME, PackedAdapter, adapted_layers, base_name
from meshpar.weights import TypedSource, WeightMap
from meshpar.weights.rules import Spans, spans_of

Adapters = Literal["merged", "only"]


class Live(Checkpointable, Protocol):
    """A :class:`meshpar.Parallelized` whose weights are streamed."""

    def reshard(self) -> None:
        """Free gathered parameters."""
        ...


class Averages(Protocol):
    """A :class:`meshpar.state.averaging.Averaged`."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the average by the names of the parameters."""
        ...


class TensorMeta(NamedTuple):
    """Name, dtype and shape of a tensor, which its receiver needs before it comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@final
class Published:
    """Stream the weights of a parallel module: whole tensors under their published names, for an inference engine.

    Names, dtypes, shapes, order and bytes are those of :func:`meshpar.checkpoints.export_safetensors` of the same
    state. Each iteration is one version. Parts travel from the ranks that have them to the one that gets the values: a
    rank holds at most a bucket of them, and the tensor that is being put together.

    >>> for name, tensor in par.published(dtype=torch.bfloat16): engine.load(name, tensor)  # doctest: +SKIP

    Args:
        par: the parallel module, with values.
        dtype: dtype of the floating-point tensors; None: the parameters' own.
        bucket: bytes on their way at a time, as a number or as text: ``"256MiB"``.
        adapters: ``"merged"``: LoRA's products are added to the weights, slice by slice; ``"only"``: the adapters
            alone, by peft's names.
        averaged: a moving average of the parameters (``par.averaged``), whose values are taken.
        quantize: as for :func:`meshpar.checkpoints.export_safetensors`.
        high: as there.
        to: the rank that gets the values.
        digested: compute ``digest`` in each iteration.

    Attributes:
        version: number of iterations that have begun.
        digest: of what the last iteration yielded, if ``digested``, on every rank once it has ended; else empty. A
            receiver that computes the same (:class:`meshpar.checkpoints.Digest`) has this version whole.
        to: the rank that gets the values.

    Raises:
        CheckpointError: a bucket that is no size, a rank that there is not, adapters of a module without any, or what
            an export refuses.
    """

    def __init__(
        self,
        par: Live,
        dtype: torch.dtype | None = None,
        bucket: int | str = "256MiB",
        adapters: Adapters = "merged",
        averaged: Averages | None = None,
        *,
        quantize: Quantization | None = None,
        high: Sequence[str] = (),
        to: int = 0,
        digested: bool = False,
    ) -> None:
        self._par, self._bucket = par, bytes_of(bucket)
        self._adapters, self._averaged = adapters, averaged
        self._options = ExportOptions(dtype=dtype, quantize=quantize, high=tuple(high), verify="none")
        self.to = to
        self._digested, self.version, self.digest = digested, 0, ""
        if not 0 <= to < dist.get_world_size():
            raise CheckpointError(f"to is {to}; expected a rank from 0 to {dist.get_world_size() - 1}")
        self._known: dict[str, tuple[torch.Size, torch.dtype, _Boxes]] | None = None
        self._known = self._of_all_stages()
        self.metadata()

    def metadata(self) -> list[TensorMeta]:
        """Return name, dtype and shape of each tensor in the order of the stream, without communication."""
        source, dtypes, order = self._written(_Leaf(self._held(), torch.device("meta")))
        shapes = source.shapes()
        return [TensorMeta(name, dtypes[name], tuple(shapes[name])) for name in order]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor; on ranks other than ``to`` the tensor is on the meta device.

        Raises:
            MeshparError: the weights changed during the iteration.

        Collective: every rank iterates to the end.
        """
        self.version, self.digest = self.version + 1, ""
        with reads_of(self._par.module).during(f"version {self.version} of par.published()"):
            yield from self._streamed()

    def _streamed(self) -> Iterator[tuple[str, Tensor]]:
        digest, held = Digest(), self._held()
        before = {name: _version(tensor.tensor) for name, tensor in held.items()}
        leaf = _Leaf(held, torch.device("meta"))
        source, dtypes, order = self._written(leaf)
        parts = _Parts(held, self.to, self._par.device)
        values = self._written(parts)[0]
        here, shapes = dist.get_rank() == self.to, source.shapes()
        limit = max(1, self._bucket // 2)  # one bucket is read while the next one travels
        device = self._par.device if here else torch.device("meta")
        for bucket in parts.moved(_buckets(_tiles(source, dtypes, order, leaf, limit), limit)):
            for tile in bucket:
                if tile.first:
                    out = torch.empty(tuple(shapes[tile.name]), dtype=dtypes[tile.name], device=device)
                index = tuple(slice(*span) for span in tile.spans)
                if here:
                    values.read(tile.name, index, out[index])
                if tile.last:
                    if self._digested and here:
                        digest.add(tile.name, out)
                    yield tile.name, out
                    out = torch.empty(0)
        if changed := [name for name, tensor in held.items() if _version(tensor.tensor) != before[name]]:
            raise MeshparError(
                f"{len(changed)} tensors were changed while they were streamed ({', '.join(changed[:3])}), so that "
                "what was yielded is a mixture of versions: drop it, and change weights after the stream has ended"
            )
        if self._digested:
            said = [digest.hexdigest()]
            dist.broadcast_object_list(said, src=self.to, group=runtime.hosts())
            self.digest = said[0]

    def _held(self) -> dict[str, _Held]:
        """Return the tensors to publish by the module's names, a tied one under its first."""
        self._par.reshard()
        state = model_state(self._par.module, {group[0] for group in self._par.layout.tied}).tensors
        averages = {} if self._averaged is None else self._averaged.state_dict()["averages"]
        check_have_memory(state, "published")
        own = {clean_name(name): _Held(averages.get(name, state[name]), state[name].dtype) for name in in_order(state)}
        if self._known is None:
            return own
        others = {name: torch.empty(self._known[name][0], device="meta") for name in self._known if name not in own}
        return {
            name: _Held(own[name].tensor if name in own else others[name], *self._known[name][1:])
            for name in in_order(self._known)
        }

    def _of_all_stages(self) -> dict[str, tuple[torch.Size, torch.dtype, _Boxes]] | None:
        """Return shape, dtype and parts of the tensors of all stages, which the first stage that has one sends; None
        where every rank has all layers.

        Collective where layers are divided.
        """
        if (layers := applied(self._par.module).layers) is None:
            return None
        found, adapted = dict[str, tuple[torch.Size, torch.dtype, _Boxes]](), False
        said: list[Any] = [dist.get_process_group_ranks(layers.group)]
        dist.broadcast_object_list(said, src=self.to, group=runtime.hosts())
        for stage in said[0]:  # a rank of each, which shares its tensors with all that send some of them
            described: list[Any] = [None, None]
            if stage == dist.get_rank():
                boxes = _BoxesOf(stage)
                own = {name: (one.tensor.shape, one.dtype, boxes(one.tensor)) for name, one in self._held().items()}
                described = [own, bool(adapted_layers(self._par.module))]
            dist.broadcast_object_list(described, src=stage, group=runtime.hosts())
            found, adapted = {**described[0], **found}, adapted or described[1]
        if adapted:
            raise CheckpointError(
                "the module has adapters, and pp divides its layers: no rank can merge those of others; save a step "
                "and restore it on a mesh without pp, or train adapters on a mesh without pp"
            )
        return found

    def _written(self, leaf: _Leaf) -> tuple[TypedSource, Mapping[str, torch.dtype], list[str]]:
        """Return the tensors as an export writes them, made of those of a leaf, the dtype of each, and their order."""
        weights, adapted = self._par.layout.weights, adapted_layers(self._par.module)
        pairs = {layer: [f"{clean_name(layer)}.lora_{which}.{NAME}.weight" for which in "AB"] for layer in adapted}
        factors = {name for pair in pairs.values() for name in pair}
        source: TypedSource = leaf
        if self._adapters == "only" and adapted:
            source, weights = leaf.named({_peft_name(name): name for name in factors}), WeightMap()
        elif self._adapters == "merged":
            frozen = leaf.named({name: name for name in leaf.shapes() if name not in factors})
            source = Merged(frozen, dict(_factors(leaf, adapted, pairs))) if adapted else leaf
        else:
            raise CheckpointError(
                f"adapters is {self._adapters!r}, and the module has {len(adapted)} layers with adapters; expected "
                "'merged', or 'only' for a module of add_adapters"
            )
        converted, dtypes = convert(weights.publish(source), self._options, self._par.layout.config)
        files = in_files(converted.shapes(), dtypes, MAX_SHARD_BYTES, scaled=isinstance(converted, Quantized))
        return converted, dtypes, list(itertools.chain.from_iterable(files.values()))


_Boxes = list[tuple[Spans, list[int]]]
"""Parts of a tensor, and the ranks that have each."""


class _Held(NamedTuple):
    """A tensor of which ranks hold parts, and the dtype that its values have in the module.

    Attributes:
        boxes: its parts where stages told them; None: as this rank's tensor says.
    """

    tensor: Tensor
    dtype: torch.dtype
    boxes: _Boxes | None = None


class _Need(NamedTuple):
    """A slice of a module's tensor that a published one is made of.

    Attributes:
        dtype: in which it travels.
    """

    name: str
    spans: Spans
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Tile:
    """A slice of a published tensor, in the order of its bytes, and what it is made of."""

    name: str
    spans: Spans
    needs: Sequence[_Need]
    first: bool
    last: bool

    @property
    def nbytes(self) -> int:
        return sum(_size(need.spans) * need.dtype.itemsize for need in self.needs)


class _Leaf:
    """The module's tensors as a source, which notes what is read of them and reads nothing."""

    def __init__(self, held: Mapping[str, _Held], device: torch.device) -> None:
        self._held, self.device = held, device
        self._needs: list[_Need] = []

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.tensor.shape) for name, tensor in self._held.items()}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {name: tensor.dtype for name, tensor in self._held.items()}

    def read(self, name: str, index: tuple[slice, ...], out: Tensor) -> None:
        own = self._held[name]
        narrow = out.dtype if out.dtype.itemsize < own.dtype.itemsize else own.dtype
        self._needs.append(_Need(name, spans_of(index, tuple(own.tensor.shape)), narrow))

    def taken(self) -> list[_Need]:
        """Return what was read since the last call."""
        needs, self._needs = self._needs, []
        return needs

    def whole(self, name: str) -> Tensor:
        """Read a tensor whole."""
        own = self._held[name]
        out = torch.empty(own.tensor.shape, dtype=own.dtype, device=self.device)
        self.read(name, tuple(slice(0, size) for size in out.shape), out)
        return out

    def named(self, names: Mapping[str, str]) -> _Named:
        """Return some of the tensors under other names: new -> own."""
        return _Named(self, names)


@final
class _Named:
    """Some tensors of a source under other names."""

    def __init__(self, source: TypedSource, names: Mapping[str, str]) -> None:
        self._source, self._names = source, {name: names[name] for name in in_order(names)}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = self._source.shapes()
        return {name: shapes[own] for name, own in self._names.items()}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        dtypes = self._source.dtypes()
        return {name: dtypes[own] for name, own in self._names.items()}

    def read(self, name: str, index: tuple[slice, ...], out: Tensor) -> None:
        self._source.read(self._names[name], index, out)


class _Piece(NamedTuple):
    """The part of a need that one rank sends.

    Attributes:
        inside: its slice of that rank's part of the tensor.
        place: its slice of the need.
    """

    sender: int
    need: _Need
    inside: tuple[slice, ...]
    place: tuple[slice, ...]

    @property
    def elements(self) -> int:
        return math.prod(span.stop - span.start for span in self.place)


@final
class _BoxesOf:
    """The parts of tensors and their ranks; none where ``to`` gets a tensor from ranks that do not share it."""

    def __init__(self, to: int) -> None:
        self._to, self._found = to, dict[Any, _Boxes]()

    def __call__(self, tensor: Tensor) -> _Boxes:
        if not isinstance(tensor, DTensor):
            return [(tuple((0, size) for size in tensor.shape), [self._to])]
        mesh = tensor.device_mesh
        key = (tuple(tensor.shape), tensor.placements, mesh)
        if key not in self._found:
            boxes: dict[Spans, list[int]] = {}
            members = mesh.mesh
            for coordinate in itertools.product(*map(range, members.shape)) if (members == self._to).any() else ():
                index = local_index(tensor.shape, tensor.placements, tuple(members.shape), coordinate)
                boxes.setdefault(tuple((span.start, span.stop) for span in index), []).append(int(members[coordinate]))
            self._found[key] = list(boxes.items())
        return self._found[key]


@final
class _Along:
    """The parts of a tensor in the order of the dimension that is cut most often."""

    def __init__(self, boxes: _Boxes) -> None:
        cuts = [len({box[dim] for box, _ in boxes}) for dim in range(len(boxes[0][0]))]
        self._dim = cuts.index(max(cuts))
        self._boxes = sorted(boxes, key=lambda part: part[0][self._dim][0])
        self._starts = [box[self._dim][0] for box, _ in self._boxes]
        self._widest = max(box[self._dim][1] - box[self._dim][0] for box, _ in boxes)

    def near(self, spans: Spans) -> _Boxes:
        """Return the parts that may meet a slice: those whose beginnings are near its own."""
        begin, end = spans[self._dim]
        first = bisect.bisect_right(self._starts, begin - self._widest)
        return self._boxes[first : bisect.bisect_left(self._starts, end)]


@final
class _Parts(_Leaf):
    """The module's tensors as a source, which reads the parts of other ranks in the order of their notes."""

    def __init__(self, held: Mapping[str, _Held], to: int, device: torch.device) -> None:
        super().__init__(held, device)
        self._to, self._rank, self._count = to, dist.get_rank(), 0
        self._boxes, self._along = _BoxesOf(to), dict[int, _Along]()  # of lists that this object or `held` keeps
        self._rooms = [torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]
        self._waiting: Iterator[tuple[_Need, list[tuple[_Piece, Tensor | None]]]] = iter(())
        on_host = all(local_tensor(one.tensor).is_cpu for one in held.values() if not one.tensor.is_meta)
        self._group = runtime.hosts() if on_host else _own_group()
        self._home = torch.device("cpu") if on_host else device

    def read(self, name: str, index: tuple[slice, ...], out: Tensor) -> None:
        need, pieces = next(self._waiting)
        assert (need.name, need.spans) == (name, spans_of(index, tuple(self._held[name].tensor.shape)))
        for piece, data in pieces:
            out[piece.place].copy_(self._mine(piece) if data is None else data)

    def moved(self, buckets: Iterator[list[_Tile]]) -> Iterator[list[_Tile]]:
        """Yield buckets whose parts can be read until the next one; what is yielded next is on its way meanwhile."""
        ahead = None
        for bucket in itertools.chain(buckets, (None,)):
            begun = None if bucket is None else (bucket, *self._begin(bucket))
            if ahead is not None:
                tiles, works, waiting = ahead
                for work in works:
                    work.wait()
                self._waiting = iter(waiting)
                yield tiles
            ahead = begun

    def _begin(self, bucket: list[_Tile]) -> tuple[list[Any], list[tuple[_Need, list[tuple[_Piece, Tensor | None]]]]]:
        """Send what this rank has of a bucket, or receive what others have."""
        needs = [(need, self._pieces(need)) for tile in bucket for need in tile.needs]
        sizes: dict[int, int] = {}
        for need, pieces in needs:
            for piece in pieces:
                if piece.sender != self._to and self._rank in (self._to, piece.sender):
                    sizes[piece.sender] = _up(sizes.get(piece.sender, 0)) + piece.elements * need.dtype.itemsize
        room = dict(zip(sizes, self._taken(sum(map(_up, sizes.values()))).split([*map(_up, sizes.values())])))
        used = dict.fromkeys(room, 0)
        waiting: list[tuple[_Need, list[tuple[_Piece, Tensor | None]]]] = []
        for need, pieces in needs:
            found: list[tuple[_Piece, Tensor | None]] = []
            for piece in pieces:
                data = None
                if piece.sender in room:
                    start = _up(used[piece.sender])
                    used[piece.sender] = start + piece.elements * need.dtype.itemsize
                    data = room[piece.sender][start : used[piece.sender]].view(need.dtype)
                    data = data.view([span.stop - span.start for span in piece.place])
                    if piece.sender == self._rank:
                        data.copy_(self._mine(piece))
                found.append((piece, data))
            waiting.append((need, found))
        call: Any = dist.isend if self._rank != self._to else dist.irecv
        calls = [
            dist.P2POp(call, buffer, self._to if call is dist.isend else sender, self._group)
            for sender, buffer in room.items()
        ]
        return dist.batch_isend_irecv(calls) if calls else [], waiting if call is dist.irecv else []

    def _taken(self, size: int) -> Tensor:
        """Return memory that is in use until the next call but one."""
        free, last = self._rooms
        if free.numel() < size:
            self._rooms[0] = free = torch.empty(0)
            free = torch.empty(size, dtype=torch.uint8, device=self._home)
        self._rooms = [last, free]
        return free[:size]

    def _mine(self, piece: _Piece) -> Tensor:
        own = self._held[piece.need.name]
        return local_tensor(own.tensor)[piece.inside].to(own.dtype)

    def _pieces(self, need: _Need) -> list[_Piece]:
        """Divide a need among the ranks that have it: the one that gets it, otherwise one after another."""
        self._count += 1
        found = []
        for box, ranks in self._near(need):
            spans = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(need.spans, box, strict=True)]
            if all(a < b for a, b in spans):
                sender = self._to if self._to in ranks else ranks[self._count % len(ranks)]
                inside = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(spans, box))
                place = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(spans, need.spans))
                found.append(_Piece(sender, need, inside, place))
        return found

    def _near(self, need: _Need) -> _Boxes:
        """Return the parts of a tensor that may meet a need, by bisection."""
        held = self._held[need.name]
        boxes = self._boxes(held.tensor) if held.boxes is None else held.boxes
        if not need.spans or len(boxes) < 2:
            return boxes
        if id(boxes) not in self._along:
            self._along[id(boxes)] = _Along(boxes)
        return self._along[id(boxes)].near(need.spans)


_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def _own_group() -> dist.ProcessGroup:
    """Return the group of all ranks for streams alone: on a device messages of a group wait for its collectives, and
    the default group may be an axis's.

    Collective where it is called first: every rank calls it.
    """
    world: Any = dist.group.WORLD
    if world not in _GROUPS:
        made: Any = dist.new_group(group_desc="published", timeout=shared_timeout())
        _GROUPS[world] = made
    return _GROUPS[world]


def _tiles(
    source: TypedSource, dtypes: Mapping[str, torch.dtype], order: Sequence[str], leaf: _Leaf, limit: int
) -> Iterator[_Tile]:
    """Cut the stream into tiles, as an export does."""
    shapes = source.shapes()
    for name in order:
        whole = torch.empty(tuple(shapes[name]), dtype=dtypes[name], device="meta")
        spans = list(tiles_of(source, name, dtypes[name], limit))
        spans = spans or [tuple((0, size) for size in whole.shape)]
        for number, box in enumerate(spans):
            index = tuple(slice(*span) for span in box)
            source.read(name, index, whole[index])
            yield _Tile(name, box, leaf.taken(), number == 0, number == len(spans) - 1)


def _buckets(tiles: Iterable[_Tile], limit: int) -> Iterator[list[_Tile]]:
    """Group tiles whose needs take at most ``limit`` bytes together, or a tile alone."""
    bucket: list[_Tile] = []
    size = 0
    for tile in tiles:
        if bucket and size + tile.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(tile)
        size += tile.nbytes
    if bucket:
        yield bucket


def _factors(
    leaf: _Leaf, adapted: Mapping[str, Any], pairs: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, Factors]]:
    """Yield the adapters of each weight, by the module's name of it."""
    for layer, adapter in adapted.items():
        packed = adapter if isinstance(adapter, PackedAdapter) else None
        if packed is None:
            scaling: Any = adapter.scaling
            weight, scale = f"{layer}.base_layer.weight", float(scaling[NAME])
        else:
            below, weight = adapter, layer
            while isinstance(below, PackedAdapter):
                below, weight = below.base_layer, f"{weight}.base_layer"
            weight, scale = f"{weight}.{packed.leaf}", packed.scale
        yield clean_name(weight), Factors(partial(_pair, leaf, *pairs[layer]), scale, packed)


def _pair(leaf: _Leaf, a: str, b: str) -> tuple[Tensor, Tensor]:
    return leaf.whole(a), leaf.whole(b)


def _peft_name(name: str) -> str:
    return f"base_model.model.{base_name(name).replace(f'.{NAME}.', '.')}"


def _size(spans: Spans) -> int:
    return math.prod(stop - start for start, stop in spans)


def _up(position: int) -> int:
    """Return the next position at which a tensor of any dtype may begin."""
    return -(-position // 16) * 16


def _version(tensor: Tensor) -> tuple[int, int]:
    """Return the number of in-place changes, of a DTensor and of this rank's part of it."""
    local = local_tensor(tensor)
    return (0, 0) if tensor.is_inference() or local.is_inference() else (tensor._version, local._version)
