"""AdamW for a parallel module's parameters, learning-rate schedules by name, and loss scaling for float16; of any
optimizer its values for evaluation, and whether its step of whole tensors is that of their parts: exact on shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, Protocol, final, get_args, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from meshpar._torch.tensors import foreach_mul_
from meshpar.core import runtime
from meshpar.core.errors import MeshparError, RecipeError, brief
from meshpar.core.layout import ModelLayout
from meshpar.core.passes import find_blocks
from meshpar.core.patterns import suggestion, tied_names
from meshpar.optim.matrices import parameter_groups
from meshpar.parallelized import Parallelized
from meshpar.passes.pipeline.portion import first_covering
from meshpar.passes.pipeline.running import Layers
from meshpar.same_bits.trees import SameBits
from meshpar.step.forward import fact_of, layout_of
from meshpar.tensors.placements import by_device, local_tensor
from meshpar.training.settings import Bound, Count, Part, bound_problems

_FUSED_DEVICES = ("cpu", "cuda", "xpu", "hpu", "mps", "mtia")
Name = Literal["constant", "linear", "cosine", "step", "wsd"]
Scaling = Literal["none", "linear", "sqrt"]
"""How a learning rate grows with the number of data ranks, see :func:`scaled_rate`."""
_SHAPES, _CUTS = ((64, 128), (4000,)), (37, 1300)  # small and large parts: some quantise tensors from 4,096 elements
_STEPS = 3
_TOLERANCE = 1e-5  # of the largest change: kernels round the ends of a vector in another way


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWSettings:
    """Configure AdamW (Loshchilov and Hutter, 2019).

    >>> from meshpar.training import AdamWSettings
    >>> AdamWSettings(lr=1e-3).betas
    (0.9, 0.95)

    Attributes:
        lr: learning rate, until a schedule sets another.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decay of parameters with two dims or more; biases and norms do not decay.
        fused: one kernel for many parameters; None: if the device supports it.
    """

    lr: Annotated[float, Bound(gt=0)] = 3e-4
    betas: tuple[Part, Part] = (0.9, 0.95)
    eps: Annotated[float, Bound(gt=0)] = 1e-8
    weight_decay: Annotated[float, Bound(ge=0)] = 0.1
    fused: bool | None = None

    def __post_init__(self) -> None:
        if problems := list(bound_problems(self)):
            raise RecipeError("; ".join(problems))


def build_adamw(module: nn.Module, settings: AdamWSettings) -> torch.optim.AdamW:
    """Return AdamW over the trainable parameters; build it after ``plan.apply`` and ``materialize``."""
    groups = parameter_groups(module, settings.weight_decay)
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    # on a CPU the fused kernel computes the ends of shards by other instructions
    cuts_matter = fact_of(module, SameBits) is not None and any(map(runtime.on_host, devices))
    fused = settings.fused if settings.fused is not None else devices <= set(_FUSED_DEVICES) and not cuts_matter
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=fused)


def scale_rates(
    optimizer: torch.optim.Optimizer,
    module: nn.Module | Parallelized,
    rates: Mapping[str, float] | None = None,
    *,
    layer_decay: float | None = None,
) -> None:
    """Multiply the learning rates of parameters by factors that follow from their names, the same on every mesh.

    Groups of the optimizer are divided; a group's ``lr_scale`` is its factor, which schedules and checkpoints keep.

    >>> import torch
    >>> from torch import nn
    >>> from meshpar.training import scale_rates
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    >>> scale_rates(optimizer, model, {"0": 0.5})
    >>> print([group["lr"] for group in optimizer.param_groups])
    [0.05, 0.1]

    Args:
        optimizer: has made no step yet.
        module: the module or its ``Parallelized``, whose parameters the optimizer has.
        rates: pattern of parameters or modules -> factor; the first pattern that matches counts.
        layer_decay: factor of each block from the last one down, times that of ``rates`` (Clark et al., ELECTRA, 2020):
            of n blocks the last has ``layer_decay``, the first ``layer_decay ** n``, what is before the blocks
            ``layer_decay ** (n + 1)``, and what comes behind them 1.
    """
    module = module if isinstance(module, nn.Module) else module.module
    rates, layers = dict(rates or {}), fact_of(module, Layers)
    if wrong := [factor for factor in (*rates.values(), 1.0 if layer_decay is None else layer_decay) if not factor > 0]:
        raise MeshparError(f"a factor of a learning rate must be above 0, got {wrong[0]}")
    if layers is not None and any(layers.ties.shared.keys() & group for group in tied_names(module)):
        raise MeshparError(
            "scale_rates: embedding and head are tied over stages of pp, where each stage names the weight in its own "
            "way; use a mesh without pp, or a model whose weights are not tied"
        )
    chosen = first_covering([*rates], module, "rates pattern")
    depths = {} if layer_decay is None else _depths(module, layout_of(module))
    ids, decay = [id(parameter) for parameter in module.parameters()], layer_decay or 1.0
    factors = {id_: rates.get(chosen.get(id_, ""), 1.0) * decay ** depths.get(id_, 0) for id_ in ids}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        parts: dict[float, list[torch.Tensor]] = {}
        for parameter in group["params"]:
            parts.setdefault(factors[id(parameter)], []).append(parameter)
        for times, part in parts.items():
            scales = {"lr": group["lr"] * times, "lr_scale": group.get("lr_scale", 1.0) * times}
            groups.append({**group, "params": part, **scales})
    optimizer.param_groups[:] = groups


def _depths(module: nn.Module, layout: ModelLayout) -> dict[int, int]:
    """Return by ``id`` of a parameter how many blocks are behind it, its own included; one more before all blocks."""
    every = {name for name, _ in find_blocks(module, layout)}
    every |= {*layers.portion.line} if (layers := fact_of(module, Layers)) is not None else set()
    blocks = [name for name, _ in module.named_modules() if name in every]
    if not blocks:
        problem = "layer_decay: the model's layout names no blocks; give ModelLayout(blocks=...), or use rates"
        raise MeshparError(problem)
    depths, begun = dict[int, int](), 0
    for name, child in module.named_modules():
        begun += name in blocks
        counted = not begun or f"{name}.".startswith(f"{blocks[begun - 1]}.")  # before all blocks, or inside of one
        for parameter in child.parameters(recurse=False):
            depths.setdefault(id(parameter), len(blocks) - begun + counted)
    return depths


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Set the learning rate of every step.

    >>> from meshpar.training import Schedule
    >>> Schedule(name="constant", lr=1e-3, steps=100, warmup_steps=3).rate(1)
    0.0005

    Attributes:
        name: ``constant``, ``linear`` or ``cosine`` (both reach ``min_ratio`` at the last step), ``step`` (times
            ``gamma`` every ``step_every`` steps, like StepLR) or ``wsd`` (warm-up, stable, then linear decay over the
            last ``decay_fraction``; Hu et al., MiniCPM, 2024).
        lr: the peak learning rate.
        steps: length of the schedule, if it differs from the run's; None: the run's length.
        warmup_steps: number of steps with linear growth at the beginning; step 0 has ``lr / (warmup_steps + 1)``.
        warmup_ratio: length of the warm-up as a share of the schedule, instead of ``warmup_steps``.
        min_ratio: lowest rate after the warm-up, as a share of the peak, for every schedule; 0: no floor, like torch.
        step_every: steps between two drops of ``step``.
        gamma: factor of a drop.
        decay_fraction: share of the steps over which ``wsd`` decays.
        decay_steps: number of last steps over which ``wsd`` decays, instead of ``decay_fraction``. A run of ``wsd`` can
            decay from any of its checkpoints: resume with ``training.steps`` of that step plus ``decay_steps``.
    """

    name: Name = "cosine"
    lr: Annotated[float, Bound(gt=0)] = 3e-4
    steps: Count | None = None
    warmup_steps: Annotated[int, Bound(ge=0)] = 0
    warmup_ratio: Part = 0.0
    min_ratio: Annotated[float, Bound(ge=0, le=1)] = 0.0
    step_every: Count = 1
    gamma: Annotated[float, Bound(gt=0, le=1)] = 0.1
    decay_fraction: Annotated[float, Bound(gt=0, le=1)] = 0.2
    decay_steps: Count | None = None

    def __post_init__(self) -> None:
        names = get_args(Name)
        problems = [] if self.name in names else [f"no schedule {self.name!r}; {suggestion(self.name, names)}"]
        problems += bound_problems(self)
        if self.steps is not None and self.warmup_steps > self.steps:
            problems.append(f"warmup_steps must be from 0 to steps, got {self.warmup_steps} of {self.steps} steps")
        if problems:
            raise RecipeError("; ".join(problems))

    def over(self, steps: int) -> Schedule:
        """Return the schedule of a run of so many steps: with its length and its warm-up in steps.

        >>> Schedule(warmup_ratio=0.1).over(50).warmup_steps
        5
        """
        steps = self.steps or steps
        warmup_steps = self.warmup_steps or round(self.warmup_ratio * steps)
        return replace(self, steps=steps, warmup_steps=warmup_steps, warmup_ratio=0.0)

    def factor(self, step: float) -> float:
        """Return the rate of ``step`` (from 0) as a part of the peak."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        return max(self.min_ratio, self._shape(step - self.warmup_steps))

    def _shape(self, step: float) -> float:
        """Return the part of the peak at a step after the warm-up, for every schedule without its floor."""
        if self.name in ("constant", "step"):
            return 1.0 if self.name == "constant" else self.gamma ** (step // self.step_every)
        if self.steps is None:
            problem = "a schedule without steps has no length of its own; set steps=, or use schedule.over(steps)"
            raise RecipeError(problem)
        length = max(1, self.steps - self.warmup_steps)
        progress = min(1.0, step / length)
        if self.name == "cosine":
            return self.min_ratio + (1.0 - self.min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))
        if self.name == "wsd":
            share = self.decay_fraction if self.decay_steps is None else self.decay_steps / length
            progress = max(0.0, 1.0 - (1.0 - progress) / share)
        return 1.0 - (1.0 - self.min_ratio) * progress

    def rate(self, step: float) -> float:
        """Return the learning rate of ``step`` (from 0), which may lie between two steps."""
        return self.lr * self.factor(step)

    def apply(self, optimizer: torch.optim.Optimizer, step: float) -> float:
        """Set the rate of ``step`` in every parameter group, times its ``lr_scale``, and return the rate."""
        rate = self.rate(step)
        for group in optimizer.param_groups:
            group_rate = rate * group.get("lr_scale", 1.0)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(group_rate)
            else:
                group["lr"] = group_rate
        return rate


def scaled_rate(lr: float, mode: Scaling, data_size: int) -> float:
    """Return ``lr`` of one data rank for ``data_size`` times its batch (``linear``: Goyal et al., 2017)."""
    scales = {"none": 1.0, "linear": float(data_size), "sqrt": math.sqrt(data_size)}
    if mode not in scales:
        raise RecipeError(f"scale_lr is one of {', '.join(scales)}; got {mode!r}")
    return lr * scales[mode]


@final
class LossScaler:
    """Scale the loss so that float16 gradients do not underflow, and skip steps that overflow (Micikevicius et al.).

    ``torch.amp.GradScaler`` detects overflow in each rank's shards. Here the gradient norm decides for all ranks.

    >>> from meshpar.training import LossScaler
    >>> scaler = LossScaler(scale=1024.0)
    >>> scaler.update(norm=float("inf")), scaler.scale
    (False, 512.0)

    Attributes:
        scale: factor of the loss.
        skipped: number of steps skipped so far.
    """

    def __init__(
        self, *, scale: float = 2.0**16, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000
    ) -> None:
        """Begin with ``scale``: times ``growth`` after ``interval`` good steps, ``backoff`` after an overflow."""
        if not (scale > 0 and growth >= 1 and 0 < backoff < 1 and interval >= 1):
            raise RecipeError(
                f"expected scale > 0, growth >= 1, backoff in 0 to 1, interval >= 1; got {scale}, {growth}, "
                f"{backoff}, {interval}"
            )
        self.scale, self.skipped = scale, 0
        self._growth, self._backoff, self._interval, self._good = growth, backoff, interval, 0

    @torch.no_grad()
    def unscale_(self, module: nn.Module) -> None:
        """Divide every gradient of this rank by the scale; call it before clipping."""
        grads = (local_tensor(parameter.grad) for parameter in module.parameters() if parameter.grad is not None)
        for together in by_device(grads).values():
            foreach_mul_(together, 1.0 / self.scale)

    def update(self, norm: float) -> bool:
        """Adapt the scale by the norm of the unscaled gradients, and return whether the optimizer may step."""
        if math.isfinite(norm):
            self._good += 1
            if self._good == self._interval:
                self.scale, self._good = self.scale * self._growth, 0
            return True
        self.scale, self._good, self.skipped = self.scale * self._backoff, 0, self.skipped + 1
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {"scale": self.scale, "good": self._good, "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self.scale, self._good, self.skipped = state["scale"], state["good"], state["skipped"]


@runtime_checkable
class HasModes(Protocol):
    """An optimizer whose parameters have other values in evaluation than in training, as those of schedulefree."""

    def train(self) -> Any: ...  # noqa: ANN401 - returned by nobody
    def eval(self) -> Any: ...  # noqa: ANN401


@contextmanager
def use_evaluation_values(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Give the parameters an optimizer's values for evaluation inside of the ``with`` block; most have no others."""
    if not isinstance(optimizer, HasModes):
        yield
        return
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()


def check_elementwise(make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    """Raise MeshparError if an optimizer that ``make`` returns does not step shards as it steps whole tensors."""
    before, name = _draw(torch.Generator().manual_seed(0)), ""
    try:
        name = type(make(nn.ParameterList(map(nn.Parameter, before)))).__name__
        whole, *parts = (_train(make, partial(_part, number)) for number in (None, 0, 1))
        differs = any(
            not float((result - torch.cat(halves)).abs().max()) <= _TOLERANCE * float((result - start).abs().max())
            for start, result, *halves in zip(before, whole, *parts, strict=True)
        )
        if not differs:
            with nullcontext() if dist.is_initialized() else runtime.simulated(1):
                mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("trial",))
                _train(make, lambda _, value: DTensor.from_local(value, mesh, [Shard(0)]))
    except Exception as error:
        raise MeshparError(
            f"the optimizer {name} cannot be tried on a few numbers, whole and as shards ({brief(error)}), which shows "
            "whether its step on shards is exact; use another, such as torch.optim.AdamW"
        ) from error
    if differs:
        raise MeshparError(
            f"the step of {name} on a whole tensor differs from its step on two parts of the tensor: an element "
            "depends on others, or on random numbers, so training would depend on the mesh; use a rule for each "
            "element alone, torch.optim.Adafactor, or meshpar.optim (class: muon, small_adamw)"
        )


def _draw(draw: torch.Generator) -> list[Tensor]:
    return [torch.randn(shape, generator=draw) for shape in _SHAPES]


def _part(number: int | None, cut: int, value: Tensor) -> Tensor:
    return value if number is None else value.tensor_split([cut])[number].clone()


def _train(make: Callable[[nn.Module], torch.optim.Optimizer], placed: Callable[[int, Tensor], Tensor]) -> list[Tensor]:
    """Return tensors, as ``placed`` makes them of a place to cut and a value, after some steps of an optimizer."""
    draw = torch.Generator().manual_seed(0)
    module = nn.ParameterList(nn.Parameter(value) for value in map(placed, _CUTS, _draw(draw)))
    optimizer = make(module)
    if isinstance(optimizer, HasModes):
        optimizer.train()
    for _ in range(_STEPS):
        for parameter, grad in zip(module, map(placed, _CUTS, _draw(draw)), strict=True):
            parameter.grad = grad
        optimizer.step()
    return [parameter.detach() for parameter in module]
