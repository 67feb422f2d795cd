"""A watchdog: when a job stands still, every rank says where it is, one names those that did not arrive, and the job
ends.
"""

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
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, final

import torch.distributed as dist

from meshpar._torch.groups import collective_counts, last_collectives

STALLED = 75
"""The exit code of a rank that the watchdog ended (sysexits.h: EX_TEMPFAIL); another start may heal it."""

_STORE = "it is on rank 0's host: rank 0 or its launcher is stopped or dead"


@final
class Watchdog:
    """Ends a job that stands still. A context manager; no collective, for they are what stalls: ranks talk through the
    store.

    Progress is a new value of ``progress()`` or of ``moves()``, or one more collective on any process group. When there
    was none for ``stall_s`` seconds, this rank writes its stacks, its step and the last collective of each group to
    ``file``, asks the others to do the same, and rank 0 (the lowest rank that answers) names those that did not arrive:
    ranks that do not answer at all, and ranks that are behind the others in some group. Then every rank leaves with
    :data:`STALLED`, at most about 20 seconds after the bound. A rank that does not answer (stopped, or stuck) is killed
    by one of its host's, so that the launcher need not wait for it.
    """

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
        """Prepare; entering starts it.

        Args:
            stall_s: seconds without progress that are too many; time-outs of collectives must be longer, or they end
                the job first.
            store: a connection of this watchdog's own, equal on all ranks.
            progress: returns another value when the job has moved, such as the step.
            rank: of this process.
            world_size: number of ranks.
            moves: returns another value when work moves in which there is neither step nor collective: validation,
                writing.
            on_stall: is told the verdict before the process ends, and whether ranks were found that did not arrive;
                otherwise the store could not be asked, and what took it down is told by others.
            file: for stacks and verdict; None: standard error.
            answer_s: seconds in which a rank that lives answers when one of them asks.
        """
        self._stall_s, self._store, self._progress, self._moves = stall_s, store, progress, moves
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        return self._progress(), tuple(collective_counts().values()), self._moves()

    def _stay_in_touch(self) -> None:
        """Tell the others where this process is, and listen whether one of them has given up."""
        me = json.dumps({"host": socket.gethostname(), "pid": os.getpid()})
        with suppress(dist.DistError):  # a store that is gone is noticed when it is asked
            self._store.set(f"beat/{self._rank}", me)
            while not self._end.wait(self._every):
                if self._store.check(["stall"]):
                    self._asked.set()

    def _give_up(self, idle_s: float) -> None:
        file = self._file or sys.stderr
        counts = {group: list(pair) for group, pair in last_collectives().items()}
        where = {
            "step": str(self._progress()),
            "idle_s": round(idle_s, 1),
            "groups": counts,
            "host": socket.gethostname(),
        }
        last = "; ".join(f"{group}: {what} (number {number})" for group, (number, what) in counts.items()) or "none"
        file.write(
            f"watchdog: rank {self._rank} on {where['host']} has made no progress for {idle_s:.0f} s; step "
            f"{where['step']}; last collective of each group: {last}\n"
        )
        file.flush()
        faulthandler.dump_traceback(file=file, all_threads=True)
        verdict, sure = self._ask(where)
        file.write(f"watchdog: {verdict}\n")
        file.flush()
        if self._on_stall is not None:
            self._on_stall(verdict, sure)
        self._silent()  # last: it breaks the connections of those that still write
        os._exit(STALLED)  # the main thread waits for a collective that will not end

    def _ask(self, where: Mapping[str, Any]) -> tuple[str, bool]:
        """Return the verdict, and whether the others were asked; in a thread of its own, for a store that hangs must
        not hold it up.
        """
        found: list[tuple[str, bool]] = []
        talk = threading.Thread(target=lambda: found.append(self._agree(where)), daemon=True)
        talk.start()
        talk.join(self._answer_s * 3)
        return found[0] if found else (f"the store does not answer; {_STORE}", False)

    def _agree(self, where: Mapping[str, Any]) -> tuple[str, bool]:
        store, deadline = self._store, time.monotonic() + self._answer_s + self._every
        try:
            store.set(f"told/{self._rank}", json.dumps(where))
            store.set("stall", str(self._rank))
            missing = set(range(self._world))
            while missing and time.monotonic() < deadline:
                missing = {rank for rank in missing if not store.check([f"told/{rank}"])}
                time.sleep(0.05)
            answers = {
                rank: json.loads(store.get(f"told/{rank}")) for rank in range(self._world) if rank not in missing
            }
            beats = {rank: json.loads(store.get(f"beat/{rank}")) for rank in missing if store.check([f"beat/{rank}"])}
        except dist.DistError as error:
            return f"the store does not answer ({error}); {_STORE}", False
        text = verdict_of(answers, sorted(missing), {rank: beat["host"] for rank, beat in beats.items()})
        first = min(answers)
        store.set(f"done/{self._rank}", "")
        while time.monotonic() < deadline + self._answer_s and not all(
            store.check([f"done/{rank}"]) for rank in answers
        ):
            time.sleep(0.02)  # who leaves early breaks the connections of those that still write
        self._silent = lambda: self._end_silent(beats, answers)
        return text if self._rank == first else f"{text} (rank {first} reports the same)", True

    def _end_silent(self, beats: Mapping[int, Mapping[str, Any]], answers: Mapping[int, Mapping[str, Any]]) -> None:
        """Kill ranks of this host that do not answer; done by the host's first rank that does, to its launcher's
        children alone.
        """
        host = socket.gethostname()
        if self._rank != min((rank for rank, answer in answers.items() if answer["host"] == host), default=-1):
            return
        for beat in beats.values():
            with suppress(OSError, ValueError, IndexError):  # it may be gone by now
                stat = Path(f"/proc/{beat['pid']}/stat").read_text(encoding="utf-8")
                if beat["host"] == host and int(stat.rpartition(")")[2].split()[1]) == os.getppid():
                    os.kill(beat["pid"], signal.SIGKILL)


def verdict_of(answers: Mapping[int, Mapping[str, Any]], missing: Sequence[int], hosts: Mapping[int, str]) -> str:
    """Return which ranks did not arrive where.

    Args:
        answers: rank -> its step and, for each group, the number and the name of its last collective.
        missing: ranks that did not answer.
        hosts: of those, where that is known.
    """
    parts = []
    if missing:
        named = ", ".join(f"{rank} ({hosts[rank]})" if rank in hosts else str(rank) for rank in missing)
        parts.append(f"ranks that do not answer, stopped or dead or their host is lost: {named}")
    for group in sorted({name for answer in answers.values() for name in answer["groups"]}):
        members = {rank: answer["groups"][group] for rank, answer in answers.items() if group in answer["groups"]}
        most = max(number for number, _ in members.values())
        behind = sorted(rank for rank, (number, _) in members.items() if number < most)
        what = next(name for number, name in members.values() if number == most)
        if behind:
            parts.append(
                f"ranks that did not arrive at {what}, number {most} of {group}: {', '.join(map(str, behind))}"
            )
    if not parts:
        steps = ", ".join(f"rank {rank} at step {answer['step']}" for rank, answer in sorted(answers.items()))
        parts.append(
            f"every rank answers and none is behind in a collective ({steps}); their stack traces show where they wait"
        )
    return "the job makes no progress; " + "; ".join(parts)
