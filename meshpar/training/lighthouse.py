"""The membership of a job of several replicas: torchft's lighthouse decides, by heartbeats and by majority."""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from datetime import timedelta
from typing import Any, Protocol, cast, final
from urllib.parse import urlsplit

import torch.distributed as dist
from torch import Tensor

from meshpar.core import runtime
from meshpar.core.errors import ReplicaError
from meshpar.process.imports import need
from meshpar.training.quorum import Quorum, QuorumMember

_BEAT_S, _DEAD_S, _SLICE_S = 0.3, 2.5, 5.0
_FIRST_STEP_S = 600.0
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
        members = tuple(sorted(map(_member, answer.participants), key=lambda participant: participant.name))
        return Quorum(number=int(answer.quorum_id), members=members)

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


def _member(found: Any) -> QuorumMember:  # noqa: ANN401 - torchft has no types for it
    fields = {**found.data, **{field: tuple(found.data[field]) for field in ("sum", "drawn")}}
    return QuorumMember(name=found.replica_id, store=found.store_address, step=found.step - 1, **fields)


class Peers(Protocol):
    """The methods of a gloo backend that needs no process group; torch's stubs lack them."""

    def allreduce(self, tensors: list[Tensor], op: object = ..., /) -> dist.Work: ...
    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> dist.Work: ...
    def recv(self, tensors: list[Tensor], source: int, tag: int, /) -> dist.Work: ...
    def shutdown(self) -> None: ...


def connect(member: QuorumMember, name: str, rank: int, size: int, timeout_s: float) -> Peers:
    """Return a new gloo group that meets at a member's store; raises RuntimeError if the others do not come in time."""
    host, _, port = member.store.rpartition(":")
    limit = timedelta(seconds=timeout_s)
    store = dist.TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=limit)
    return cast("Peers", dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, limit))


def _torchft() -> Any:  # noqa: ANN401 - an optional package
    runtime.quiet("RUST_LOG")
    return need("torchft.coordination", extra="replicas")
