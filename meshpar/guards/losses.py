"""Compare the losses from which ranks that share samples and positions start a backward: what leaves a split module
otherwise than by its output differs between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshpar.core import runtime
from meshpar.core.errors import ParallelError
from meshpar.exchange.ranks import Largest, Looks
from meshpar.step.moment import Guard, Guarded

_ROUNDINGS, _QUEUED_ROUNDINGS = 64, 1024
"""How far losses may differ, in units of their dtype's rounding: an accelerator adds in another order each time."""
_LEAST = 1e-2
"""How large a loss counts at least: one whose terms cancel to about zero has the rounding of its terms."""


@final
class Losses(Guard):
    """The losses of one parallel module's backwards; ``groups``: of the axes whose ranks see the same positions."""

    def __init__(self, groups: Mapping[str, dist.ProcessGroup], device: torch.device, *, always: bool = True) -> None:
        self._groups, self._device, self._looked = dict(groups), device, 0
        self._always = always and not runtime.queues(device)

    @classmethod
    def of(cls, guarded: Guarded) -> Losses:
        """Return the losses of a module."""
        resolved = guarded.resolved
        axes = () if resolved.splits_sequence else resolved.same
        groups = {axis: guarded.meshes[resolved.held].get_group(axis) for axis in axes}
        return cls(groups, guarded.device, always=guarded.guards == "always")

    def simulated(self) -> Guard:
        return SentLosses(list(self._groups.values()), self._device, on_cpu=self._always)

    def before_backward(self, roots: Iterable[object], *, reaches: Callable[[], bool]) -> None:
        """Compare every time on a CPU, on an accelerator, where reading waits, the first times."""
        if self._groups and (self._always or self._looked < Looks.FIRST) and reaches():
            self.check(roots)

    def check(self, roots: Iterable[object]) -> None:
        """Compare what a backward of the module is about to start from. Collective over the axes."""
        self._looked += 1
        plain = [
            root.detach()
            for root in roots
            if isinstance(root, Tensor) and not isinstance(root, DTensor) and root.numel() == 1
        ]
        kind = max((loss.dtype for loss in plain), key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)
        total = torch.zeros((), device=self._device, dtype=torch.float64)
        for loss in plain:
            total += loss.reshape(()).to(self._device, torch.float64).nan_to_num(-1e300)
        allowed = torch.finfo(kind).eps * (_QUEUED_ROUNDINGS if runtime.queues(self._device) else _ROUNDINGS)
        for axis, group in self._groups.items():
            high, low = Largest(torch.stack([total, -total]), group).read().tolist()
            low = -low
            if high != low and not high - low <= allowed * max(abs(high), abs(low), _LEAST):
                raise ParallelError(
                    f"ranks of {axis} compute the same samples together, but their backward starts from different "
                    f"losses: from {low:.6g} to {high:.6g}, here {total.item():.6g}. Give collectives of your own in "
                    "a loss or a hook group=par.data_group, whose ranks have different samples. Where a value made "
                    "inside of a split module entered the loss by another way than the module's output (an attribute, "
                    "a list, a hook), each rank has that of its own heads or features; leave that module and the "
                    "layers in it whole, TensorParallel(styles={'blocks.*.attn': None}), or draw random numbers of the "
                    "loss alike on these ranks"
                )


@final
class SentLosses(Guard):
    """The losses of simulated ranks, which are sent on a CPU and not looked at."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], device: torch.device, *, on_cpu: bool) -> None:
        self._groups, self._device = groups if on_cpu else (), device

    def before_backward(self, roots: Iterable[object], *, reaches: Callable[[], bool]) -> None:
        for group in self._groups if self._groups and reaches() else ():
            Largest(torch.empty(2, dtype=torch.float64, device=self._device), group).read()
