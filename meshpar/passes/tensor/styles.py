"""The tensor-parallel styles: how one module computes when its features or rows are split over ranks.

Follows Megatron-LM (arXiv 1909.08053; sequence parallelism: arXiv 2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from meshpar._torch.calls import assert_async
from meshpar.core.errors import PlanError
from meshpar.core.mesh import sizes_text
from meshpar.passes.data.whole_parameters import (
    empty_problems,
    features_of,
    is_transposed,
    linear,
    local,
    replaced_problems,
    strides,
    sum_gradients,
)
from meshpar.passes.tensor.collectives import (
    copy_to,
    copy_weight,
    gather_replicated,
    join_parts,
    own_parts,
    split_replicated,
)
from meshpar.passes.tensor.context import SEQUENCE_DIM, Context, Style
from meshpar.passes.tensor.parts import FeatureTable
from meshpar.step.inner_calls import record, set_attribute, set_forward


@final
@dataclass(frozen=True, slots=True)
class Vocabulary(Style):
    """An embedding split by rows: each rank looks up the tokens that it holds, and the results are summed."""

    splits = splits_positions = stands_alone = computes_in_parts = True

    def problems(self, name: str, module: nn.Module, size: int) -> Iterator[str]:
        if not isinstance(module, nn.Embedding):
            yield f"{name} is a {type(module).__name__}, and no Embedding to split by rows; leave it out of the table"
        elif module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            yield (
                f"{name} uses max_norm, sparse or scale_grad_by_freq, which rows on several ranks cannot; turn them off"
            )
        else:
            if not _is_scaled(module):
                yield from replaced_problems(name, module, nn.Embedding)
            yield from empty_problems(name, "rows", module.num_embeddings, size)

    def split_dims(self, module: nn.Module) -> Mapping[str, int]:
        return {"weight": 0}

    def install(self, name: str, module: nn.Module, context: Context) -> None:
        assert isinstance(module, nn.Embedding)
        rows = -(-module.num_embeddings // context.parts)
        padding, scaled, group = module.padding_idx, _is_scaled(module), context.features

        def lookup(tokens: Tensor) -> Tensor:
            assert_async(
                ((tokens >= 0) & (tokens < module.num_embeddings)).all(), "a token is outside of the vocabulary"
            )

            def lookup_part(number: int, weight: Tensor) -> Tensor:
                start = rows * number
                width = min(rows, module.num_embeddings - start)
                here = (tokens >= start) & (tokens < start + width)
                index = torch.where(here, tokens - start, 0)
                vectors = F.embedding(index, weight)
                if padding is not None:
                    vectors = torch.where((tokens == padding)[..., None], vectors.detach(), vectors)
                return vectors * here[..., None]

            vectors = context.leave(context.of_each_part(lookup_part, own_parts(local(module.weight), 0, group)))
            if not scaled:
                return vectors
            scale: Any = module.embed_scale
            return vectors * (scale.to(module.weight.dtype) if isinstance(scale, Tensor) else scale)

        set_forward(module, lookup, reads_parameters=True)


def _is_scaled(module: nn.Module) -> bool:
    """Return whether this is an embedding of transformers' (Gemma's): a lookup times ``embed_scale``."""
    return getattr(module, "embed_scale", None) is not None and type(module).__module__.startswith("transformers.")


@final
@dataclass(frozen=True, slots=True)
class Region(Style):
    """A module whose inside is split: its input is prepared once for all projections in it."""

    # such as a position bias that an earlier layer computed
    local_inputs: tuple[str, ...] = ()
    # attributes of the module, of heads or features, that become those of one part
    counts: tuple[str, ...] = ()

    is_region = computes_in_parts = True

    def problems(self, name: str, module: nn.Module, size: int) -> Iterator[str]:
        for attribute in self.counts:
            value = vars(module).get(attribute)
            if not isinstance(value, int):
                yield (
                    f"{name}.{attribute} is {value!r}, and 'region:{','.join(self.counts)}' divides it; expected a "
                    "whole number: name attributes that count heads or features"
                )
            elif value % size:
                yield f"{name}.{attribute} is {value}, which tp={size} does not divide; {sizes_text('tp', value)}"

    def shard(self, name: str, module: nn.Module, context: Context) -> None:
        for attribute in self.counts:
            set_attribute(module, attribute, vars(module)[attribute] // context.parts)

    def install(self, name: str, module: nn.Module, context: Context) -> None:
        # Not a forward hook: recomputation and FSDP2 hook the same module, and their hooks must see the input as it
        # came.
        inner = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            named: Any = next((key for key in context.inputs if isinstance(kwargs.get(key), Tensor)), None)
            first: Any = 0 if args and isinstance(args[0], Tensor) else named
            if first is None:
                wanted = " or ".join(context.inputs)
                raise PlanError(
                    f"{name} got no hidden states: expected a tensor first, or as {wanted}; name it in "
                    "layout.tensor.hidden_inputs"
                )
            hidden = args[0] if first == 0 else kwargs[first]
            if not hidden.is_floating_point():
                got = f"{tuple(hidden.shape)} of {hidden.dtype}"
                raise PlanError(
                    f"{name or 'the model'} is a region, which splits what is computed of hidden states, and got "
                    f"{got}; give 'region' to the modules inside whose projections are split"
                )
            context.arrive(name, hidden)
            args = tuple(self._enter(name, "", value, number == first, context) for number, value in enumerate(args))
            return inner(
                *args, **{key: self._enter(name, key, value, key == first, context) for key, value in kwargs.items()}
            )

        set_forward(module, forward)

    def _enter(self, name: str, key: str, value: Any, is_hidden: bool, context: Context) -> Any:
        """Bring one input into the region; of the others only those whose gradient this rank would know in part."""
        if is_hidden:
            return context.enter(value)
        if not (isinstance(value, Tensor) and value.requires_grad) or key in self.local_inputs:
            return value
        if context.sequence_parallel:
            raise PlanError(
                f"{name} has a second input with a gradient, whose positions in the sequence are unknown; use "
                "TensorParallel(sequence_parallel=False)"
            )
        return copy_to(value, context.features)


@final
@dataclass(frozen=True, slots=True)
class Colwise(Style):
    """A linear layer split by output features."""

    # equal projections that are fused
    parts: int = 1
    # the output stays split by "no", is joined by "yes", and by "loss" unless the loss is parallel
    gather: str = "no"

    splits = computes_in_parts = True

    @property
    def stands_alone(self) -> bool:  # type: ignore[override]
        return self.gather != "no"

    @property
    def splits_logits(self) -> bool:  # type: ignore[override]
        return self.gather == "loss"

    def problems(self, name: str, module: nn.Module, size: int) -> Iterator[str]:
        if (features := features_of(module)) is None:
            yield (
                f"{name} is a {type(module).__name__}, and no linear layer to split by output features; leave it out "
                "of the table"
            )
            return
        yield from replaced_problems(name, module, nn.Linear)
        width = features[1]
        if self.parts == 1:
            yield from empty_problems(name, "output features", width, size)
        elif width % (self.parts * size):
            yield (
                f"{name} fuses {self.parts} projections of {width // self.parts} features, which tp={size} does not "
                f"divide; {sizes_text('tp', width // self.parts)}"
            )

    def split_dims(self, module: nn.Module) -> Mapping[str, int]:
        return {"weight": 1 if is_transposed(module) else 0, "bias": 0}

    def install(self, name: str, module: nn.Module, context: Context) -> None:
        group, out_dim = context.features, 1 if is_transposed(module) else 0
        prepare = context.enter if context.region_of(name) is None else None
        width = (features_of(module) or (0, 0))[1]
        if self.gather == "no":
            context.join_after(name)

        def forward(x: Tensor) -> Tensor:
            if self.gather == "no":
                context.part(module, x)
            if prepare is not None:
                context.arrive(name, x)
            weight, bias = own_parts(local(module.weight), out_dim, group, self.parts), local(module.bias)
            bias = None if bias is None else own_parts(bias, 0, group, self.parts)
            return finish(linear(module, x if prepare is None else prepare(x), weight, bias))

        def finish(y: Tensor) -> Tensor:
            if self.gather == "no":
                return y
            # generation wants all logits
            if self.gather == "loss" and context.loss_parallel and torch.is_grad_enabled():
                shape = torch.Size((*y.shape[:-1], width))
                y = join_parts(y, y.ndim - 1, group)
                return DTensor.from_local(
                    y, context.mesh, [Shard(y.ndim - 1)], run_check=False, shape=shape, stride=strides(shape)
                )
            return gather_replicated(y, width, group)

        set_forward(module, forward, reads_parameters=True)
        # what the chunked loss does around its own products, which are of whole shards
        if self.gather == "loss" and prepare is not None and context.features is context.group:
            record(module).around = (prepare, finish)


@final
@dataclass(frozen=True, slots=True)
class Rowwise(Style):
    """A linear layer split by input features, reduced to a sum; ``split_input`` where the input comes whole."""

    split_input: bool = False

    splits = computes_in_parts = True

    def problems(self, name: str, module: nn.Module, size: int) -> Iterator[str]:
        if (features := features_of(module)) is None:
            yield (
                f"{name} is a {type(module).__name__}, and no linear layer to split by input features; leave it out "
                "of the table"
            )
        else:
            yield from replaced_problems(name, module, nn.Linear)
            yield from empty_problems(name, "input features", features[0], size)

    def split_dims(self, module: nn.Module) -> Mapping[str, int]:
        return {"weight": 0 if is_transposed(module) else 1}

    def install(self, name: str, module: nn.Module, context: Context) -> None:
        group, in_dim = context.features, 0 if is_transposed(module) else 1

        def forward(x: Tensor) -> Tensor:
            x = split_replicated(x, group) if self.split_input else x
            y = context.leave(linear(module, x, own_parts(local(module.weight), in_dim, group), None))
            context.join()
            bias = local(module._parameters["bias"])
            if bias is None:
                return y
            if not context.sequence_parallel:
                return y + bias
            return join_parts(own_parts(y, SEQUENCE_DIM, group) + copy_weight(bias, group), SEQUENCE_DIM, group)

        set_forward(module, forward, reads_parameters=True)


@final
@dataclass(frozen=True, slots=True)
class Sequence(Style):
    """A module between the regions (norm, position embedding): under sequence parallelism on a rank's positions."""

    stands_alone = splits_positions = computes_in_parts = True

    def install(self, name: str, module: nn.Module, context: Context) -> None:
        if not context.sequence_parallel:
            return
        inner, group, is_embedding = module.forward, context.features, isinstance(module, nn.Embedding)
        if is_embedding:

            def forward(positions: Tensor) -> Tensor:
                length = context.positions_each(positions.shape[-1]) * context.size // context.parts
                return inner(context.of_each_part(lambda number: positions.narrow(-1, number * length, length)))

            set_forward(module, forward)
        sum_gradients(name, module, context)
        if context.features is context.group:
            return
        summed = module.forward

        def forward_in_parts(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            x = x if is_embedding else own_parts(x, SEQUENCE_DIM, group)
            return join_parts(summed(x, *args, **kwargs), SEQUENCE_DIM, group)

        set_forward(module, forward_in_parts)


@final
@dataclass(frozen=True, slots=True)
class GradSum(Style):
    """A replicated module applied to this rank's slice of heads (q/k norms): its gradients are summed over the axis."""

    sums_gradients = computes_in_parts = True

    def install(self, name: str, module: nn.Module, context: Context) -> None:
        sum_gradients(name, module, context)


def parse(text: Any) -> Style:
    """Return the style that a layout's text names; ValueError where there is none."""
    if isinstance(text, Style):
        return text
    if not isinstance(text, str):
        raise ValueError(
            f"{text!r} is no tensor-parallel style; write a style's name, or an object whose class inherits Style"
        )
    name, _, argument = text.partition(":")
    if name == "packed_colwise" and argument.isdigit() and int(argument) > 1:
        return Colwise(parts=int(argument))
    if name == "region" and all(map(str.isidentifier, counts := argument.split(","))):
        return Region(counts=tuple(counts))
    if argument or name not in STYLES:
        raise ValueError(
            f"no tensor-parallel style {text!r}; there are {', '.join(sorted(STYLES))}, packed_colwise:N and "
            "region:ATTRIBUTE,..."
        )
    return STYLES[name]()


PER_HEAD = "per_head"
PARAMETER_STYLES = (PER_HEAD, "grad_sum")
"""The styles of a single parameter, which its pattern names: split along its first dim, or its gradient summed."""

STYLES: dict[str, Callable[[], Style]] = {
    "region": Region,
    "colwise": Colwise,
    "colwise_gather": lambda: Colwise(gather="yes"),
    "head": lambda: Colwise(gather="loss"),
    "rowwise": Rowwise,
    "rowwise_split": lambda: Rowwise(split_input=True),
    "vocab": Vocabulary,
    "features": FeatureTable,
    "sequence": Sequence,
    "grad_sum": GradSum,
}
