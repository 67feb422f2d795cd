"""The weights of a running job under their published names: a stream of whole tensors, or an export."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from meshpar.checkpoints.export import moving, safetensors
from meshpar.checkpoints.export.moving import DividedTensor, NotingSource, PartOwners, RenamedSource, Tile
from meshpar.checkpoints.export.published import Digest, bytes_of, clean_name
from meshpar.checkpoints.export.quantizing import Quantization
from meshpar.checkpoints.export.safetensors import ExportOptions, convert, export_safetensors, tiles_of
from meshpar.checkpoints.export.target import free_target, make_beside
from meshpar.checkpoints.format.copying import Progress
from meshpar.checkpoints.format.manifest import in_order
from meshpar.checkpoints.steps.planning import Planning
from meshpar.checkpoints.steps.ranks import SavingRanks
from meshpar.checkpoints.steps.saving import Noted, Saving
from meshpar.checkpoints.steps.state import Checkpointable, check_have_memory, model_state
from meshpar.checkpoints.steps.steps import Steps, remove
from meshpar.checkpoints.storage.files import Dtypes
from meshpar.checkpoints.storage.place import Place, PlaceLike, place
from meshpar.core import runtime
from meshpar.core.errors import CheckpointError, MeshparError
from meshpar.parallelized import Parallelized
from meshpar.passes.pipeline.running import Layers
from meshpar.process.waiting import reads_of
from meshpar.state.averaging import Averaged
from meshpar.step.forward import fact_of
from meshpar.tensors.placements import local_tensor
from meshpar.weights import TypedSource, WeightMap
from meshpar.weights.maps import NAME, AdapterFactors, MergedAdapters, PackedAdapterLayer, adapted_layers, base_name

T = TypeVar("T")
Adapters = Literal["merged", "only"]


class TensorMeta(NamedTuple):
    """Name, dtype and shape of a tensor, which its receiver needs before it comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@final
class Published:
    """Stream the weights of a parallel module: whole tensors under their published names, for an inference engine.

    Names, dtypes, shapes, order and bytes are those of :func:`meshpar.checkpoints.export_safetensors` of the same
    state. Each iteration is one version. A rank holds at most a bucket of parts, and the tensor that they make.

    >>> for name, tensor in par.published(dtype=torch.bfloat16): engine.load(name, tensor)  # doctest: +SKIP

    Args:
        par: the parallel module, with values.
        dtype: dtype of the floating-point tensors; None: the parameters' own.
        bucket: bytes on their way at a time, as a number or as text: ``"256MiB"``.
        adapters: ``"merged"``: LoRA's products are added to the weights; ``"only"``: the adapters, by peft's names.
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
        CheckpointError: a bucket that is no size, a rank that there is not, or what an export refuses.
    """

    def __init__(
        self,
        par: Parallelized,
        dtype: torch.dtype | None = None,
        bucket: int | str = "256MiB",
        adapters: Adapters = "merged",
        averaged: Averaged | None = None,
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
        self._described: dict[str, _Description] | None = None
        self._described = self._of_all_stages()
        self.metadata()

    def metadata(self) -> list[TensorMeta]:
        """Return name, dtype and shape of each tensor in the order of the stream, without communication."""
        source, dtypes, order = self._convert(NotingSource(self._tensors(), torch.device("meta")))
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
        digest, tensors, device = Digest(), self._tensors(), self._par.device
        before = {name: _version(divided.tensor) for name, divided in tensors.items()}
        notes = NotingSource(tensors, torch.device("meta"))
        source, dtypes, order = self._convert(notes)
        moved = moving.MovedSource(tensors, self.to, device)
        values = self._convert(moved)[0]
        here, shapes = dist.get_rank() == self.to, source.shapes()
        limit = max(1, self._bucket // 2)  # one bucket is read while the next one travels
        for bucket in moved.move(moving.in_buckets(_tiles(source, dtypes, order, notes, limit), limit)):
            for tile in bucket:
                if tile.first:
                    where = device if here else "meta"
                    out = torch.empty(tuple(shapes[tile.name]), dtype=dtypes[tile.name], device=where)
                index = tuple(slice(*span) for span in tile.spans)
                if here:
                    values.read(tile.name, index, out[index])
                if tile.last:
                    if self._digested and here:
                        digest.add(tile.name, out)
                    yield tile.name, out
                    out = torch.empty(0)
        if changed := [name for name, divided in tensors.items() if _version(divided.tensor) != before[name]]:
            raise MeshparError(
                f"{len(changed)} tensors were changed while they were streamed ({', '.join(changed[:3])}), so that "
                "what was yielded is a mixture of versions: drop it, and change weights after the stream has ended"
            )
        if self._digested:
            self.digest = _said_by(self.to, digest.hexdigest)

    def _tensors(self) -> dict[str, DividedTensor]:
        """Return the tensors to publish by the module's names, a tied one under its first."""
        self._par.reshard()
        state = model_state(self._par.module, {group[0] for group in self._par.layout.tied}).tensors
        averages = {} if self._averaged is None else self._averaged.state_dict()["averages"]
        check_have_memory(state, "published")
        tensors = {
            clean_name(name): DividedTensor(averages.get(name, state[name]), state[name].dtype)
            for name in in_order(state)
        }
        if self._described is None:
            return tensors
        every = {}
        for name in in_order(self._described):
            shape, dtype, owners = self._described[name]
            tensor = tensors[name].tensor if name in tensors else torch.empty(shape, device="meta")
            every[name] = DividedTensor(tensor, dtype, owners)
        return every

    def _of_all_stages(self) -> dict[str, _Description] | None:
        """Return the tensors of all stages, None where all have all layers; collective where layers are divided."""
        if (layers := fact_of(self._par.module, Layers)) is None:
            return None
        descriptions, adapted = dict[str, _Description](), False
        # a rank of each stage, which shares its tensors with all that send some of them
        for stage in _said_by(self.to, lambda: dist.get_process_group_ranks(layers.group)):
            described, has_adapters = _said_by(stage, partial(self._describe, stage))
            descriptions, adapted = {**described, **descriptions}, adapted or has_adapters
        if adapted:
            raise CheckpointError(
                "the module has adapters, and pp divides its layers: no rank can merge those of others; save a step "
                "and restore it on a mesh without pp, or train adapters on a mesh without pp"
            )
        return descriptions

    def _describe(self, stage: int) -> tuple[dict[str, _Description], bool]:
        """Return the tensors of this rank's stage, and whether it has adapters."""
        owners, tensors = moving.OwnersOf(stage), self._tensors().items()
        described = {name: (each.tensor.shape, each.dtype, owners(each.tensor)) for name, each in tensors}
        return described, bool(adapted_layers(self._par.module))

    def _convert(self, tensors: NotingSource) -> tuple[TypedSource, Mapping[str, torch.dtype], list[str]]:
        """Return the module's tensors as an export writes them, the dtype of each, and their order."""
        weights, adapted = self._par.layout.weights, adapted_layers(self._par.module)
        pairs = {layer: [f"{clean_name(layer)}.lora_{which}.{NAME}.weight" for which in "AB"] for layer in adapted}
        factors = {name for pair in pairs.values() for name in pair}
        source: TypedSource = tensors
        if self._adapters == "only" and adapted:
            names = {f"base_model.model.{base_name(name).replace(f'.{NAME}.', '.')}": name for name in factors}
            source, weights = RenamedSource(tensors, names), WeightMap()
        elif self._adapters == "merged":
            frozen = RenamedSource(tensors, {name: name for name in tensors.shapes() if name not in factors})
            source = MergedAdapters(frozen, dict(_factors(tensors, adapted, pairs))) if adapted else tensors
        else:
            raise CheckpointError(
                f"adapters is {self._adapters!r}, and the module has {len(adapted)} layers with adapters; expected "
                "'merged', or 'only' for a module of add_adapters"
            )
        converted, dtypes = convert(weights.publish(source), self._options, self._par.layout.config)
        files = safetensors.divide_into_files(converted, dtypes, self._options)
        return converted, dtypes, list(itertools.chain.from_iterable(files.values()))


_Description = tuple[torch.Size, torch.dtype, PartOwners]  # shape, dtype and parts of a tensor


def _said_by(rank: int, say: Callable[[], T]) -> T:
    """Return on every rank what ``say`` returns on one; collective."""
    values: list[Any] = [say() if dist.get_rank() == rank else None]
    dist.broadcast_object_list(values, src=rank, group=runtime.hosts())
    return values[0]  # type: ignore[no-any-return]


def _tiles(
    source: TypedSource, dtypes: Dtypes, order: Sequence[str], notes: NotingSource, limit: int
) -> Iterator[Tile]:
    """Cut the stream into tiles, as an export does."""
    shapes = source.shapes()
    for name in order:
        whole = torch.empty(tuple(shapes[name]), dtype=dtypes[name], device="meta")
        boxes = list(tiles_of(source, name, dtypes[name], limit)) or [tuple((0, size) for size in whole.shape)]
        for number, spans in enumerate(boxes):
            index = tuple(slice(*span) for span in spans)
            source.read(name, index, whole[index])
            yield Tile(name, spans, notes.take_notes(), number == 0, number == len(boxes) - 1)


def _factors(
    tensors: NotingSource, adapted: Mapping[str, Any], pairs: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, AdapterFactors]]:
    """Yield the adapters of each weight, by the module's name of it."""
    for layer, adapter in adapted.items():
        packed = adapter if isinstance(adapter, PackedAdapterLayer) else None
        if packed is None:
            linear: Any = adapter
            weight, scale = f"{layer}.base_layer.weight", float(linear.scaling[NAME])
        else:
            below, weight = adapter, layer
            while isinstance(below, PackedAdapterLayer):
                below, weight = below.base_layer, f"{weight}.base_layer"
            weight, scale = f"{weight}.{packed.leaf}", packed.scale
        yield clean_name(weight), AdapterFactors(partial(_pair, tensors, *pairs[layer]), scale, packed)


def _pair(tensors: NotingSource, a: str, b: str) -> tuple[Tensor, Tensor]:
    return tensors.whole(a), tensors.whole(b)


def _version(tensor: Tensor) -> tuple[int, int]:
    """Return the number of in-place changes, of a DTensor and of this rank's part of it."""
    local = local_tensor(tensor)
    return (0, 0) if tensor.is_inference() or local.is_inference() else (tensor._version, local._version)


def export_module(
    par: Checkpointable,
    dst: PlaceLike,
    dtype: torch.dtype | None = None,
    max_shard_size: int = 5 << 30,
    tokenizer: PlaceLike | None = None,
    progress: Progress | None = None,
    *,
    overwrite: bool = False,
    timeout_s: float = 1800.0,
) -> Place:
    """Export a parallel module without gathering it, by twice the model's size on the disk, or in the store.

    Collective: every rank calls it, with the same ``dst`` on a file system that all share, or a URL.

    Args:
        par: the parallel module.
        dst: the folder to write; it appears once it is complete.
        dtype: dtype of the floating-point tensors; None: unchanged.
        max_shard_size: bytes of tensors in one file, unless one tensor alone is larger.
        tokenizer: a folder whose files (but for weights and ``config.json``) are copied next to the model.
        progress: called after each tile.
        overwrite: whether to replace an existing folder.
        timeout_s: seconds that a rank waits for the others within one step.

    Returns:
        ``dst``.

    Raises:
        CheckpointError: on every rank, if any rank fails.
    """
    ranks = SavingRanks(timeout_s)
    target = place(dst).resolve()

    def begin() -> Place:
        free_target(target, overwrite=overwrite)
        return make_beside(target)

    root = ranks.share("exporting", begin)
    try:
        steps = Steps(root)
        folder = ranks.share("exporting", lambda: steps.begin(0, replace=False))
        saving = Saving(ranks, folder, Noted(step=0, extra={}, metrics={}), Planning())
        saving.plan(par, None)
        step = saving.finish(lambda manifest: steps.commit(folder, manifest))
        ranks.share(
            "exporting",
            lambda: export_safetensors(step, target, dtype, max_shard_size, tokenizer, progress, overwrite=overwrite),
        )
        return place(dst)
    finally:
        if ranks.rank == 0:
            remove(root)
