"""Start, stop and restart the ranks of a replica on all of its nodes together."""

from __future__ import annotations

import math
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from meshpar.core.errors import LaunchError
from meshpar.launchers.agent.terms import NO_USE, RETRY, SILENT_S, STOPPED, start_id
from meshpar.process.waiting import Waiting

_BEAT_S, _ANSWER_S, _POLL_S = 1.0, 5.0, 0.05
_LONGEST = 1 << 16  # bytes of a line, and about as many are read at once
_PENDING = 64  # connections that are accepted at once
_FREE_PORTS = range(20_000, 32_768)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a replica's ranks: its address and id, and the id of the starts in which steps are counted."""

    head: str
    run_id: str
    series: str


@final
class NodeMeeting:
    """The connections of a replica's nodes to its first, whose address is in a file; one thread calls all methods."""

    def __init__(self, file: Path, replica: int, node: int, nodes: int) -> None:
        """Describe a node of a replica; ``file``: for the first node's address, in a folder that all nodes share."""
        self._address = _Address(file)
        self._replica, self._node, self._nodes = replica, node, nodes
        self._server: socket.socket | None = None
        self._run_id = self._series = f"{start_id()}-0"
        self._links, self._new, self._left = dict[int, _Link](), list[_Link](), list[_Link]()
        self._whom, self._taken = "", False
        self.lost: int | None = None
        self.codes: dict[int, int] = {}

    def __enter__(self) -> NodeMeeting:
        if self._node == 0 and self._nodes > 1:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            self._server = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
            self._server.setblocking(False)
            self._address.publish(f"{socket.gethostname()}:{self._server.getsockname()[1]} {secrets.token_hex(8)}")
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()
        deadline = time.monotonic() + _ANSWER_S
        while self._left and time.monotonic() < deadline:
            self._close_left()
            time.sleep(_POLL_S)
        for link in (*self._left, *self._new):
            link.close()
        if self._server is not None:
            self._server.close()

    def gather(self, over: Callable[[], bool], wait_s: float) -> Start | None:
        """Wait for all nodes and return the next start; None if it is ``over``, or nodes are missing or have ended."""
        if self.lost is not None or self.verdict() == RETRY:
            self._series = self._run_id  # the ranks are no cause of these
        self._leave()
        self.codes = {}
        waiting = Waiting(wait_s)
        while not (over() or self.codes or self._taken):
            self._close_left()
            start = self._come() if self._node else self._call()
            if start is not None:
                self.lost = None
                return start
            if not waiting.more(self._whom):
                self._note(
                    f"{self._whom} did not come within {wait_s:.0f} s; start the commands of all nodes of the replica "
                    "again"
                )
                break
        return None

    def keep(self) -> None:
        """Hear the other nodes, and be heard; call it every few seconds after :meth:`gather`."""
        self._beat()
        if self._server is not None:
            self._accept(self._server)
        for node in list(self._links):
            self._hear(node)

    def tell(self, code: int) -> None:
        """Tell the other nodes how the ranks of this one ended."""
        self._ended(self._node, code)

    def verdict(self) -> int | None:
        """Return the exit code of the replica's start, equal on all nodes; None until all ranks have ended."""
        if len(self.codes) < self._nodes:
            return None
        codes = set(self.codes.values())
        if self._nodes == 1 or codes == {0}:
            return self.codes[0]
        return NO_USE if NO_USE in codes else max(codes & STOPPED, default=RETRY if RETRY in codes else 1)

    def names(self, *nodes: int) -> str:
        """Return nodes of the replica by their numbers in the job."""
        numbers = ", ".join(str(self._replica * self._nodes + node) for node in nodes)
        return f"node{'s' if len(nodes) > 1 else ''} {numbers} of replica {self._replica}"

    def _call(self) -> Start | None:
        self.keep()
        missing = [node for node in range(1, self._nodes) if node not in self._links]
        if missing:
            self._whom = f"{self.names(*missing)} at {self._address.text.partition(' ')[0]}"
            if not self._address.read():  # another node may have made the folder anew
                self._address.publish(self._address.text)
            return None
        series, _, number = self._run_id.rpartition("-")
        self._run_id = f"{series}-{int(number) + 1}"
        head = f"{socket.gethostname()}:{free_port()}" if self._nodes > 1 else ""
        start = Start(head=head, run_id=self._run_id, series=self._series)
        self._send("start", start.head, start.run_id, start.series)
        return start

    def _come(self) -> Start | None:
        """Connect to the first node, which may have moved, and return the start that it tells."""
        published = self._address.read()
        if published and (published != self._address.text or 0 not in self._links):
            self._leave()
            self._address.text = published
            address, _, key = published.partition(" ")
            self._whom = f"{self.names(0)} at {address}"
            host, _, port = address.rpartition(":")
            with suppress(OSError):
                self._links[0] = _Link(socket.create_connection((host, int(port)), timeout=_ANSWER_S))
                self._send("come", key, self._node)
        self._beat()
        self._whom = self._whom or f"{self.names(0)}, whose address is not in {self._address.file}"
        start: Start | None = None
        for word, *rest in self._hear(0):
            if word == "start":
                start = Start(head=rest[0], run_id=rest[1], series=rest[2])
            elif word == "waits":
                self._whom = " ".join(rest)
        return start if 0 in self._links else None

    def _accept(self, server: socket.socket) -> None:
        """Accept nodes. One that comes again was lost before, or another process came with its number."""
        with suppress(BlockingIOError):
            for _ in range(_PENDING):
                self._new.append(_Link(server.accept()[0]))
        key = self._address.text.partition(" ")[2]
        for link in list(self._new):
            lines = link.lines()
            for number, line in enumerate(lines, 1):
                if line[:2] == ["come", key] and len(line) == 3:
                    self._new.remove(link)
                    if (node := int(line[2])) in self._links:
                        self._links[node].send("taken")
                        self._lose(node)
                    self._links[node] = link
                    self._follow(lines[number:])  # which may have been read at once
                    break
            if link.closed and link in self._new:
                self._new.remove(link)
                link.close()

    def _hear(self, node: int) -> list[list[str]]:
        link = self._links.get(node)
        lines = [] if link is None else link.lines()
        self._follow(lines)
        if link is not None and link.closed:
            self._lose(node)
        return lines

    def _follow(self, lines: list[list[str]]) -> None:
        for word, *rest in lines:
            if word == "end":
                self._ended(int(rest[0]), int(rest[1]))
            elif word == "lost" and self.verdict() is None:
                self.lost = int(rest[0])
            elif word == "taken":
                self._taken = True
                self._note(
                    f"another process came as {self.names(self._node)}; give each node its own --node-rank, and start "
                    "it once"
                )

    def _ended(self, node: int, code: int) -> None:
        if node not in self.codes:
            self.codes[node] = code
            self._send("end", node, code)  # the first node tells all others

    def _lose(self, node: int) -> None:
        link = self._links.pop(node)
        link.leave()  # a node whose network is back sees it at once
        self._left.append(link)
        if node not in self.codes or (self._node and self.verdict() is None):
            self.lost = node
            self._send("lost", node)

    def _leave(self) -> None:
        """End the connections in such a way that the others can read all that was sent."""
        self._left += self._links.values()
        self._links = {}
        for link in self._left:
            link.leave()

    def _close_left(self) -> None:
        for link in list(self._left):
            link.lines()
            if link.closed:
                self._left.remove(link)
                link.close()

    def _beat(self) -> None:
        for link in self._links.values():
            link.beat("waits", self._whom or "for nobody")

    def _send(self, *words: object) -> None:
        for link in self._links.values():
            link.send(*words)

    def _note(self, text: str) -> None:
        print(f"meshpar: {text}", file=sys.stderr, flush=True)


@final
class _Link:
    """A connection to another node; ``closed``: by that node, or after :data:`SILENT_S` seconds of silence."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection, self._rest, self._heard, self._beaten = connection, b"", time.monotonic(), -math.inf
        self.closed = False

    def send(self, *words: object) -> None:
        with suppress(OSError):  # ``lines`` sees that it is closed
            self._connection.send(" ".join(map(str, words)).encode() + b"\n")

    def beat(self, *words: object) -> None:
        if time.monotonic() - self._beaten >= _BEAT_S:
            self._beaten = time.monotonic()
            self.send(*words)

    def lines(self) -> list[list[str]]:
        """Return lines that have come, each as its words; more of a peer that sends without end at the next call."""
        try:
            while len(self._rest) < _LONGEST and (text := self._connection.recv(4096)):
                self._rest, self._heard = self._rest + text, time.monotonic()
            self.closed = len(self._rest) < _LONGEST or b"\n" not in self._rest
        except BlockingIOError:
            self.closed = self.closed or time.monotonic() - self._heard > SILENT_S
        except OSError:
            self.closed = True
        *whole, self._rest = self._rest.split(b"\n")
        return [words for line in whole if (words := line.decode(errors="replace").split())]

    def leave(self) -> None:
        """Send no more. A full close would discard lines that the other node has not read yet."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._connection.close()


@final
class _Address:
    """The file with the first node's address and key; ``text``: what this node knows of it."""

    def __init__(self, file: Path) -> None:
        self.file, self.text, self._looked = file, "", -math.inf

    def read(self) -> str:
        """Return the content, which is read once a second."""
        if time.monotonic() - self._looked < _BEAT_S:
            return self.text
        self._looked = time.monotonic()
        with suppress(FileNotFoundError):
            return self.file.read_text(encoding="utf-8").strip()
        return ""

    def publish(self, text: str) -> None:
        self.text = text
        publish(self.file, text)


def publish(path: Path, text: str) -> None:
    """Write a line that other nodes of this user may read at any time: it may have a key."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new-{secrets.token_hex(4)}")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(f"{text}\n")
    new.replace(path)


def free_port() -> int:
    """Return a free port below the kernel's ephemeral range (32768), so that it stays free for some seconds."""
    first = os.getpid() % len(_FREE_PORTS)  # processes that ask at the same time begin at different ports
    for port in (*_FREE_PORTS[first:], *_FREE_PORTS[:first]):
        with socket.socket() as server, suppress(OSError):  # taken
            server.bind(("", port))
            return port
    raise LaunchError(f"all ports from {_FREE_PORTS[0]} to {_FREE_PORTS[-1]} are in use; free one of them")
