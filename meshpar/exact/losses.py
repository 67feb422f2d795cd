"""Whether ranks that share their samples and positions start a backward from the same loss.

What is made inside of a split module may leave it by another way than its output: by an attribute, a list, a hook. Each rank then has that
of its own heads or features, and a loss that takes it in differs between the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshpar.errors import ParallelError
from meshpar.replicas import Looks

_ROUNDINGS = {"cpu": 64, "accelerator": 1024}
"""How far losses may differ, in units of their dtype's rounding: an accelerator adds in another order each time."""


@final
class Losses:
    """The losses of one parallel module's backwards.

    Args:
        groups: axis -> its process group, of the axes whose ranks see the same samples and positions.
        device: where numbers are exchanged.
    """

    def __init__(self, groups: Mapping[str, dist.ProcessGroup], device: torch.device) -> None:
        self._groups, self._device, self._looks = dict(groups), device, Looks()
        self._roots: list[Tensor] = []
        self._taken: list[Tensor] = []

    def begin(self, roots: Iterable[object]) -> None:
        """Remember what a backward starts from, of whatever model."""
        if self._groups:
            plain = [each for each in roots if isinstance(each, Tensor) and not isinstance(each, DTensor)]
            self._roots = [each.detach() for each in plain if each.numel() == 1]

    def reach(self) -> None:
        """Remember that the backward that has begun reaches this module."""
        self._taken += self._roots
        self._roots = []

    def check(self) -> None:
        """Compare what the backwards since the last comparison started from: every time on a CPU, on an accelerator the first times.

        Raises:
            ParallelError: on every rank of the axis alike.

        Collective over the axes.
        """
        taken, self._taken = self._taken, []
        if not self._groups or not self._looks.now("", self._device):
            return
        kind = max((each.dtype for each in taken), key=lambda each: torch.finfo(each).eps, default=torch.float64)
        mine = torch.zeros((), device=self._device, dtype=torch.float64)
        for each in taken:
            mine += each.reshape(()).to(self._device, torch.float64).nan_to_num(-1e300)
        allowed = torch.finfo(kind).eps * _ROUNDINGS["cpu" if self._device.type == "cpu" else "accelerator"]
        for axis, group in self._groups.items():
            both = torch.stack([mine, -mine])
            dist.all_reduce(both, dist.ReduceOp.MAX, group)
            most, least = both[0].item(), -both[1].item()
            if most != least and not most - least <= allowed * max(abs(most), abs(least)):
                raise ParallelError(
                    f"ranks of {axis} compute the same samples together, but their backward starts from different losses: from {least:.6g} "
                    f"to {most:.6g}, here {mine.item():.6g}. A value made inside of a split module entered the loss by another way than "
                    "the module's output (an attribute, a list, a hook), and each rank has that of its own heads or features; leave that "
                    "module and the layers in it whole, TensorParallel(styles={'blocks.*.attn': None}), or draw "
                    "random numbers of the loss alike on these ranks"
                )
