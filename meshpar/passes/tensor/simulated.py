"""Ranks of one axis as threads of one process, with real numbers: what a split computes can be tried before there are any processes."""

from __future__ import annotations

import threading
from typing import Any, final

import torch
from torch import Tensor


@final
class Meeting:
    """Where the threads of ``size`` simulated ranks hand each other tensors.

    Args:
        size: number of ranks.
        timeout_s: seconds after which a rank that waits for another gives up.
    """

    def __init__(self, size: int, timeout_s: float = 60.0) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=timeout_s)
        self._given: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Hand in ``value`` and return what every rank handed in.

        Raises:
            threading.BrokenBarrierError: a rank failed, or did not come in time.
        """
        self._given[rank] = value
        self._barrier.wait()
        everything = list(self._given)
        self._barrier.wait()  # nobody hands in the next before all have read
        return everything

    def abort(self) -> None:
        """Let the other ranks know that one failed."""
        self._barrier.abort()


@final
class SimulatedGroup:
    """One rank's process group on a :class:`Meeting`; the collectives of :mod:`meshpar.passes.tensor.collectives` know it."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._meeting.size

    def rank(self) -> int:
        """Return this rank."""
        return self._rank

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' ``x``."""
        return torch.stack(self._meeting.exchange(self._rank, x.detach())).sum(0)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Return the ranks' ``x`` joined along ``dim``."""
        return torch.cat(self._meeting.exchange(self._rank, x.detach()), dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's chunk along ``dim`` of the sum of the ranks' ``x``."""
        return self.all_reduce(x).chunk(self.size(), dim)[self._rank].contiguous()

    def all_to_all(self, x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        """Return the rows that the ranks sent to this one: ``sent[r]`` rows of ``x`` go to rank r."""
        parts = self._meeting.exchange(self._rank, x.detach().split(sent))
        return torch.cat([each[self._rank] for each in parts])
