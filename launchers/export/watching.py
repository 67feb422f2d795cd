"""``meshpar export --watch``: export new steps beside the job that writes them."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from meshpar.checkpoints.lease import is_written
from meshpar.checkpoints.leftovers import host_name, is_running, process_id
from meshpar.checkpoints.steps import PIN_FILE, Steps
from meshpar.checkpoints.storage import Place, write_durably
from meshpar.errors import CheckpointError


def watch(root: Path, export: Callable[[Place], object], *, best: str | None = None, every: int = 1, poll_s: float = 5.0) -> None:
    """Export each new step until no job writes the folder any more.

    A step is pinned while it is exported, so that retention does not delete it.

    Args:
        root: the folder of steps.
        export: exports the step's folder that it is given; a CheckpointError of it is printed, and the next step is tried.
        best: a metric (``+name``: higher is better): export a step only if it is the best so far; None: any.
        every: export each step whose number is a multiple of this.
        poll_s: seconds between two looks at the folder.
    """
    steps, done, held = Steps(root), set[int](), None
    _release_dead(steps)
    while True:
        running = is_written(root)  # before the look, so that the last step is seen
        chosen = [step for step in steps.committed() if step % every == 0] if best is None else []
        if best is not None and (step := steps.best(best)) is not None and step != held:
            chosen, held = [step], step
        for step in (each for each in chosen if each not in done):
            done.add(step)
            with _held(steps, step) as folder:
                if folder is not None:
                    _try(export, folder)
        if not running:
            return
        time.sleep(poll_s)


def _try(export: Callable[[Place], object], folder: Place) -> None:
    try:
        export(folder)
    except CheckpointError as error:
        print(f"meshpar: {folder.name} is not exported: {error}", file=sys.stderr, flush=True)


@contextmanager
def _held(steps: Steps, step: int) -> Iterator[Place | None]:
    """Pin a step meanwhile, unless it is pinned already; None if retention has just deleted it."""
    folder, ours = steps.folder(step), step not in steps.pinned()
    try:
        if ours:
            holder = {"host": host_name(), "process": os.getpid(), "id": process_id(os.getpid())}
            write_durably(folder / PIN_FILE, json.dumps(holder))
    except FileNotFoundError:
        yield None
        return
    try:
        yield folder if step in steps.committed() else None
    finally:
        if ours:
            (folder / PIN_FILE).unlink(missing_ok=True)


def _release_dead(steps: Steps) -> None:
    """Remove the pins of watchers of this host that were killed."""
    for step in steps.pinned():
        pin = steps.folder(step) / PIN_FILE
        try:
            held = json.loads(pin.read_text())
            dead = held["host"] == host_name() and not is_running(held["process"], held["id"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a user's pin is empty
        if dead:
            pin.unlink(missing_ok=True)
