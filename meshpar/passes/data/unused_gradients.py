"""Parameters that no rank used in a backward: they get no gradient, as in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import nn

from meshpar.core import runtime

Exchange = Callable[[], tuple[Sequence[dist.ProcessGroup], torch.device]]


@final
class Unused:
    """Find the parameters that no rank used, among those whose gradient counts as zero on this one.

    A parameter that a rank did not use counts as zero in the reduction. One that no rank used must have no gradient
    afterwards: an optimizer would decay it, or move it by its momentum. The ranks tell one another beside other work,
    in one exchange after a backward; only a rank with such a parameter waits.

    Args:
        module: the outermost module.
        exchange: returns the groups over which ranks that have the same parameters tell one another, and the device of
            the exchange; None: gradients are not averaged.
    """

    def __init__(self, module: nn.Module, exchange: Exchange | None) -> None:
        self._module, self._exchange = module, exchange
        self._pending: dist.Work | None = None
        self._marks = torch.zeros(0, dtype=torch.uint8)

    def drop(self, unused: Sequence[nn.Parameter]) -> None:
        """Take the gradients from those of ``unused`` that no rank used in the backward that has ended.

        Collective where gradients are averaged: every rank calls it.
        """
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        if self._exchange is None and not unused:
            return
        parameters = list(self._module.parameters())
        if self._exchange is not None:
            groups, device = self._exchange()
            zeros = {id(parameter) for parameter in unused}
            used = [parameter.grad is not None and id(parameter) not in zeros for parameter in parameters]
            self._marks = torch.tensor(used, dtype=torch.uint8, device=device)
            for group in groups:
                if self._pending is not None:
                    self._pending.wait()
                self._pending = dist.all_reduce(self._marks, dist.ReduceOp.MAX, group, async_op=True)
        if not unused:
            return
        used_somewhere: set[int] = set()
        if self._pending is not None and not runtime.is_simulated():
            self._pending.wait()
            self._pending = None
            used_somewhere = {
                id(parameter) for parameter, mark in zip(parameters, self._marks.tolist(), strict=True) if mark
            }
        for parameter in unused:
            if id(parameter) not in used_somewhere:
                parameter.grad = None
