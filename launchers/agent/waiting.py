"""Wait for other processes within a time limit: print for whom every ten seconds, and end at Ctrl-C."""

from __future__ import annotations

import socket
import sys
import time
from typing import final

EVERY_S = 10.0
"""Seconds between two lines about a wait."""

_POLL_S = 0.05
_CONNECT_S = 5.0


@final
class Waiting:
    """A wait in Python, which a signal interrupts; torch's stores wait in C++, which none does."""

    def __init__(self, wait_s: float) -> None:
        """Begin a wait of at most ``wait_s`` seconds."""
        self._wait_s, self._began = wait_s, time.monotonic()
        self._told = self._began

    def more(self, whom: str) -> bool:
        """Sleep a moment and return whether there is time left; ``whom`` is printed every ten seconds."""
        now = time.monotonic()
        if now - self._began > self._wait_s:
            return False
        if now - self._told >= EVERY_S:
            print(f"meshpar: waiting for {whom}, {now - self._began:.0f} of {self._wait_s:.0f} s", file=sys.stderr, flush=True)
            self._told = now
        time.sleep(_POLL_S)
        return True


def unreached(host: str, port: int, wait_s: float, whom: str) -> str:
    """Wait until a port accepts connections; return the reason if it does not within ``wait_s`` seconds, else an empty text."""
    waiting = Waiting(wait_s)
    while True:
        try:
            socket.create_connection((host, port), timeout=min(_CONNECT_S, wait_s)).close()
        except OSError as error:
            if not waiting.more(f"{whom} at {host}:{port} ({error})"):
                return str(error)
        else:
            return ""
