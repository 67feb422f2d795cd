"""The next action of a replica, decided from a quorum and the replica's own state alone."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import final

Sum = tuple[int, int]
"""The group in which gradients were added up: a quorum's number, and how often members had failed by then. Later
sums are larger.
"""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumMember:
    """One replica of a quorum; its name has the number of its process. ``waits``: it has gradients whose sum failed."""

    name: str
    store: str
    step: int
    sum: Sum
    waits: bool
    failures: int
    drawn: Sum = (0, 0)
    life: int = 0
    waited: float = 0.0

    @property
    def state(self) -> tuple[int, Sum]:
        """The history that its weights come from; the largest number is the job's."""
        return self.step, self.sum


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Quorum:
    """The replicas that the lighthouse has put together, by name; ``number`` changes with them."""

    number: int
    members: tuple[QuorumMember, ...]

    @property
    def key(self) -> Sum:
        """The number of a group of these members: another one after each failure."""
        return self.number, max(member.failures for member in self.members)

    @property
    def best(self) -> tuple[int, Sum]:
        """The job's newest state."""
        return max(member.state for member in self.members)

    @property
    def newest(self) -> tuple[QuorumMember, ...]:
        """The members with the newest state."""
        return tuple(member for member in self.members if member.state == self.best)

    @property
    def waiting(self) -> tuple[QuorumMember, ...]:
        """The members with gradients of one division of samples."""
        waiting = [member for member in self.newest if member.waits]
        last = max((member.drawn for member in waiting), default=None)
        return tuple(member for member in waiting if member.drawn == last)

    @property
    def ready(self) -> tuple[QuorumMember, ...]:
        """The members that go on together: those with gradients to add up, where there are any, else all."""
        return self.waiting or self.members

    @property
    def leader(self) -> QuorumMember:
        """The member that writes: of those with the newest state, the one that has trained longest."""
        return max(self.newest, key=lambda member: (member.life, member.name))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of ``ready``."""
        return tuple(member.name for member in self.ready)

    @property
    def group(self) -> Division:
        """The group that these members make."""
        return self.key, self.names


Division = tuple[Sum, tuple[str, ...]]
"""A group of members, and their names: they share the samples of a step, and exchange gradients and state."""


class ReplicaPhase(Enum):
    """Where a replica is in its step."""

    # It has no state, and copies that of the others.
    JOINS = auto()
    # It has a state, and looks for those with whom it trains the next step.
    BEGINS = auto()
    # It has gradients of a step, whose sum failed.
    WAITS = auto()
    # It has the sum of a step's gradients, which counts if the quorum's newest state is made of it.
    SUMMED = auto()


class ReplicaAction(Enum):
    """The next action of a replica: ``SUM`` adds up again, ``FOLLOW`` gives the step up and begins the next with this
    quorum, ``LEAVE`` with another, ``END_AHEAD`` ends because the others have resumed from an earlier step.
    """

    ASK = auto()
    SYNCHRONIZE = auto()
    BEGIN = auto()
    SUM = auto()
    COMMIT = auto()
    FOLLOW = auto()
    LEAVE = auto()
    END_WITHOUT_STATE = auto()
    END_AHEAD = auto()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """A replica's own state; ``sum`` is of the last step, in ``SUMMED`` of this one."""

    name: str
    phase: ReplicaPhase
    step: int
    sum: Sum
    compared: Division | None = None
    with_samples: frozenset[str] = frozenset()


def decide(quorum: Quorum | None, state: ReplicaState) -> ReplicaAction:
    """Return what a replica does next. ``quorum``: the last one that it got; None: it needs another."""
    if quorum is None:
        return ReplicaAction.ASK
    names, newest = quorum.names, quorum.best
    if state.phase is ReplicaPhase.SUMMED:
        return ReplicaAction.COMMIT if newest == (state.step + 1, state.sum) else ReplicaAction.FOLLOW
    if state.phase is ReplicaPhase.WAITS:
        if state.name not in names:
            return ReplicaAction.LEAVE  # the others share the samples of this step differently
        if not quorum.waiting:
            return ReplicaAction.FOLLOW  # those with gradients cannot make a step of them: all share the samples anew
        if state.with_samples.isdisjoint(names):
            return ReplicaAction.LEAVE  # all samples of this step were those of lost replicas: it is shared anew
        return ReplicaAction.SUM if newest == (state.step, state.sum) else ReplicaAction.FOLLOW
    if state.compared == quorum.group and all(member.state == newest for member in quorum.ready):
        return ReplicaAction.BEGIN
    if state.name not in names:
        return ReplicaAction.ASK  # the others complete a step
    if newest[0] < 0:
        return ReplicaAction.END_WITHOUT_STATE
    if state.phase is ReplicaPhase.BEGINS and newest < (state.step, state.sum):
        return ReplicaAction.END_AHEAD
    return ReplicaAction.SYNCHRONIZE
