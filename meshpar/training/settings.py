"""Settings of a run, how it ended, and bounds of fields."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from types import NoneType
from typing import Annotated, Any, Literal, final, get_args, get_origin, get_type_hints

from meshpar.core.errors import RecipeError

_WORDS = {"ge": "from", "gt": "above", "le": "to", "lt": "below"}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Bounds on a field's value, as an annotation: ``Annotated[int, Bound(ge=1)]``; pydantic reads them, too."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    @property
    def _limits(self) -> dict[str, float]:
        return {name: limit for name, limit in asdict(self).items() if limit is not None}

    def __contains__(self, value: Any) -> bool:
        return all(getattr(operator, name)(value, limit) for name, limit in self._limits.items())

    def __str__(self) -> str:
        return " ".join(f"{_WORDS[name]} {limit}" for name, limit in self._limits.items())

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return handler(source) | self._limits


Count = Annotated[int, Bound(ge=1)]
"""A number of things of which there is at least one."""

Every = Count | Literal["epoch"] | None
"""How often something happens: steps between two times, ``"epoch"`` (at its end) or None (never)."""

Part = Annotated[float, Bound(ge=0, lt=1)]
"""A part of a whole, and not all of it."""


def bound_problems(settings: Any) -> Iterator[str]:
    """Yield one line for each field of a dataclass object whose value is outside its bounds."""
    for name, hint in get_type_hints(type(settings), include_extras=True).items():
        kinds = [hint] if get_origin(hint) is Annotated else list(get_args(hint))
        several = get_origin(hint) is tuple
        for index, number in enumerate(kinds):
            if get_origin(number) is not Annotated:
                continue
            kind, bound = get_args(number)
            value = getattr(settings, name)
            value = value[index] if several else value
            alternatives = [] if several else [alternative for alternative in kinds if alternative is not number]
            inner = [choice for alternative in alternatives for choice in get_args(alternative) or [alternative]]
            allowed = [None if choice is NoneType else choice for choice in inner]
            fits = isinstance(value, kind if kind is int else (int, float)) and value in bound
            if value not in allowed and not fits:
                whole = "an integer " if kind is int else ""
                yield f"{name} must be {whole}{bound}{''.join(f' or {other!r}' for other in allowed)}, got {value!r}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """Set the length of the training and the frequency of its events, in optimizer steps.

    >>> from meshpar.training import TrainSettings
    >>> TrainSettings(steps=100, epochs=3).total_steps(steps_per_epoch=20)
    60

    Attributes:
        steps: stop after this number of steps; None: no limit.
        epochs: stop after this number of passes over the data, if that is earlier; None: no limit.
        log_every: steps between two records. A checkpoint between them adds a record, also that of a stopped job.
        validate_every: steps between two validations, or ``"epoch"``; None: only at the end. The end of a run always
            has one.
        validate_steps: number of validation batches; None: all.
        checkpoint_every: steps between two checkpoints, or ``"epoch"``; None: only at the end. The end of a run always
            has one.
        check_replicas_every: steps between two comparisons of parameters that must be equal; None: only at the start.
            The start of a run always has one.
        digest_every: steps between two digests of the weights (``weights/digest``), equal on every mesh for equal bits,
            by which ``meshpar compare`` finds where two runs differ; a new run begins with one. None: none.
        clip: largest gradient norm; None: only measure the norm.
        norms: patterns of modules whose gradient norms are reported, too, as ``grad_norm/NAME``: ``[embed, layers.*]``.
        nonfinite: reaction to a loss or gradient that is not finite: ``"raise"``, or ``"skip"`` the step (float16 with
            a scaler always skips). To skip, the host reads the norm of every step. To raise, the host reads an
            accelerator's norm at each record and before each checkpoint: no checkpoint contains the weights of such a
            step.
        skip_spikes: skip a step whose gradient norm is above this factor of the median of the last 100 norms, once
            there are 20; the record's ``skipped`` counts these steps, and a warning names each. The norm of a skipped
            step stays out of the median. The host reads the norm of every step. None: no step is skipped for its norm.
        balance_rate: change of each expert's bias per optimizer step (DeepSeek-V3, arXiv 2412.19437, section 2.1.2,
            which uses 0.001): the bias rises if the expert got fewer tokens than the mean of its layer, over all ranks,
            and falls if it got more. 0: biases stay.
        balance_loss: coefficient of Switch's loss (arXiv 2101.03961, section 2.2), added to the loss of each
            micro-batch: computed from the tokens of all ranks, mean over layers. 0: none.
        reduce_each: reduce gradients after every micro-batch, which saves memory.
        on_error: reaction to an error of a validation or an evaluation: ``"continue"`` logs the error and trains on;
            ``"stop"`` ends the run after a checkpoint. A step that is due is saved before it is validated.
        silent_s: seconds that an evaluation may take between two calls of the model before the watchdog counts the time
            as no progress.
        grace_s: seconds after a stop request within which an evaluation has to end. The run then ends without its
            result.
        seed: seed of the random state. Step s draws from a state made of ``seed`` and s, so no random state is saved.
    """

    steps: Count | None = None
    epochs: Count | None = None
    log_every: Count = 10
    validate_every: Every = None
    validate_steps: Count | None = None
    checkpoint_every: Every = None
    check_replicas_every: Count | None = None
    digest_every: Count | None = None
    clip: Annotated[float, Bound(gt=0)] | None = 1.0
    norms: tuple[str, ...] = ()
    nonfinite: Literal["raise", "skip"] = "raise"
    skip_spikes: Annotated[float, Bound(gt=1)] | None = None
    balance_rate: Annotated[float, Bound(ge=0)] = 0.0
    balance_loss: Annotated[float, Bound(ge=0)] = 0.0
    reduce_each: bool = False
    on_error: Literal["continue", "stop"] = "continue"
    silent_s: Annotated[float, Bound(gt=0)] = 1800.0
    grace_s: Annotated[float, Bound(gt=0)] = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        problems = list(bound_problems(self))
        if self.steps is None and self.epochs is None:
            problems.insert(0, "set the length of the training: steps=, epochs= or both")
        if self.nonfinite not in ("raise", "skip"):
            problems.append(f"nonfinite is 'raise' or 'skip', got {self.nonfinite!r}")
        if self.on_error not in ("continue", "stop"):
            problems.append(f"on_error is 'continue' or 'stop', got {self.on_error!r}")
        if problems:
            raise RecipeError("; ".join(problems))

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return how many steps a run from the beginning has."""
        bounds = [self.steps, None if self.epochs is None else self.epochs * steps_per_epoch]
        return min(bound for bound in bounds if bound is not None)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended: its ``steps``, why it ``stopped`` (None: it is complete), and its last ``values``."""

    steps: int
    stopped: str | None
    values: Mapping[str, float]
