"""Steps that all ranks run together: if one fails, all fail with the same error within a bounded time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar, final

import torch.distributed as dist

from meshpar.core import runtime
from meshpar.core.errors import CheckpointError, StoreError

T = TypeVar("T")
_Outcome = tuple[str | None, Any]


@final
class Ranks:
    """The ranks that save and restore together, on a gloo group of their own; one process without a process group.

    Collective: every rank constructs it and runs each step, in the same order.

    Args:
        timeout_s: seconds that a rank waits for the others in one step; creating the group is the first.

    Raises:
        CheckpointError: the group was not created in that time, or a rank ended.

    Attributes:
        broken: whether communication failed in a step; the next step needs new Ranks.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._group = _make_group(self._timeout) if many else None
        self.rank = dist.get_rank() if many else 0
        self.size = dist.get_world_size() if many else 1
        self.broken = False

    def collect(self, step: str, act: Callable[[], T]) -> list[T]:
        """Run ``act`` on every rank; rank 0 returns all results in rank order, the others an empty list."""
        outcome, interrupt = _attempt(self.rank, act)
        outcomes = self._exchange(step, lambda: self._gather(outcome))
        if interrupt is not None:
            raise interrupt
        return [value for _, value in outcomes] if self.rank == 0 else []

    def share(self, step: str, act: Callable[[], T]) -> T:
        """Run ``act`` on rank 0 alone; every rank returns its result."""
        outcome: _Outcome = (None, None)
        interrupt: BaseException | None = None
        if self.rank == 0:
            outcome, interrupt = _attempt(0, act)
        received = self._exchange(step, lambda: [self._broadcast(outcome)])
        if interrupt is not None:
            raise interrupt
        return received[0][1]

    def spread(self, step: str, act: Callable[[], Sequence[T]]) -> T:
        """Run ``act`` on rank 0 alone; each rank returns its own item of the result."""
        outcomes: list[_Outcome] = []
        interrupt: BaseException | None = None
        if self.rank == 0:
            (failure, values), interrupt = _attempt(0, act)
            outcomes = [
                (failure, value) for value in ([values] * self.size if failure is not None or not values else values)
            ]
        received = self._exchange(step, lambda: [self._scatter(outcomes)])
        if interrupt is not None:
            raise interrupt
        return received[0][1]

    def everyone(self, step: str, act: Callable[[], T]) -> list[T]:
        """Run ``act`` on every rank; every rank returns all results in rank order."""
        results = self.collect(step, act)
        return self.share(step, lambda: results)

    def close(self) -> None:
        """Destroy the group."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def _exchange(self, step: str, talk: Callable[[], list[_Outcome]]) -> list[_Outcome]:
        try:
            if self._group is not None:
                dist.monitored_barrier(self._group, timeout=self._timeout, wait_all_ranks=True)
            outcomes = talk()
        except RuntimeError as error:
            self.broken = True
            reason = str(error).partition("\n")[0]
            raise CheckpointError(
                f"{step} failed: rank {self.rank} lost the others, or waited longer than {self._timeout}: {reason}"
            ) from error
        if failures := [failure for failure, _ in outcomes if failure is not None]:
            kind = (
                StoreError
                if any(failure is not None and value is StoreError for failure, value in outcomes)
                else CheckpointError
            )
            raise kind("\n  ".join([f"{step} failed on {len(failures)} of {self.size} ranks:", *failures]))
        return outcomes

    def _gather(self, outcome: _Outcome) -> list[_Outcome]:
        """Gather all outcomes on rank 0, and send failures to every rank."""
        if self._group is None:
            return [outcome]
        outcomes: list[_Outcome] | None = [(None, None) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather_object(outcome, outcomes, dst=0, group=self._group)
        failures: list[_Outcome] = self._broadcast(
            [one_outcome for one_outcome in outcomes or () if one_outcome[0] is not None]
        )
        return failures or outcomes or []

    def _broadcast(self, value: T) -> T:
        values = [value]
        if self._group is not None:
            dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def _scatter(self, outcomes: list[_Outcome]) -> _Outcome:
        if self._group is None:
            return outcomes[0]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, outcomes if self.rank == 0 else None, src=0, group=self._group)
        return mine[0]


def _make_group(timeout: timedelta) -> dist.ProcessGroup:
    """Make a gloo group of all ranks.

    On a thread of its own, because gloo connects to one rank after another and waits for each as long as ``timeout``,
    and longer for one that dies between publishing its address and answering. A thread that still waits then ends with
    the process.
    """
    made: Future[dist.ProcessGroup] = Future()

    def make() -> None:
        try:
            made.set_result(runtime.new_host_group("checkpoints", timeout.total_seconds()))
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            made.set_exception(error)

    threading.Thread(target=make, name="meshpar-group", daemon=True).start()
    try:
        return made.result(timeout.total_seconds())
    except (TimeoutError, RuntimeError) as error:
        reason = str(error).partition("\n")[0] or "no answer"
        raise CheckpointError(
            f"rank {dist.get_rank()} could not connect to the {dist.get_world_size() - 1} others within {timeout}: "
            f"one has ended, or did not call save or restore; call it on every rank ({reason})"
        ) from error


def _attempt(rank: int, act: Callable[[], T]) -> tuple[_Outcome, BaseException | None]:
    """Run ``act``; an error becomes text for the other ranks, and an interrupt is also kept to be raised here."""
    try:
        return (None, act()), None
    except CheckpointError as error:
        return (f"rank {rank}: {error}", StoreError if isinstance(error, StoreError) else None), None
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        return (f"rank {rank}: {type(error).__name__}: {error}", None), None
    except BaseException as error:  # noqa: BLE001 - raised again by the caller once the others know
        return (f"rank {rank}: {type(error).__name__}", None), error
