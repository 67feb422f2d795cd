"""One save: plan, stage, write, commit. All ranks complete each of these, or none does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from meshpar.checkpoints.format.manifest import MODEL, Manifest, step_name, step_of
from meshpar.checkpoints.format.verify import verify_files
from meshpar.checkpoints.format.writing import Checksum, Layout, WriteReport, WrittenFile, layout_of, write_parts
from meshpar.checkpoints.steps import state
from meshpar.checkpoints.steps.background import PartSamples, Stager, own_stream, ready_event
from meshpar.checkpoints.steps.planning import Agreed, Described, Planning, alike, parts_of
from meshpar.checkpoints.steps.ranks import SavingRanks
from meshpar.checkpoints.steps.state import Checkpointable, Optimizers, mesh_axes, model_state, plain, random_state
from meshpar.checkpoints.steps.steps import remove
from meshpar.checkpoints.storage.disk import DiskPath
from meshpar.checkpoints.storage.files import failing_as
from meshpar.checkpoints.storage.place import Place, upload
from meshpar.core.errors import CheckpointError
from meshpar.process.leftovers import leftover, on_the_way
from meshpar.state.averaging import Averaged

_SPARE_BYTES = 64 << 20  # archives' headers, metadata, the manifest


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """The caller's additions to a step: plain data, and averages of the parameters."""

    step: int
    extra: Mapping[str, Any]
    metrics: Mapping[str, float]
    rank_extra: Any = None
    averages: Mapping[str, Averaged] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSettings:
    """How a rank writes its files."""

    threads: int = 2  # number of files that it writes at once
    checksum: Checksum = "crc32"  # of the files, in addition to the CRC-32 of the parts
    on_write: Callable[[], None] = lambda: None  # called after every block, by the threads that write
    staging: DiskPath | None = None  # where Saving.stage writes the files, from which Saving.finish uploads them


@final
class Saving:
    """One save into a temporary folder: call :meth:`plan`, in the background :meth:`stage`, then :meth:`finish`."""

    def __init__(
        self,
        ranks: SavingRanks,
        folder: Place,
        noted: Noted,
        planning: Planning,
        settings: WriteSettings = WriteSettings(),
    ) -> None:
        self._ranks, self._folder, self._noted, self._planning = ranks, folder, noted, planning
        self._settings, staging = settings, settings.staging
        self._staging = None if staging is None else on_the_way(staging / step_name(noted.step), "tmp")
        self._staged: list[WrittenFile] | None = None
        self._tensors: dict[str, Tensor] = {}
        self._stage_error: Exception | None = None

    def plan(self, par: Checkpointable, optimizer: Optimizers | None, *, later: bool = False) -> None:
        """Agree on the parts that each rank writes; collective. ``later``: copy buffers now, which forwards change."""
        describe = functools.partial(self._describe, par, optimizer, later)
        settle = functools.partial(self._settle, par)
        share = self._planning.agree(self._ranks, f"planning step {self._noted.step}", describe, settle)
        self._parts = parts_of(share, self._tensors)
        wholes = [self._tensors[part.name] for part in self._parts]
        self._samples = PartSamples(self._parts, wholes) if later else None
        self._ready, self._device = ready_event(par.device), par.device
        self._tensors = {}

    def stage(self, stager: Stager) -> None:
        """Copy the parts that this rank writes, which may change on return; :meth:`finish` raises an error."""
        try:
            if changed := self._copy_to(stager):
                raise CheckpointError(
                    f"{len(changed)} tensors were changed while the save in the background copied them "
                    f"({', '.join(changed[:5])}); call before_step() of the CheckpointManager before you change "
                    "parameters outside of an optimizer's step"
                )
        except Exception as error:  # noqa: BLE001 - the other ranks, which go on to finish(), must hear of it there
            self._stage_error = error
        self._samples = None

    def _copy_to(self, stager: Stager) -> list[str]:
        """Copy the parts; return the names of those that were written meanwhile."""
        assert self._samples is not None
        parts, before = self._parts, self._samples.parts
        if self._staging is None:
            staged = stager.stage([*parts, *before], self._device, self._ready)
            self._parts, before = staged[: len(parts)], staged[len(parts) :]
            after = self._samples.of(self._parts)
        else:
            self._stage_on_disk(self._staging)
            with own_stream(self._device, self._ready):
                after = self._samples.of(parts)
            staged = stager.stage([*before, *after], self._device, self._ready)
            before, after = staged[: len(before)], staged[len(before) :]
        return self._samples.written(before, after, self._parts)

    def _stage_on_disk(self, folder: DiskPath) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for path in folder.parent.iterdir():
            dead = leftover(path)
            if dead and dead.kind == "tmp" and step_of(dead.of) is not None and dead.abandoned():
                remove(path)
        folder.mkdir()
        with failing_as(f"staging in {folder.parent}"):
            self._staged = self._write_to(folder)

    def finish(self, commit: Callable[[Manifest], Place]) -> Place:
        """Write, check and commit; return the step's folder. Collective: all ranks fail if any does."""
        step, layout, reports = self._noted.step, list[Layout](), list[WriteReport]()
        committing = f"committing step {step}"

        def write() -> WriteReport:
            files = self._write()
            layout.append(layout_of(files))
            return layout[0].report(files)

        def record(layouts: Sequence[Layout] = ()) -> Place | None:
            with failing_as(f"writing to {self._folder.parent}"):
                if (ledger := self._planning.ledger_of(reports, layouts)) is None:
                    return None
                manifest = ledger.write(self._folder, reports, self._entries)
                verify_files(self._folder, manifest, "size")
                return commit(manifest)

        def record_as_before(reports_of_ranks: Sequence[WriteReport]) -> Place | None:
            reports.extend(reports_of_ranks)
            return record()

        try:
            folder = self._ranks.agree(f"writing step {step}", write, record_as_before, deciding=committing)
        finally:
            if self._staging is not None:
                remove(self._staging)
        if folder is None:
            folder = self._ranks.agree(f"recording step {step}", lambda: layout[0], record, deciding=committing)
        assert folder is not None
        return folder

    def _describe(self, par: Checkpointable, optimizer: Optimizers | None, later: bool) -> Described:
        model = model_state(par.module, {group[0] for group in par.layout.tied})
        trained = state.optimizer_state(optimizer, model) if optimizer is not None else None
        tensors: dict[str, Tensor] = {
            MODEL + name: tensor.clone() if later and not isinstance(tensor, nn.Parameter) else tensor
            for name, tensor in model.tensors.items()
        }
        tensors |= trained.tensors if trained else {}
        tensors |= state.averaged_tensors(self._noted.averages, model.first)
        tensors |= random_state(self._ranks.rank, par.device)
        state.check_have_memory(tensors, "save")
        if (began := step_of(self._folder.name.partition(".")[0])) not in (None, self._noted.step):
            raise CheckpointError(
                f"this rank saves step {self._noted.step}, rank 0 step {began}; pass the same step on every rank"
            )
        if self._folder.mounted and not self._folder.is_dir():
            raise CheckpointError(
                f"{self._folder}, created by rank 0, does not exist here; use a file system that all ranks share"
            )
        self._tensors = tensors
        return Described(
            alike=alike(tensors),
            tied=model.tied,
            optimizer=trained.table if trained else None,
            rank_extra=plain(self._noted.rank_extra, "rank_extra"),
            extra=plain(self._noted.extra, "extra"),
        )

    def _settle(
        self, par: Checkpointable, agreed: Agreed, tables: Sequence[Mapping[str, Any]], rank_extra: Sequence[Any]
    ) -> None:
        """Check the space on the disk, and note the plain data of the step; on rank 0."""
        needed, free = sum(group.nbytes for group in agreed.groups) + _SPARE_BYTES, self._folder.free_bytes()
        if free < needed:
            raise CheckpointError(
                f"{self._folder.parent} has {free / 1e9:.2f} GB free; this step needs {needed / 1e9:.2f} GB: free "
                "some space"
            )
        self._entries = {
            "step": self._noted.step,
            "extra": plain(self._noted.extra, "extra"),
            "metrics": plain(self._noted.metrics, "metrics"),
            "mesh": mesh_axes(par.mesh),
            "world_size": self._ranks.size,
            "device": par.device.type,
            "plan": str(par.plan),
            "tied": agreed.tied,
            "weights": par.layout.weights.to_json(),
            "config": plain(par.layout.config, "layout.config"),
            "optimizer": state.merged_tables(tables) if tables else None,
            "seed": torch.initial_seed(),
            "rank_extra": rank_extra if any(extra is not None for extra in rank_extra) else (),
            "averages": {
                name: {"updates": average.updates, "calls": average.calls}
                for name, average in self._noted.averages.items()
            },
        }

    def _write(self) -> list[WrittenFile]:
        if self._stage_error is not None:
            raise self._stage_error
        with failing_as(f"writing to {self._folder.parent}"):
            if self._staging is None or self._staged is None:
                return self._write_to(self._folder)
            sources = [self._staging / file.name for file in self._staged]
            targets = [self._folder / file.name for file in self._staged]
            with ThreadPoolExecutor(self._settings.threads, thread_name_prefix="meshpar-upload") as pool:
                list(pool.map(functools.partial(upload, on_write=self._settings.on_write), sources, targets))
            return self._staged

    def _write_to(self, folder: Place) -> list[WrittenFile]:
        if self._ready is not None:
            self._ready.synchronize()
        rank, parts, how = self._ranks.rank, self._parts, self._settings
        return write_parts(folder, rank, parts, threads=how.threads, checksum=how.checksum, on_write=how.on_write)
