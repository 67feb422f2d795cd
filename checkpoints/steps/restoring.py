"""One restore: verify, compare, and only then read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from meshpar.checkpoints.format.manifest import MODEL, RANDOM, read_manifest
from meshpar.checkpoints.format.verify import Verify, open_verified
from meshpar.checkpoints.steps import state
from meshpar.checkpoints.steps.ranks import SavingRanks
from meshpar.checkpoints.steps.state import Checkpointable, ModelState, OptimizerGroup, Optimizers
from meshpar.checkpoints.storage.checksums import crc32
from meshpar.checkpoints.storage.place import Place
from meshpar.core.errors import CheckpointError
from meshpar.plan import Plan
from meshpar.process.waiting import reads_of
from meshpar.state.averaging import Averaged
from meshpar.tensors.placements import held_by_this_rank, local_tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredState:
    """Report the result of :meth:`CheckpointManager.restore`: the plain data that was saved with the tensors.

    Attributes:
        step: number of the step.
        extra: the ``extra`` that ``save`` received.
        rank_extra: the ``rank_extra`` of this rank; None on another mesh, where ranks differ.
        metrics: the ``metrics`` that ``save`` received.
        same_mesh: whether mesh, world size and device type equal those of the save.
        random: ``"restored"``: every generator has its saved state; ``"derived"``: ``par.manual_seed`` seeded from the
            saved seed and the step; ``"kept"``: unchanged.
        skipped: differences that ``partial=True`` accepted, line by line.
        folder: the step's folder.
        passed_over: newer steps that were damaged, with the damage of each; only with ``fallback``.
    """

    step: int
    extra: Mapping[str, Any]
    rank_extra: Any
    metrics: Mapping[str, float]
    same_mesh: bool
    random: str
    skipped: tuple[str, ...]
    folder: Place
    passed_over: tuple[str, ...] = ()


class _Differences(NamedTuple):
    """Differences on one rank, line by line."""

    wrong: list[str]
    missing: list[str]
    unexpected: set[str]
    groups: dict[OptimizerGroup, set[str]]


@final
class Restoring:
    """One restore."""

    def __init__(
        self,
        ranks: SavingRanks,
        folder: Place,
        par: Checkpointable,
        optimizer: Optimizers | None,
        averages: Mapping[str, Averaged],
    ) -> None:
        self._ranks, self._folder, self._par, self._optimizer = ranks, folder, par, optimizer
        self._averages = averages

    def open(self, verify: Verify) -> None:
        """Verify the step; collective. Raises CheckpointError on every rank if it is damaged."""
        seals = self._ranks.everyone("opening the checkpoint", lambda: self._verified(verify))
        for other in (rank for rank, seal in enumerate(seals) if seal != seals[0]):
            raise CheckpointError(
                f"{self._folder} is not the same step on rank 0 and on rank {other}; use a file system that all ranks "
                "share, and restore when no other job replaces the step"
            )

    def _verified(self, verify: Verify) -> int:
        self._manifest = read_manifest(self._folder)
        files = sorted(self._manifest.files)[self._ranks.rank :: self._ranks.size]
        self._source = open_verified(self._folder, self._manifest, verify, files)
        return crc32(self._manifest.to_json().encode())

    def compare(self, *, cast: bool, partial: bool) -> None:
        """Raise one error that lists the differences on all ranks that ``partial`` does not accept; collective."""
        by_rank = self._ranks.everyone("comparing", lambda: self._differences(cast))
        wrong = list(dict.fromkeys(line for rank in by_rank for line in rank.wrong))
        lenient = list(dict.fromkeys(line for rank in by_rank for line in rank.missing))
        table = self._manifest.optimizer
        if self._optimizer is not None and table is None:
            lenient.append("missing: the optimizer's state; this step was saved without an optimizer")
        elif self._optimizer is not None and table is not None:
            lenient += _group_differences([entry for rank in by_rank for entry in rank.groups.items()], table)
        unexpected = set.intersection(*(rank.unexpected for rank in by_rank))
        lenient += [f"unexpected: {name}" for name in sorted(unexpected)]
        if wrong or (lenient and not partial):
            remedy = [] if wrong else ["CheckpointManager.restore(..., partial=True) restores what fits"]
            lines = [f"{self._folder} does not fit this job; nothing was changed:", *wrong, *lenient, *remedy]
            raise CheckpointError("\n  ".join(lines))
        self._skipped = lenient

    def read(self, *, random: bool, passed_over: tuple[str, ...] = ()) -> RestoredState:
        """Restore; collective. If a tensor's bytes are damaged, every rank raises, and the state is partly restored."""
        self._ranks.everyone("reading (the state is partly restored)", self._read)
        manifest, par = self._manifest, self._par
        here = state.mesh_axes(par.mesh), self._ranks.size, par.device.type
        same = here == (manifest.mesh, manifest.world_size, manifest.device)
        return RestoredState(
            step=manifest.step,
            extra=manifest.extra,
            rank_extra=manifest.rank_extra[self._ranks.rank] if same and manifest.rank_extra else None,
            metrics=manifest.metrics,
            same_mesh=same,
            random=self._restore_random(same) if random else "kept",
            skipped=tuple(self._skipped),
            folder=self._folder,
            passed_over=passed_over,
        )

    def _differences(self, cast: bool) -> _Differences:
        self._model = state.model_state(self._par.module)
        saved_as = {name: group[0] for group in self._manifest.tied for name in group}
        self._renamed: dict[str, str] = {}  # our names of tied tensors that were saved under another of their names
        for name, aliases in self._model.names.items():
            candidates = [*aliases, *(saved_as[alias] for alias in aliases if alias in saved_as)]
            saved = next((candidate for candidate in candidates if MODEL + candidate in self._manifest.tensors), name)
            if saved != name:
                self._renamed[name] = saved
        wanted = {MODEL + self._saved_name(name): tensor for name, tensor in self._model.tensors.items()}
        self._averaged = state.averaged_tensors(self._averages, self._saved_name)
        wanted |= self._averaged
        state.check_have_memory(wanted, "restore")
        missing, wrong, located = list[str](), list[str](), dict[str, tuple[slice, ...]]()
        for name, tensor in wanted.items():
            shape, stored = tuple(tensor.shape), self._source.tensors.get(name)
            if stored is None:
                missing.append(f"missing: {name}, {shape}")
            elif stored.shape != shape:
                wrong.append(f"wrong shape: {name} is {shape} here and {stored.shape} in the checkpoint")
            else:
                located[name] = held_by_this_rank(tensor)
                if stored.dtype != tensor.dtype and not cast:
                    wrong.append(
                        f"wrong dtype: {name} is {tensor.dtype} here and {stored.dtype} in the checkpoint; cast=True "
                        "converts it"
                    )
        self._source.locate(located)
        unexpected = {name for name in self._manifest.tensors if name.startswith(MODEL) and name not in wanted}
        groups = _group_names(self._optimizer, self._model, self._renamed) if self._optimizer is not None else {}
        return _Differences(wrong, missing, unexpected, groups)

    def _saved_name(self, name: str) -> str:
        first = self._model.first(name)
        return self._renamed.get(first, first)

    def _read(self) -> None:
        reads_of(self._par.module).wait("restore()")
        wanted = [(MODEL + self._saved_name(name), tensor) for name, tensor in self._model.tensors.items()]
        if self._optimizer is not None and self._manifest.optimizer is not None:
            table, stored = self._manifest.optimizer, self._source.tensors
            wanted += state.restore_optimizer(self._optimizer, self._model, table, self._renamed, stored)
        wanted += self._averaged.items()
        stored_pairs = [(name, tensor) for name, tensor in wanted if name in self._source.tensors]
        self._source.locate({name: held_by_this_rank(tensor) for name, tensor in stored_pairs})

        def read(pair: tuple[str, Tensor]) -> None:
            with torch.no_grad():  # of this thread
                self._source.read(pair[0], held_by_this_rank(pair[1]), local_tensor(pair[1]))

        self._source.each(read, sorted(stored_pairs, key=lambda named: self._source.place(named[0])))
        for called, counts in self._manifest.averages.items():
            if called in self._averages:
                self._averages[called].updates, self._averages[called].calls = counts["updates"], counts["calls"]

    def _restore_random(self, same: bool) -> str:
        plan = self._par.plan
        alike = isinstance(plan, Plan) and plan.same_bits
        rank = 0 if alike else self._ranks.rank
        prefix = f"{RANDOM}rank-{rank}."
        names = [name for name in self._source.tensors if name.startswith(prefix)]
        if not (same or alike) or not names:
            self._par.manual_seed(crc32(f"{self._manifest.seed} {self._manifest.step}".encode()))
            return "derived"
        generators = {}
        for name in names:
            stored = self._source.tensors[name]
            generators[name] = torch.empty(stored.shape, dtype=stored.dtype)
            self._source.read(name, (), generators[name])
        state.set_random_state(rank, self._par.device, generators)
        return "restored"


def check_same_arguments(ranks: SavingRanks, asked: Mapping[str, Any]) -> None:
    """Raise CheckpointError on every rank if ranks called restore() with different arguments; collective."""
    asked_by_rank = ranks.everyone("finding the step", lambda: asked)
    for rank, other in enumerate(asked_by_rank):
        pairs = [(name, value, other[name]) for name, value in asked_by_rank[0].items() if value != other[name]]
        if pairs:
            values = ", ".join(f"{name}={first!r} on rank 0 and {here!r} on rank {rank}" for name, first, here in pairs)
            raise CheckpointError(f"restore() got {values}; pass the same arguments on every rank")


def _group_names(given: Optimizers, model: ModelState, renamed: Mapping[str, str]) -> dict[OptimizerGroup, set[str]]:
    """Return the checkpoint's names of the parameters in each group of the optimizers."""
    names = {id(tensor): name for name, tensor in model.tensors.items()}
    optimizers = state.optimizers_of(given)
    state.parameters_of(optimizers, names)
    return {
        (called, type(optimizer).__name__, position): {renamed.get(names[id(p)], names[id(p)]) for p in group["params"]}
        for called, optimizer in optimizers.items()
        for position, group in enumerate(optimizer.param_groups)
    }


def _group_differences(ours: Iterable[tuple[OptimizerGroup, Collection[str]]], table: Mapping[str, Any]) -> list[str]:
    """Compare the names in each group of each rank with the checkpoint's; return a line for each difference."""
    # By parameter, not by group: groups may depend on the mesh, because fused kernels do not accept plain tensors
    # together with DTensors, and stages may order groups differently.
    options, classes = state.options_by_parameter(table), state.class_by_parameter(table)
    ours = list(ours)
    here = {name: kind for (_, kind, _), group in ours for name in group}
    lines = []
    for text, names_only in (("here", here.keys() - set(options)), ("in the checkpoint", set(options) - here.keys())):
        if names_only:
            lines.append(f"optimizer: trained only {text}: {', '.join(sorted(names_only)[:10])}")
    for (called, _, position), group in ours:
        saved = [options[name] for name in group if name in options]
        differing = sorted({key for settings in saved for key in saved[0] if settings.get(key) != saved[0][key]})
        if differing:
            values = ", ".join(f"{key} {sorted({str(settings.get(key)) for settings in saved})}" for key in differing)
            which = f"{position} of {called!r}" if called else str(position)
            lines.append(
                f"optimizer: parameter group {which} joins parameters that the checkpoint has with other options: "
                f"{values}"
            )
    names_by_class: dict[tuple[str, str], list[str]] = {}
    for name in sorted(here.keys() & classes.keys()):
        names_by_class.setdefault((here[name], classes[name]), []).append(name)
    lines += [
        f"optimizer: {kind} here and {theirs} in the checkpoint, for {', '.join(names[:5])}"
        for (kind, theirs), names in names_by_class.items()
        if kind != theirs
    ]
    return list(dict.fromkeys(lines))
