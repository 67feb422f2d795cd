"""Learning-rate schedules by name: pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, final

import torch

from meshpar.errors import RecipeError
from meshpar.patterns import suggestion
from meshpar.training.bounds import Bound, Count, bound_problems

Name = Literal["constant", "linear", "cosine", "step", "wsd"]
Scaling = Literal["none", "linear", "sqrt"]
"""How a learning rate grows with the number of data ranks, see :func:`scaled_rate`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Set the learning rate of every step.

    >>> from meshpar.training import Schedule
    >>> Schedule(name="constant", lr=1e-3, steps=100, warmup_steps=3).rate(1)
    0.0005

    Attributes:
        name: ``constant``, ``linear`` or ``cosine`` (both reach ``min_ratio`` at the last step), ``step`` (times ``gamma`` every
            ``step_every`` steps, like StepLR) or ``wsd`` (warm-up, stable, then linear decay over the last ``decay_fraction``; Hu et al.,
            MiniCPM, 2024).
        lr: the peak learning rate.
        steps: number of steps of the run.
        warmup_steps: number of steps with linear growth at the beginning; step 0 has ``lr / (warmup_steps + 1)``.
        min_ratio: lowest rate after the warm-up, as a share of the peak, for every schedule; 0: no floor, like torch.
        step_every: steps between two drops of ``step``.
        gamma: factor of a drop.
        decay_fraction: share of the steps over which ``wsd`` decays.
    """

    name: Name = "cosine"
    lr: Annotated[float, Bound(gt=0)] = 3e-4
    steps: Count = 1
    warmup_steps: Annotated[int, Bound(ge=0)] = 0
    min_ratio: Annotated[float, Bound(ge=0, le=1)] = 0.0
    step_every: Count = 1
    gamma: Annotated[float, Bound(gt=0, le=1)] = 0.1
    decay_fraction: Annotated[float, Bound(gt=0, le=1)] = 0.2

    def __post_init__(self) -> None:
        problems = [] if self.name in _SHAPES else [f"no schedule {self.name!r}; {suggestion(self.name, _SHAPES)}"]
        problems += bound_problems(self)
        if self.warmup_steps > self.steps:
            problems.append(f"warmup_steps must be from 0 to steps, got {self.warmup_steps} of {self.steps} steps")
        if problems:
            raise RecipeError("; ".join(problems))

    def factor(self, step: int) -> float:
        """Return the rate of ``step`` (from 0) as a part of the peak."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        return max(self.min_ratio, _SHAPES[self.name](self, step - self.warmup_steps))

    def rate(self, step: int) -> float:
        """Return the learning rate of ``step`` (from 0)."""
        return self.lr * self.factor(step)

    def apply(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        """Set the learning rate of every parameter group for ``step`` and return it."""
        rate = self.rate(step)
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        return rate


def scaled_rate(lr: float, mode: Scaling, data_size: int) -> float:
    """Return ``lr`` for ``data_size`` times the batch of one data rank.

    Args:
        lr: the rate that suits one data rank's batch.
        mode: ``none``, ``linear`` (Goyal et al., 2017) or ``sqrt`` (usual for Adam).
        data_size: how many data ranks.
    """
    scales = {"none": 1.0, "linear": float(data_size), "sqrt": math.sqrt(data_size)}
    if mode not in scales:
        raise RecipeError(f"scale_lr is one of {', '.join(scales)}; got {mode!r}")
    return lr * scales[mode]


def _progress(schedule: Schedule, step: int) -> float:
    return min(1.0, step / max(1, schedule.steps - schedule.warmup_steps))


def _constant(schedule: Schedule, step: int) -> float:
    return 1.0


def _linear(schedule: Schedule, step: int) -> float:
    return 1.0 - (1.0 - schedule.min_ratio) * _progress(schedule, step)


def _cosine(schedule: Schedule, step: int) -> float:
    return schedule.min_ratio + (1.0 - schedule.min_ratio) * 0.5 * (1.0 + math.cos(math.pi * _progress(schedule, step)))


def _step(schedule: Schedule, step: int) -> float:
    return schedule.gamma ** (step // schedule.step_every)


def _wsd(schedule: Schedule, step: int) -> float:
    left = 1.0 - _progress(schedule, step)
    return 1.0 - (1.0 - schedule.min_ratio) * max(0.0, 1.0 - left / schedule.decay_fraction)


_SHAPES: dict[Name, Callable[[Schedule, int], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "step": _step,
    "wsd": _wsd,
}
