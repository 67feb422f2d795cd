"""The right to write a folder, which a dead process cannot hold for ever, also on a file system that hosts share."""

from __future__ import annotations

import datetime
import json
import threading
import time
from contextlib import suppress
from typing import Any, final

from meshpar.checkpoints.steps.steps import warn_only
from meshpar.checkpoints.storage.place import PlaceLike, place
from meshpar.core.errors import CheckpointError
from meshpar.process.leftovers import is_running, this_process

LEASE_NAME = ".writer"


@final
class Lease:
    """A file that names a folder's holder, who is dead where its count does not rise for ``dead_s`` seconds."""

    def __init__(self, folder: PlaceLike, *, beat_s: float = 5.0, dead_s: float = 30.0) -> None:
        self._path, self._beat_s, self._dead_s = place(folder).absolute() / LEASE_NAME, beat_s, dead_s
        self._us = this_process()
        self._since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._made_folder = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="meshpar-lease", daemon=True)

    def take(self) -> None:
        """Take the folder, after up to ``dead_s`` seconds for a sign of its holder, who is an error if it lives."""
        self._made_folder = self._path.parent.make()
        created = self._path.create(self._text(-1))
        holder, version = self._read()
        if not created and not self._is_ours(holder) and self._lives(holder):
            raise CheckpointError(f"{self._path.parent} {_describe(holder)}; end that job, or train in another folder")
        self._write(0, version)
        if not created and self._path.mounted:
            # of two that replace a dead holder in the same moment, the last one has the file
            time.sleep(self._beat_s / 5)
            self.check()
        self._thread.start()

    def check(self) -> None:
        """Raise CheckpointError if another process has taken the folder since, because this one seemed dead."""
        holder, version = self._read()
        if version is None:
            raise CheckpointError(
                f"{self._path} is gone, by which this job owns the folder: the folder was deleted, moved or unmounted"
            )
        if not self._is_ours(holder):
            raise CheckpointError(
                f"{self._path.parent} {_describe(holder)}, which took it while this job gave no sign of life; end one "
                "of them"
            )

    def release(self) -> None:
        """Give the folder up, and leave none where there was none and nothing was written."""
        self._ended.set()
        self._thread.join()
        if self._is_ours(self._read()[0]):
            self._path.unlink(missing_ok=True)
        if self._made_folder:
            with suppress(OSError):
                self._path.parent.rmdir()

    def _lives(self, holder: dict[str, Any]) -> bool:
        if holder.get("host") == self._us["host"]:
            return is_running(holder["process"], holder["id"])
        deadline = time.monotonic() + self._dead_s
        while time.monotonic() < deadline:
            time.sleep(self._beat_s / 5)
            if self._read()[0] != holder:
                return True
        return False

    def _beat(self) -> None:
        count = 0
        while not self._ended.wait(self._beat_s):
            count += 1
            with warn_only(f"cannot renew {self._path}"):
                holder, version = self._read()
                if not self._is_ours(holder):
                    return  # the next check() raises
                self._write(count, version)

    def _write(self, count: int, replaces: Any) -> None:  # noqa: ANN401 - a version
        if not self._path.create(self._text(count), replaces=replaces):
            raise CheckpointError(
                f"{self._path.parent} {_describe(self._read()[0])}, which took it at this moment; end one of the jobs"
            )

    def _text(self, count: int) -> bytes:
        return json.dumps({**self._us, "since": self._since, "count": count}).ljust(512).encode()

    def _read(self) -> tuple[dict[str, Any], Any]:
        """Return what the file says, and its version; None: there is none."""
        text, version = self._path.read_version() or (b"", None)
        try:
            holder = json.loads(text)
        except ValueError:
            return {}, version  # given up, or being written
        return (holder if isinstance(holder, dict) and {*self._us, "since"} <= holder.keys() else {}), version

    def _is_ours(self, holder: dict[str, Any]) -> bool:
        return {key: holder.get(key) for key in self._us} == self._us


def is_written(folder: PlaceLike, *, patient: bool = True) -> bool:
    """Return whether a live process holds the right to write a folder.

    ``patient``: wait for a sign of one on another host; otherwise the age of its last sign decides.
    """
    lease = Lease(folder)
    holder, _ = lease._read()
    if holder and not patient and holder["host"] != lease._us["host"]:
        return lease._path.untouched_s() < lease._dead_s
    return bool(holder) and lease._lives(holder)


def _describe(holder: dict[str, Any]) -> str:
    who = f"process {holder['process']} on {holder['host']} since {holder['since']}" if holder else "an unknown process"
    return f"is written by another job: {who}"
