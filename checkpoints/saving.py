"""The course of one save: plan, write, commit; every rank at every step, or none."""

from __future__ import annotations

import datetime
import importlib.metadata
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan

from meshpar.checkpoints.dcp import DistributedCheckpoint
from meshpar.checkpoints.job import MODEL, Job, mesh_axes
from meshpar.checkpoints.manifest import Manifest, verify_files
from meshpar.checkpoints.ranks import Ranks
from meshpar.checkpoints.state import model_state, optimizer_state, plain, random_state
from meshpar.checkpoints.steps import Steps
from meshpar.checkpoints.writing import FileSums, Write, planned_bytes
from meshpar.errors import CheckpointError

_SPARE_BYTES = 64 << 20  # archives' headers, metadata, the manifest


@final
class Saving:
    """One save on its way. ``noted`` is what is known before: the step, what the caller added."""

    def __init__(
        self, ranks: Ranks, folder: Path, par: Job, optimizer: torch.optim.Optimizer | None, noted: Mapping[str, Any], rank_extra: Any
    ) -> None:
        self._ranks, self._folder, self._par, self._optimizer = ranks, folder, par, optimizer
        self._noted, self._rank_extra = noted, rank_extra

    def run(self, steps: Steps) -> Path:
        """Write and commit; return the step's folder. Collective; raises CheckpointError on every rank when any of them fails."""
        step = self._noted["step"]
        plans = self._ranks.collect(f"planning step {step}", self._plan)
        mine = self._ranks.spread(f"planning step {step}", lambda: self._divide([plan for plan, _ in plans]))
        written = self._ranks.collect(f"writing step {step}", lambda: self._write.write(mine))
        return self._ranks.share(f"committing step {step}", lambda: self._commit(steps, written, [extra for _, extra in plans]))

    def _plan(self) -> tuple[SavePlan, Any]:
        self._model = model_state(self._par.module, {group[0] for group in self._par.layout.tied})
        self._trained = optimizer_state(self._optimizer, self._model) if self._optimizer is not None else None
        tensors: dict[str, Tensor] = {MODEL + name: tensor for name, tensor in self._model.tensors.items()}
        tensors |= self._trained.tensors if self._trained else {}
        tensors |= random_state(self._ranks.rank, self._par.device)
        if unmade := [name for name, tensor in tensors.items() if tensor.is_meta]:
            raise CheckpointError(f"{len(unmade)} tensors have no memory yet ({unmade[0]}, ...); call par.materialize() before save")
        if not self._folder.is_dir():
            raise CheckpointError(f"{self._folder}, made by rank 0, is not here; the ranks must share that folder")
        self._write = Write(self._folder, tensors, is_main=self._ranks.rank == 0)
        return self._write.plan(), plain(self._rank_extra, "rank_extra")

    def _divide(self, plans: list[SavePlan]) -> list[SavePlan]:
        divided = self._write.divide(plans)
        needed, free = planned_bytes(divided) + _SPARE_BYTES, shutil.disk_usage(self._folder).free
        if free < needed:
            raise CheckpointError(f"{self._folder.parent} has {free / 1e9:.2f} GB free; this step needs {needed / 1e9:.2f} GB")
        return divided

    def _commit(self, steps: Steps, written: Sequence[tuple[list[Any], FileSums]], rank_extra: Sequence[Any]) -> Path:
        sums: FileSums = {name: pair for _, each in written for name, pair in each.items()}
        sums |= self._write.finish([results for results, _ in written])
        manifest = self._manifest(sums, rank_extra if any(each is not None for each in rank_extra) else ())
        verify_files(self._folder, manifest, "size")
        return steps.commit(self._folder, manifest)

    def _manifest(self, sums: FileSums, rank_extra: Sequence[Any]) -> Manifest:
        tensors = DistributedCheckpoint(self._folder).tensors  # as a reader will see them: parts that do not add up are found here
        return Manifest(
            saved_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            files={name: {"size": size, "crc32": checksum} for name, (size, checksum) in sorted(sums.items())},
            mesh=mesh_axes(self._par.mesh),
            world_size=self._ranks.size,
            device=self._par.device.type,
            plan=str(self._par.plan),
            tensors={name: {"dtype": str(each.dtype).removeprefix("torch."), "shape": list(each.shape)} for name, each in tensors.items()},
            tied=self._model.tied,
            weights=self._par.layout.weights.to_json(),
            config=plain(self._par.layout.config, "layout.config"),
            optimizer=self._trained.table if self._trained else None,
            seed=torch.initial_seed(),
            rank_extra=rank_extra,
            versions={"torch": torch.__version__, "meshpar": importlib.metadata.version("meshpar")},
            **self._noted,
        )
