"""The membership of a job of several replicas, which torchft's lighthouse decides, and their groups of peers."""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar, cast, final
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from meshpar._torch.groups import bound
from meshpar.core import runtime
from meshpar.core.errors import MeshparError, ReplicaError, brief
from meshpar.process.imports import need
from meshpar.training.quorum import Division, Quorum, QuorumMember
from meshpar.training.stop import StopAskedError

T = TypeVar("T")

_BEAT_S, _DEAD_S, _SLICE_S = 0.3, 2.5, 5.0
_FIRST_STEP_S = 600.0
_ALONE_S = 30.0  # that a replica waits for others before the first step, and for an answer beyond two steps
_MOST_TRIES = 12
_CONNECT_S = 5.0  # gloo tries five times
GIVE_A_LIGHTHOUSE = "start the job with `meshpar run --elastic=replicas`, or set TORCHFT_LIGHTHOUSE=http://HOST:PORT"


def lighthouse_address() -> str:
    """Return the address of the job's lighthouse, ``http://host:port``; empty where there is none."""
    return runtime.settings("TORCHFT_LIGHTHOUSE").get("TORCHFT_LIGHTHOUSE", "")


def this_replica() -> tuple[str, int]:
    """Return this replica's name, and the number of replicas of the whole job; 0 outside of an elastic job."""
    settings = runtime.settings("MESHPAR_REPLICA")
    return settings.get("MESHPAR_REPLICA", str(os.getpid())), runtime.number("MESHPAR_REPLICAS", 0)


@final
class Lighthouse:
    """Serve the membership of a job until :meth:`close`; one process of the job, or of another machine, holds it.

    Args:
        port: to listen on; 0: any.
        host: address to listen at; ``[::]``: all. There is no authentication: let only the hosts of the job reach it.
        least: smallest number of replicas that train.
        patience_s: seconds that replicas wait for one that lives and does not answer.
        dead_s: seconds without a heartbeat after which a replica counts as lost.
    """

    def __init__(
        self,
        port: int = 0,
        *,
        host: str = "127.0.0.1",
        least: int = 1,
        patience_s: float = 20.0,
        dead_s: float = _DEAD_S,
    ) -> None:
        self._server = _torchft().LighthouseServer(
            bind=f"{host}:{port}",
            min_replicas=least,
            join_timeout_ms=round(1000 * patience_s / 2),
            quorum_tick_ms=50,
            heartbeat_timeout_ms=round(1000 * dead_s),
        )
        self.port = urlsplit(self._server.address()).port or port

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()


@final
class Membership:
    """This replica at the lighthouse, on one rank. Heartbeats end when it makes no step for much longer than usual."""

    def __init__(self, lighthouse: str, name: str, *, patience_s: float, wait_s: float) -> None:
        self.name = f"{name}:{uuid.uuid4().hex[:12]}"
        self._patience_s, self._address = patience_s, lighthouse
        here, connect = _address_towards(lighthouse, wait_s), timedelta(seconds=patience_s)
        try:
            self._client, self._beats = (_torchft().LighthouseClient(lighthouse, connect) for _ in range(2))
        except RuntimeError as error:
            raise _silent(lighthouse, error) from error
        self._server = dist.TCPStore(here, 0, is_master=True, wait_for_workers=False, timeout=connect)
        self.store = f"[{here}]:{self._server.port}" if ":" in here else f"{here}:{self._server.port}"
        self._moved = self._heard = time.monotonic()
        self._longest_s, self.fresh = _FIRST_STEP_S, False
        self._ended = threading.Event()
        threading.Thread(target=self._beat, name="meshpar-replica", daemon=True).start()

    def moved(self, longest_s: float) -> None:
        """Note that the replica moves, and its longest step."""
        self._moved, self._longest_s = time.monotonic(), longest_s

    def ask(self, member: QuorumMember) -> Quorum | None:
        """Ask once to be in the next quorum, for some seconds; None: there is none yet."""
        fields = ("sum", "waits", "failures", "drawn", "life", "waited")
        data: dict[Any, object] = {field: getattr(member, field) for field in fields}
        try:
            answer = self._client.quorum(
                self.name, timedelta(seconds=_SLICE_S), self._address, self.store, member.step + 1, 1, False, data
            )
        except TimeoutError:
            return None
        except RuntimeError:  # not reachable
            time.sleep(_BEAT_S)
            return None
        self.fresh, self._heard = True, time.monotonic()
        members = list[QuorumMember]()
        for peer in sorted(answer.participants, key=lambda participant: participant.replica_id):
            more = {**peer.data, "sum": tuple(peer.data["sum"]), "drawn": tuple(peer.data["drawn"])}
            members.append(QuorumMember(name=peer.replica_id, store=peer.store_address, step=peer.step - 1, **more))
        return Quorum(number=int(answer.quorum_id), members=tuple(members))

    def current(self) -> bool:
        """Return whether this replica was heard all the time since the last quorum, so that others waited for it."""
        return self.fresh and time.monotonic() - self._heard < _DEAD_S

    def close(self) -> None:
        """End the heartbeats."""
        self._ended.set()

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_S):
            now = time.monotonic()
            if now - self._heard > _DEAD_S:
                self.fresh = False  # the others may have gone on without this replica
            if now - self._moved > self._patience_s + 2 * self._longest_s:
                continue
            try:
                self._beats.heartbeat(self.name, timedelta(seconds=_DEAD_S))
            except (TimeoutError, RuntimeError):
                continue
            self._heard = time.monotonic()


def _address_towards(lighthouse: str, wait_s: float) -> str:
    """Return this host's address on the network of the lighthouse, for which it waits."""
    url, deadline = urlsplit(lighthouse), time.monotonic() + wait_s
    while True:
        try:
            with socket.create_connection((url.hostname or "", url.port or 0), timeout=_SLICE_S) as probe:
                return str(probe.getsockname()[0])
        except OSError as error:
            if time.monotonic() > deadline:
                raise _silent(lighthouse, error) from error
            time.sleep(_BEAT_S)


def _silent(lighthouse: str, error: Exception) -> ReplicaError:
    return ReplicaError(
        f"the lighthouse of the job's replicas does not answer at {lighthouse!r} ({error}); {GIVE_A_LIGHTHOUSE}"
    )


Peers = Any
"""A gloo backend without a process group, whose methods torch's stubs lack."""


def _torchft() -> Any:  # noqa: ANN401 - an optional package
    runtime.quiet("RUST_LOG")
    return need("torchft.coordination", extra="replicas")


@final
class Together:
    """Let the ranks of a replica decide alike: rank 0 speaks for it, and an error of one is all ranks'. Collective."""

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
        if self._group is None:
            return result if good else None
        flag = torch.tensor(int(good))
        dist.all_reduce(flag, dist.ReduceOp.MIN, self._group)
        return result if flag else None

    def did(self, act: Callable[[], object]) -> bool:
        """Run ``act``, which needs the other replicas, and return whether it succeeded on every rank."""
        return self.attempt(lambda: [act()]) is not None


def plain_name(name: str) -> str:
    """Return a replica's name without the number of its process."""
    return name.rpartition(":")[0]


@final
class Rendezvous:
    """This replica at the lighthouse, and its group with the others. Every method but :meth:`alive` is collective."""

    def __init__(
        self, lighthouse: str | None, name: str | None, replicas: int | None, patience_s: float, wait_s: float
    ) -> None:
        launched, count = this_replica()
        self.expected = count if replicas is None else replicas
        self._patience_s, self._wait_s = patience_s, wait_s
        self.ranks = Together(patience_s + _ALONE_S)
        self._membership: Membership | None = None
        until, entered = time.monotonic() + wait_s, None
        while entered is None:  # in slices, for each of which the other ranks of the replica wait
            entered = self.ranks.tell(lambda: self._enter(lighthouse or lighthouse_address(), name or launched, until))
        self.name: str = entered
        self.quorum: Quorum | None = None  # None: the next step needs another
        self._group: tuple[Peers, Division] | None = None
        self._compared = False  # the states of its members
        self._failures, self._tries = 0, 0
        # whether it led the last quorum, and how often it came to lead
        self.longest_s, self.first, self.term = 0.0, False, 0
        self.waits_since = time.monotonic()

    def _enter(self, lighthouse: str, name: str, until: float) -> str | None:
        """Return the name at the lighthouse, on rank 0; None: it does not answer yet."""
        if not lighthouse:
            problem = f"the job has no lighthouse, through which replicas find one another; {GIVE_A_LIGHTHOUSE}"
            raise ReplicaError(problem)
        try:
            self._membership = Membership(
                lighthouse, name, patience_s=self._patience_s, wait_s=min(_CONNECT_S, until - time.monotonic())
            )
        except ReplicaError:
            if time.monotonic() > until:
                raise
            return None
        return self._membership.name

    def close(self) -> None:
        """Leave the others, which then do not wait for this replica."""
        if self._membership is not None:
            self._membership.close()
        self.disconnect()

    def alive(self) -> None:
        """Report progress to the lighthouse."""
        if self._membership is not None:
            self._membership.moved(self.longest_s)

    def is_current(self) -> bool:
        """Return whether this replica was heard all the time since the last quorum."""
        return self.ranks.tell(lambda: self._membership is not None and self._membership.current())

    def ask(self, member: QuorumMember, *, after: int, trained: bool, asked: Callable[[], str | None]) -> Quorum:
        """Get the quorum that decides whether a step counts, or with whom to train one ``after`` so many steps."""
        began = time.monotonic()
        self.waits_since = min(self.waits_since, began)  # after a restore, which may take longer on others
        unknown = after == 0 or member.step < 0 or not trained
        limit_s = self._wait_s if unknown else _ALONE_S + 2 * self.longest_s

        def ask_once() -> Quorum | None:
            assert self._membership is not None
            quorum = self._membership.ask(
                replace(member, failures=self._failures, waited=time.monotonic() - self.waits_since)
            )
            waited = time.monotonic() - began
            if quorum is not None and (member.waits or self.name in quorum.names):
                fresh = quorum.best[1] == (0, 0)  # nobody has trained yet: refused by all alike
                # By what all members know: if each went by its own clock, one might connect while another still waits,
                # in turns, for ever.
                longest_s = max(member.waited for member in quorum.members)
                if not fresh or trained or len(quorum.members) >= self.expected or longest_s > _ALONE_S:
                    return quorum
                time.sleep(0.1)
            if waited > limit_s:
                raise ReplicaError(
                    f"replica {plain_name(self.name)} found no other replicas to train with in {waited:.0f} s after "
                    f"step {after}: the lighthouse does not answer, or its quorum leaves this replica out; start the "
                    "replica again, or start the job from its newest checkpoint"
                )
            if reason := asked():
                raise StopAskedError(reason)
            return None

        quorum = None
        while quorum is None:
            quorum = self.ranks.tell(ask_once)
        self.quorum, self._failures = quorum, quorum.key[1]
        leads = quorum.leader.name == self.name
        self.first, self.term = leads, self.term + (leads and not self.first)
        return quorum

    @property
    def peers(self) -> Peers:
        """The group with the peers of this rank."""
        if self._group is None:
            raise RuntimeError("there is no group")
        return self._group[0]

    @property
    def compared(self) -> Division | None:
        """The group whose members have compared their states; None: there is none."""
        return self._group[1] if self._group is not None and self._compared else None

    def connect(self) -> None:
        """Make the group of this rank's peers among the members that are ready, unless there is this one. RuntimeError
        if the others do not come in time to the store of the first.
        """
        assert self.quorum is not None
        members, division = self.quorum.ready, self.quorum.group
        if self._group is not None and self._group[1] == division:
            return
        self.disconnect()
        (number, failures), names = division
        # With the members: those that complete a step meet before those that join, in one quorum.
        path = f"{number}.{failures}/{' '.join(names)}/{dist.get_rank()}"
        host, _, port = members[0].store.rpartition(":")
        limit = timedelta(seconds=min(_CONNECT_S, self._patience_s))
        store = dist.TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=limit)
        rank, size = names.index(self.name), len(names)
        peers = dist.ProcessGroupGloo(dist.PrefixStore(path, store), rank, size, limit)
        bound(peers, self._patience_s)
        self._group = peers, division

    def compare(self, compare: Callable[[Peers], None]) -> bool:
        """Compare the states of the group's members, unless they have been; return whether all ranks could."""
        self._compared = self._compared or self.ranks.did(lambda: compare(self.peers))
        return self._compared

    def disconnect(self) -> None:
        """Close the group."""
        if self._group is not None:
            self._group[0].shutdown()
        self._group, self._compared = None, False

    def succeed(self) -> None:
        """Note that an exchange with the others succeeded."""
        self._tries = 0
        self.alive()

    def fail(self, after: int) -> None:
        """Note that an exchange with the others failed: the next one needs another quorum and group."""
        self._tries += 1
        if self._tries == _MOST_TRIES:
            raise ReplicaError(
                f"replica {plain_name(self.name)} failed {_MOST_TRIES} times in a row to exchange with the others "
                f"after step {after}, the last time with {self.ranks.error!r}; check that the hosts of all replicas "
                "reach one another (GLOO_SOCKET_IFNAME names the interface), then start the replica again"
            )
        self._failures += 1
        self.quorum = None
        self.disconnect()
