"""The sum of all replicas' gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import final

import torch
from torch import Tensor, nn

from meshpar.step.placements import local_tensor
from meshpar.training.quorum import Peers

_BUCKET = 1 << 22  # elements


@final
class Summed:
    """The weighted sum of all members' gradients, beside which the gradients of this replica stay until
    :meth:`commit`.
    """

    def __init__(self, group: Peers, module: nn.Module, slot: int, slots: int, mine: Tensor) -> None:
        """Add up over ``group``; ``mine`` has the tokens of this replica and its other sums, ``slot`` is its number of
        ``slots``.

        Raises:
            RuntimeError: a member failed.
        """
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        known = torch.tensor([float(parameter.grad is not None) for parameter in self._trained], dtype=torch.float64)
        slotted = torch.zeros(2 * slots, dtype=torch.float64)
        slotted[slot], slotted[slots + slot] = mine[0], 1.0
        vector = torch.cat([slotted, mine, known])
        group.allreduce([vector]).wait()
        self.counted = [bool(count) for count in vector[slots : 2 * slots]]
        self.totals = vector[2 * slots : 2 * slots + len(mine)]
        self._known = vector[2 * slots + len(mine) :].tolist()
        weight = float(mine[0] / self.totals[0]) if self.totals[0] else 0.0
        self._flats: list[tuple[list[Tensor], Tensor]] = []
        works = []
        for bucket in buckets(parameter for parameter, known in zip(self._trained, self._known, strict=True) if known):
            flat = torch.cat(
                [_gradient(parameter).reshape(-1).to("cpu", summed_in(parameter.dtype)) for parameter in bucket]
            )
            flat.mul_(weight)
            works.append(group.allreduce([flat]))
            self._flats.append((bucket, flat))
        for work in works:
            work.wait()

    def commit(self) -> None:
        """Replace the gradients of this replica by those of all."""
        for bucket, flat in self._flats:
            parts = flat.split([local_tensor(parameter).numel() for parameter in bucket])
            for parameter, part in zip(bucket, parts):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                grad = local_tensor(parameter.grad)
                grad.copy_(part.view(grad.shape))


def buckets(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield parameters of one dtype whose gradients or values travel together, in their order."""
    bucket, size = list[Tensor](), 0
    for parameter in parameters:
        if bucket and (parameter.dtype != bucket[0].dtype or size >= _BUCKET):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += local_tensor(parameter).numel()
    if bucket:
        yield bucket


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of a dtype are added up."""
    return torch.promote_types(dtype, torch.float32)


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(local_tensor(parameter)) if parameter.grad is None else local_tensor(parameter.grad)
