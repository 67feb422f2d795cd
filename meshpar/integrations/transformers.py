"""transformers' Trainer, and trainers that inherit it (TRL's, sentence-transformers'), on the mesh of a plan."""

# Where transformers is not installed, pyright reads this file in its place.
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import inspect
from typing import TypeVar, cast

from transformers import Trainer

from meshpar import MeshparError
from meshpar.integrations._sentences import SentenceTrainerOnMesh
from meshpar.integrations._trainer import TrainerOnMesh

__all__ = ["on_mesh"]

AnyTrainer = TypeVar("AnyTrainer", bound=type[Trainer])

_TESTED = ("SFTTrainer", "DPOTrainer", "RewardTrainer", "GRPOTrainer", "SentenceTransformerTrainer")
"""Trainers of other packages that are compared with one process."""


def on_mesh(trainer: AnyTrainer) -> AnyTrainer:
    """Return a trainer's class with one more argument, ``plan``: it trains on the plan's mesh, as in one process.

    >>> trainer = on_mesh(Trainer)(model, arguments, train_dataset=samples, plan=plan)  # doctest: +SKIP

    ``plan`` is a Plan, or a mesh's text (``"dp_shard=2"``) for the passes that it usually wants. Batches, evaluations,
    callbacks and checkpoints are Trainer's. ``per_device_train_batch_size`` counts the samples of a rank with other
    samples. A ``checkpoint-N`` has a step of :class:`meshpar.checkpoints.CheckpointManager`, which
    ``resume_from_checkpoint`` reads on any mesh. ``save_model`` exports for ``from_pretrained``.

    Args:
        trainer: transformers' Trainer, or a class that inherits it, such as TRL's SFTTrainer.

    Raises:
        MeshparError: the class is no Trainer. The new class raises it on every rank, before training, for a plan or an
            argument with which training would not equal one process.

    Collective: every rank makes the trainer and calls its methods, inside :func:`meshpar.distributed`.
    """
    if not (inspect.isclass(trainer) and issubclass(trainer, Trainer)):
        raise MeshparError(f"on_mesh got {trainer!r}; expected transformers.Trainer, or a class that inherits it")
    packages = {kind: kind.__module__.partition(".")[0] for kind in trainer.__mro__ if not inspect.isabstract(kind)}
    for kind, package in packages.items():
        foreign = package in ("trl", "sentence_transformers") and not kind.__name__.startswith("_")
        if foreign and kind.__name__ not in _TESTED:
            raise MeshparError(
                f"{kind.__name__} has not been compared with one process; expected Trainer, {', '.join(_TESTED)}, or a "
                "class of yours that inherits one: train in a loop of your own"
            )
    members = {"__doc__": trainer.__doc__, "__module__": trainer.__module__}
    base = SentenceTrainerOnMesh if "sentence_transformers" in packages.values() else TrainerOnMesh
    return cast("AnyTrainer", type(f"{trainer.__name__}OnMesh", (base, trainer), members))
