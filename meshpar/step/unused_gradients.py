"""Parameters that no rank used in a backward: they get no gradient, as in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import nn

from meshpar.exchange.ranks import Ranks
from meshpar.step.moment import Moment


@final
class UnusedGradients(Moment):
    """Find the parameters that no rank used, among those whose gradient counts as zero on this one."""

    def __init__(self, module: nn.Module, ranks: Ranks | None) -> None:
        self._module, self._ranks = module, ranks
        self._pending: dist.Work | None = None
        self._marks = torch.zeros(0, dtype=torch.uint8)

    def gradients(self, unused: list[nn.Parameter]) -> None:
        """Drop the gradients of ``unused`` that no rank used. Collective where gradients are averaged."""
        parameters = list(self._module.parameters())
        self._send(parameters, unused)
        if not unused:
            return
        used_somewhere = self._used_somewhere(parameters)
        for parameter in unused:
            if id(parameter) not in used_somewhere:
                parameter.grad = None

    def _send(self, parameters: Sequence[nn.Parameter], unused: Sequence[nn.Parameter]) -> None:
        """Start to tell the other ranks which parameters this one used."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        if self._ranks is None:
            return
        zeros = {id(parameter) for parameter in unused}
        used = [parameter.grad is not None and id(parameter) not in zeros for parameter in parameters]
        self._marks = torch.tensor(used, dtype=torch.uint8, device="cpu")
        self._pending = dist.all_reduce(self._marks, dist.ReduceOp.MAX, self._ranks.hosts, async_op=True)

    def _used_somewhere(self, parameters: Sequence[nn.Parameter]) -> set[int]:
        if self._pending is None:
            return set()
        self._pending.wait()
        self._pending = None
        return {id(parameter) for parameter, mark in zip(parameters, self._marks.tolist(), strict=True) if mark}

    def simulated(self) -> Moment:
        """Return what sends as much, and looks at nothing: simulated ranks all use the same parameters."""
        return _SentMarks(self)


@final
class _SentMarks(Moment):
    def __init__(self, real: UnusedGradients) -> None:
        self._real = real

    def gradients(self, unused: list[nn.Parameter]) -> None:
        self._real._send(list(self._real._module.parameters()), unused)
        for parameter in unused:
            parameter.grad = None
