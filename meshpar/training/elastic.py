"""Train in several replicas, each a world of its own, of which some may be lost and come back."""

from __future__ import annotations

import functools
import math
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from meshpar._torch.groups import bound
from meshpar.core.errors import MeshparError, PlanError, ReplicaError
from meshpar.parallelized import Parallelized
from meshpar.state.optimizer_shares import plan_problems
from meshpar.training import elastic_job
from meshpar.training.data import Batches, TensorBatch
from meshpar.training.divided_optimizer import Divided, check_separable
from meshpar.training.quorum import Member, Membership, Peers, Quorum, Sum, connect
from meshpar.training.replica_ranks import Together
from meshpar.training.replicated import Replicated, Stateful
from meshpar.training.stop import StopAskedError
from meshpar.training.summed import Summed

_MOST_S = 30.0
_MOST_TRIES = 12
_CONNECT_S = 5.0  # gloo tries five times
_STEPS_TO_STOP = 2


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
        optimizer_copies: number of replicas that hold each parameter's optimizer state, where a pass divides it over
            replicas (``HybridShard(optimizer="world")``). With 2, a lost replica takes nothing along. With 1, its loss
            ends the job, which resumes from the newest checkpoint.

    Attributes:
        step: number of steps that were committed; a loop that restores a checkpoint sets it.
        counted: whether each of the shares of the last step counted.
        changes: the changes since the loop last cleared the list.

    Raises:
        PlanError: lists the parts of the plan, the model and the data that replicas do not support.
        MeshparError: the optimizer's step of one parameter depends on others, and its state was to be divided.
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
        optimizer_copies: int = 2,
    ) -> None:
        if problems := [*plan_problems(par.spec, par.module, optimizer_copies), *data.share_problems()]:
            raise PlanError(problems)
        known, whole = elastic_job.replica()
        self.par, self.optimizer, self.data = par, optimizer, data
        self.step, self.changes = 0, list[Change]()
        self._divided: Divided | None = None
        if any(pass_.divides_optimizer for pass_ in par.plan.passes):
            check_separable(optimizer)
            self._divided = Divided(optimizer, optimizer_copies, par.module)
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)
        alike = same, optimizer_copies if self._divided is not None else 0
        self._state = Replicated(par, optimizer, data, data if state is None else state, alike, self._divided)
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
        self._open, self._stepped, self._saves = False, False, False
        self._asked_to_stop, self._leaves, self._saved = 0, False, -1
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

        The restore then reads this replica's share of divided optimizer state alone, if all replicas are there to read
        theirs.
        """
        self._blank = True
        self._ask(waits=False)
        assert self._quorum is not None
        self._blank = self._quorum.best[0] >= 0 and self._quorum.covered
        if not self._blank:
            names = [member.name for member in self._quorum.members]
            if self._divided is not None and len(set(map(_plain, names))) == len(names) == self._expected:
                self._divided.expect_restore(names.index(self._name), len(names))
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

    @contextmanager
    def saving(self, *, last: bool = False) -> Iterator[bool]:
        """Enter to save a checkpoint: yields whether this replica is the one that writes it, see :meth:`writes`.

        Inside, the replica that writes has all optimizer state that replicas divide; the parts of others are in its
        host memory. All replicas enter it after the same steps; a second time after one step, it gathers nothing and
        yields False.

        >>> with replicas.saving() as writes:                               # doctest: +SKIP
        ...     if writes:                                                  # doctest: +SKIP
        ...         checkpoints.save(replicas.step, par, optimizer)         # doctest: +SKIP

        Raises:
            ReplicaError: see :meth:`begin`.
        """
        if self._divided is None:
            yield self.writes(last=last)
            return
        gathered = not self._leaves and self._saved != self.step and self._gather()
        self._saved = self.step
        try:
            yield gathered and self.writes(last=last)
        finally:
            self._divided.keep(self._divided.holds)

    def stops(self, asked: bool) -> bool:
        """Return whether this replica stops after the step that was committed last, if it was ``asked`` to, such as by
        a signal.

        Replicas among which optimizer state is divided need one another to save: they stop after one step if all are
        asked to. One that is asked alone leaves the others two steps later, and saves nothing.
        """
        if self._divided is None:
            return asked
        together = self._quorum is not None and all(member.stops for member in self._quorum.newest)
        self._leaves = not together and self._asked_to_stop == _STEPS_TO_STOP
        self._asked_to_stop = self._asked_to_stop + 1 if asked else 0
        return together or self._leaves

    @property
    def saves_alone(self) -> bool:
        """Tell whether a replica has all state that a checkpoint needs."""
        return self._divided is None

    @property
    def optimizer_sent(self) -> int:
        """Bytes of parameters that this rank has sent to other replicas after its last step; 0 where optimizer state
        is not divided.
        """
        return 0 if self._divided is None else self._divided.sent

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
            counts = False
            if summed is not None:
                assert self._quorum is not None
                done = self._quorum.key
                self._ask(waits=False, done=done)
                counts = self._quorum.covered
                if counts and self._quorum.best == (self.step + 1, done):
                    self._commit(summed, done)
                    if failed:
                        self._changed(self.step, time.monotonic() - began)
                    total, *rest = summed.totals.split([1, *(tensor.numel() for tensor in values)])
                    return [total.reshape(()), *(part.view(value.shape) for part, value in zip(rest, values))]
            if not counts:
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
        self._tries, self._open = 0, self._divided is not None
        self.alive()

    def _recovered(self) -> bool:
        """After a sum failed or cannot count, find who has gradients of the step; return whether to add up again."""
        self._fail()
        self._ask(waits=True)
        quorum = self._quorum
        assert quorum is not None
        if not quorum.covered:
            self._check_lost()
            return True  # a member has a sum that cannot count, and will ask again, too
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

    # Divided optimizer state

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self._divided is not None
        if any(callable(argument) for argument in (*args[1:], *kwargs.values())):
            raise MeshparError(
                f"{type(optimizer).__name__}.step got a closure, which computes gradients that the replicas have not "
                "added up; call backward and Replicas.reduce, then step() alone"
            )
        self.par.reshard()
        self._stepped = self._divided.set_aside()
        if self._stepped and not self._open:
            raise MeshparError(
                "optimizer.step() found gradients that the replicas have not added up; call Replicas.reduce once "
                "before each step, and optimizer.zero_grad() after it"
            )

    def _after_step(self, *_: object) -> None:
        """Get the values of the parameters that other replicas have stepped, whoever is lost meanwhile."""
        assert self._divided is not None
        self._divided.put_back()
        began, failed = time.monotonic(), False
        while self._stepped:
            quorum = self._quorum
            if quorum is not None:
                if not quorum.covered:
                    self._check_lost()
                elif quorum.best != (self.step, self._sum):
                    raise ReplicaError(
                        f"the other replicas made another step before replica {_plain(self._name)} had received their "
                        f"new values of step {self.step}; start replica {_plain(self._name)} again"
                    )
                elif not quorum.open:
                    return
                elif self._exchange():
                    if failed:
                        self._changed(self.step, time.monotonic() - began)
                    return
                self._fail()
            failed = True
            self._ask(waits=False, anyhow=True)

    def _exchange(self) -> bool:
        """Bring those with the newest state to the same values; return whether all have them, as far as this replica
        knows.
        """
        quorum, divided = self._quorum, self._divided
        assert quorum is not None and divided is not None
        place, held = self._placed(quorum.newest)

        def act() -> None:
            self._connect(quorum.newest)
            divided.exchange(self._peers, place, held)

        if not self._ranks.did(act):
            return False
        self._open = False
        if not self._ranks.did(self._wait_for_all):
            return False
        self._quorum, self._tries = quorum.closed(), 0
        return True

    def _gather(self) -> bool:
        """Bring all optimizer state to the replica that leads; return whether this one has it, or else all others
        need no more of it.
        """
        self._saves = True
        try:
            while True:
                quorum = self._quorum
                if quorum is None:
                    self._ask(waits=False, anyhow=True)
                    continue
                if not quorum.covered:
                    self._check_lost()
                elif quorum.best != (self.step, self._sum):
                    return False
                elif self._ranks.did(self._gathered):
                    leads = quorum.leader.name == self._name
                    ended = self._ranks.did(self._wait_for_all)
                    if leads and not ended:
                        self._fail()
                    if leads or ended:
                        return leads
                self._fail()
                self._ask(waits=False, anyhow=True)
                assert self._quorum is not None
                if any(member.phase != "saving" for member in self._quorum.newest):
                    return False  # who has gone on knows that the replica that leads has all
        finally:
            self._saves = False

    def _gathered(self) -> None:
        quorum = self._quorum
        assert self._divided is not None and quorum is not None
        self._connect(quorum.newest)
        self._divided.gather(self._peers, *self._placed(quorum.newest), quorum.newest.index(quorum.leader))

    def _placed(self, members: Sequence[Member]) -> tuple[int, list[int]]:
        """Return the place of this replica among members, and what each holds."""
        return [member.name for member in members].index(self._name), [member.holds for member in members]

    def _wait_for_all(self) -> None:
        """Wait until every member of the group has come so far."""
        self._peers.allreduce([torch.zeros(1)]).wait()

    def _check_lost(self) -> None:
        quorum = self._quorum
        assert quorum is not None
        if quorum.lost:
            held = functools.reduce(operator.or_, (member.holds for member in quorum.newest))
            gone = f"{(quorum.whole & ~held).bit_count()} of {quorum.whole.bit_count()}"
            raise ReplicaError(
                f"the optimizer state of {gone} parameters after step {quorum.best[0]} was lost with the replicas "
                "that held it; start the job again, which resumes from its newest checkpoint, and raise "
                "optimizer_copies to survive more losses at once"
            )

    # Membership

    def _enter(self, lighthouse: str, name: str, until: float) -> str | None:
        if not lighthouse:
            raise ReplicaError(
                "the job has no lighthouse, through which replicas find one another; start the job with `meshpar run "
                "--elastic=replicas`, or set TORCHFT_LIGHTHOUSE=http://HOST:PORT"
            )
        try:
            self._membership = Membership(
                lighthouse,
                name,
                patience_s=self._patience_s,
                wait_s=min(_CONNECT_S, until - time.monotonic()),
                whole=0 if self._divided is None else self._divided.whole,
            )
        except ReplicaError:
            if time.monotonic() > until:
                raise
            return None
        return self._membership.name

    def _ask(self, *, waits: bool, done: Sum | None = None, anyhow: bool = False) -> None:
        """Get the quorum that decides: whether the step ``done`` counts, or with whom to complete or begin one.

        Args:
            waits: this replica has gradients to add up.
            done: the sum that it has.
            anyhow: return also a quorum whose members complete a step without this replica.
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
                holds=0 if self._divided is None or self._blank else self._divided.holds,
                phase="summed" if done is not None else "saving" if self._saves else "open" if self._open else "",
                stops=bool(self._asked_to_stop),
                waited=time.monotonic() - self._met,
            )
            found = self._membership.ask(member)
            waited = time.monotonic() - began
            if found is not None and (waits or anyhow or any(other.name == self._name for other in found.ready)):
                fresh = found.best[1] == (0, 0)  # nobody has trained yet: refused by all alike
                whole = len(found.members) >= self._expected and (
                    self._blank or found.covered
                )  # a member may restore its share yet
                # By what all members know: if each went by its own clock, one might connect while another still waits,
                # in turns, for ever.
                if not fresh or self._trained or whole or found.waited > _MOST_S:
                    return found
                time.sleep(0.1)
            if waited > limit:
                raise ReplicaError(
                    f"replica {_plain(self._name)} found no other replicas to train with in {waited:.0f} s after step "
                    f"{self.step}: the lighthouse does not answer, or its quorum leaves this replica out; start the "
                    "replica again, or the job from its newest checkpoint"
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
            if not self._quorum.covered:
                self._check_lost()
            elif self._is_one_state():
                self._tries = 0
                self.alive()
                return
            self._fail()

    def _is_one_state(self) -> bool:
        """Try to bring the quorum's members to the newest state; return whether all have it."""
        quorum, divided = self._quorum, self._divided
        assert quorum is not None
        best = quorum.best
        if not self._blank and best < (self.step, self._sum):
            raise ReplicaError(
                f"the other replicas have resumed from a checkpoint before step {self.step}, because optimizer state "
                f"was lost; start replica {_plain(self._name)} again"
            )
        mine = not self._blank and best == (self.step, self._sum)
        if divided is not None and quorum.open and mine and not self._exchange():
            return False
        if not self._ranks.did(self._connect):
            return False
        held = self._ranks.attempt(lambda: self._state.copied(self._peers, quorum, self._name))
        if held is None:
            return False
        if held:
            self._state.take(held)
            self._blank = self._open = False
        self.step, self._sum = best
        place, holds = self._placed(quorum.ready)
        shares = holds = [bits if member.state == best else 0 for bits, member in zip(holds, quorum.ready)]
        if divided is not None:
            shares = divided.shares(holds)
            if not self._ranks.did(lambda: divided.send_shares(self._peers, place, holds, shares)):
                return False
        if not self._compared or shares != holds:
            if not self._ranks.did(lambda: self._state.compare(self._peers, self.step, shares[place])):
                return False
            if divided is not None:  # now that all have what they are to hold
                divided.keep(shares[place])
        self._compared = True
        return True

    def _is_settled(self) -> bool:
        assert self._quorum is not None
        same = all(member.state == self._quorum.best for member in self._quorum.ready)
        known = self._compared and self._key == (self._quorum.key, self._names())
        return same and known and not (self._divided is not None and self._quorum.open)

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

    def _connect(self, members: Sequence[Member] = ()) -> None:
        """Make the group of this rank's peers among members, or those that are ready, unless it is the one that
        there is.
        """
        assert self._quorum is not None
        members, key = members or self._quorum.ready, self._quorum.key
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
