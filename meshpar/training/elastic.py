"""Train in several replicas, each a world of its own, of which some may be lost and come back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from meshpar.core.errors import PlanError, ReplicaError
from meshpar.parallelized import Parallelized
from meshpar.plan import lost_replica_problems
from meshpar.training.data import Batches, TensorBatch
from meshpar.training.lighthouse import Rendezvous, plain_name
from meshpar.training.quorum import (
    Division,
    Quorum,
    QuorumMember,
    ReplicaAction,
    ReplicaPhase,
    ReplicaState,
    Sum,
    decide,
)
from meshpar.training.replicated import Replicated, Stateful, Summed


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Report a change of the replicas that train, by their names.

    Attributes:
        step: number of completed steps.
        replicas: those that train from now on; ``lost`` and ``joined`` are the differences.
        seconds: seconds that this replica waited.
    """

    step: int
    replicas: tuple[str, ...]
    lost: tuple[str, ...]
    joined: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        changes = [
            f"{word} {', '.join(names)}" for word, names in (("lost", self.lost), ("joined", self.joined)) if names
        ]
        count = f"{len(self.replicas)} replica{'s' if len(self.replicas) != 1 else ''}"
        return f"{count} after step {self.step}: {'; '.join(changes)} ({self.seconds:.1f} s)"


@final
class Replicas:
    """Train one model in several replicas, each a job of its own with its own process group; a lost replica costs a
    step.

    Every replica takes its share of each step's samples, and gradients are averaged over the replicas, weighted by
    their tokens. If a replica ends, hangs or is cut off, the others complete the step without it, and its samples come
    again in the next steps. A new or returned replica gets the state of a living one, compared by hash. A step counts
    if torchft's lighthouse has put together a quorum of replicas that have its sum, so that a replica that was dropped
    commits nothing.

    >>> with Replicas(par, optimizer, batches) as replicas:                 # doctest: +SKIP
    ...     while batches.epoch < 1:                                        # doctest: +SKIP
    ...         for batch in par.accumulate(replicas.begin()):              # doctest: +SKIP
    ...             loss_sum, tokens = ...                                  # doctest: +SKIP
    ...             (loss_sum * par.token_scale(tokens)).backward()         # doctest: +SKIP
    ...         replicas.reduce(tokens)                                     # doctest: +SKIP
    ...         optimizer.step(); optimizer.zero_grad()                     # doctest: +SKIP

    Every method is collective in the replica: all of its ranks call it.

    Args:
        par: the parallel module of this replica alone. All replicas start from the same weights.
        optimizer: its optimizer.
        data: the batches of this replica, read without workers.
        state: state that a new replica also gets, with the position of ``data`` in it; None: the position alone.
        same: an object whose ``repr`` must be equal on all replicas, such as settings.
        lighthouse: ``http://host:port``; None: ``TORCHFT_LIGHTHOUSE``, which ``meshpar run --elastic=replicas`` sets.
        name: of this replica; None: as the launcher says.
        replicas: how many to wait for at the start; None: as the launcher says.
        patience_s: seconds that replicas wait for one that does not answer; more than their step times differ.
        wait_s: seconds that a new replica waits for the others.

    Attributes:
        step: number of steps that were committed; a loop that restores a checkpoint sets it.
        counted: whether each of the shares of the last step counted.
        changes: the changes since the loop last cleared the list.

    Raises:
        PlanError: lists the parts of the plan, the model and the data that replicas do not support.
        ReplicaError: the lighthouse does not answer.
    """

    def __init__(
        self,
        par: Parallelized,
        optimizer: torch.optim.Optimizer,
        data: Batches,
        *,
        state: Stateful | None = None,
        same: object = None,
        lighthouse: str | None = None,
        name: str | None = None,
        replicas: int | None = None,
        patience_s: float = 20.0,
        wait_s: float = 900.0,
    ) -> None:
        if problems := [*lost_replica_problems(par.plan.passes, par.spec, par.module), *data.share_problems()]:
            raise PlanError(problems)
        self.par, self.optimizer, self.data = par, optimizer, data
        self.step, self.changes = 0, list[Change]()
        self.counted: tuple[bool, ...] = ()
        self._copies = Replicated(par, optimizer, data, data if state is None else state, same)
        self._rendezvous = Rendezvous(lighthouse, name, replicas, patience_s, wait_s)
        self._phase = ReplicaPhase.BEGINS
        self._left = False  # the last step was given up: the others may have made it
        self._sum: Sum = (0, 0)
        self._life = 0  # steps that this process has committed
        self._division: Division = ((0, 0), ())  # of the samples of this step
        self._trained: tuple[str, ...] = ()
        self._began = 0.0

    def __enter__(self) -> Replicas:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the other replicas, which then do not wait for this one."""
        self._rendezvous.close()

    def join(self) -> bool:
        """Return whether living replicas have a state, which :meth:`begin` copies; else restore a checkpoint."""
        self._phase = ReplicaPhase.JOINS
        if self._ask().best[0] >= 0:
            return True
        self._phase = ReplicaPhase.BEGINS
        self._rendezvous.quorum = None  # the next one says from where this replica starts
        self._rendezvous.waits_since = math.inf
        return False

    @property
    def slot(self) -> int:
        """Number of this replica among those that share the samples of this step, from 0."""
        return self._division[1].index(self._rendezvous.name)

    @property
    def slots(self) -> int:
        """Number of replicas that share the samples of this step."""
        return len(self._division[1])

    @property
    def sum(self) -> Sum:
        """The group in which the last step was added up; of two replicas' steps of one number, the larger counts."""
        return self._sum

    def writes(self, *, last: bool = False) -> bool:
        """Return whether this replica writes checkpoints and reports after this step; ``last``: it trains no further,
        and asks whether its state is still the newest if it was not heard for a while.
        """
        if not self.leads:
            return False
        current = self._rendezvous.is_current()
        return current if current or not last else self._ask().best == (self.step, self._sum)

    @property
    def leads(self) -> bool:
        """True where this replica trained longest of those with the newest state when they last met; not collective."""
        return self._rendezvous.first and not self._left

    @property
    def term(self) -> int:
        """How often this replica came to lead: another one may have written in between; not collective."""
        return self._rendezvous.term

    def alive(self) -> None:
        """Report progress, as after each batch of a validation: a replica that is silent for long is dropped."""
        self._rendezvous.alive()

    def begin(self, asked: Callable[[], str | None] = lambda: None) -> list[TensorBatch]:
        """Begin a step: let new replicas in, copy the state if this one is behind, and return the rank's batches.

        ``asked`` returns the reason of a stop request on this rank, or None; it ends a wait for other replicas.

        Raises:
            ReplicaError: this replica does not reach the others any more; a new start of it may.
            StopAskedError: rank 0 of this replica was asked to stop while it waited; no step has begun.
        """
        began = time.monotonic()
        while (action := self._decide()) is not ReplicaAction.BEGIN:
            if action is ReplicaAction.ASK:
                self._ask(asked=asked)
            elif action is ReplicaAction.SYNCHRONIZE and self._synchronize():
                self._rendezvous.succeed()
                break  # all members have one state now, whatever they had when the quorum came together
            elif action is ReplicaAction.SYNCHRONIZE:
                self._rendezvous.fail(self.step)
            elif action is ReplicaAction.END_WITHOUT_STATE:
                raise ReplicaError(
                    "the running replicas ended before this replica had received their state; start this replica "
                    "again, from the newest checkpoint"
                )
            else:
                raise ReplicaError(
                    f"the other replicas have resumed from a checkpoint before step {self.step}; start replica "
                    f"{plain_name(self._rendezvous.name)} again"
                )
        assert self._rendezvous.quorum is not None
        self._left, self._division = False, self._rendezvous.quorum.group
        if self._division[1] != self._trained:
            self._note_change(time.monotonic() - began)
        self._began = time.monotonic()
        return self.data.share(self.slot, self.slots)

    @torch.no_grad()
    def reduce(self, tokens: int, *values: Tensor) -> list[Tensor] | None:
        """Average the gradients over replicas, and commit the step: call it between backward and optimizer.

        Args:
            tokens: number of tokens that this rank counted in the step, the weight of its gradients.
            values: sums of this rank, such as of losses.

        Returns:
            Tokens, then ``values``, summed over the ranks of all replicas that counted: float64, in host memory. None:
            the step does not count here. Its gradients are dropped, and the next :meth:`begin` copies the others'
            state, or shares the samples again.
        """
        self.par.reshard()
        began, failed = time.monotonic(), False
        flat = [tensor.detach().double().reshape(-1).cpu() for tensor in values]
        numbers = torch.cat([torch.tensor([float(tokens)], dtype=torch.float64), *flat])
        numbers = self.par.data_sum(numbers.to(self.par.device)).cpu()
        action = ReplicaAction.SUM
        while action is ReplicaAction.SUM:
            summed = self._rendezvous.ranks.attempt(
                lambda: Summed(self._rendezvous.peers, self.par.module, self.slot, self.slots, numbers)
            )
            if summed is not None:
                assert self._rendezvous.quorum is not None
                group = self._rendezvous.quorum.key
                self._phase = ReplicaPhase.SUMMED
                self._ask(done=group)
                action = self._decide(done=group)
            else:
                failed = True
                self._rendezvous.fail(self.step)
                self._phase = ReplicaPhase.WAITS
                self._ask()
                action = self._decide()
                if action is ReplicaAction.SUM and not self._rendezvous.ranks.did(self._rendezvous.connect):
                    self._rendezvous.disconnect()
        self._phase = ReplicaPhase.BEGINS
        if action is ReplicaAction.COMMIT:
            assert summed is not None
            summed.commit()
            self.data.count(summed.counted)
            self._life += 1
            self.step, self._sum, self.counted = self.step + 1, group, tuple(summed.counted)
            self._rendezvous.longest_s = max(self._rendezvous.longest_s, time.monotonic() - self._began)
            self._rendezvous.succeed()
            if failed:
                self._note_change(time.monotonic() - began)
            total, *parts = summed.totals.split([1, *(tensor.numel() for tensor in values)])
            return [total.reshape(()), *(part.view(value.shape) for part, value in zip(parts, values))]
        if action is ReplicaAction.LEAVE:
            self._rendezvous.quorum = None
        self._left = True
        for parameter in self.par.module.parameters():
            parameter.grad = None
        return None

    def _decide(self, *, done: Sum | None = None) -> ReplicaAction:
        slots = enumerate(self._division[1]) if self._phase is ReplicaPhase.WAITS else ()
        state = ReplicaState(
            name=self._rendezvous.name,
            phase=self._phase,
            step=self.step,
            sum=self._sum if done is None else done,
            compared=self._rendezvous.compared,
            with_samples=frozenset(name for number, name in slots if self.data.has_share(number)),
        )
        return decide(self._rendezvous.quorum, state)

    def _ask(self, *, done: Sum | None = None, asked: Callable[[], str | None] = lambda: None) -> Quorum:
        """Get a quorum. ``done``: the group of this step's sum."""
        joins = self._phase is ReplicaPhase.JOINS
        member = QuorumMember(
            name=self._rendezvous.name,
            store="",
            step=-1 if joins else self.step + (done is not None),
            sum=self._sum if done is None else done,
            waits=self._phase is ReplicaPhase.WAITS,
            failures=0,
            drawn=self._division[0],
            life=self._life,
        )
        return self._rendezvous.ask(member, after=self.step, trained=bool(self._trained), asked=asked)

    def _synchronize(self) -> bool:
        """Try to bring the quorum's members to the newest state; return whether all have it."""
        rendezvous, quorum = self._rendezvous, self._rendezvous.quorum
        assert quorum is not None
        if not rendezvous.ranks.did(rendezvous.connect):
            return False
        received = rendezvous.ranks.attempt(lambda: self._copies.synchronize(rendezvous.peers, quorum, rendezvous.name))
        if received is None:
            return False
        if received:
            self._copies.load(received)
            self._phase = ReplicaPhase.BEGINS
        self.step, self._sum = quorum.best
        return rendezvous.compare(lambda peers: self._copies.compare(peers, self.step))

    def _note_change(self, seconds: float) -> None:
        """Note which replicas were lost and joined since the last step."""
        assert self._rendezvous.quorum is not None
        before, now = set(self._trained), self._rendezvous.quorum.names
        self._trained, lost, joined = now, before - {*now}, {*now} - before
        # the first to come may begin without the others
        if (lost or joined) and (before or len(now) < self._rendezvous.expected):
            replicas, gone, new = (tuple(map(plain_name, sorted(names))) for names in (now, lost, joined))
            self.changes.append(Change(step=self.step, replicas=replicas, lost=gone, joined=new, seconds=seconds))
