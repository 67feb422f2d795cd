"""A rank's part of a model that is divided into stages, as data; tensors and parameters that other ranks have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch.distributed as dist
from torch import Tensor, nn

from meshpar.core.errors import MeshparError
from meshpar.core.passes import unmatched
from meshpar.core.patterns import covers
from meshpar.passes.pipeline.cuts import Result
from meshpar.passes.pipeline.stand_ins import Carried
from meshpar.step.forward import Run, run_of


@final
@dataclass(frozen=True, slots=True)
class Chunk:
    """Blocks of one rank that follow one another; they begin with the model's block number ``first``."""

    blocks: tuple[nn.Module, ...]
    first: int
    # what crosses the cuts before and behind them beside the value that a block hands on
    takes: tuple[Result, ...]
    gives: tuple[Result, ...]
    # the number of the last block in the model's order
    end: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "end", self.first + len(self.blocks) - 1)


@final
@dataclass(slots=True, kw_only=True)
class Rule:
    """The rule for a call of a module where a stage runs."""

    # of the block in the model's order
    number: int | None = None
    # The chunk before which it stands in for the last block of the stage before, and returns what comes from there:
    # what the model computes between two blocks is then computed by the second one's stage.
    takes: int | None = None
    # the chunk in which it computes; None: in all of them, -1: in none; and what answers in the others
    only: int | None = None
    otherwise: nn.Module | None = None
    # of its results, those that cross cuts
    results: tuple[Result, ...] = ()
    has_blocks: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """The layers of a model that one rank has; its chunk ``c`` is stage ``c * ranks + rank`` of the model."""

    module: nn.Module
    chunks: tuple[Chunk, ...]
    rules: Mapping[str, Rule]
    group: dist.ProcessGroup
    rank: int
    ranks: int
    carried: Carried
    # names of all blocks of the model, in the order of their calls
    line: tuple[str, ...]
    draws_random: bool

    # the stage with the last blocks, which has the loss
    last: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "last", self.ranks * len(self.chunks) - 1)


@final
@dataclass(slots=True, kw_only=True)
class Turn:
    """A forward or a backward of one micro-batch on one stage of this rank."""

    chunk: int = 0
    number: int = 0
    stage: int = 0
    # the shapes of the micro-batch's tensors
    form: object = None
    # By ``id``: the number and the version of each tensor of the micro-batch on whose bytes the stages have agreed.
    agreed: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    # What the stage before has handed on, and this one to the next; the loss on the last one.
    arrived: list[Tensor] = field(default_factory=list)
    left: list[Tensor] = field(default_factory=list)
    # what a forward has of the results that cross cuts
    results: dict[Result, Tensor] = field(default_factory=dict)
    # of what was handed on, when it was
    versions: Sequence[int] = ()
    # something has yet to be received, or sent
    takes: bool = False
    sends: bool = False


@final
@dataclass(frozen=True, slots=True)
class OtherLayers:
    """A fact: tensors that other ranks have, by all their names -> their shapes without memory."""

    tensors: Mapping[str, Tensor]


def tensors_elsewhere(run: Run | None) -> Mapping[str, Tensor]:
    """Return the tensors that other ranks have; none where all ranks have all layers."""
    elsewhere = None if run is None else run.find(OtherLayers)
    return {} if elsewhere is None else elsewhere.tensors


def all_parameters(module: nn.Module) -> list[Tensor]:
    """Return all parameters of the model, once each: this rank's, and the shapes of those of other ranks."""
    elsewhere = [tensor for tensor in tensors_elsewhere(run_of(module)).values() if isinstance(tensor, nn.Parameter)]
    return [*module.parameters(), *{id(tensor): tensor for tensor in elsewhere}.values()]


def first_covering(patterns: Sequence[str], module: nn.Module, what: str) -> dict[int, str]:
    """Return by ``id`` of a parameter the first of ``patterns`` that covers a name of it; each must cover one."""
    covered = dict[int, str]()
    every = [*module.named_parameters(remove_duplicate=False), *tensors_elsewhere(run_of(module)).items()]
    for pattern in reversed(patterns):
        fitting = {id(tensor): pattern for name, tensor in every if covers(pattern, name)}
        if not fitting:
            raise MeshparError(unmatched(f"{what} {pattern!r}", pattern, module))
        covered |= fitting
    return covered
