"""sentence-transformers' trainer on the mesh of a plan: what differs from Trainer in losses, batches and exports."""

# Where transformers is not installed, pyright reads this file in its place.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from meshpar import MeshparError
from meshpar.integrations._shared import whole_states
from meshpar.integrations._trainer import TrainerOnMesh, has_step

_LOSSES = ("MultipleNegativesRankingLoss", "CosineSimilarityLoss")
"""Losses that are compared with one process."""


class SentenceTrainerOnMesh(TrainerOnMesh):
    """A trainer of texts, whose loss calls the model for each column and may compare a text with all of the batch."""

    is_fsdp_enabled: bool
    loss: Any
    _compared = "texts, whose features"
    # its losses are means, and get no number of items
    loss_is_scaled_for_ga = False

    def _divide(self, model: nn.Module) -> nn.Module:
        for loss in self.loss.values() if isinstance(self.loss, Mapping) else [self.loss]:
            if (name := type(loss).__name__) not in _LOSSES:
                raise MeshparError(
                    f"loss is {name}, which has not been compared with one process; expected {' or '.join(_LOSSES)}: "
                    "pass one of them, or train in a loop of your own with par.gather"
                )
            if getattr(loss, "gather_across_devices", None) is False:
                raise MeshparError(
                    f"{name} has gather_across_devices=False, with which a text is compared with those of its rank "
                    "alone; expected all of the batch: pass gather_across_devices=True"
                )
        return super()._divide(model)

    def _build_dataloader(self, dataset: Any, batch_size: int, dataset_kind: str) -> Any:
        ranks = self.accelerator.num_processes
        if ranks > 1 and isinstance(dataset, Mapping):
            raise MeshparError(
                f"{dataset_kind}: {ranks} data ranks would draw a step's batches from several of the datasets "
                f"{', '.join(dataset)}, and one process draws them from one; expected one dataset: join them by "
                "datasets.concatenate_datasets"
            )
        self._check_samples(dataset, dataset_kind, batch_size)
        plain: Any = super()
        return plain._build_dataloader(dataset, batch_size, dataset_kind)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        # as under FSDP every rank runs the evaluators on all texts, because an encoding needs each rank's weights
        before, self.is_fsdp_enabled = self.is_fsdp_enabled, True
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self.is_fsdp_enabled = before

    def _export(self, folder: Path) -> None:
        with whole_states([self._par]):
            if self.args.should_save:
                # the class's: the module's own refuses shards
                type(self.model).save_pretrained(self.model, str(folder))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not has_step(resume_from_checkpoint):
            raise MeshparError(
                f"{resume_from_checkpoint} has weights of one process; expected a checkpoint of a trainer on a mesh: "
                "load them by SentenceTransformer(folder), and train that model"
            )
