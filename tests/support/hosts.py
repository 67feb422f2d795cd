"""Several hosts on one Linux machine: network namespaces on a bridge, with links that can be slow."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import final


class Unavailable(RuntimeError):
    """What this machine lacks; a test skips with it."""


@final
class Hosts:
    """Hosts ``n1`` to ``nN``, and ``ctl`` (this machine), on one network; a context manager; needs root."""

    def __init__(self, count: int, aliases: Mapping[str, str] | None = None) -> None:
        """Prepare ``count`` hosts; ``aliases`` are further names of theirs, alias -> host."""
        self.names = [f"n{number}" for number in range(1, count + 1)]
        self._aliases = dict(aliases or {})
        self._tag = f"mp{os.getpid()}"
        self._subnet = f"10.77.{os.getpid() % 250 + 1}"
        self._files = Path()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Hosts:
        missing = [tool for tool in ("ip", "tc", "nsenter", "unshare") if shutil.which(tool) is None]
        if missing:
            raise Unavailable(f"hosts need {', '.join(missing)} (Debian: iproute2, util-linux)")
        if os.geteuid() != 0:
            raise Unavailable("hosts are network namespaces, which need root")
        self._reap()
        self._files = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="meshpar-hosts-")))
        try:
            self._make()
            self.run(self.names[0], ["true"])
        except subprocess.CalledProcessError as error:
            self._stack.close()
            raise Unavailable(
                f"this machine gives no namespaces: {' '.join(error.cmd)}: {error.stderr.strip()}"
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in self.names:
            self.kill(name)
        self._stack.close()

    def address(self, name: str) -> str:
        """Return a host's address; ``ctl`` is this machine."""
        return f"{self._subnet}.{1 if name == 'ctl' else 10 + int(name[1:])}"

    def command(self, name: str, command: Sequence[str], *, before: str = "") -> list[str]:
        """Return the command that runs ``command`` on a host; ``before`` is a line of shell run first."""
        script = f'hostname "$0"; mount --bind {self._files}/hosts /etc/hosts; {before or ":"}; exec "$@"'
        enter = [
            "nsenter", f"--net=/run/netns/{self.namespace(name)}", "unshare", "--uts", "--mount", "--propagation",
            "private",
        ]  # fmt: skip
        return [*enter, "bash", "-c", script, name, *command]

    def run(self, name: str, command: Sequence[str]) -> str:
        """Run a command on a host and return its output."""
        return _run(*self.command(name, command))

    def shape(self, rate: str | None, *names: str) -> None:
        """Bound what ``names`` (default: each host) send to others, such as ``200mbit``; None: no bound."""
        for name in names or self.names:
            queue = ["ip", "netns", "exec", self.namespace(name), "tc", "qdisc"]
            subprocess.run(
                [*queue, "del", "dev", "eth0", "root"], capture_output=True, check=False
            )  # there may be none
            if rate is not None:
                _run(*queue, "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "256kb", "latency", "400ms")

    def kill(self, name: str) -> None:
        """End every process of a host at once, as a lost node does."""
        for pid in _run("ip", "netns", "pids", self.namespace(name)).split():
            subprocess.run(["kill", "-9", pid], capture_output=True, check=False)  # it may have ended by now

    def cut(self, name: str, *, cut: bool = True) -> None:
        """Cut a host's link, or mend it."""
        _run("ip", "link", "set", f"{self._tag}v{name[1:]}", "down" if cut else "up")

    def namespace(self, name: str) -> str:
        """Return the name of a host's network namespace."""
        return f"{self._tag}{name}"

    def _reap(self) -> None:
        """Remove the hosts of processes that were killed before they could."""
        for space in (line.split()[0] for line in _run("ip", "netns").splitlines()):
            found = re.fullmatch(r"(mp(\d+))n\d+", space)
            if found is not None and not Path(f"/proc/{found[2]}").exists():
                for pid in _run("ip", "netns", "pids", space).split():
                    subprocess.run(["kill", "-9", pid], capture_output=True, check=False)
                subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
                subprocess.run(["ip", "link", "del", found[1]], capture_output=True, check=False)

    def _make(self) -> None:
        bridge, run = self._tag, _run
        lines = ["127.0.0.1 localhost", *(f"{self.address(name)} {name}" for name in ("ctl", *self.names))]
        lines += [f"{self.address(name)} {alias}" for alias, name in self._aliases.items()]
        (self._files / "hosts").write_text("\n".join(lines) + "\n")
        run("ip", "link", "add", bridge, "type", "bridge")
        self._stack.callback(run, "ip", "link", "del", bridge)
        run("ip", "addr", "add", f"{self.address('ctl')}/24", "dev", bridge)
        run("ip", "link", "set", bridge, "up")
        for name in self.names:
            space, link = self.namespace(name), f"{self._tag}v{name[1:]}"
            run("ip", "netns", "add", space)
            self._stack.callback(run, "ip", "netns", "del", space)
            run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
            run("ip", "link", "set", link, "master", bridge, "up")
            run("ip", "-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            run("ip", "-n", space, "link", "set", "eth0", "up")
            run("ip", "-n", space, "link", "set", "lo", "up")


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
