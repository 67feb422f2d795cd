"""What a rank has of a model that is divided into stages, as data, and the action that it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

import torch.distributed as dist
from torch import Tensor, nn

from meshpar.passes.pipeline.cuts import Result
from meshpar.passes.pipeline.stand_ins import Carried


@final
@dataclass(frozen=True, slots=True)
class Chunk:
    """Blocks of one rank that follow one another.

    Attributes:
        blocks: modules, in the order of their calls.
        first: number of the first one in the model's order.
        takes: what comes beside the value that the stage before hands on.
        gives: what goes to the next stage beside the value of the last block.
    """

    blocks: tuple[nn.Module, ...]
    first: int
    takes: tuple[Result, ...]
    gives: tuple[Result, ...]

    @property
    def end(self) -> int:
        """The number of the last block in the model's order."""
        return self.first + len(self.blocks) - 1


@final
@dataclass(slots=True, kw_only=True)
class Rule:
    """What a call of a module does where a stage runs.

    Attributes:
        number: of the block in the model's order; None: it is none.
        takes: the chunk before which it stands in for the last block of the stage before, and returns what comes from
            there: what the model computes between two blocks is then computed by the second one's stage.
        only: the chunk in which it computes; None: in all of them, -1: in none.
        otherwise: what answers the calls in other chunks.
        results: of its results, those that cross cuts.
        around: it has blocks inside.
    """

    number: int | None = None
    takes: int | None = None
    only: int | None = None
    otherwise: nn.Module | None = None
    results: tuple[Result, ...] = ()
    around: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """The layers of a model that one rank has.

    Attributes:
        module: the outermost module.
        chunks: of this rank's blocks: stage ``chunk * ranks + rank`` of the model.
        rules: names of modules -> what their calls do.
        group: the ranks that have the stages.
        rank: of this rank there.
        ranks: their number.
        carried: the form of the value that passes from block to block, which the stand-ins return.
        line: names of all blocks of the model, in the order of their calls.
        draws: the model draws random numbers.
    """

    module: nn.Module
    chunks: tuple[Chunk, ...]
    rules: Mapping[str, Rule]
    group: dist.ProcessGroup
    rank: int
    ranks: int
    carried: Carried
    line: tuple[str, ...]
    draws: bool

    @property
    def last(self) -> int:
        """The stage with the last blocks, which has the loss."""
        return self.ranks * len(self.chunks) - 1


@final
@dataclass(slots=True, kw_only=True)
class Turn:
    """A forward or a backward of one micro-batch on one stage of this rank.

    Attributes:
        chunk: that runs.
        number: of the micro-batch.
        stage: that runs: the number of stages before it.
        form: the shapes of the micro-batch's tensors.
        arrived: the value that the stage before has handed on, and what came beside it.
        left: likewise to the next stage; the loss on the last one.
        takes: something has yet to be received.
        sends: something has yet to be sent.
    """

    chunk: int = 0
    number: int = 0
    stage: int = 0
    form: object = None
    arrived: list[Tensor] = field(default_factory=list)
    left: list[Tensor] = field(default_factory=list)
    takes: bool = False
    sends: bool = False
