"""Rank the settings that a search found by their estimates, in groups that the forecast cannot tell apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, final

import torch

from meshpar.core.mesh import MeshSpec
from meshpar.forecasting.cost import ERROR_RANGE
from meshpar.forecasting.hardware import RESERVED_RANGE, Verdict, reserved_range
from meshpar.forecasting.report import GIB, Forecast
from meshpar.passes import (
    ActivationCheckpoint,
    FullyShard,
    HybridShard,
    Pass,
    PipelineParallel,
    Replicate,
    TensorParallel,
)

VARIED = (PipelineParallel, TensorParallel, ActivationCheckpoint, FullyShard, HybridShard, Replicate)
"""The passes that a search chooses itself, with their options."""


def axes_of(passes: Sequence[Pass]) -> set[str]:
    """Return the axes that passes use."""
    return {axis for pass_ in passes for axis in pass_.axes}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One way to train: sizes of axes, options of the passes that a search varies, and passes it keeps (``beside``)."""

    replicas: int = 1
    shards: int = 1
    tp: int = 1
    reshard: bool = True
    recompute: str = "none"
    micro_batch: int = 1
    beside: tuple[Pass, ...] = ()
    fixed: Mapping[str, int] = field(default_factory=dict)
    world: bool = False
    elastic: bool = False
    stages: int = 1
    blocks: tuple[int, ...] = ()
    micro_batches: int = 1

    @property
    def kept(self) -> str:
        """The fixed axes, as text."""
        return ", ".join(f"{axis}={size}" for axis, size in self.fixed.items())

    def mesh(self) -> MeshSpec:
        """Return the mesh, without axes of size 1 other than ``dp_shard``."""
        axes = {"pp": self.stages, "dp_replicate": self.replicas, "dp_shard": self.shards, "tp": self.tp}
        varied = {name: size for name, size in axes.items() if size > 1 or name == "dp_shard"}
        return MeshSpec(varied | dict(self.fixed))

    def job(self) -> MeshSpec:
        """Return the mesh of one job: of one replica, where each is a job of its own."""
        return MeshSpec({**self.mesh().axes, "dp_replicate": 1}) if self.elastic and self.replicas > 1 else self.mesh()

    def passes(self) -> list[Pass]:
        """Return the passes in their order, computing in bfloat16 on float32 parameters."""
        claimed = axes_of(self.beside)
        passes: list[Pass] = [pass_ for pass_ in self.beside if self.tp > 1 or "tp" not in pass_.axes]
        if self.stages > 1:
            passes.append(PipelineParallel(stages=self.blocks or None))
        if self.tp > 1 and "tp" not in claimed:
            passes.append(TensorParallel(sequence_parallel=True, loss_parallel=True))
        if self.recompute != "none":
            passes.append(ActivationCheckpoint(mode="full" if self.recompute == "full" else "selective"))
        if "dp_shard" not in claimed:
            common: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
            common["reshard_after_forward"] = self.reshard
            optimizer: Literal["replica", "world"] = "world" if self.world else "replica"
            passes.append(HybridShard(optimizer=optimizer, **common) if self.replicas > 1 else FullyShard(**common))
        return sorted(passes, key=lambda pass_: pass_.stage)

    def __str__(self) -> str:
        gathered = "" if self.reshard else ", parameters kept gathered"
        again = "no recomputation" if self.recompute == "none" else f"{self.recompute} recomputation"
        staged = f", {self.micro_batches} of them" if self.stages > 1 else ""
        staged += f", stages of {', '.join(map(str, self.blocks))} blocks" if self.blocks else ""
        world = ", optimizer=world" if self.world else ""
        return f"{self.mesh()}; micro-batch {self.micro_batch}{staged}; {again}{gathered}{world}"


class Candidate(NamedTuple):
    """Settings, the tokens per second of all ranks, the peak bytes of tensors, and why they are out, if they are."""

    settings: Settings
    tokens_per_second: float
    peak: int
    verdict: Verdict
    problem: str = ""


class Ranking(NamedTuple):
    """Forecasts of the best, groups of alike speed (fastest first, what fits before what may fit), and what is out.

    Of the steps that the search wanted, ``simulated`` were: fewer where its time was up.
    """

    best: tuple[Forecast, ...]
    groups: tuple[tuple[Candidate, ...], ...]
    out: tuple[Candidate, ...]
    simulated: int = 0
    wanted: int = 0

    @property
    def fitting(self) -> tuple[Candidate, ...]:
        """Candidates that fit or may fit, in the order of the groups."""
        return tuple(candidate for group in self.groups for candidate in group)


def alike(candidates: Iterable[Candidate]) -> tuple[tuple[Candidate, ...], ...]:
    """Return groups of candidates, fastest first, whose speeds differ by less than the forecast's error."""
    groups = list[list[Candidate]]()
    for candidate in sorted(candidates, key=lambda candidate: -candidate.tokens_per_second):
        if groups and candidate.tokens_per_second >= groups[-1][0].tokens_per_second * (1 - ERROR_RANGE):
            groups[-1].append(candidate)
        else:
            groups.append([candidate])
    return tuple(tuple(sorted(group, key=lambda candidate: candidate.verdict != "fits")) for group in groups)


def gib_reserved(peak: int) -> str:
    """Return the GiB that an allocator reserves for tensors of ``peak`` bytes."""
    least, largest = reserved_range(peak)
    return f"{least / GIB:.0f} to {largest / GIB:.0f}"


_SHOWN = 10  # settings of the first group in the text; of each later one, and of those that are out, half as many


def ranking_text(ranking: Ranking) -> str:
    """Return the ranking for a terminal; the first ones also have their own reports."""
    count = Counter(candidate.verdict for candidate in ranking.fitting)
    least, largest = RESERVED_RANGE
    counted = f"{count['fits']} settings fit, {count['may fit']} may fit, {len(ranking.out)} do not"
    lines = list[str]()
    if ranking.simulated < ranking.wanted:
        lines.append(
            f"the search's time was up after {ranking.simulated} of {ranking.wanted} steps to simulate, and other "
            "settings may be faster; give it more: --seconds"
        )
    lines.append(f"{counted} (an allocator reserves {least} to {largest} times the peak of tensors)")
    for number, group in enumerate(ranking.groups[:3]):
        shown = _SHOWN if number == 0 else _SHOWN // 2
        lines.append(f"{group_title(ranking.groups, number)}:")
        for candidate in group[:shown]:
            reserved = f"{gib_reserved(candidate.peak)} GiB".rjust(14)
            costs = f"{candidate.tokens_per_second:12,.0f} tokens/s  {candidate.peak / GIB:6.1f} GiB"
            lines.append(f"  {costs}, reserved {reserved}  {candidate.verdict:<7}  {candidate.settings}")
        if len(group) > shown:
            lines.append(f"  and {len(group) - shown} more")
    if ranking.out:
        closest = sorted(ranking.out, key=lambda candidate: candidate.peak)[: _SHOWN // 2]
        lines.append("out, the nearest to fitting first:")
        lines += (f"  {candidate.settings}: {candidate.problem}" for candidate in closest)
    return "\n".join(lines)


def group_title(groups: Sequence[Sequence[Candidate]], number: int) -> str:
    """Return what the settings of a group have in common, against the fastest of all."""
    fastest = max(candidate.tokens_per_second for candidate in groups[0])
    slower = sorted(1 - candidate.tokens_per_second / fastest for candidate in groups[number])
    if len(slower) == 1:
        return "the fastest setting" if number == 0 else f"one setting, {slower[0]:.0%} slower"
    if number:
        return f"{slower[0]:.0%} to {slower[-1]:.0%} slower, {len(slower)} settings that it cannot tell apart"
    same = "the error of the forecast: it cannot tell which is faster; those that fit come first"
    return f"the fastest, {len(slower)} settings within {ERROR_RANGE:.0%}, {same}"
