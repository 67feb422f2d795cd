"""Quantise the linear weights of a model tile by tile, with layouts and scales of compressed-tensors 0.20."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, final

import torch

from meshpar.checkpoints.format.copying import StoredSource, check_piece
from meshpar.checkpoints.storage.files import Box, tiles
from meshpar.core.errors import CheckpointError
from meshpar.core.patterns import covers, suggestion
from meshpar.weights import TypedSource
from meshpar.weights.rules import Spans, spans_of

_TILE_ELEMENTS = 512 << 10  # of a weight at a time: float32 values and what is made of them stay in a core's cache
_BYTES = 4 << 20  # of a tile of any other tensor
# Parts of a module's name: embeddings, heads, routers, norms, and T5's wo, which transformers reads as float32.
_HIGH: tuple[str, ...] = ("*embed*", "wte", "wpe", "shared", "*head", "score", "classifier")
_HIGH += ("gate", "*_gate", "*router*", "*norm*", "ln_*", "*_bias", "wo")
# layers of transformers' Conv1D, with (in, out) weights
_CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")

Quantization = Literal["fp8", "fp8-block", "int8", "int4"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How a format stores a weight."""

    layout: str  # the format's name in compressed-tensors
    block: tuple[int, int | None]  # rows and columns that share a scale; None: all columns
    dtype: torch.dtype  # of the stored weight
    packed: int = 1  # number of values in one element of the stored weight
    largest: float  # the largest stored value
    half: float  # half of the range of stored values
    # entries of config_groups, besides those that all formats share
    weights: Mapping[str, Any]
    activations: Mapping[str, Any] | None = field(default=None)

    def grid(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the shape of the scales of a weight."""
        return shape[0] // self.block[0], 1 if self.block[1] is None else shape[1] // self.block[1]

    def store(self, rows: torch.Tensor, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stored form of whole blocks of float32 rows (overwritten), and their scales."""
        down, across = self.grid(rows.shape)
        blocks = rows.view(down, self.block[0], across, -1)
        largest = torch.maximum(blocks.amax(3), -blocks.amin(3)).amax(1)
        scales = (largest / self.half).to(scale_dtype)
        scales.masked_fill_(scales == 0, torch.finfo(scale_dtype).eps)
        blocks.div_(scales.float()[:, None, :, None])
        if self.dtype.is_floating_point:
            return rows.clamp_(-self.largest, self.largest).to(self.dtype), scales
        values = rows.round_().clamp_(-self.largest - 1, self.largest).to(torch.int8)
        if self.packed > 1:  # eight values of 4 bits, plus 8, in each int32, the first in the lowest bits
            nibbles = (values + 8).view(torch.uint8)
            values = (nibbles[:, ::2] | nibbles[:, 1::2] << 4).view(torch.int32)
        return values, scales

    def config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """Return ``quantization_config``, as compressed-tensors writes it."""
        shared = {"symmetric": True, "group_size": None}
        group = {
            "targets": ["Linear"],
            "weights": {**shared, "dynamic": False, **self.weights},
            "input_activations": None if self.activations is None else {**shared, "dynamic": True, **self.activations},
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": self.layout,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(ignore),
            "kv_cache_scheme": None,
        }


_FLOAT8 = {"num_bits": 8, "type": "float"}
_INT8 = {"num_bits": 8, "type": "int"}
SCHEMES: Mapping[str, Scheme] = {
    "fp8": Scheme(
        layout="float-quantized", block=(1, None), dtype=torch.float8_e4m3fn, largest=448.0, half=448.0,
        weights={**_FLOAT8, "strategy": "channel"}, activations={**_FLOAT8, "strategy": "token"},
    ),
    "fp8-block": Scheme(
        layout="float-quantized", block=(128, 128), dtype=torch.float8_e4m3fn, largest=448.0, half=448.0,
        weights={**_FLOAT8, "strategy": "block", "block_structure": [128, 128]},
        activations={**_FLOAT8, "strategy": "group", "group_size": 128},
    ),
    "int8": Scheme(
        layout="int-quantized", block=(1, None), dtype=torch.int8, largest=127.0, half=127.5,
        weights={**_INT8, "strategy": "channel"}, activations={**_INT8, "strategy": "token"},
    ),
    "int4": Scheme(
        layout="pack-quantized", block=(1, 128), dtype=torch.int32, packed=8, largest=7.0, half=7.5,
        weights={"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
    ),
}  # fmt: skip


def is_high(module: str) -> bool:
    """Return whether a module's weight is kept as it is by default: of embeddings, heads, routers, norms."""
    return any(fnmatchcase(part, pattern) for part in module.split(".") for pattern in _HIGH)


def fitting(patterns: Sequence[str], modules: Mapping[str, object]) -> set[str]:
    """Return the modules that fit one of the patterns; raises CheckpointError for a pattern that fits none."""
    if lost := [pattern for pattern in patterns if not any(covers(pattern, module) for module in modules)]:
        raise CheckpointError(f"no weight of two dims belongs to a module {lost[0]!r}; {suggestion(lost[0], modules)}")
    return {module for module in modules if any(covers(pattern, module) for pattern in patterns)}


@final
class Quantized:
    """A published model's tensors, its linear weights (two dims, ``*.weight``) quantised but for those of ``high``."""

    def __init__(
        self, source: TypedSource, scheme: Scheme, dtype: torch.dtype | None, high: Sequence[str], *, checked: bool
    ) -> None:
        self._source, self._scheme, self._checked = source, scheme, checked
        dtypes, shapes, modules = source.dtypes(), source.shapes(), dict[str, tuple[int, ...]]()
        for name, shape in shapes.items():
            is_wide = dtypes[name].is_floating_point and dtypes[name].itemsize > 1
            if is_wide and name.endswith(".weight") and len(shape) == 2 and math.prod(shape) > 0:
                modules[name.removesuffix(".weight")] = shape
        chosen = fitting(high, modules)
        self.kept = [child for child in modules if is_high(child) or child in chosen]
        self.layers = {name: shape for name, shape in modules.items() if name not in self.kept}
        if not self.layers:
            raise CheckpointError(
                "no weight is left to quantise; expected tensors *.weight of two dims beside embeddings, heads and "
                "norms"
            )
        down, across = scheme.block[0], scheme.block[1] or 1
        if odd := [f"{name} {size}" for name, size in self.layers.items() if size[0] % down or size[1] % across]:
            raise CheckpointError(
                f"{len(odd)} weights do not divide into blocks of {down} x {across}: {', '.join(odd[:3])}; keep them "
                "high (--keep-high, in Python high=[...]), or choose a format with one scale a row (fp8, int8)"
            )
        self._parts: dict[str, tuple[str, str]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        for name, shape in shapes.items():
            module, wide = name.removesuffix(".weight"), dtypes[name]
            wide = dtype if dtype is not None and wide.is_floating_point else wide
            if name.endswith(".weight") and module in self.layers:
                self._add(module, wide if wide in (torch.float32, torch.bfloat16, torch.float16) else torch.float32)
            else:
                self._shapes[name], self._dtypes[name] = shape, wide
        self._scales: tuple[str, list[torch.Tensor]] = ("", [])

    def _add(self, module: str, scale_dtype: torch.dtype) -> None:
        """Note the stored tensors of a layer."""
        scheme, (rows, columns) = self._scheme, self.layers[module]
        name = f"{module}.weight" if scheme.packed == 1 else f"{module}.weight_packed"
        stored: dict[str, tuple[str, tuple[int, ...], torch.dtype]] = {
            name: ("weight", (rows, columns // scheme.packed), scheme.dtype),
            f"{module}.weight_scale": ("scale", scheme.grid((rows, columns)), scale_dtype),
        }
        if scheme.packed > 1:
            stored[f"{module}.weight_shape"] = "shape", (2,), torch.int64
        for key, (part, shape, dtype) in stored.items():
            self._parts[key], self._shapes[key], self._dtypes[key] = (module, part), shape, dtype

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return self._dtypes

    def pieces(self, name: str) -> Sequence[Box]:
        """Return the pieces of a tensor that is stored as it is."""
        return () if name in self._parts or not isinstance(self._source, StoredSource) else self._source.pieces(name)

    def tiles(self, name: str) -> Iterator[Spans]:
        """Yield the pieces in which to read a tensor, in order, after a check of a weight's stored bytes."""
        shape = self._shapes[name]
        module, part = self._parts.get(name, ("", ""))
        if part != "weight":
            yield from tiles(shape, self._dtypes[name].itemsize, _BYTES)
            return
        if self._checked and isinstance(self._source, StoredSource):
            for piece in self._source.pieces(f"{module}.weight"):
                check_piece(piece)
        unit = self._scheme.block[0]
        step = max(1, _TILE_ELEMENTS // self.layers[module][1] // unit) * unit
        for start in range(0, shape[0], step):
            yield (start, min(shape[0], start + step)), (0, shape[1])

    def read(self, name: str, index: tuple[slice, ...], out: torch.Tensor) -> None:
        module, part = self._parts.get(name, ("", ""))
        if not part:
            self._source.read(name, index, out)
        elif part == "shape":
            out.copy_(torch.tensor(self.layers[module])[index])
        elif part == "weight":
            (start, stop), columns = spans_of(index, self._shapes[name])
            unit = self._scheme.block[0]
            first = start // unit * unit
            weight, scales = self._stored(module, first, -(-stop // unit) * unit, out.device)
            self._keep(module, first // unit, scales)
            out.copy_(weight[start - first : stop - first, slice(*columns)])
        else:
            out.copy_(self._all_scales(module, out.device)[index])

    def _stored(self, module: str, start: int, stop: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        columns = self.layers[module][1]
        rows = torch.empty(stop - start, columns, device=device)
        self._source.read(f"{module}.weight", (slice(start, stop), slice(0, columns)), rows)
        weight, scales = self._scheme.store(rows, self._dtypes[f"{module}.weight_scale"])
        if not scales.is_meta and not scales.isfinite().all():
            raise CheckpointError(
                f"{module}.weight has values that are infinite, NaN or too large for a scale of {scales.dtype}, in "
                f"rows {start} to {stop}; export an earlier step, or keep this weight high"
            )
        return weight, scales

    def _keep(self, module: str, first: int, scales: torch.Tensor) -> None:
        """Keep the scales of the layer that is being written: they are written after its weight."""
        if first == 0:
            self._scales = (module, [])
        if self._scales[0] == module and sum(map(len, self._scales[1])) == first:
            self._scales[1].append(scales)

    def _all_scales(self, module: str, device: torch.device) -> torch.Tensor:
        if self._scales[0] != module or sum(map(len, self._scales[1])) < self._shapes[f"{module}.weight_scale"][0]:
            for spans in self.tiles(next(name for name, part in self._parts.items() if part == (module, "weight"))):
                first, stop = spans[0]
                self._keep(module, first // self._scheme.block[0], self._stored(module, first, stop, device)[1])
        return torch.cat(self._scales[1])

    def config(self) -> dict[str, Any]:
        """Return ``quantization_config``, as compressed-tensors writes it."""
        # a tied head has no tensor of its own
        heads = [] if any(name.endswith("lm_head") for name in self.kept) else ["lm_head"]
        return self._scheme.config([*self.kept, *heads])


def scheme_for(how: str, config: Mapping[str, Any] | None) -> Scheme:
    """Return the scheme of a format; raises CheckpointError for a model that compressed-tensors does not load in it."""
    if how not in SCHEMES:
        raise CheckpointError(f"quantize is {how!r}; expected one of {', '.join(SCHEMES)}")
    if not config:
        raise CheckpointError(
            "a quantised model needs a config.json, which tells engines its format; got none: pass one (--config DIR)"
        )
    if (kind := config.get("model_type")) in _CONV1D:
        raise CheckpointError(
            f"the layers of {kind} are transformers' Conv1D, which compressed-tensors does not load; export it plain, "
            "or as GGUF (--quantize q8_0)"
        )
    return SCHEMES[how]
