"""LoRA (Hu et al., arXiv 2106.09685) through peft: small trained adapters beside frozen weights, on any plan.

peft builds the adapters. The model's layout describes them, so that passes shard them with the layers that they adapt. Only the adapters
are trained and saved in checkpoints.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from meshpar.errors import MeshparError, RecipeError
from meshpar.layout import ModelLayout
from meshpar.parallelized import Parallelized
from meshpar.passes import random
from meshpar.passes.local import sum_gradients
from meshpar.passes.tensor.context import Context, Style
from meshpar.patterns import find_modules
from meshpar.registry import layout_for
from meshpar.weights import WeightSource, dtypes_of

NAME = "default"
"""The adapter's name in peft, which is part of the names of its parameters."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoRA:
    """Settings of LoRA adapters.

    Attributes:
        targets: endings of the names of linear layers (``q_proj``), or ``all-linear``: all except the head.
        rank: rank of the product that is added to a weight.
        alpha: the product is scaled by ``alpha / rank``.
        dropout: probability of dropout on the adapters' input in training.
    """

    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0 or not 0 <= self.dropout < 1 or not self.targets:
            raise RecipeError(f"expected at least one target, rank of at least 1, alpha above 0 and dropout in 0 to 1; got {self}")


def add_adapters(model: nn.Module, settings: LoRA) -> ModelLayout:
    """Add adapters to ``model`` (best on the meta device), freeze its other parameters, and return the layout for the plan.

    >>> par = plan.apply(model, add_adapters(model, LoRA()))  # doctest: +SKIP

    Args:
        model: the model to adapt, in place.
        settings: targets, rank, alpha and dropout.

    Raises:
        MeshparError: peft is not installed.
        RecipeError: the targets match no linear layer.
    """
    peft = _peft()
    layout = layout_for(model)
    targets = settings.targets if isinstance(settings.targets, str) else list(settings.targets)
    config = peft.LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=targets, lora_dropout=settings.dropout)
    try:
        peft.inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    except ValueError as error:
        raise RecipeError(f"lora: {error}") from error
    adapted = adapted_layers(model)
    if odd := [name for name, layer in adapted.items() if NAME not in layer.lora_A or not hasattr(layer.lora_A[NAME], "weight")]:
        raise RecipeError(f"lora.targets name {odd[0]}, a {type(adapted[odd[0]].base_layer).__name__}; adapters require linear layers")
    if not adapted:
        raise RecipeError(f"lora.targets {targets} match no linear layer of the model; give endings of their names, or all-linear")
    if not any(parameter.is_meta for name, parameter in model.named_parameters() if not _is_adapter(name)):
        _fill_adapters(model, adapted)
    return _adapted(layout, model, adapted)


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return peft's layers by name."""
    return {name: child for name, child in model.named_modules() if hasattr(child, "base_layer") and hasattr(child, "lora_A")}


@final
class WithAdapters:
    """A published model's weights as a source for a model with adapters. A is random and B is zero, as in peft.

    >>> par.materialize(weights=WithAdapters(Safetensors(folder), par.module, seed=0))  # doctest: +SKIP

    Args:
        source: the published weights.
        module: the model with adapters.
        seed: seed of A.
    """

    def __init__(self, source: WeightSource, module: nn.Module, *, seed: int = 0) -> None:
        self._source, self._seed = source, seed
        shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters(remove_duplicate=False)}
        self._adapters = {name: shape for name, shape in shapes.items() if _is_adapter(name)}
        self._renamed = {name: base_name(name) for name in shapes if ".base_layer." in name}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return every tensor's name and shape."""
        offered = dict(self._source.shapes())
        moved = {name: offered.pop(base) for name, base in self._renamed.items() if base in offered}
        return offered | moved | self._adapters

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Return the dtypes of the published weights, if the source has dtypes."""
        known = dict(dtypes_of(self._source))
        return known | {name: known.pop(base) for name, base in self._renamed.items() if base in known}

    def read(self, name: str, index: tuple[slice, ...], out: Tensor) -> None:
        """Copy ``tensor[index]`` into ``out``."""
        if name in self._adapters:
            out.copy_(drawn(name, self._adapters[name], self._seed)[index])
        else:
            self._source.read(self._renamed.get(name, name), index, out)


@final
class Adapters:
    """The adapters of a parallel model, to save and restore: ``manager.save(step, Adapters(par), optimizer)``."""

    def __init__(self, par: Parallelized) -> None:
        self.module: nn.Module = _TrainedOnly(par.module)
        self.mesh, self.plan, self.device, self.manual_seed = par.mesh, par.plan, par.device, par.manual_seed
        # Neither config nor weight map, because a whole model is not saved.
        self.layout = ModelLayout(blocks=par.layout.blocks)


@final
class _TrainedOnly(nn.Module):
    """A module's trained parameters under their names."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self._whole = (whole,)  # in a tuple, so that it is no part of this module

    def state_dict(self, *args: Any, keep_vars: bool = False, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        trained = {name: parameter for name, parameter in self._whole[0].named_parameters() if parameter.requires_grad}
        return trained if keep_vars else {name: parameter.detach() for name, parameter in trained.items()}


def base_name(name: str) -> str:
    """Return a parameter's name in the model without adapters."""
    return name.replace(".base_layer.", ".")


def drawn(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return an adapter's initial values, the same on every mesh: A from Kaiming's uniform distribution, B zero."""
    value = torch.zeros(shape)
    if ".lora_A." in name:
        generator = torch.Generator().manual_seed(random.mix(seed, zlib.crc32(name.encode())))
        nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
    return value


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def _fill_adapters(model: nn.Module, adapted: Mapping[str, Any]) -> None:
    """Allocate and initialise the adapters of a model that already has weights."""
    for name, layer in adapted.items():
        device = layer.base_layer.weight.device
        for part in ("lora_A", "lora_B"):
            inner = getattr(layer, part)[NAME]
            shape = tuple(inner.weight.shape)
            inner.weight = nn.Parameter(drawn(f"{name}.{part}.{NAME}.weight", shape, 0).to(device))


def _adapted(layout: ModelLayout, model: nn.Module, adapted: Mapping[str, Any]) -> ModelLayout:
    """Return the layout of the model with adapters."""
    table, refusals = dict[str, Any](), dict(layout.refusals)
    for pattern, style in layout.tensor.items():
        names = [name for name, _ in find_modules(model, pattern)]
        touched = [name for name in names if name in adapted]
        if not touched:
            table[pattern] = style
            continue
        for name in names:
            table.update(_styles(name, style) if name in adapted else {name: style})
            if name in adapted and not (isinstance(style, str) and style.partition(":")[0] in ("colwise", "packed_colwise", "rowwise")):
                refusals["tp"] = f"adapters on {name}, whose style is {style}, cannot be split; leave it out of lora.targets"
    heads: dict[str, int] = {}
    for pattern, count in layout.heads.items():
        for name, _ in find_modules(model, pattern):
            heads |= dict.fromkeys([f"{name}.base_layer", f"{name}.lora_B.{NAME}"] if name in adapted else [name], count)
    init = _Initialiser(layout, adapted)
    tied = tuple(tuple(_moved(name, adapted) for name in group) for group in layout.tied)
    return replace(layout, tensor=table, heads=heads, refusals=refusals, init=init, tied=tied, copied_heads=())


def _moved(name: str, adapted: Mapping[str, Any]) -> str:
    owner, _, leaf = name.rpartition(".")
    return f"{owner}.base_layer.{leaf}" if owner in adapted else name


def _styles(name: str, style: object) -> dict[str, Any]:
    """Return the styles of an adapted layer's parts.

    Beside a layer split by outputs, A is whole; beside one split by inputs, A is split and reduced as the layer is, and B runs on what
    comes out of it.
    """
    inner, a, b = f"{name}.base_layer", f"{name}.lora_A.{NAME}", f"{name}.lora_B.{NAME}"
    if style == "rowwise":
        return {inner: style, a: "rowwise", b: "sequence"}
    return {inner: style, a: WholeA(), b: style}


@final
@dataclass(frozen=True, slots=True)
class WholeA(Style):
    """The whole A in front of a B that is split by outputs.

    Inside a region it sees the gradient of this rank's part of B, and under sequence parallelism outside of one this rank's positions:
    both are parts of a sum over the axis. Otherwise B prepares its own input, which sums the gradient before it comes here.
    """

    def install(self, name: str, module: nn.Module, context: Context) -> None:
        """Sum the gradient over the axis if it is a partial sum."""
        if context.sequence_parallel or context.region_of(name) is not None:
            sum_gradients(name, module, context)


@final
class _Initialiser:
    """A layout's initialisation, with the adapters' own. A class, because a forecast sends layouts to its process."""

    def __init__(self, layout: ModelLayout, adapted: Mapping[str, Any]) -> None:
        self._init = layout.init
        self._parts = {getattr(layer, part)[NAME]: part for layer in adapted.values() for part in ("lora_A", "lora_B")}

    def __call__(self, module: nn.Module) -> None:
        part = self._parts.get(module)
        if part == "lora_A":
            nn.init.kaiming_uniform_(module.get_parameter("weight"), a=math.sqrt(5))
        elif part == "lora_B":
            nn.init.zeros_(module.get_parameter("weight"))
        elif self._init is not None:
            self._init(module)
        else:
            next(_own_init(module))()


def _own_init(module: nn.Module) -> Iterator[Callable[[], Any]]:
    for method in ("reset_parameters", "_reset_parameters"):
        if callable(getattr(module, method, None)):
            yield getattr(module, method)
    yield lambda: None


def _peft() -> ModuleType:
    try:
        import peft
    except ImportError as error:
        raise MeshparError("adapters require peft, which is not installed: pip install 'meshpar[lora]'") from error
    return peft
