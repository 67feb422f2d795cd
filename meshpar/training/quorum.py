"""The replicas that train the next step together: torchft's lighthouse decides, by heartbeats and by majority."""

from __future__ import annotations

import socket
import threading
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, cast, final
from urllib.parse import urlsplit

import torch.distributed as dist
from torch import Tensor

from meshpar.core import runtime
from meshpar.core.errors import ReplicaError
from meshpar.process.imports import need

Sum = tuple[int, int]
"""The group in which gradients were added up: a quorum's number, and how often members had failed by then. Later
sums are larger.
"""

_BEAT_S, _DEAD_S, _SLICE_S = 0.3, 2.5, 5.0
_FIRST_STEP_S = 600.0
GIVE_A_LIGHTHOUSE = "start the job with `meshpar run --elastic=replicas`, or set TORCHFT_LIGHTHOUSE=http://HOST:PORT"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One replica of a quorum.

    Attributes:
        name: the replica's name and the number of its process; another start of the replica has another.
        store: ``host:port`` of its store.
        step: number of steps that it has committed, or is ready to commit; -1: it has no state yet.
        sum: the group in which the gradients of its last step were added up.
        waits: it has gradients of the next step, whose sum failed.
        failures: number of failures that it has seen.
        drawn: the group with which it shares the samples of the step that it ``waits`` to complete.
        life: number of steps that its process has committed.
        waited: seconds that it has waited for the first step with others, its tries to connect included.
    """

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
    """The replicas that the lighthouse has put together; the same on each of them.

    Attributes:
        number: changes with the members.
        members: in the order of their names.
    """

    number: int
    members: tuple[Member, ...]

    @property
    def key(self) -> Sum:
        """The number of a group of these members: another one after each failure."""
        return self.number, max(member.failures for member in self.members)

    @property
    def best(self) -> tuple[int, Sum]:
        """The job's newest state."""
        return max(member.state for member in self.members)

    @property
    def newest(self) -> tuple[Member, ...]:
        """The members with the newest state."""
        return tuple(member for member in self.members if member.state == self.best)

    @property
    def waited(self) -> float:
        """Seconds that the one of them that has waited longest has waited for the first step with others."""
        return max(member.waited for member in self.members)

    @property
    def waiting(self) -> tuple[Member, ...]:
        """The members with gradients of one division of samples."""
        waiting = [member for member in self.newest if member.waits]
        last = max((member.drawn for member in waiting), default=None)
        return tuple(member for member in waiting if member.drawn == last)

    @property
    def ready(self) -> tuple[Member, ...]:
        """The members that go on together: those with gradients to add up, where there are any, else all."""
        return self.waiting or self.members

    @property
    def leader(self) -> Member:
        """The member that writes: of those with the newest state, the one that has trained longest."""
        return max(self.newest, key=lambda member: (member.life, member.name))


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
    """This replica at the lighthouse; one rank of each replica has it.

    Heartbeats end when the replica makes no step for much longer than its longest one, so that one that hangs is
    dropped.

    Args:
        lighthouse: its address, ``http://host:port``.
        name: of this replica.
        patience_s: see :class:`Lighthouse`.
        wait_s: seconds to wait for the lighthouse.

    Raises:
        ReplicaError: it does not answer.
    """

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

    def ask(self, member: Member) -> Quorum | None:
        """Ask once to be in the next quorum, for some seconds; None: there is none yet."""
        fields = ("sum", "waits", "failures", "drawn", "life", "waited")
        data: dict[Any, object] = {field: getattr(member, field) for field in fields}
        try:
            found = self._client.quorum(
                self.name, timedelta(seconds=_SLICE_S), self._address, self.store, member.step + 1, 1, False, data
            )
        except TimeoutError:
            return None
        except RuntimeError:  # not reachable
            time.sleep(_BEAT_S)
            return None
        self.fresh, self._heard = True, time.monotonic()
        members = tuple(sorted(map(_member, found.participants), key=lambda participant: participant.name))
        return Quorum(number=int(found.quorum_id), members=members)

    def current(self) -> bool:
        """Return whether this replica has been heard all the time since the last quorum: else the others may have
        gone on without it.
        """
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
    place, deadline = urlsplit(lighthouse), time.monotonic() + wait_s
    while True:
        try:
            with socket.create_connection((place.hostname or "", place.port or 0), timeout=_SLICE_S) as probe:
                return str(probe.getsockname()[0])
        except OSError as error:
            if time.monotonic() > deadline:
                raise _silent(lighthouse, error) from error
            time.sleep(_BEAT_S)


def _silent(lighthouse: str, error: Exception) -> ReplicaError:
    return ReplicaError(
        f"the lighthouse of the job's replicas does not answer at {lighthouse!r} ({error}); {GIVE_A_LIGHTHOUSE}"
    )


def _member(found: Any) -> Member:  # noqa: ANN401 - torchft has no types for it
    fields = {**found.data, **{field: tuple(found.data[field]) for field in ("sum", "drawn")}}
    return Member(name=found.replica_id, store=found.store_address, step=found.step - 1, **fields)


class Peers(Protocol):
    """The methods of a gloo backend that needs no process group; torch's stubs lack them."""

    def allreduce(self, tensors: list[Tensor], op: object = ..., /) -> dist.Work: ...
    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> dist.Work: ...
    def recv(self, tensors: list[Tensor], source: int, tag: int, /) -> dist.Work: ...
    def shutdown(self) -> None: ...


def connect(member: Member, name: str, rank: int, size: int, timeout_s: float) -> Peers:
    """Return a new gloo group that meets at a member's store. Every rank of the group calls it.

    Raises:
        RuntimeError: the others did not come within ``timeout_s``, or the member ended.
    """
    host, _, port = member.store.rpartition(":")
    limit = timedelta(seconds=timeout_s)
    store = dist.TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=limit)
    return cast("Peers", dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, limit))


def _torchft() -> Any:  # noqa: ANN401 - an optional package
    runtime.quiet("RUST_LOG")
    return need("torchft.coordination", extra="replicas")
