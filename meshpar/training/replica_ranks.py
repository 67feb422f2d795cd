"""The ranks of one replica, which act as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast, final

import torch
import torch.distributed as dist

from meshpar.core import runtime
from meshpar.core.errors import MeshparError, ReplicaError, brief

T = TypeVar("T")


@final
class Together:
    """Lets the ranks of a replica decide alike: rank 0 speaks with the lighthouse, and what failed on one rank has
    failed on all.

    Every method is collective: all ranks of the replica call it.

    Args:
        timeout_s: seconds that ranks wait for one another.

    Attributes:
        error: what failed last on this rank.
    """

    def __init__(self, timeout_s: float) -> None:
        self.error = "another rank of this replica failed"
        self._group: dist.ProcessGroup | None = None
        if dist.get_world_size() > 1:
            self._group = runtime.new_host_group("replica", timeout_s)

    def tell(self, act: Callable[[], T]) -> T:
        """Run ``act`` on rank 0 of the replica alone and return its result, or raise its error, on every rank."""
        outcome: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                outcome = [(act(), None)]
            except MeshparError as error:
                outcome = [(None, error)]
            except Exception as error:  # noqa: BLE001 - the other ranks, which wait for it, must hear of it
                outcome = [(None, ReplicaError(f"rank 0 of this replica failed: {brief(error)}"))]
                outcome[0][1].__cause__ = error
        if self._group is not None:
            dist.broadcast_object_list(outcome, src=0, group=self._group)
        result, failure = outcome[0]
        if failure is not None:
            raise failure
        return cast("T", result)

    def attempt(self, act: Callable[[], T]) -> T | None:
        """Return the result of ``act``, which needs the other replicas; None on every rank where it failed on one."""
        result: T | None = None
        try:
            result = act()
            good = True
        except RuntimeError as error:
            if isinstance(error, MeshparError):
                raise
            good, self.error = False, f"{type(error).__name__}: {error}"
        return result if self._all(good) else None

    def did(self, act: Callable[[], object]) -> bool:
        """Run ``act``, which needs the other replicas, and return whether it succeeded on every rank."""
        return self.attempt(lambda: [act()]) is not None

    def _all(self, good: bool) -> bool:
        """Return whether all ranks of the replica say so."""
        if self._group is None:
            return good
        flag = torch.tensor(int(good))
        dist.all_reduce(flag, dist.ReduceOp.MIN, self._group)
        return bool(flag)
