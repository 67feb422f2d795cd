"""The tensor-parallel styles: how one module computes when its features live on several ranks.

Parameters that are split become DTensors on the tensor axis (so that sharding, checkpoints, clipping and optimizers know them); the
arithmetic runs on their local tensors, with the collectives written out. Replicated parameters stay plain tensors.
Follows Megatron-LM (arXiv 1909.08053; sequence parallelism: arXiv 2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, final, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from meshpar.errors import PlanError
from meshpar.mesh import divisors
from meshpar.passes.collectives import copy_to, gather_partial, gather_replicated, reduce_from, reduce_scatter, regroup
from meshpar.passes.random import fork, join

SEQUENCE_DIM = 1
"""Activations are (batch, sequence, features)."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What every style of one application shares.

    Attributes:
        mesh: the tensor axis, 1-D.
        sequence_parallel: activations between regions are split along the sequence.
        loss_parallel: the head leaves its logits split over the vocabulary.
        dropout: random state must follow the axis.
        inputs: keyword names under which a region may receive its hidden states.
        sharded: id of a parameter as it was -> the DTensor parameter that took its place, so that tied ones stay tied.
        regions: name -> the region that a module stands in.
    """

    mesh: DeviceMesh
    sequence_parallel: bool
    loss_parallel: bool
    dropout: bool
    inputs: tuple[str, ...]
    sharded: dict[int, nn.Parameter] = field(default_factory=dict)
    regions: dict[str, Region] = field(default_factory=dict)

    def region_of(self, name: str) -> Region | None:
        """Return the innermost region around the module called ``name``."""
        parts = name.split(".")
        return next((self.regions[outer] for n in range(len(parts), 0, -1) if (outer := ".".join(parts[:n])) in self.regions), None)

    def enter(self, x: Tensor) -> Tensor:
        """Bring hidden states from between the regions to a computation that is split over the axis."""
        group = self.mesh.get_group()
        return gather_partial(x, SEQUENCE_DIM, group) if self.sequence_parallel else copy_to(x, group)

    def leave(self, x: Tensor) -> Tensor:
        """Bring the axis's partial sums back to hidden states between the regions.

        Raises:
            PlanError: under sequence parallelism, a sequence length that the axis does not divide.
        """
        group = self.mesh.get_group()
        if not self.sequence_parallel:
            return reduce_from(x, group)
        if x.shape[SEQUENCE_DIM] % group.size():
            raise PlanError(
                [
                    f"sequence length {x.shape[SEQUENCE_DIM]} is not divided by tp={group.size()}, over which sequence parallelism "
                    "splits it; pad the batch to a multiple, or use TensorParallel(sequence_parallel=False)"
                ]
            )
        return reduce_scatter(x, SEQUENCE_DIM, group)


@runtime_checkable
class Style(Protocol):
    """How one kind of module is split. A layout may bring its own."""

    def problems(self, name: str, module: nn.Module, size: int) -> Iterator[str]:
        """Yield why ``module`` cannot be split over ``size`` ranks; pure."""

    def shard(self, name: str, module: nn.Module, context: Context) -> None:
        """Replace the parameters that are split by DTensors on ``context.mesh``."""

    def install(self, name: str, module: nn.Module, context: Context) -> None:
        """Make the module compute with its shards."""


@final
class Region:
    """A module whose inside is split: one preparation of its input serves all projections in it."""

    def __init__(self) -> None:
        self._shared: Tensor | None = None
        self._device = torch.device("cpu")

    def problems(self, name: str, module: nn.Module, size: int) -> Iterator[str]:
        return iter(())

    def shard(self, name: str, module: nn.Module, context: Context) -> None:
        """Nothing of its own is split."""

    def install(self, name: str, module: nn.Module, context: Context) -> None:
        # Not a forward hook: recomputation and FSDP2 hook the same module, and their hooks must see the input as it came.
        inner = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], Tensor):
                key, x = None, args[0]
            else:
                key = next((key for key in context.inputs if isinstance(kwargs.get(key), Tensor)), None)
                if key is None:
                    wanted = " or ".join(context.inputs)
                    raise PlanError(
                        [f"{name} got no hidden states: expected a tensor first, or as {wanted}; name it in layout.hidden_inputs"]
                    )
                x = kwargs[key]
            self._begin(module, x, context)
            try:
                entered = context.enter(x)
                return inner(entered, *args[1:], **kwargs) if key is None else inner(*args, **kwargs | {key: entered})
            finally:
                self.end()

        _set_forward(module, forward)

    def _begin(self, module: nn.Module, x: Tensor, context: Context) -> None:
        if context.dropout and module.training and not context.sequence_parallel:
            self._device = x.device
            self._shared = fork(x.device, context.mesh.get_local_rank())

    def end(self) -> None:
        """Go back to the random state that the axis shares; activations are replicated from here on."""
        if self._shared is not None:
            join(self._device, self._shared)
            self._shared = None


@final
@dataclass(frozen=True, slots=True)
class Colwise:
    """A linear layer split by output features; ``parts`` > 1 where that many equal projections are fused.

    ``gather`` says what becomes of the output: ``"no"`` (it stays split), ``"yes"`` (joined again), ``"loss"`` (joined unless the plan
    asks for loss parallelism: the head over the vocabulary).
    """

    parts: int = 1
    gather: str = "no"

    def problems(self, name: str, module: nn.Module, size: int) -> Iterator[str]:
        features = _features(module)
        if features is None:
            yield f"{name} is a {type(module).__name__}, which cannot be split by output features; expected a linear layer"
        elif self.parts == 1:
            yield from _empty_problems(name, "output features", features[1], size)
        elif features[1] % (self.parts * size):
            yield (
                f"{name} fuses {self.parts} projections of {features[1] // self.parts} features, which tp={size} does not divide; "
                f"tp in {divisors(features[1] // self.parts)} would"
            )

    def shard(self, name: str, module: nn.Module, context: Context) -> None:
        _shard_parameter(module, "weight", 1 if _is_transposed(module) else 0, context)
        _shard_parameter(module, "bias", 0, context)

    def install(self, name: str, module: nn.Module, context: Context) -> None:
        group, out_dim = context.mesh.get_group(), 1 if _is_transposed(module) else 0
        prepare = context.enter if context.region_of(name) is None else None
        width = (_features(module) or (0, 0))[1]

        def forward(x: Tensor) -> Tensor:
            weight, bias = _local(module.weight), _local(module.bias)
            if self.parts > 1:
                weight = regroup(weight, self.parts, out_dim, group)
                bias = None if bias is None else regroup(bias, self.parts, 0, group)
            y = _linear(module, x if prepare is None else prepare(x), weight, bias)
            if self.gather == "no":
                return y
            if self.gather == "loss" and context.loss_parallel:
                shape = torch.Size((*y.shape[:-1], width))
                return DTensor.from_local(y, context.mesh, [Shard(y.ndim - 1)], run_check=False, shape=shape, stride=_strides(shape))
            return gather_replicated(y, width, group)

        _set_forward(module, forward)


@final
@dataclass(frozen=True, slots=True)
class Rowwise:
    """A linear layer split by input features; the partial sums are reduced and the bias is added once."""

    def problems(self, name: str, module: nn.Module, size: int) -> Iterator[str]:
        features = _features(module)
        if features is None:
            yield f"{name} is a {type(module).__name__}, which cannot be split by input features; expected a linear layer"
        else:
            yield from _empty_problems(name, "input features", features[0], size)

    def shard(self, name: str, module: nn.Module, context: Context) -> None:
        _shard_parameter(module, "weight", 0 if _is_transposed(module) else 1, context)

    def install(self, name: str, module: nn.Module, context: Context) -> None:
        region, group = context.region_of(name), context.mesh.get_group()

        def forward(x: Tensor) -> Tensor:
            y = context.leave(_linear(module, x, _local(module.weight), None))
            if region is not None:
                region.end()
            bias = module._parameters["bias"]
            if bias is None:
                return y
            return y + (copy_to(bias, group) if context.sequence_parallel else bias)

        _set_forward(module, forward)


@final
@dataclass(frozen=True, slots=True)
class Vocabulary:
    """An embedding split by rows: each rank looks up the tokens that it holds, and the results are summed."""

    def problems(self, name: str, module: nn.Module, size: int) -> Iterator[str]:
        if not isinstance(module, nn.Embedding):
            yield f"{name} is a {type(module).__name__}, which cannot be split by vocabulary rows; expected an Embedding"
        elif module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            yield f"{name} uses max_norm, sparse or scale_grad_by_freq, which rows on several ranks cannot; turn them off"
        else:
            yield from _empty_problems(name, "rows", module.num_embeddings, size)

    def shard(self, name: str, module: nn.Module, context: Context) -> None:
        _shard_parameter(module, "weight", 0, context)

    def install(self, name: str, module: nn.Module, context: Context) -> None:
        assert isinstance(module, nn.Embedding)
        rows = -(-module.num_embeddings // context.mesh.size())
        start = rows * context.mesh.get_local_rank()
        held = min(rows, module.num_embeddings - start)
        padding = module.padding_idx

        def lookup(tokens: Tensor) -> Tensor:
            weight = _local(module.weight)
            here = (tokens >= start) & (tokens < start + held)
            index = torch.where(here, tokens - start, 0)
            found = F.embedding(index, weight)
            if padding is not None:
                found = torch.where((tokens == padding)[..., None], found.detach(), found)
            return context.leave(found * here[..., None])

        # Scaled embeddings (Gemma's) wrap the lookup in a forward of their own; they keep it.
        plain = type(module).forward is nn.Embedding.forward
        _set_forward(module, lookup if plain else _with_scale(module, lookup))


@final
@dataclass(frozen=True, slots=True)
class Sequence:
    """A module that runs between the regions: under sequence parallelism on this rank's positions, otherwise as it is.

    An embedding (of positions) looks up every position and keeps this rank's; other modules (norms) get theirs as input.
    """

    def problems(self, name: str, module: nn.Module, size: int) -> Iterator[str]:
        return iter(())

    def shard(self, name: str, module: nn.Module, context: Context) -> None:
        """Its parameters stay whole."""

    def install(self, name: str, module: nn.Module, context: Context) -> None:
        if not context.sequence_parallel:
            return
        inner = module.forward
        if isinstance(module, nn.Embedding):
            ranks, me = context.mesh.size(), context.mesh.get_local_rank()

            def forward(positions: Tensor) -> Tensor:
                length = positions.shape[-1] // ranks
                return inner(positions.narrow(-1, me * length, length))

            _set_forward(module, forward)
        _sum_gradients(module, context)


@final
@dataclass(frozen=True, slots=True)
class GradSum:
    """A replicated module applied to this rank's slice of heads (q/k norms): its gradients are summed over the axis."""

    def problems(self, name: str, module: nn.Module, size: int) -> Iterator[str]:
        return iter(())

    def shard(self, name: str, module: nn.Module, context: Context) -> None:
        """Its parameters stay whole."""

    def install(self, name: str, module: nn.Module, context: Context) -> None:
        _sum_gradients(module, context)


def parse(text: Any) -> Style:
    """Return the style that a layout's text names.

    Raises:
        ValueError: no such style.
    """
    if not isinstance(text, str):
        return text
    name, _, argument = text.partition(":")
    if name == "packed_colwise" and argument.isdigit() and int(argument) > 1:
        return Colwise(parts=int(argument))
    if argument or name not in STYLES:
        raise ValueError(f"no tensor-parallel style {text!r}; there are {', '.join(sorted(STYLES))} and packed_colwise:N")
    return STYLES[name]()


STYLES: dict[str, Callable[[], Style]] = {
    "region": Region,
    "colwise": Colwise,
    "colwise_gather": lambda: Colwise(gather="yes"),
    "head": lambda: Colwise(gather="loss"),
    "rowwise": Rowwise,
    "vocab": Vocabulary,
    "sequence": Sequence,
    "grad_sum": GradSum,
}


def _set_forward(module: Any, forward: Callable[..., Any]) -> None:
    module.forward = forward


def _is_transposed(module: nn.Module) -> bool:
    """Tell GPT-2's Conv1D, whose weight is (in, out), from a linear layer, whose weight is (out, in)."""
    return type(module).__name__ == "Conv1D"


def _features(module: nn.Module) -> tuple[int, int] | None:
    """Return (input features, output features) of a linear layer, None for anything else."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not (isinstance(module, nn.Linear) or _is_transposed(module)):
        return None
    rows, columns = weight.shape
    return (rows, columns) if _is_transposed(module) else (columns, rows)


def _empty_problems(name: str, what: str, count: int, size: int) -> Iterator[str]:
    """Yield a split that leaves ranks with nothing; one that leaves the last rank less is exact."""
    if -(-count // size) * (size - 1) >= count:
        yield f"{name} has {count} {what}, which tp={size} splits so that some ranks would hold none; tp in {divisors(count) or 1} would do"


def _linear(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.t() if _is_transposed(module) else weight, bias)


def _local(parameter: Any) -> Any:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _shard_parameter(module: nn.Module, name: str, dim: int, context: Context) -> None:
    parameter = module._parameters.get(name)
    if parameter is None:
        return
    taken = context.sharded.get(id(parameter))
    if taken is None:
        local = parameter.detach().chunk(context.mesh.size(), dim)[context.mesh.get_local_rank()]
        whole = DTensor.from_local(
            local.clone(memory_format=torch.contiguous_format),
            context.mesh,
            [Shard(dim)],
            run_check=False,
            shape=parameter.shape,
            stride=_strides(parameter.shape),
        )
        taken = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        taken.__dict__.update(parameter.__dict__)
        context.sharded[id(parameter)] = context.sharded[id(taken)] = taken
    module._parameters[name] = taken


def _sum_gradients(module: nn.Module, context: Context) -> None:
    """Let the module's own parameters be seen through ``copy_to``, so that their partial gradients are summed inside autograd.

    A hook on the parameter would sum what earlier micro-batches accumulated once more.
    """
    inner, group = module.forward, context.mesh.get_group()

    def forward(*args: Any, **kwargs: Any) -> Any:
        own = {name: value for name, value in module._parameters.items() if value is not None}
        try:
            for name, value in own.items():
                module._parameters[name] = copy_to(value, group)  # type: ignore[assignment]
            return inner(*args, **kwargs)
        finally:
            module._parameters.update(own)

    _set_forward(module, forward)


def _with_scale(module: Any, lookup: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    if getattr(module, "embed_scale", None) is None:
        raise PlanError(
            [f"{type(module).__name__} has a forward of its own, which a split by vocabulary rows would skip; leave it out of the table"]
        )

    def forward(tokens: Tensor) -> Tensor:
        scale = module.embed_scale
        return lookup(tokens) * (scale.to(module.weight.dtype) if isinstance(scale, Tensor) else scale)

    return forward
