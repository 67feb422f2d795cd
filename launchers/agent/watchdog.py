"""A watchdog: if a job makes no progress, each rank prints its state and the job ends with the missing ranks' names."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO, final

import torch.distributed as dist

from meshpar._torch.groups import collective_counts, last_collectives
from meshpar.launchers.agent.stacks import find_late, read_probe
from meshpar.launchers.agent.terms import RETRY

_STORE = "it is on rank 0's host: rank 0 or its launcher is stopped or dead"


@final
class Watchdog:
    """Ends a job without progress by :data:`RETRY`, after the lowest rank that answers has named those that do not."""

    def __init__(
        self,
        stall_s: float,
        store: dist.Store,
        progress: Callable[[], object],
        *,
        rank: int,
        world_size: int,
        moves: Callable[[], object] = lambda: None,
        on_stall: Callable[[str, bool], None] | None = None,
        file: TextIO | None = None,
        answer_s: float = 5.0,
    ) -> None:
        """``progress``, ``moves``: change after a step, and after other work; ``on_stall``: gets the verdict."""
        self._stall_s, self._progress, self._moves = stall_s, progress, moves
        # torch's types do not know append.
        self._store: Any = store
        self._rank, self._world, self._on_stall, self._file = rank, world_size, on_stall, file
        self._every, self._answer_s = min(5.0, stall_s / 4), answer_s
        self._silent: Callable[[], None] = lambda: None
        self._end, self._asked = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=target, name="meshpar-watchdog", daemon=True)
            for target in (self._watch, self._stay_in_touch)
        ]

    def __enter__(self) -> Watchdog:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(1.0)  # a thread that still talks when the interpreter ends can abort it

    def _watch(self) -> None:
        """Look for progress; this thread never talks, so that nothing can hold it up."""
        seen, idle_s, looked = self._state(), 0.0, time.monotonic()
        while not self._end.wait(self._every):
            # Of a longer pause this process, or its machine, was itself stopped: the job had no time to move.
            idle_s, looked = idle_s + min(time.monotonic() - looked, 2 * self._every), time.monotonic()
            now = self._state()
            if now != seen:
                seen, idle_s = now, 0.0
            if idle_s > self._stall_s or self._asked.is_set():
                self._give_up(idle_s)

    def _state(self) -> object:
        return tuple(read_probe(probe) for probe in (self._progress, collective_counts, self._moves))

    def _stay_in_touch(self) -> None:
        """Tell the others where this process is, and listen whether one of them has given up."""
        me = json.dumps({"rank": self._rank, "host": socket.gethostname(), "pid": os.getpid()})
        with suppress(Exception):  # a store that is gone is noticed when it is asked
            self._store.append("beats", f"{me}\n")
            while not self._end.wait(self._every):
                if self._store.check(["stall"]):
                    self._asked.set()

    def _give_up(self, idle_s: float) -> None:
        """Write, ask, and end the process, whatever fails on the way."""
        try:
            where: dict[str, Any] = {"rank": self._rank, "step": str(read_probe(self._progress)), "groups": {}}
            where |= {"idle_s": round(idle_s, 1), "host": socket.gethostname()}
            with suppress(Exception):
                where["groups"] = {group: list(pair) for group, pair in last_collectives().items()}
            groups = where["groups"].items()
            last = "; ".join(f"{group}: {what} (number {number})" for group, (number, what) in groups) or "none"
            self._write(
                f"watchdog: rank {self._rank} on {where['host']} has made no progress for {where['idle_s']:.0f} s; "
                f"step {where['step']}; last collective of each group: {last}"
            )
            with suppress(Exception):
                faulthandler.dump_traceback(file=self._file or sys.stderr, all_threads=True)
            verdict, sure = self._ask(where)
            self._write(f"watchdog: {verdict}")
            with suppress(Exception):
                if self._on_stall is not None:
                    self._on_stall(verdict, sure)
            self._silent()  # last: it breaks the connections of those that still write
        finally:
            os._exit(RETRY)  # the main thread waits for a collective that will not end

    def _write(self, line: str) -> None:
        with suppress(Exception):  # a full disk, a closed stream
            file = self._file or sys.stderr
            file.write(f"{line}\n")
            file.flush()

    def _ask(self, where: Mapping[str, Any]) -> tuple[str, bool]:
        """Ask the other ranks for their last progress, in a thread because the store may hang: (verdict, asked)."""
        verdicts: list[tuple[str, bool]] = []

        def talk() -> None:
            try:
                verdicts.append(self._agree(where))
            except Exception as error:  # noqa: BLE001 - without a verdict the process ends all the same
                verdicts.append((f"the store does not answer ({error}); {_STORE}", False))

        asking = threading.Thread(target=talk, daemon=True)
        asking.start()
        asking.join(self._answer_s * 3)
        return verdicts[0] if verdicts else (f"the store does not answer; {_STORE}", False)

    def _agree(self, where: Mapping[str, Any]) -> tuple[str, bool]:
        """Answer, and return the verdict; the first rank that gives up reads all answers, for all ranks."""
        store, deadline = self._store, time.monotonic() + self._answer_s + self._every
        store.append("answers", f"{json.dumps(where)}\n")
        store.add("answered", 1)
        if store.add("asking", 1) == 1:
            store.set("stall", str(self._rank))
            while store.add("answered", 0) < self._world and time.monotonic() < deadline:
                time.sleep(0.05)
            self._collect()
        try:
            store.wait(["verdict"], _left(deadline + self._answer_s / 2))
        except dist.DistError:  # the first one has died since
            self._collect()
        verdict = json.loads(store.get("verdict"))
        if store.add("read", 1) >= verdict["answers"]:
            store.set("end", "")
        with suppress(dist.DistError):  # who leaves early breaks the connections of those that still write
            store.wait(["end"], _left(deadline + 0.8 * self._answer_s))
        self._silent = lambda: self._end_silent(verdict)
        first = verdict["first"]
        return verdict["text"] if self._rank == first else f"{verdict['text']} (rank {first} reports the same)", True

    def _collect(self) -> None:
        """Read what all ranks have said, and write the verdict for them."""
        said = [self._store.get(key).decode() if self._store.check([key]) else "" for key in ("answers", "beats")]
        answers, beats = ({line["rank"]: line for line in map(json.loads, lines.splitlines())} for lines in said)
        missing = sorted(set(range(self._world)) - set(answers))
        silent = {rank: beats[rank] for rank in missing if rank in beats}
        verdict = {
            "text": verdict_of(answers, missing, {rank: beat["host"] for rank, beat in silent.items()}),
            "answers": len(answers),
            "first": min(answers),
            "first_of": {answers[rank]["host"]: rank for rank in sorted(answers, reverse=True)},
            "silent": list(silent.values()),
        }
        self._store.set("verdict", json.dumps(verdict))

    def _end_silent(self, verdict: Mapping[str, Any]) -> None:
        """Kill this host's ranks that do not answer: its first rank does, among its launcher's children."""
        host = socket.gethostname()
        if self._rank != verdict["first_of"].get(host):
            return
        for beat in verdict["silent"]:
            with suppress(OSError, ValueError, IndexError):  # it may be gone by now
                stat = Path(f"/proc/{beat['pid']}/stat").read_text(encoding="utf-8")
                if beat["host"] == host and int(stat.rpartition(")")[2].split()[1]) == os.getppid():
                    os.kill(beat["pid"], signal.SIGKILL)


def _left(until: float) -> timedelta:
    return timedelta(seconds=max(0.1, until - time.monotonic()))


def verdict_of(answers: Mapping[int, Mapping[str, Any]], missing: Sequence[int], hosts: Mapping[int, str]) -> str:
    """Return which ranks did not answer, and which are behind at which collective of which group."""
    parts = []
    if missing:
        named = ", ".join(f"{rank} ({hosts[rank]})" if rank in hosts else str(rank) for rank in missing)
        parts.append(f"ranks that do not answer, stopped or dead or their host is lost: {named}")
    parts += find_late(answers)
    if not parts:
        steps = ", ".join(f"rank {rank} at step {answer['step']}" for rank, answer in sorted(answers.items()))
        parts.append(
            f"every rank answers and none is behind in a collective ({steps}); their stack traces show where they wait"
        )
    return "the job makes no progress; " + "; ".join(parts)
