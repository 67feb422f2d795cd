"""Send a run's records to trackers (``trackers.py``). A thread sends them from ``metrics.jsonl``, so that one that
is down, slow or full never stops or slows a step.
"""

from __future__ import annotations

import json
import logging
import platform
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist

from meshpar.core import registry
from meshpar.core.errors import brief
from meshpar.parallelized import Parallelized
from meshpar.process.imports import need
from meshpar.process.leftovers import write_durably
from meshpar.process.secrets import redacted
from meshpar.training.metrics import Ended, JsonLines, Metrics
from meshpar.training.trackers import TrackedRun, Tracker

log = logging.getLogger(__name__)

METRICS, SENT = "metrics.jsonl", "trackers"
"""Names in a run's folder: the records, and the folder that says how many of them each tracker has."""
PATIENCE_S = 10.0
"""How long the end of a run waits for its trackers."""
_MOST = 1000  # records at once
_PAUSE_S, _RETRY_S, _LONGEST_S = 5.0, 1.0, 60.0  # between two sends; after an error, and at most
_TRIES = 3  # of a record alone, before one after it is tried
_CLOSE_S = 5.0
_GIT_S = 10.0


@final
class Trackers:
    """Write records to ``metrics.jsonl``, and send them to trackers, one thread each; a :class:`Reporter` of one rank.

    >>> from meshpar.training import Trackers
    >>> board = Trackers("runs/mine", {"wandb": {"project": "lm"}})  # doctest: +SKIP
    >>> board.report({"step": 1, "train/loss": 2.5})  # doctest: +SKIP
    >>> board.close()  # doctest: +SKIP

    Args:
        folder: the run's folder, which keeps how much each tracker has got: a later start sends the rest.
        trackers: options of each tracker, by name of a plugin or import path.
        step: completed steps; lines of later ones are set aside (:class:`JsonLines`).
        name: of the run; None: the folder's.
        facts: what the trackers show of the run; :func:`facts_of` returns those of a plan.
        code: a folder under git, whose commit is a fact too; None: none.
    """

    def __init__(
        self,
        folder: str | Path,
        trackers: Mapping[str, Mapping[str, Any]],
        *,
        step: int = 0,
        name: str | None = None,
        facts: Mapping[str, Any] | None = None,
        code: str | Path | None = None,
    ) -> None:
        folder = Path(folder).absolute()
        factories = {called: partial(usable(registry.TRACKER.find(called)), **trackers[called]) for called in trackers}
        shown = redacted(facts or {}) | ({} if code is None else {"commit": commit_of(Path(code))})
        self._lines = JsonLines(folder / METRICS, step=step)
        run = TrackedRun(name=name or folder.name, id="", folder=folder, step=step, facts=shown)
        self._senders = [_Sender(called, make, run) for called, make in factories.items()]

    def report(self, record: Metrics) -> None:
        """Write a record, which the trackers get within five seconds."""
        self._lines.report(record)

    def note(self, text: str) -> None:
        """Ignore the text: trackers get numbers only."""

    def close(self, ended: Ended = "complete") -> None:
        """Wait up to 10 seconds for the trackers; what they lack is sent at the next start."""
        self._lines.close()
        end = time.monotonic() + PATIENCE_S
        for sender in self._senders:
            sender.ended = ended
            sender.ends.set()
        for sender in self._senders:
            sender.join(end)


def usable(found: Any) -> Any:  # noqa: ANN401 - what the package offers
    """Return a plugin whose ``requires``, if any, is installed; raises MeshparError otherwise."""
    if requires := getattr(found, "requires", None):
        need(requires[0], extra=requires[1])
    return found


@final
class _Sender:
    """The thread of one tracker: every five seconds it sends new lines of the file, so nothing waits in memory."""

    def __init__(self, name: str, make: Callable[[TrackedRun], Tracker], run: TrackedRun) -> None:
        self.ends = threading.Event()
        self.ended: Ended = "complete"
        self._name, self._make = name, make
        self._lines, self._marker = run.folder / METRICS, run.folder / SENT / f"{name}.json"
        state: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            state = json.loads(self._marker.read_text(encoding="utf-8"))
        self._run = replace(run, id=state.get("id") or secrets.token_hex(4))
        # of a run that was set back, what is left was sent
        self._sent = min(int(state.get("sent", 0)), self._lines.stat().st_size)
        self._warned = False
        self._most, self._alone, self._retry_s = _MOST, 0, _RETRY_S  # lines at once; errors of the next line alone
        self._ahead: set[bytes] = set()  # lines that the tracker has, after one that it refused
        self._thread = threading.Thread(target=self._sends, name=f"meshpar-tracker-{name}", daemon=True)
        self._thread.start()

    def join(self, end: float) -> None:
        """Wait until a time of the monotonic clock; warn if the tracker has not got everything by then."""
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            self._warn("it does not answer")

    def _sends(self) -> None:
        tracker: Tracker | None = None
        last, taken = False, list[bytes]()
        while not last:
            last = self.ends.is_set()
            try:
                if tracker is None:
                    self._mark()  # so that a start after this one continues it
                    tracker = self._make(self._run)
                while taken := self._unsent(self._most):
                    try:
                        self._send(tracker, taken)
                    except Exception:
                        self._judge(tracker, taken)
                        raise
                    self._count(taken)
                    self._warned, taken = False, []
                if last:
                    tracker.close(self.ended)
                self.ends.wait(_PAUSE_S)
            except BaseException as error:  # noqa: BLE001 - each tracker has its own, and SystemExit ends no thread
                self._warn(brief(error))
                self._most = max(1, len(taken) // 2) if taken else self._most
                if tracker is not None:
                    self._close(tracker)
                tracker = None
                self.ends.wait(self._retry_s)
                self._retry_s = min(2 * self._retry_s, _LONGEST_S)

    def _count(self, lines: Sequence[bytes]) -> None:
        """Note that the tracker has lines."""
        self._sent += sum(map(len, lines))
        self._most, self._alone, self._retry_s = min(2 * self._most, _MOST), 0, _RETRY_S
        self._mark()

    def _judge(self, tracker: Tracker, refused: Sequence[bytes]) -> None:
        """Set a line aside that was refused alone several times, if a later one is taken: the service is there."""
        self._alone += len(refused) == 1
        if self._alone < _TRIES:
            return
        later = [line for line in self._unsent(2 + self._alone % _MOST)[1:] if line not in self._ahead][-1:]
        self._send(tracker, later)
        if later:
            self._ahead |= {*later}
            with self._marker.with_suffix(".refused.jsonl").open("ab") as file:
                file.write(refused[0])
            text = "tracker %s refuses one record, %s; it is set aside in %s, and later ones are sent"
            log.warning(text, self._name, refused[0].decode(errors="replace").strip()[:200], file.name)
            self._count(refused)

    def _send(self, tracker: Tracker, lines: Sequence[bytes]) -> None:
        records = [record for line in lines if line not in self._ahead and (record := _record(line))]
        if records:
            tracker.send(records)
            steps = (int(record["step"]) for record in records)
            self._run = replace(self._run, step=max(self._run.step, *steps))

    def _close(self, tracker: Tracker) -> None:
        """Close a tracker that failed; one that does not end within some seconds is left to its thread."""

        def close() -> None:
            with suppress(BaseException):  # it has failed already
                tracker.close("stopped")

        thread = threading.Thread(target=close, name=f"{self._thread.name}-ends", daemon=True)
        thread.start()
        thread.join(_CLOSE_S)

    def _unsent(self, most: int) -> list[bytes]:
        """Return lines that are whole and not sent yet."""
        with self._lines.open("rb") as file:
            file.seek(self._sent)
            return [line for line in islice(file, most) if line.endswith(b"\n")]

    def _mark(self) -> None:
        self._marker.parent.mkdir(exist_ok=True)
        write_durably(self._marker, json.dumps({"id": self._run.id, "sent": self._sent}))

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            text = (
                "tracker %s: %s; training continues. Records stay in %s and are sent as soon as it answers, at the "
                "latest when the run is started again"
            )
            log.warning(text, self._name, why, self._lines)


def _record(line: bytes) -> dict[str, float]:
    """Return the finite values of a line; nothing for a line that is no record."""
    try:
        record = json.loads(line)
        return {name: value for name, value in record.items() if value is not None} if "step" in record else {}
    except (ValueError, TypeError):
        return {}


def facts_of(par: Parallelized) -> dict[str, Any]:
    """Return ``plan`` and ``environment`` of a run as plain data, for :class:`Trackers`."""
    from meshpar import __version__

    device = torch.cuda.get_device_name(par.device) if par.device.type == "cuda" else par.device.type
    versions = {"python": platform.python_version(), "torch": str(torch.__version__), "meshpar": __version__}
    return {
        "plan": {"mesh": str(par.spec), "passes": [repr(pass_) for pass_ in par.plan.passes]},
        "environment": versions | {"host": platform.node(), "ranks": dist.get_world_size(), "device": device},
    }


def commit_of(folder: Path) -> str | None:
    """Return the commit of a folder under git, or None; runs no command that the folder's settings of git name."""
    named = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), "rev-parse", "--verify", "HEAD"]
    try:
        return subprocess.run(named, capture_output=True, text=True, check=True, timeout=_GIT_S).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
