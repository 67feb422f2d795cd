"""Tensor-parallel styles for modules with parameters of their own: experts, per-head vectors, feature-split tables."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshpar.core.mesh import sizes_text
from meshpar.passes.data.whole_parameters import (
    empty_problems,
    features_of,
    is_transposed,
    linear,
    local,
    replaced_problems,
    shard_parameter,
)
from meshpar.passes.tensor.collectives import copy_to, copy_weight, gather_replicated, own_parts
from meshpar.passes.tensor.context import Context, Style
from meshpar.step.inner_calls import set_forward


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Parts(Style):
    """A module that computes with this rank's part of its own parameters."""

    # name of an own parameter -> (dim that is split, how many equal parts stand fused along it)
    dims: Mapping[str, tuple[int, int]]
    # parameters that are added to the partial sums (biases): each rank adds its share of the whole
    added: tuple[str, ...] = ()
    # parameters used whole on a part of heads or features: their gradients are summed
    summed: tuple[str, ...] = ()
    # the module takes replicated inputs to partial sums (experts); else what is around it has styles
    sums: bool = False

    splits = computes_in_parts = True

    def problems(self, name: str, module: nn.Module, size: int) -> Iterator[str]:
        for parameter, value in module.named_parameters(recurse=False):
            if parameter not in self.dims:
                if self.sums and parameter not in self.added:
                    yield (
                        f"{name}.{parameter} has no rule for the split over tp, and its gradient would be incomplete; "
                        f"leave {name} whole"
                    )
                continue
            dim, parts = self.dims[parameter]
            length = value.shape[dim]
            if length % (parts * size):
                fused = f"{parts} parts of " if parts > 1 else ""
                fits = sizes_text("tp", length // parts)
                yield (
                    f"{name}.{parameter} has {fused}{length // parts} in dim {dim}, which tp={size} does not divide; "
                    f"{fits}"
                )

    def split_dims(self, module: nn.Module) -> Mapping[str, int]:
        parameters = {name: value for name, value in module._parameters.items() if value is not None}
        return {name: dim % parameters[name].ndim for name, (dim, _) in self.dims.items() if name in parameters}

    def install(self, name: str, module: nn.Module, context: Context) -> None:
        inner, group = module.forward, context.features

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self.sums:
                return with_own(module, self._parts(module, group), lambda: inner(*args, **kwargs))
            args = tuple(_enter(value, context) for value in args)
            kwargs = {key: _enter(value, context) for key, value in kwargs.items()}
            first = next(argument for argument in (*args, *kwargs.values()) if isinstance(argument, Tensor))
            parts = self._parts(module, group)
            return context.sum_of(module, first, lambda: with_own(module, parts, lambda: inner(*args, **kwargs)))

        set_forward(module, forward, reads_parameters=True)

    def _parts(self, module: nn.Module, group: Any) -> dict[str, Tensor]:
        """Return what this rank computes with in the place of the module's own parameters."""
        parts = {name: local(value) for name, value in module._parameters.items() if value is not None}
        for name, part in parts.items():
            if name in self.dims:
                dim, fused = self.dims[name]
                parts[name] = own_parts(part, dim % part.ndim, group, fused)
            elif name in (*self.added, *self.summed):
                whole = copy_weight(part, group)
                parts[name] = whole / group.size() if name in self.added else whole
        return parts


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Experts(Style):
    """Whole experts a rank, for tokens that chose them; the forward skips numbers beyond its experts."""

    # splits inside the experts where the axis does not divide their number
    otherwise: Parts | None = None

    splits = True

    def problems(self, name: str, module: nn.Module, size: int) -> Iterator[str]:
        count = _expert_count(module)
        if count % size == 0:
            return
        problems = list(self.otherwise.problems(name, module, size)) if self.otherwise else [""]
        if problems:
            yield f"{name} has {count} experts, which tp={size} does not divide; {sizes_text('tp', count)}"
            yield from filter(None, problems)

    def shard(self, name: str, module: nn.Module, context: Context) -> None:
        other, names = self._other(name, module, context), [name for name, _ in module.named_parameters(recurse=False)]
        dims = dict.fromkeys(names, 0) if other is None else other.split_dims(module)
        for parameter, dim in dims.items():
            shard_parameter(module, parameter, dim, context)

    def install(self, name: str, module: nn.Module, context: Context) -> None:
        if (other := self._other(name, module, context)) is not None:
            other.install(name, module, context)
            return
        group = context.group
        count, inner = _expert_count(module) // group.size(), module.forward
        bind = inspect.signature(inner).bind

        def forward(*args: Any, **kwargs: Any) -> Any:
            bound = bind(*args, **kwargs)
            first, *rest = bound.arguments
            index = next(key for key in rest if not bound.arguments[key].is_floating_point())
            weight = next(key for key in rest if bound.arguments[key].is_floating_point())
            chosen = bound.arguments[index] - group.rank() * count
            elsewhere = (chosen < 0) | (chosen >= count)
            weights = copy_to(bound.arguments[weight], group).masked_fill(elsewhere, 0.0)
            bound.arguments |= {
                first: _enter(bound.arguments[first], context),
                index: chosen.masked_fill(elsewhere, count),
                weight: weights,
            }
            parts = {key: local(value) for key, value in module._parameters.items() if value is not None}
            counted = {"num_experts": count, "_is_expert_parallel": True}
            run = partial(with_own, module, parts, lambda: inner(*bound.args, **bound.kwargs), counted)
            return context.sum_of(module, weights, run)

        set_forward(module, forward, reads_parameters=True)

    def _other(self, name: str, module: nn.Module, context: Context) -> Parts | None:
        """Return how to split inside experts, whole where another axis divides them already and cannot again."""
        if any(
            isinstance(parameter, DTensor) and parameter.device_mesh.ndim > 1
            for parameter in module.parameters(recurse=False)
        ):
            parts = self.otherwise
            return Parts(dims={}) if parts is None or any(parts.problems(name, module, context.size)) else parts
        return self.otherwise if _expert_count(module) % context.size else None


@final
@dataclass(frozen=True, slots=True)
class FeatureTable(Style):
    """An embedding split by features: each rank looks up slices of vectors, joined unless ``gather`` is False."""

    gather: bool = True

    splits = computes_in_parts = True

    @property
    def stands_alone(self) -> bool:  # type: ignore[override]
        return self.gather

    def problems(self, name: str, module: nn.Module, size: int) -> Iterator[str]:
        if type(module).forward is not nn.Embedding.forward:
            yield (
                f"{name} is a {type(module).__name__}, and no Embedding to split by features; leave it out of the table"
            )
        else:
            yield from replaced_problems(name, module, nn.Embedding)
            yield from empty_problems(name, "features", module.get_parameter("weight").shape[1], size)

    def split_dims(self, module: nn.Module) -> Mapping[str, int]:
        return {"weight": 1}

    def install(self, name: str, module: nn.Module, context: Context) -> None:
        inner, group, width = module.forward, context.features, module.get_parameter("weight").shape[1]
        if not self.gather:
            context.join_after(name)

        def forward(tokens: Tensor) -> Tensor:
            weight = own_parts(local(module.weight), 1, group)
            vectors = with_own(module, {"weight": weight}, lambda: inner(tokens))
            if self.gather:
                return gather_replicated(vectors, width, group)
            context.part(module, vectors)
            return vectors

        set_forward(module, forward, reads_parameters=True)


@final
@dataclass(frozen=True, slots=True)
class Shared(Style):
    """A module whose output every rank adds to a partial sum: each adds its share of it."""

    computes_in_parts = True

    def problems(self, name: str, module: nn.Module, size: int) -> Iterator[str]:
        if any(True for _ in module.parameters()):
            yield f"{name} has parameters, whose gradients a share would scale; leave it out of the table"

    def install(self, name: str, module: nn.Module, context: Context) -> None:
        inner, size = module.forward, context.parts
        set_forward(module, lambda x: inner(x) / size)


@final
@dataclass(frozen=True, slots=True)
class CopiedHeads(Style):
    """A projection to fewer heads (keys, values) than ranks: whole on each rank, which computes one head with it."""

    heads: int

    def install(self, name: str, module: nn.Module, context: Context) -> None:
        group, dim = context.features, 1 if is_transposed(module) else 0
        width = (features_of(module) or (0, 0))[1] // self.heads
        prepare = context.enter if context.region_of(name) is None else None

        def of_head(whole: Tensor, dim: int) -> Tensor:
            def narrow(number: int, x: Tensor) -> Tensor:
                return x.narrow(dim, number * self.heads // group.size() * width, width)

            return context.of_each_part(narrow, copy_weight(whole, group))

        def forward(x: Tensor) -> Tensor:
            weight, bias = local(module._parameters["weight"]), local(module._parameters.get("bias"))
            weight = of_head(weight, dim)
            bias = None if bias is None else of_head(bias, 0)
            return linear(module, x if prepare is None else prepare(x), weight, bias)

        set_forward(module, forward, reads_parameters=True)


def with_own(
    module: nn.Module, own: Mapping[str, Tensor], run: Callable[[], Any], attributes: Mapping[str, Any] | None = None
) -> Any:
    """Return ``run()`` while the module's own parameters (and plain attributes) are these."""
    parameters = {name: module._parameters[name] for name in own}
    before = {name: module.__dict__[name] for name in attributes or {} if name in module.__dict__}
    try:
        module._parameters.update(own)  # type: ignore[arg-type]
        module.__dict__.update({name: value for name, value in (attributes or {}).items() if name in before})
        return run()
    finally:
        module._parameters.update(parameters)
        module.__dict__.update(before)


def local_parameters(module: nn.Module) -> dict[str, Any]:
    """Return this rank's parts of the parameters of a module's own, also of plain ones."""
    return {
        name: local(parameter) if isinstance(parameter, DTensor) else parameter
        for name, parameter in module._parameters.items()
        if parameter is not None
    }


def _enter(value: Any, context: Context) -> Any:
    """Bring one input to a computation that is split, if a gradient comes back through it."""
    return context.enter(value) if isinstance(value, Tensor) and value.is_floating_point() else value


def _expert_count(module: nn.Module) -> int:
    return min((len(value) for value in module.parameters(recurse=False)), default=0)
