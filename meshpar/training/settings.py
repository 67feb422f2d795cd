"""How long a run is, what happens how often, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, final

from meshpar.errors import RecipeError
from meshpar.training.bounds import Bound, Count, Every, bound_problems


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
        validate_every: steps between two validations, or ``"epoch"``; None: only at the end. The end of a run always has one.
        validate_steps: number of validation batches; None: all.
        checkpoint_every: steps between two checkpoints, or ``"epoch"``; None: only at the end. The end of a run always has one.
        check_replicas_every: steps between two comparisons of parameters that must be equal; None: only at the start. The start of a run
            always has one.
        clip: largest gradient norm; None: only measure the norm.
        nonfinite: reaction to a loss or gradient that is not finite: ``"raise"``, or ``"skip"`` the step (float16 with a scaler always
            skips). To skip, the host reads the norm of every step. To raise, the host reads an accelerator's norm at each record and before
            each checkpoint: no checkpoint contains the weights of such a step.
        balance_rate: change of each expert's bias per optimizer step (DeepSeek-V3, arXiv 2412.19437, section 2.1.2, which uses 0.001): the
            bias rises if the expert got fewer tokens than the mean of its layer, over all ranks, and falls if it got more. 0: biases stay.
        balance_loss: coefficient of Switch's loss (arXiv 2101.03961, section 2.2), added to the loss of each micro-batch: computed from the
            tokens of all ranks, mean over layers. 0: none.
        reduce_each: reduce gradients after every micro-batch, which saves memory.
        seed: seed of the random state. Step s draws from a state made of ``seed`` and s, so no random state is saved.
    """

    steps: Count | None = None
    epochs: Count | None = None
    log_every: Count = 10
    validate_every: Every = None
    validate_steps: Count | None = None
    checkpoint_every: Every = None
    check_replicas_every: Count | None = None
    clip: Annotated[float, Bound(gt=0)] | None = 1.0
    nonfinite: Literal["raise", "skip"] = "raise"
    balance_rate: Annotated[float, Bound(ge=0)] = 0.0
    balance_loss: Annotated[float, Bound(ge=0)] = 0.0
    reduce_each: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        problems = ["set the length of the training: steps=, epochs= or both"] if self.steps is None and self.epochs is None else []
        problems += bound_problems(self)
        if self.nonfinite not in ("raise", "skip"):
            problems.append(f"nonfinite is 'raise' or 'skip', got {self.nonfinite!r}")
        if problems:
            raise RecipeError("; ".join(problems))

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return how many steps a run from the beginning has."""
        bounds = [self.steps, None if self.epochs is None else self.epochs * steps_per_epoch]
        return min(bound for bound in bounds if bound is not None)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Hold the end of a run: its ``steps``, the reason why it ``stopped`` (None: it is complete), and its last values."""

    steps: int
    stopped: str | None
    values: Mapping[str, float]
