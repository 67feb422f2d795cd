"""Steps that all ranks run together: if one fails, all fail with the same error within a bounded time."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar, final

import torch.distributed as dist

from meshpar.core.errors import CheckpointError, StoreError
from meshpar.exchange.host_messages import Messages, branch_of, receive_bytes, send_bytes

T = TypeVar("T")
R = TypeVar("R")
_Outcome = tuple[str | None, Any]
# times the time-out that a rank waits for the one above it: that one waits for all below it, and then decides
_BOTH_WAYS = 2.5


@final
class SavingRanks:
    """The ranks that save and restore together, by messages along a tree; once ``broken``, new ones are needed."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._messages = Messages("checkpoints", timeout_s=timeout_s) if many else None
        self.rank, self.size = (self._messages.rank, self._messages.size) if self._messages is not None else (0, 1)
        self._branch, self.broken = branch_of(self.rank, self.size), False

    def agree(self, step: str, act: Callable[[], T], decide: Callable[[list[T]], R], *, deciding: str = "") -> R:
        """Run ``act`` on every rank, then ``decide`` on rank 0 with all results; every rank returns its decision."""
        outcome, interrupt = _attempt(self.rank, act)
        interrupts = [interrupt]

        def talk() -> tuple[str, list[_Outcome]]:
            outcomes = self._gather(outcome)
            answer = step, [outcome for outcome in outcomes if outcome[0] is not None]
            if self.rank == 0 and not answer[1]:
                decided, interrupted = _attempt(0, lambda: decide([value for _, value in outcomes]))
                interrupts.append(interrupted)
                answer = deciding or step, [decided]
            return self._broadcast(answer)  # type: ignore[no-any-return]

        return self._finish(step, talk, interrupts)  # type: ignore[no-any-return]

    def collect(self, step: str, act: Callable[[], T]) -> list[T]:
        """Run ``act`` on every rank; rank 0 returns all results in rank order, the others an empty list."""
        results: list[T] = []
        self.agree(step, act, results.extend)
        return results

    def everyone(self, step: str, act: Callable[[], T]) -> list[T]:
        """Run ``act`` on every rank; every rank returns all results in rank order."""
        return self.agree(step, act, list)

    def share(self, step: str, act: Callable[[], T]) -> T:
        """Run ``act`` on rank 0 alone; every rank returns its result."""
        outcome, interrupt = _attempt(0, act) if self.rank == 0 else ((None, None), None)
        return self._finish(step, lambda: self._broadcast((step, [outcome])), [interrupt])  # type: ignore[no-any-return]

    def spread(self, step: str, act: Callable[[], Sequence[T]]) -> T:
        """Run ``act`` on rank 0 alone; each rank returns its own item of the result."""
        outcomes: list[_Outcome] = []
        interrupt: BaseException | None = None
        if self.rank == 0:
            (failure, values), interrupt = _attempt(0, act)
            items = values if values and failure is None else [values] * self.size
            outcomes = [(failure, item) for item in items]
        return self._finish(step, lambda: (step, [self._scatter(outcomes)]), [interrupt])  # type: ignore[no-any-return]

    def close(self) -> None:
        self._messages = None

    def _finish(
        self, step: str, talk: Callable[[], tuple[str, list[_Outcome]]], interrupts: Sequence[BaseException | None]
    ) -> Any:  # noqa: ANN401 - what an act returned
        """Return the outcome of an exchange; raise its failures, or what interrupted this rank."""
        try:
            step, outcomes = talk()
        except RuntimeError as error:
            self.broken = True
            reason = str(error).partition("\n")[0]
            raise CheckpointError(
                f"{step} failed: rank {self.rank} lost the others, or waited longer than {self._timeout}: {reason}"
            ) from error
        if failures := [failure for failure, _ in outcomes if failure is not None]:
            kind = StoreError if any(value is StoreError for _, value in outcomes) else CheckpointError
            raise kind("\n  ".join([f"{step} failed on {len(failures)} of {self.size} ranks:", *failures]))
        if interrupted := [error for error in interrupts if error is not None]:
            raise interrupted[0]
        return outcomes[0][1]

    def _gather(self, outcome: _Outcome) -> list[_Outcome]:
        """Gather all outcomes on rank 0; the others return those of the ranks below them."""
        gathered = [pickle.dumps(outcome)]
        for child, end in self._branch.children:
            gathered += pickle.loads(self._receive(child, 1 + (end - child - 1).bit_length() / 32))
        if self._branch.parent is not None:
            self._send({self._branch.parent: pickle.dumps(gathered)}, _BOTH_WAYS)
            return []
        return [pickle.loads(packed) for packed in gathered]

    def _broadcast(self, value: Any) -> Any:  # noqa: ANN401
        if self._messages is None:
            return value
        data = pickle.dumps(value) if self._branch.parent is None else self._receive(self._branch.parent)
        self._send({child: data for child, _ in self._branch.children})
        return pickle.loads(data)

    def _scatter(self, outcomes: list[_Outcome]) -> _Outcome:
        """Return this rank's item of rank 0's outcomes."""
        if self._branch.parent is None:
            items = [pickle.dumps(outcome) for outcome in outcomes]
        else:
            items = pickle.loads(self._receive(self._branch.parent))
        parts = {child: items[child - self.rank : end - self.rank] for child, end in self._branch.children}
        self._send({child: pickle.dumps(part) for child, part in parts.items()})
        return pickle.loads(items[0])  # type: ignore[no-any-return]

    def _receive(self, source: int, times: float = _BOTH_WAYS) -> bytes:
        assert self._messages is not None
        try:
            return receive_bytes(self._messages, source, self._timeout * times)
        except RuntimeError as error:
            raise self._lost(source, error) from error

    def _send(self, messages: Mapping[int, bytes], times: float = 1.0) -> None:
        if self._messages is None:
            return
        works = [(to, send_bytes(self._messages, data, to)) for to, data in messages.items()]
        for to, sent in works:
            try:
                for work in sent:
                    work.wait(self._timeout * times)
            except RuntimeError as error:
                raise self._lost(to, error) from error

    def _lost(self, peer: int, error: RuntimeError) -> RuntimeError:
        """Return the error that names the rank that was lost first, and close the connections: all ranks fail now."""
        assert self._messages is not None
        peer = self._messages.lost(peer, waited="Timed out" in str(error))
        return RuntimeError(f"rank {peer} has ended, or did not come ({str(error).partition(chr(10))[0]})")


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
