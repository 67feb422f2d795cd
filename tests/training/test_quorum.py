"""What a replica does next, as a table: nothing runs here."""

import dataclasses

import pytest

from meshpar.training.quorum import Quorum, QuorumMember, ReplicaAction, ReplicaPhase, ReplicaState, decide

OLD, NEW = (1, 0), (2, 0)


def member(name, step, sum=OLD, *, waits=False, drawn=OLD):
    return QuorumMember(name=name, store="", step=step, sum=sum, waits=waits, failures=0, drawn=drawn)


def quorum(*members):
    return Quorum(number=3, members=members)


BOTH = quorum(member("a", 5), member("b", 5))
BEHIND = quorum(member("a", 5), member("b", 6, NEW))
SPLIT = quorum(member("a", 5), member("b", 5, NEW))
WAITING = quorum(member("a", 5, waits=True), member("b", 5, waits=True), member("c", 5))
OTHERS_WAIT = quorum(member("a", 5), member("b", 5, waits=True))
ALONE = quorum(member("a", 5, waits=True), member("c", 5))
OTHER_DIVISION = quorum(member("a", 5, waits=True), member("b", 5, waits=True, drawn=NEW))
NEWER_WITHOUT_GRADIENTS = quorum(member("a", 5, waits=True), member("b", 6, NEW))
BLANK = quorum(member("a", -1, (0, 0)), member("b", -1, (0, 0)))
JOINING = quorum(member("a", -1, (0, 0)), member("b", 5))
SUMMED = quorum(member("a", 6, (3, 0)), member("b", 6, (3, 0)))
DROPPED = quorum(member("a", 6, (3, 0)), member("b", 6, (4, 0)))

BEGINS = ReplicaState(name="a", phase=ReplicaPhase.BEGINS, step=5, sum=OLD)
JOINS = dataclasses.replace(BEGINS, phase=ReplicaPhase.JOINS, step=0, sum=(0, 0))
WAITS = dataclasses.replace(BEGINS, phase=ReplicaPhase.WAITS, with_samples=frozenset("ab"))
DONE = dataclasses.replace(BEGINS, phase=ReplicaPhase.SUMMED, sum=(3, 0))


def after_comparing(state, found):
    return dataclasses.replace(state, compared=found.group)


TABLE = {
    "no quorum": (None, BEGINS, ReplicaAction.ASK),
    "no quorum, and gradients": (None, WAITS, ReplicaAction.ASK),
    "a new group compares its states first": (BOTH, BEGINS, ReplicaAction.SYNCHRONIZE),
    "a group that has compared begins": (BOTH, after_comparing(BEGINS, BOTH), ReplicaAction.BEGIN),
    "another group compares again": (BOTH, after_comparing(BEGINS, ALONE), ReplicaAction.SYNCHRONIZE),
    "one is behind": (BEHIND, after_comparing(BEGINS, BEHIND), ReplicaAction.SYNCHRONIZE),
    "two steps of one number": (SPLIT, after_comparing(BEGINS, SPLIT), ReplicaAction.SYNCHRONIZE),
    "the others complete a step": (OTHERS_WAIT, BEGINS, ReplicaAction.ASK),
    "the others are older": (BOTH, dataclasses.replace(BEGINS, step=7), ReplicaAction.END_AHEAD),
    "the others have an older sum": (BOTH, dataclasses.replace(BEGINS, sum=NEW), ReplicaAction.END_AHEAD),
    "one that joins copies, whatever it has": (JOINING, JOINS, ReplicaAction.SYNCHRONIZE),
    "one that joins has no sum to defend": (JOINING, dataclasses.replace(JOINS, step=9), ReplicaAction.SYNCHRONIZE),
    "nobody has a state": (BLANK, JOINS, ReplicaAction.END_WITHOUT_STATE),
    "all that have gradients add them up": (WAITING, WAITS, ReplicaAction.SUM),
    "the others lack samples": (ALONE, WAITS, ReplicaAction.SUM),
    "all samples were those of lost ones": (
        ALONE,
        dataclasses.replace(WAITS, with_samples=frozenset("b")),
        ReplicaAction.LEAVE,
    ),
    "the others share the samples differently": (OTHER_DIVISION, WAITS, ReplicaAction.LEAVE),
    "the others have made the step": (NEWER_WITHOUT_GRADIENTS, WAITS, ReplicaAction.FOLLOW),
    "gradients of another state": (ALONE, dataclasses.replace(WAITS, step=4), ReplicaAction.FOLLOW),
    "a sum that the quorum has counts": (SUMMED, DONE, ReplicaAction.COMMIT),
    "a sum of a group that was dropped does not": (DROPPED, DONE, ReplicaAction.FOLLOW),
    "a sum of which the quorum knows nothing does not": (BOTH, DONE, ReplicaAction.FOLLOW),
}
"""What holds -> the quorum, the replica's state, and what it does."""


@pytest.mark.parametrize("what", TABLE)
def test_what_a_replica_does_follows_from_the_quorum_and_its_state(what):
    found, state, action = TABLE[what]
    assert decide(found, state) is action


def test_every_action_is_decided_somewhere():
    assert {action for _, _, action in TABLE.values()} == {*ReplicaAction}
