"""What rows about loops share: a loop on the ranks of a plan, and the same loop in one process."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from meshpar import ModelLayout, Pass, Plan
from tests.support.loop_sides import LAYOUT, PLANS, Side

Loop = Callable[[Side], None]


class Planned(Side):
    """A side under a mesh of two ranks and passes of its own."""

    def __init__(self, mesh: str, passes: Sequence[Pass], *, alone: bool) -> None:
        super().__init__("FSDP", alone=alone)
        self.mesh, self.passes = mesh, passes

    def apply(self, module: nn.Module, layout: ModelLayout = LAYOUT) -> nn.Module:
        if self.alone:
            return module
        self.par = Plan(self.mesh, self.passes).apply(module, layout)
        return self.par.module

    def part(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.par is None else super().part(rows)


def side(plan: str | tuple[str, Sequence[Pass]], *, alone: bool) -> Side:
    if not isinstance(plan, str):
        return Planned(*plan, alone=alone)
    return Side(plan, alone=alone)


def on(plan: str | tuple[str, Sequence[Pass]], loop: Loop) -> None:
    """Run a loop on the ranks of a plan: a title of ``PLANS``, or a mesh of two ranks and its passes."""
    loop(side(plan, alone=False))


def difference(plan: str | tuple[str, Sequence[Pass]], loop: Loop, tolerance: float = 1e-9) -> str | None:
    """Run a loop on the ranks of a plan and in one process, and return what differs most; None where nothing does."""
    ranks, alone = side(plan, alone=False), side(plan, alone=True)
    loop(ranks)
    loop(alone)
    return ranks.difference(alone, tolerance)


__all__ = ["PLANS", "Loop", "difference", "on"]
