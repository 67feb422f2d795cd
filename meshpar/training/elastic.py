"""Train in several replicas, each a world of its own, of which some may be lost and come back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from meshpar._torch.groups import bound
from meshpar.core.errors import PlanError, ReplicaError
from meshpar.parallelized import Parallelized
from meshpar.plan import lost_replica_problems
from meshpar.training import elastic_job
from meshpar.training.data import Batches, TensorBatch
from meshpar.training.quorum import GIVE_A_LIGHTHOUSE, Member, Membership, Peers, Quorum, Sum, connect
from meshpar.training.replica_ranks import Together
from meshpar.training.replicated import Replicated, Stateful
from meshpar.training.stop import StopAskedError
from meshpar.training.summed import Summed

_MOST_S = 30.0
_MOST_TRIES = 12
_CONNECT_S = 5.0  # gloo tries five times


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Report a change of the replicas that train.

    Attributes:
        step: number of completed steps.
        replicas: names of the replicas that train from now on.
        lost: names of the replicas that were lost.
        joined: names of the new replicas.
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
        left = f"{len(self.replicas)} replica{'s' if len(self.replicas) != 1 else ''}"
        return f"{left} after step {self.step}: {'; '.join(changes)} ({self.seconds:.1f} s)"


@final
class Replicas:
    """Train one model in several replicas, each a job of its own with its own process group; a lost replica costs a
    step.

    Every replica takes its share of each step's samples. Gradients are averaged over the replicas that are there,
    weighted by their tokens, and every optimizer makes the same step. If a replica ends, hangs or is cut off, the
    others complete the step without it, and its samples come again in the next steps. A new or returned replica gets
    weights, optimizer state and the position in the data from a living one, compared by hash. torchft's lighthouse
    decides which replicas are there. A step counts if the lighthouse has put together a quorum of replicas that have
    its sum, so that a replica that was dropped commits nothing.

    >>> with Replicas(par, optimizer, batches) as replicas:                 # doctest: +SKIP
    ...     while batches.epoch < 1:                                        # doctest: +SKIP
    ...         for batch in par.accumulate(replicas.begin()):              # doctest: +SKIP
    ...             loss_sum, tokens = ...                                  # doctest: +SKIP
    ...             (loss_sum * par.token_scale(tokens)).backward()         # doctest: +SKIP
    ...         replicas.reduce(tokens)                                     # doctest: +SKIP
    ...         optimizer.step(); optimizer.zero_grad()                     # doctest: +SKIP

    Every method is collective in the replica: all of its ranks call it.

    Args:
        par: the parallel module of this replica: its mesh has no other replicas. All replicas start from the same
            weights.
        optimizer: its optimizer.
        data: the batches of this replica. They are read by the training process, without workers.
        state: state that a new replica also gets, with the position of ``data`` in it; None: the position alone.
        same: an object that must be equal on all replicas, such as settings; its ``repr`` is compared when they meet.
        lighthouse: ``http://host:port``; None: ``TORCHFT_LIGHTHOUSE``, which ``meshpar run --elastic=replicas`` sets.
        name: of this replica in messages; None: as the launcher says.
        replicas: number of replicas to wait for at the start; None: as the launcher says.
        patience_s: seconds that replicas wait for one that does not answer, longer than the difference between their
            step times.
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
        known, whole = elastic_job.replica()
        self.par, self.optimizer, self.data = par, optimizer, data
        self.step, self.changes = 0, list[Change]()
        self._state = Replicated(par, optimizer, data, data if state is None else state, same)
        self._expected, self._patience_s, self._wait_s = whole if replicas is None else replicas, patience_s, wait_s
        self._ranks = Together(patience_s + _MOST_S)
        self._membership: Membership | None = None
        until, entered = time.monotonic() + wait_s, None
        while entered is None:  # in slices, for each of which the other ranks of the replica wait
            entered = self._ranks.tell(
                lambda: self._enter(lighthouse or elastic_job.lighthouse(), name or known, until)
            )
        self._name: str = entered
        self._sum: Sum = (0, 0)
        self._failures, self._life, self._blank = 0, 0, False
        self._tries, self._terms = 0, 0
        self._met = time.monotonic()  # from when it waits for the first step with others
        self._drawn: Sum = (0, 0)
        self._quorum: Quorum | None = None
        self._group: Peers | None = None
        self._key: tuple[Sum, tuple[str, ...]] | None = None
        self._compared = False
        self._slots: tuple[str, ...] = ()
        self.counted: tuple[bool, ...] = ()
        self._trained: tuple[str, ...] = ()
        self._first, self._behind, self._longest_s, self._began = False, False, 0.0, 0.0
        self._asked: Callable[[], str | None] = lambda: None  # in a wait that a stop request may end

    def __enter__(self) -> Replicas:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the other replicas, which then do not wait for this one."""
        if self._membership is not None:
            self._membership.close()
        self._drop_group()

    def join(self) -> bool:
        """Return whether living replicas have a state, which :meth:`begin` copies. If not, restore a checkpoint. Call
        it once, first.
        """
        self._blank = True
        self._ask(waits=False)
        assert self._quorum is not None
        self._blank = self._quorum.best[0] >= 0
        if not self._blank:
            self._quorum = None  # the next one tells from where this replica starts
            self._met = math.inf
        return self._blank

    @property
    def slot(self) -> int:
        """Number of this replica among those that share the samples of this step, from 0."""
        return self._slots.index(self._name)

    @property
    def slots(self) -> int:
        """Number of replicas that share the samples of this step."""
        return len(self._slots)

    @property
    def sum(self) -> Sum:
        """The group in which the last step was added up; of two replicas' steps of one number, the larger counts."""
        return self._sum

    def writes(self, *, last: bool = False) -> bool:
        """Return whether this replica is the one that writes checkpoints and reports after this step, and has not been
        dropped since.

        Args:
            last: this replica trains no further: if it was not heard for a while, it asks whether its state is still
                the newest, so that the last checkpoint is not left out.
        """
        if not self.leads:
            return False
        heard = self._ranks.tell(lambda: self._membership is not None and self._membership.current())
        if heard or not last:
            return heard
        self._ask(waits=False)
        assert self._quorum is not None
        return self._quorum.best == (self.step, self._sum)

    @property
    def leads(self) -> bool:
        """True where this replica had trained longest of those with the newest state when they last met; not
        collective.
        """
        return self._first and not self._behind

    @property
    def term(self) -> int:
        """How often this replica came to lead: another one may have written in between; not collective."""
        return self._terms

    def alive(self) -> None:
        """Report progress, as after each batch of a validation: a replica that is silent for long is dropped. Not
        collective.
        """
        if self._membership is not None:
            self._membership.moved(self._longest_s)

    def begin(self, asked: Callable[[], str | None] = lambda: None) -> list[TensorBatch]:
        """Begin a step: let new replicas in, copy the state if this one is behind, and return the micro-batches of this
        rank.

        Args:
            asked: returns the reason of a stop request on this rank, which ends a wait for other replicas; None: there
                is none.

        Raises:
            ReplicaError: this replica does not reach the others any more; a new start of it may.
            StopAskedError: rank 0 of this replica was asked to stop while it waited; no step has begun.
        """
        began = time.monotonic()
        self._asked = asked
        try:
            self._settle()
        finally:
            self._asked = lambda: None
        self._behind = False
        assert self._quorum is not None
        self._slots, self._drawn = self._names(), self._quorum.key
        if self._slots != self._trained:
            self._changed(self.step, time.monotonic() - began)
        self._began = time.monotonic()
        return self.data.share(self.slot, len(self._slots))

    @torch.no_grad()
    def reduce(self, tokens: int, *values: Tensor) -> list[Tensor] | None:
        """Average the gradients over replicas, weighted by their tokens, and commit the step: call it between backward
        and optimizer.

        Args:
            tokens: number of tokens that this rank counted in the step.
            values: sums of this rank, such as of losses.

        Returns:
            Number of tokens, then ``values``, each summed over the ranks of all replicas that counted: float64, in host
            memory. None: the others have gone on without this replica, or the only samples of an epoch's last step were
            those of lost ones. It has no gradients then, so that an optimizer changes nothing, and the next
            :meth:`begin` copies the others' state, or shares the samples anew.

        Raises:
            ReplicaError: see :meth:`begin`.
        """
        self.par.reshard()
        began = time.monotonic()
        mine = torch.cat(
            [torch.tensor([float(tokens)]), *(tensor.detach().double().reshape(-1).cpu() for tensor in values)]
        ).double()
        on_device = self.par.data_sum(mine.to(self.par.device))
        mine, failed = on_device.cpu(), False
        while True:
            summed = self._ranks.attempt(
                lambda: Summed(self._peers, self.par.module, self.slot, len(self._slots), mine)
            )
            if summed is not None:
                assert self._quorum is not None
                done = self._quorum.key
                self._ask(waits=False, done=done)
                if self._quorum.best == (self.step + 1, done):
                    self._commit(summed, done)
                    if failed:
                        self._changed(self.step, time.monotonic() - began)
                    total, *rest = summed.totals.split([1, *(tensor.numel() for tensor in values)])
                    return [total.reshape(()), *(part.view(value.shape) for part, value in zip(rest, values))]
            else:
                failed = True
                if self._recovered():
                    continue
            self._behind = True
            for parameter in self.par.module.parameters():
                parameter.grad = None
            return None

    def _commit(self, summed: Summed, done: Sum) -> None:
        """Take the sum for this replica's gradients, and count the step."""
        summed.commit()
        self.data.count(summed.counted)
        self._life += 1
        self.step, self._sum, self.counted = self.step + 1, done, tuple(summed.counted)
        self._longest_s = max(self._longest_s, time.monotonic() - self._began)
        self._tries = 0
        self.alive()

    def _recovered(self) -> bool:
        """After a sum failed or cannot count, find who has gradients of the step; return whether to add up again."""
        self._fail()
        self._ask(waits=True)
        quorum = self._quorum
        assert quorum is not None
        names = self._names()
        if self._name not in names:
            self._quorum = None  # the others share the samples of this step differently
        elif not quorum.waiting:
            return False  # those with gradients cannot make a step of them: all that there are share the samples anew
        elif not any(self.data.has_share(number) for number, name in enumerate(self._slots) if name in names):
            self._quorum = None  # all samples of this step were those of lost replicas: it is shared anew
        elif quorum.best == (self.step, self._sum):
            if not self._ranks.did(self._connect):
                self._drop_group()
            return True
        return False

    # Membership

    def _enter(self, lighthouse: str, name: str, until: float) -> str | None:
        if not lighthouse:
            raise ReplicaError(
                f"the job has no lighthouse, through which replicas find one another; {GIVE_A_LIGHTHOUSE}"
            )
        try:
            self._membership = Membership(
                lighthouse, name, patience_s=self._patience_s, wait_s=min(_CONNECT_S, until - time.monotonic())
            )
        except ReplicaError:
            if time.monotonic() > until:
                raise
            return None
        return self._membership.name

    def _ask(self, *, waits: bool, done: Sum | None = None) -> None:
        """Get the quorum that decides: whether the step ``done`` counts, or with whom to complete or begin one.

        Args:
            waits: this replica has gradients to add up.
            done: the sum that it has.
        """
        step, key = (self.step, self._sum) if done is None else (self.step + 1, done)
        began = time.monotonic()
        self._met = min(self._met, began)  # after a restore, which may take longer on others
        limit = self._wait_s if self.step == 0 or self._blank or not self._trained else _MOST_S + 2 * self._longest_s

        def ask() -> Quorum | None:
            assert self._membership is not None
            place = -1 if self._blank else step
            member = Member(
                name=self._name,
                store="",
                step=place,
                sum=key,
                waits=waits,
                failures=self._failures,
                drawn=self._drawn,
                life=self._life,
                waited=time.monotonic() - self._met,
            )
            found = self._membership.ask(member)
            waited = time.monotonic() - began
            if found is not None and (waits or any(other.name == self._name for other in found.ready)):
                fresh = found.best[1] == (0, 0)  # nobody has trained yet: refused by all alike
                whole = len(found.members) >= self._expected
                # By what all members know: if each went by its own clock, one might connect while another still waits,
                # in turns, for ever.
                if not fresh or self._trained or whole or found.waited > _MOST_S:
                    return found
                time.sleep(0.1)
            if waited > limit:
                raise ReplicaError(
                    f"replica {_plain(self._name)} found no other replicas to train with in {waited:.0f} s after step "
                    f"{self.step}: the lighthouse does not answer, or its quorum leaves this replica out; start the "
                    "replica again, or start the job from its newest checkpoint"
                )
            if reason := self._asked():
                raise StopAskedError(reason)
            return None

        found = None
        while found is None:
            found = self._ranks.tell(ask)
        self._quorum, self._failures = found, found.key[1]
        first = found.leader.name == self._name
        self._terms += first and not self._first
        self._first = first

    def _names(self) -> tuple[str, ...]:
        assert self._quorum is not None
        return tuple(member.name for member in self._quorum.ready)

    def _changed(self, step: int, seconds: float) -> None:
        before, now = set(self._trained), self._names()
        self._trained = now
        if before or len(now) < self._expected:  # the first to come may begin without the others
            lost, joined = sorted(before - set(now)), sorted(set(now) - before)
            if lost or joined:
                plain = [tuple(map(_plain, value)) for value in (now, lost, joined)]
                self.changes.append(
                    Change(step=step, replicas=plain[0], lost=plain[1], joined=plain[2], seconds=seconds)
                )

    # Groups

    def _settle(self) -> None:
        """Connect to the quorum's members and bring all of them to one state."""
        while True:
            if self._quorum is None:
                self._ask(waits=False)
            elif self._is_settled():
                return
            assert self._quorum is not None
            if self._name not in self._names():
                self._quorum = None  # the others complete a step
                continue
            if self._quorum.best[0] < 0:
                raise ReplicaError(
                    "the running replicas ended before this replica had received their state; start this replica "
                    "again, from the newest checkpoint"
                )
            if self._is_one_state():
                self._tries = 0
                self.alive()
                return
            self._fail()

    def _is_one_state(self) -> bool:
        """Try to bring the quorum's members to the newest state; return whether all have it."""
        quorum = self._quorum
        assert quorum is not None
        best = quorum.best
        if not self._blank and best < (self.step, self._sum):
            raise ReplicaError(
                f"the other replicas have resumed from a checkpoint before step {self.step}; start replica "
                f"{_plain(self._name)} again"
            )
        if not self._ranks.did(self._connect):
            return False
        held = self._ranks.attempt(lambda: self._state.copied(self._peers, quorum, self._name))
        if held is None:
            return False
        if held:
            self._state.take(held)
            self._blank = False
        self.step, self._sum = best
        self._compared = self._compared or self._ranks.did(lambda: self._state.compare(self._peers, self.step))
        return self._compared

    def _is_settled(self) -> bool:
        assert self._quorum is not None
        same = all(member.state == self._quorum.best for member in self._quorum.ready)
        return same and self._compared and self._key == (self._quorum.key, self._names())

    def _fail(self) -> None:
        self._tries += 1
        if self._tries == _MOST_TRIES:
            raise ReplicaError(
                f"replica {_plain(self._name)} failed {_MOST_TRIES} times in a row to exchange with the others after "
                f"step {self.step}, the last time with {self._ranks.error!r}; check that the hosts of all replicas "
                "reach one another (GLOO_SOCKET_IFNAME names the interface), then start the replica again"
            )
        self._failures += 1
        self._quorum = None
        self._drop_group()

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.shutdown()
        self._group, self._key = None, None

    @property
    def _peers(self) -> Peers:
        if self._group is None:
            raise RuntimeError("there is no group")
        return self._group

    def _connect(self) -> None:
        """Make the group of this rank's peers among the members that are ready, unless it is the one that there is."""
        assert self._quorum is not None
        members, key = self._quorum.ready, self._quorum.key
        names = tuple(member.name for member in members)
        if self._key != (key, names):
            self._drop_group()
            # With the members: those that complete a step meet before those that join, in one quorum.
            path = f"{key[0]}.{key[1]}/{' '.join(names)}/{dist.get_rank()}"
            limit = min(_CONNECT_S, self._patience_s)
            self._group = connect(members[0], path, names.index(self._name), len(names), limit)
            bound(self._group, self._patience_s)
            self._key, self._compared = (key, names), False


def _plain(name: str) -> str:
    return name.rpartition(":")[0]
