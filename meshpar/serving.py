"""Move streamed weights to an inference engine in another process, on this host or another one: whole versions alone.

A reference transport over TCP, which outlives either end: a group of processes would not. A receiver takes a version
when the digest of all of it agrees, and acknowledges it; until then, and after a sender was lost, it has the last one.
Use it between processes that trust each other.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor

from meshpar.checkpoints.export.published import Digest, dtype_text
from meshpar.checkpoints.storage.files import memory_of
from meshpar.core import runtime
from meshpar.core.errors import MeshparError

__all__ = ["Digest", "Receiver", "Sent", "Stream", "Weights", "receive", "send"]

_LENGTH = struct.Struct("<Q")
_LONGEST = 1 << 28  # bytes of a message that describes tensors


class Stream(Protocol):
    """Whole tensors by name, such as :meth:`meshpar.Parallelized.published` returns.

    Attributes:
        version: number of iterations that have begun.
        to: the rank that gets values.
    """

    version: int
    to: int

    def metadata(self) -> Sequence[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Return name, dtype and shape of each tensor, in their order."""
        ...

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor; on ranks without values on the meta device."""
        ...


class Sent(NamedTuple):
    """The end of one version's way, the same on every rank.

    Attributes:
        acknowledged: the receiver has it whole.
        problem: why not; empty if it has.
    """

    version: int
    digest: str
    acknowledged: bool
    problem: str


class Weights(NamedTuple):
    """One version, whole."""

    version: int
    digest: str
    tensors: Mapping[str, Tensor]


def send(stream: Stream, address: str, *, version: int | None = None, timeout_s: float = 60.0) -> Sent:
    """Send one version of streamed weights to the receiver at an address.

    A receiver that is lost, or not there yet, is told in the result and holds nobody up: the ranks iterate to the end,
    and the next version is sent as if nothing had been.

    >>> sent = send(par.published(dtype=torch.bfloat16), "engine:6000", version=step)  # doctest: +SKIP

    Args:
        stream: the weights.
        address: ``host:port`` of a :func:`receive`.
        version: number of the version; None: of the stream's iterations.
        timeout_s: bound in seconds on connecting, and on each wait for the receiver.

    Raises:
        MeshparError: an address that is none; or what the stream raises, and the receiver then drops what it got.

    Collective: every rank of the stream calls it.
    """
    where, digest, problem = _place(address), Digest(), ""
    link: socket.socket | None = None
    metadata = list(stream.metadata())
    try:
        for number, (name, tensor) in enumerate(stream):
            if tensor.is_meta:
                continue
            values = tensor.detach().cpu().contiguous()
            digest.add(name, values)
            if problem:
                continue
            try:
                if number == 0:
                    link = socket.create_connection(where, timeout_s)
                    table = [[name, dtype_text(dtype), list(shape)] for name, dtype, shape in metadata]
                    _tell(link, {"version": stream.version if version is None else version, "tensors": table})
                if link is not None:
                    link.sendall(memory_of(values) if values.numel() else b"")
            except OSError as error:
                problem = f"{address}: {error}"
        if link is not None and not problem:
            try:
                _tell(link, {"digest": digest.hexdigest()})
                problem = str(_told(link).get("problem", ""))
            except (OSError, ValueError) as error:
                problem = f"{address} did not acknowledge: {error}"
    finally:
        if link is not None:
            link.close()
    sent = [
        Sent(stream.version if version is None else version, digest.hexdigest(), not problem, problem)
        if dist.get_rank() == stream.to
        else None
    ]
    dist.broadcast_object_list(sent, src=stream.to, group=runtime.hosts())
    assert sent[0] is not None
    return sent[0]


def receive(address: str = "127.0.0.1:0", *, timeout_s: float = 60.0) -> Receiver:
    """Return a receiver of versions at an address, ``host:port``; port 0 takes a free one. See :class:`Receiver`."""
    return Receiver(address, timeout_s=timeout_s)


@final
class Receiver:
    """Receive versions of weights, in a thread of its own, and hold the newest one that is whole.

    While a version arrives, memory holds it beside the one before.

    >>> with receive("0.0.0.0:6000") as receiver:  # doctest: +SKIP
    ...     weights = receiver.wait(version=1)
    ...     engine.load_state_dict(weights.tensors)

    Args:
        address: ``host:port``; port 0 takes a free one.
        timeout_s: seconds without a byte after which a sender counts as lost.

    Attributes:
        address: with the port.
        lost: number of versions that ended before they were whole.
    """

    def __init__(self, address: str, *, timeout_s: float = 60.0) -> None:
        host, port = _place(address)
        self._server = socket.create_server((host, port))
        self.address = f"{host}:{self._server.getsockname()[1]}"
        self.lost, self._timeout, self._closed = 0, timeout_s, False
        self._newest: Weights | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._serve, name="meshpar-receive", daemon=True)
        self._thread.start()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def newest(self) -> Weights | None:
        """The newest whole version; None before the first. What is returned does not change any more."""
        with self._changed:
            return self._newest

    def wait(self, version: int, timeout_s: float = 600.0) -> Weights:
        """Return the newest version when it is ``version`` or a later one.

        Raises:
            MeshparError: it did not come in time; tells the newest one and how many were lost.
        """
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._newest is not None and self._newest.version >= version, timeout_s
            ):
                have = "none" if self._newest is None else f"version {self._newest.version}"
                raise MeshparError(
                    f"version {version} did not come to {self.address} in {timeout_s:.0f} s; it has {have}, and "
                    f"{self.lost} were lost on their way: look at the sender's log"
                )
            assert self._newest is not None
            return self._newest

    def close(self) -> None:
        """Stop receiving. What was received stays."""
        self._closed = True
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join()

    def _serve(self) -> None:
        while not self._closed:
            try:
                link, _ = self._server.accept()
            except OSError:
                return
            with link:
                link.settimeout(self._timeout)
                try:
                    weights = _version(link)
                except (OSError, ValueError, KeyError, TypeError) as error:
                    self.lost += 1
                    with suppress(OSError):
                        _tell(link, {"problem": f"the version was not taken: {error}"})
                    continue
                with self._changed:
                    self._newest = weights
                    self._changed.notify_all()
                with suppress(OSError):
                    _tell(link, {"version": weights.version})


def _version(link: socket.socket) -> Weights:
    """Read one version; raises ValueError unless all of it came as it was sent."""
    header, digest = _told(link), Digest()
    tensors: dict[str, Tensor] = {}
    for name, dtype, shape in header["tensors"]:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        memory = memory_of(tensor) if math.prod(shape) else memoryview(bytearray())
        _fill(link, memory)
        digest.add(name, tensor)
        tensors[name] = tensor
    if (expected := _told(link)["digest"]) != digest.hexdigest():
        raise ValueError(f"its digest is {digest.hexdigest()}; the sender's is {expected}")
    return Weights(int(header["version"]), digest.hexdigest(), tensors)


def _place(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise MeshparError(f"the address is {address!r}; expected host:port, such as 127.0.0.1:6000")
    return host, int(port)


def _tell(link: socket.socket, message: Mapping[str, Any]) -> None:
    data = json.dumps(message).encode()
    link.sendall(_LENGTH.pack(len(data)) + data)


def _told(link: socket.socket) -> dict[str, Any]:
    head = bytearray(_LENGTH.size)
    _fill(link, memoryview(head))
    (length,) = _LENGTH.unpack(head)
    if length > _LONGEST:
        raise ValueError(f"a message of {length} bytes, which is none of this protocol")
    data = bytearray(length)
    _fill(link, memoryview(data))
    return dict(json.loads(data))


def _fill(link: socket.socket, memory: memoryview) -> None:
    while memory:
        count = link.recv_into(memory)
        if count == 0:
            raise ConnectionError("the other end was lost")
        memory = memory[count:]
