"""LoRA (Hu et al., arXiv 2106.09685) through peft: small trained adapters beside frozen weights, on any plan.

peft builds the adapters; the model's layout describes them, so that passes shard them with the layers they adapt.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from meshpar._torch.calls import eager
from meshpar.core.errors import RecipeError
from meshpar.core.layout import ModelLayout
from meshpar.core.patterns import find_modules, matches
from meshpar.core.registry import layout_for
from meshpar.parallelized import Parallelized
from meshpar.passes.data.whole_parameters import local, sum_gradients
from meshpar.passes.tensor import random
from meshpar.passes.tensor.collectives import copy_weight
from meshpar.passes.tensor.context import Context, Style
from meshpar.process.imports import need, quiet_imports
from meshpar.state.initialize import own_init
from meshpar.tensors.placements import part_like
from meshpar.weights import Rename, WeightMap, WeightSource, dtypes_of
from meshpar.weights.maps import NAME, adapted_layers, base_name


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoRA:
    """Configure LoRA adapters.

    >>> from meshpar.training import LoRA
    >>> LoRA(targets=("q_proj", "v_proj"), rank=4).alpha
    16.0

    Attributes:
        targets: endings of the names of linear layers (``q_proj``), or ``all-linear``: all except the head.
        parameters: endings of the names of packed weights (experts, rows, columns), as in peft's ``target_parameters``:
            ``experts.gate_up_proj``. Each expert gets its own adapters.
        rank: rank of the product that is added to a weight.
        alpha: the product is scaled by ``alpha / rank``.
        dropout: probability of dropout on the adapters' input in training.
    """

    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    parameters: tuple[str, ...] = ()
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0 or not 0 <= self.dropout < 1 or not (self.targets or self.parameters):
            raise RecipeError(
                f"expected at least one target, rank of at least 1, alpha above 0 and dropout in 0 to 1; got {self}"
            )
        if self.parameters and self.dropout:
            raise RecipeError(
                f"adapters on packed weights are added to the weights and see no input, got dropout {self.dropout} "
                f"beside parameters {', '.join(self.parameters)}; set dropout to 0, or parameters to ()"
            )


def add_adapters(model: nn.Module, settings: LoRA) -> ModelLayout:
    """Add adapters to ``model`` (best on the meta device), freeze the rest, and return the layout for the plan.

    >>> par = plan.apply(model, add_adapters(model, LoRA()))  # doctest: +SKIP

    Raises:
        MeshparError: peft is not installed.
        RecipeError: the targets match no linear layer, or the parameters no packed weight.
    """
    peft = _peft()
    layout = layout_for(model)
    targets = settings.targets if isinstance(settings.targets, str) else list(settings.targets)
    _check_packed(model, settings.parameters)
    try:
        peft.inject_adapter_in_model(config_of(settings, targets), model, low_cpu_mem_usage=True)
    except ValueError as error:
        raise RecipeError(f"lora: {error}") from error
    adapted = _replace_packed(model, settings)
    weighted = {name: NAME in layer.lora_A and hasattr(layer.lora_A[NAME], "weight") for name, layer in adapted.items()}
    if odd := [name for name in adapted if not weighted[name]]:
        raise RecipeError(
            f"lora.targets name {odd[0]}, a {type(adapted[odd[0]].base_layer).__name__}; adapters require linear layers"
        )
    if not any(parameter.is_meta for name, parameter in model.named_parameters() if not _is_adapter(name)):
        for name, layer in adapted.items():
            devices = {inner: parameter.device for inner, parameter in layer.named_parameters()}
            device = next(device for inner, device in devices.items() if not _is_adapter(f".{inner}"))
            for part in ("lora_A", "lora_B"):
                module, full = getattr(layer, part)[NAME], f"{name}.{part}.{NAME}.weight"
                module.weight = nn.Parameter(draw_adapter(full, tuple(module.weight.shape), 0).to(device))
    return _adapt_layout(layout, model, adapted)


def config_of(settings: LoRA, targets: str | list[str], **others: Any) -> Any:  # noqa: ANN401 - peft's own arguments
    """Return peft's config of adapters on the linear layers ``targets`` and on the packed weights of the settings."""
    sizes = {"r": settings.rank, "lora_alpha": settings.alpha, "lora_dropout": settings.dropout}
    parameters = list(settings.parameters) or None
    return _peft().LoraConfig(target_modules=targets, target_parameters=parameters, **sizes, **others)


@final
class PackedAdapter(nn.Module):
    """Adapters on a packed weight, as peft's ``ParamWrapper``: the module below computes with ``W + scale * B @ A``."""

    def __init__(self, built: nn.Module) -> None:
        super().__init__()
        layer: Any = built
        self.base_layer, self.lora_A, self.lora_B = layer.base_layer, layer.lora_A, layer.lora_B
        self.leaf, self.scale = str(layer.parameter_name), float(layer.scaling[NAME])
        self._swaps = not layer._did_swap_in_out_features
        self._whole: list[Any] = []  # in a list, for it is no parameter of this module
        inner = self.inner()
        inner.register_forward_pre_hook(self._begin)  # FSDP2's own, which gathers, comes before
        inner.register_forward_hook(self._end, always_call=True)

    def inner(self) -> nn.Module:
        """Return the module that holds the weight: several adapters of one module stand around each other."""
        below: Any = self.base_layer
        return below.inner() if isinstance(below, PackedAdapter) else below

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the module below takes and returns
        return self.base_layer(*args, **kwargs)

    def factors(self, a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
        """Return A (experts x rank, in) and B (out, rank x experts) as factors (E, rows, rank), (E, rank, columns)."""
        a_EDR, b_ERF = a.unflatten(0, (experts, -1)).mT, b.unflatten(1, (-1, experts)).permute(2, 1, 0)
        return (a_EDR, b_ERF) if self._swaps else (b_ERF.mT, a_EDR.mT)

    @eager
    def _begin(self, module: nn.Module, args: object) -> None:
        whole: Any = module._parameters[self.leaf]
        weight = local(whole) if isinstance(whole, DTensor) else whole
        pair = [getattr(self, part)[NAME].weight for part in ("lora_A", "lora_B")]
        pair = [factor.to_local() if isinstance(factor, DTensor) else factor for factor in pair]
        placements = () if weight is whole else whole.placements
        parts = [(axis, how.dim) for axis, how in enumerate(placements) if isinstance(how, Shard)]
        for axis, _ in parts:  # a rank's part of W gives a part of the gradient of A and B
            pair = [copy_weight(factor, whole.device_mesh.get_group(axis)) for factor in pair]
        factors = list(self.factors(pair[0], pair[1], len(whole)))
        for axis, dim in parts:
            for at, side in enumerate(factors):
                if dim in (0, at + 1):
                    factors[at] = side.chunk(whole.device_mesh.size(axis), dim)[whole.device_mesh.get_local_rank(axis)]
        value = torch.baddbmm(weight, *(factor.to(weight.dtype) for factor in factors), alpha=self.scale)
        if weight is not whole:
            value = part_like(value, whole)
        self._whole.append(whole)
        module._parameters[self.leaf] = value  # type: ignore[assignment]

    @eager
    def _end(self, module: nn.Module, args: object, output: object) -> None:
        if self._whole:
            module._parameters[self.leaf] = self._whole.pop()


@final
class WithAdapters:
    """Combine published weights with new adapters, as one weight source. A is random, by ``seed``, and B is zero.

    >>> par.materialize(weights=WithAdapters(Safetensors(folder), par.module, seed=0))  # doctest: +SKIP

    Args:
        source: the published weights.
        module: the model with adapters.
    """

    def __init__(self, source: WeightSource, module: nn.Module, *, seed: int = 0) -> None:
        self._source, self._seed = source, seed
        shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters(remove_duplicate=False)}
        self._adapters = {name: shape for name, shape in shapes.items() if _is_adapter(name)}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return every tensor's name and shape."""
        return dict(self._source.shapes()) | self._adapters

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Return the dtypes of the published weights, if the source has dtypes."""
        return dtypes_of(self._source)

    def read(self, name: str, index: tuple[slice, ...], out: Tensor) -> None:
        """Copy ``tensor[index]`` into ``out``."""
        if name in self._adapters:
            out.copy_(draw_adapter(name, self._adapters[name], self._seed)[index])
        else:
            self._source.read(name, index, out)


@final
class Adapters:
    """Save and restore only the adapters of ``par``: ``manager.save(step, Adapters(par), optimizer)``."""

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

    def state_dict(  # type: ignore[override]
        self, *args: Any, keep_vars: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        trained = {name: parameter for name, parameter in self._whole[0].named_parameters() if parameter.requires_grad}
        return trained if keep_vars else {name: parameter.detach() for name, parameter in trained.items()}


def draw_adapter(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return an adapter's initial values, the same on every mesh: A from Kaiming's uniform distribution, B zero."""
    value = torch.zeros(shape)
    if ".lora_A." in name:
        generator = torch.Generator().manual_seed(random.mix(seed, zlib.crc32(name.encode())))
        nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
    return value


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def _check_packed(model: nn.Module, endings: tuple[str, ...]) -> None:
    """Raise RecipeError if an ending names anything but a packed weight."""
    for ending in endings:
        named = {name: parameter for name, parameter in model.named_parameters() if f".{name}".endswith(f".{ending}")}
        unpacked = (f"{name} {tuple(parameter.shape)}" for name, parameter in named.items() if parameter.ndim != 3)
        if (wrong := next(unpacked, None if named else "nothing")) is not None:
            names = (name for name, parameter in model.named_parameters() if parameter.ndim == 3)
            packed = sorted({".".join(name.split(".")[-2:]) for name in names})
            raise RecipeError(
                f"lora.parameters {ending!r} names {wrong}, expected a packed weight (experts, rows, columns); this "
                f"model has {', '.join(packed) or 'none, so drop lora.parameters'}"
            )


def _replace_packed(model: nn.Module, settings: LoRA) -> dict[str, Any]:
    """Put :class:`PackedAdapter` in the place of peft's layers on packed weights; return the layers with adapters."""
    for name, built in reversed(adapted_layers(model).items()):  # innermost first
        if hasattr(built, "parameter_name"):
            full = f"{base_name(name)}.{built.parameter_name}"
            if not any(f".{full}".endswith(f".{ending}") for ending in settings.parameters):
                raise RecipeError(
                    f"lora.targets {settings.targets} reach {full}, expected linear layers: this model has no layer "
                    "of its own for it; give lora.targets a list of names without it, and name packed weights in "
                    "lora.parameters"
                )
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, PackedAdapter(built))
    return adapted_layers(model)


def _adapt_layout(layout: ModelLayout, model: nn.Module, adapted: Mapping[str, Any]) -> ModelLayout:
    """Return the layout of the model with adapters."""
    table, refusal = dict[str, Any](), layout.tensor.refusal
    for pattern, style in layout.tensor.styles.items():
        names = [name for name, _ in find_modules(model, pattern)]
        touched = [name for name in names if name in adapted]
        if not touched:
            table[pattern] = style
            continue
        for name in names:
            packed = isinstance(adapted.get(name), PackedAdapter)
            if name not in adapted or packed:
                table[_inside(name, adapted)] = style
                continue
            # A is whole on a layer split by outputs; on one split by inputs it is split and reduced like the layer
            a, b = ("rowwise", "sequence") if style == "rowwise" else (WholeA(), style)
            table |= {f"{name}.base_layer": style, f"{name}.lora_A.{NAME}": a, f"{name}.lora_B.{NAME}": b}
            splits = isinstance(style, str) and style.partition(":")[0] in ("colwise", "packed_colwise", "rowwise")
            if not splits:
                refusal = f"adapters on {name}, whose style is {style}, cannot be split; leave it out of lora.targets"
    heads: dict[str, int] = {}
    for pattern, count in layout.tensor.heads.items():
        for name, _ in find_modules(model, pattern):
            parts = [f"{name}.base_layer", f"{name}.lora_B.{NAME}"] if name in adapted else [name]
            heads |= dict.fromkeys(parts, count)
    tied = tuple(
        tuple(f"{_inside(owner, adapted)}.{leaf}" for owner, _, leaf in (name.rpartition(".") for name in group))
        for group in layout.tied
    )
    modules, in_order = (
        tuple(_inside(name, adapted) for pattern in patterns for name, _ in find_modules(model, pattern))
        for patterns in (layout.experts.modules, layout.experts.in_order)
    )
    return replace(
        layout,
        tensor=replace(layout.tensor, styles=table, heads=heads, copied_heads=(), refusal=refusal),
        init=_Initialiser(layout, adapted),
        tied=tied,
        experts=replace(layout.experts, modules=modules, in_order=in_order),
        weights=WeightMap((*_renames(model), *layout.weights.rules)),
    )


def _inside(name: str, adapted: Mapping[str, Any]) -> str:
    """Return the name of the module that adapters were put around; of another its own."""
    while name in adapted:
        name += ".base_layer"
    return name


def _renames(model: nn.Module) -> Iterator[Rename]:
    """Yield rules from names of weights below adapters to those without; one where all layers have them."""
    every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    names = [name for name, _ in every if not _is_adapter(name)]
    below: dict[str, list[str]] = {}
    for name in names:
        if base_name(name) != name:
            below.setdefault(re.sub(r"\.\d+(?=\.)", ".*", name), []).append(name)
    for pattern, names_below in below.items():
        alone = any(matches(base_name(pattern), name) for name in names)
        yield from (Rename(name, base_name(name)) for name in (names_below if alone else [pattern]))


@final
@dataclass(frozen=True, slots=True)
class WholeA(Style):
    """The whole A before a B that is split by outputs."""

    def install(self, name: str, module: nn.Module, context: Context) -> None:
        """Sum the gradient over the axis if it is a partial sum; otherwise B's input does."""
        if context.sequence_parallel or context.region_of(name) is not None:
            sum_gradients(name, module, context)


@final
class _Initialiser:
    """A layout's initialisation, with the adapters' own; a class, because forecasts pickle layouts."""

    def __init__(self, layout: ModelLayout, adapted: Mapping[str, Any]) -> None:
        self._init = layout.init
        self._parts = {getattr(layer, part)[NAME]: part for layer in adapted.values() for part in ("lora_A", "lora_B")}

    def __call__(self, module: nn.Module) -> None:
        part = self._parts.get(module)
        if part == "lora_A":
            nn.init.kaiming_uniform_(module.get_parameter("weight"), a=math.sqrt(5))
        elif part == "lora_B":
            nn.init.zeros_(module.get_parameter("weight"))
        elif (init := self._init or own_init(module)) is not None:
            init(module)


@quiet_imports()
def _peft() -> ModuleType:
    return need("peft", extra="lora")
