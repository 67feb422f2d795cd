"""Objectives compute a loss from a model and a batch, summed over the counted labels.

A plugin (entry-point group ``meshpar.objectives``) is such an object, or a class whose options a recipe sets. Optional
members: ``examples``, a kind of :data:`EXAMPLES` (default: packed text), and ``unit``, what the console counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol, final

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from meshpar.core.errors import MeshparError, RecipeError
from meshpar.core.mesh import MeshSpec
from meshpar.core.passes import Role, axes_of
from meshpar.losses.chunked import chunk_for, chunked_token_loss
from meshpar.losses.token_loss import IGNORE_INDEX, token_loss, token_losses
from meshpar.plan import Plan
from meshpar.training.settings import Bound, bound_problems

SummedLoss = tuple[torch.Tensor, int | torch.Tensor, Mapping[str, torch.Tensor]]

EXAMPLES = ("tokens", "pairs", "labels")
"""Kinds of examples: packed text; texts with target texts; texts with labels."""


class Objective(Protocol):
    """Define the loss of a training, as a protocol; losses are sums, so that they add over micro-batches and ranks."""

    def tokens(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Return how many tokens (or examples) of this batch, which may be on a CPU, the loss counts."""
        ...

    def loss(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> SummedLoss:
        """Return the summed loss (a scalar), the number of counted tokens or examples, and further sums to report by
        name.

        Every reported sum is divided by the count over all ranks and micro-batches.
        """
        ...


class _CountsLabels:
    __slots__ = ()

    def tokens(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Return the number of counted labels."""
        return int((batch["labels"] != IGNORE_INDEX).sum())


@final
@dataclass(frozen=True, slots=True)
class CausalLM(_CountsLabels):
    """Predict the next token: ``labels`` (B, L) are the tokens after each of ``input_ids`` (B, L); -100 is not counted.

    Attributes:
        chunk: positions whose logits are held at once (:func:`meshpar.chunked_token_loss`); 0: all, in one piece; None:
            chunks where the logits are large and the layout names the head.
        z_loss: weight of :func:`meshpar.token_loss`'s ``z_loss``, added while the model trains; the cross entropy
            alone is then reported as ``cross_entropy``.
    """

    chunk: int | None = None
    z_loss: Annotated[float, Bound(ge=0)] = 0.0

    def __post_init__(self) -> None:
        if problems := list(bound_problems(self)):
            raise RecipeError("; ".join(problems))
        if self.chunk is not None and self.chunk < 0:
            problem = f"CausalLM(chunk={self.chunk}) must be 0 (all logits at once), a number of positions, or None"
            raise MeshparError(problem)

    def loss(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> SummedLoss:
        """Return the summed loss in float32, of plain or vocabulary-sharded logits."""
        labels, inputs = batch["labels"], {name: value for name, value in batch.items() if name != "labels"}
        chunk = chunk_for(model, batch) if self.chunk is None else self.chunk
        how: dict[str, Any] = {"reduction": "sum", "z_loss": self.z_loss if model.training else 0.0}
        with token_losses() as losses:
            if chunk:
                loss = chunked_token_loss(model, inputs, labels, chunk=chunk, **how)
            else:
                loss = token_loss(logits_of(self, model, model(**inputs), "(B, L, V)"), labels, **how)
        more = {"cross_entropy": torch.cat(losses).sum()} if how["z_loss"] else {}
        return loss, (labels != IGNORE_INDEX).sum(), more


@final
@dataclass(frozen=True, slots=True)
class Seq2Seq(_CountsLabels):
    """Predict a target text from an input text, with an encoder and a decoder.

    A batch: ``input_ids`` and ``attention_mask`` (B, S) for the encoder; ``decoder_input_ids`` (B, T), the target
    behind the start token; ``labels`` (B, T), the target, -100 where none counts.
    """

    examples: ClassVar[str] = "pairs"

    def loss(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> SummedLoss:
        """Return the cross entropy summed over the targets' tokens, in float32."""
        labels = batch["labels"]
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "decoder_input_ids")}
        logits = logits_of(self, model, model(**inputs), "(B, T, V)")
        return token_loss(logits, labels, reduction="sum"), (labels != IGNORE_INDEX).sum(), {}


@final
@dataclass(frozen=True, slots=True)
class SequenceClassification(_CountsLabels):
    """Predict a text's class: ``input_ids``, ``attention_mask`` (B, L), ``labels`` (B); -100: not counted."""

    examples: ClassVar[str] = "labels"
    unit: ClassVar[str] = "examples"

    def loss(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> SummedLoss:
        """Return the summed cross entropy in float32, and the number of correct ones as ``accuracy``."""
        labels = batch["labels"]
        output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        logits = whole_logits(logits_of(self, model, output, "(B, classes)")).float()
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
        return loss, (labels != IGNORE_INDEX).sum(), {"accuracy": (logits.detach().argmax(-1) == labels).sum()}


def logits_of(objective: object, model: nn.Module, output: object, shape: str) -> torch.Tensor:
    """Return ``output.logits``; raises MeshparError for a model without them."""
    logits = getattr(output, "logits", None)
    if logits is None:
        raise MeshparError(
            f"{type(objective).__name__} requires a model whose output has .logits {shape}; "
            f"{type(model).__name__} returned {type(output).__name__}"
        )
    return logits


def whole_logits(logits: torch.Tensor) -> torch.Tensor:
    """Return whole logits. Collective over the axis of the vocabulary if they are sharded over it."""
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation(_CountsLabels):
    """Train on the next token of the text and on a teacher's distribution (Hinton, Vinyals and Dean, arXiv 1503.02531).

    The loss of a token is ``(1 - weight) * cross entropy + weight * temperature**2 * KL(teacher || student)``, both
    distributions at the temperature, plus ``hidden_weight`` times the mean squared difference of the last hidden
    states.

    Attributes:
        teacher: the frozen model, see :func:`freeze`. It may have its own plan over the same ranks.
        temperature: temperature of both distributions; larger values soften them.
        weight: weight of the teacher's distribution.
        hidden_weight: weight of the hidden states. Both models need the same width and must support
            ``output_hidden_states``.
    """

    examples: ClassVar[str] = "tokens"

    teacher: nn.Module
    temperature: Annotated[float, Bound(gt=0)] = 2.0
    weight: Annotated[float, Bound(ge=0, le=1)] = 0.5
    hidden_weight: Annotated[float, Bound(ge=0)] = 0.0

    def __post_init__(self) -> None:
        if problems := list(bound_problems(self)):
            raise RecipeError("; ".join(problems))
        trained = [name for name, parameter in self.teacher.named_parameters() if parameter.requires_grad]
        if trained or self.teacher.training:
            why = f"{trained[0]} requires a gradient" if trained else "it is in training mode"
            raise MeshparError(f"the teacher is not frozen: {why}; call freeze(teacher) before plan.apply")

    def loss(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> SummedLoss:
        """Return the summed loss, and its parts as ``cross_entropy``, ``kl`` and ``hidden``."""
        inputs: dict[str, Any] = {name: batch[name] for name in ("input_ids", "position_ids") if name in batch}
        inputs |= {"output_hidden_states": True} if self.hidden_weight else {}
        with torch.no_grad():
            taught = self.teacher(**inputs)
        outputs, labels = ((model, model(**inputs)), (self.teacher, taught)), batch["labels"]
        student, teacher = (logits_of(self, module, output, "(B, L, V)") for module, output in outputs)
        if student.shape != teacher.shape:
            raise MeshparError(
                f"the teacher's logits have shape {tuple(teacher.shape)} and the student's {tuple(student.shape)}; "
                "use one vocabulary"
            )
        counts = labels != IGNORE_INDEX
        parts = {
            "cross_entropy": token_loss(student, labels, reduction="sum"),
            "kl": divergence(whole_logits(student), whole_logits(teacher), counts, self.temperature),
        }
        loss = (1 - self.weight) * parts["cross_entropy"] + self.weight * self.temperature**2 * parts["kl"]
        if self.hidden_weight:
            parts["hidden"] = _hidden_difference(outputs, counts)
            loss = loss + self.hidden_weight * parts["hidden"]
        return loss, counts.sum(), parts


def divergence(
    student_BLV: torch.Tensor, teacher_BLV: torch.Tensor, counts_BL: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return KL(teacher || student) at ``temperature``, in float32, summed over the positions that count."""
    log_student_BLV, log_teacher_BLV = (
        (logits.float() / temperature).log_softmax(-1) for logits in (student_BLV, teacher_BLV)
    )
    kl_BL = (log_teacher_BLV.exp() * (log_teacher_BLV - log_student_BLV)).sum(-1)
    return (kl_BL * counts_BL).sum()


def freeze(teacher: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Freeze ``teacher``: no gradients, evaluation mode, and ``dtype`` if given. Call it before ``plan.apply``."""
    teacher.requires_grad_(False)
    if dtype is not None:
        teacher.to(dtype)
    return teacher.eval()


def teacher_problems(plan: Plan, teacher: nn.Module, student_plan: Plan, world_size: int) -> Iterator[str]:
    """Yield a problem if ranks that share a batch on the teacher's mesh have different batches on the student's."""
    spec = plan.check(teacher, world_size=world_size)
    seen = student_plan.resolve(world_size)
    if split := [axis for axis in axes_of(student_plan.passes, seen, Role.POSITIONS) if seen.axes[axis] > 1]:
        yield (
            f"the student's mesh splits positions over {', '.join(split)}, which the teacher would see as whole "
            "texts; leave the axis out"
        )
        return
    places, student_places = _places(plan, spec), _places(student_plan, seen)
    for batch in dict.fromkeys(places):
        group = [rank for rank in range(spec.size) if places[rank] == batch]
        if len(batches := {student_places[rank] for rank in group}) > 1:
            yield (
                f"the teacher's mesh {spec} lets ranks {group} work on one batch, but the student's mesh {seen} gives "
                f"them {len(batches)} different ones; shard the teacher over data axes (dp_shard), or give the "
                "student the same tp"
            )
            return


def _places(plan: Plan, spec: MeshSpec) -> list[tuple[int, ...]]:
    """Return the place in the data of each rank."""
    axes = axes_of(plan.passes, spec, Role.SAMPLES)
    return [tuple(spec.coordinates(rank)[axis] for axis in axes) for rank in range(spec.size)]


def _hidden_difference(outputs: Sequence[tuple[nn.Module, object]], counts_BL: torch.Tensor) -> torch.Tensor:
    """Return the squared difference of the last hidden states of student and teacher, summed over counted positions."""
    states = [getattr(output, "hidden_states", None) for _, output in outputs]
    if lacking := [type(model).__name__ for (model, _), state in zip(outputs, states, strict=True) if not state]:
        raise MeshparError(
            f"hidden_weight requires a model that returns hidden_states; {lacking[0]} does not: set hidden_weight to 0"
        )
    student_BLD, teacher_BLD = (state[-1] for state in states if state)
    if student_BLD.shape != teacher_BLD.shape or student_BLD.shape[:2] != counts_BL.shape:
        shapes = f"{tuple(student_BLD.shape)} and {tuple(teacher_BLD.shape)}"
        raise MeshparError(
            f"hidden states of student and teacher have shapes {shapes}, at {tuple(counts_BL.shape)} tokens; "
            "hidden_weight requires equal widths, and states that are not split along the sequence: set it to 0"
        )
    squares_BL = (student_BLD.float() - teacher_BLD.float()).square().mean(-1)
    return (squares_BL * counts_BL).sum()
