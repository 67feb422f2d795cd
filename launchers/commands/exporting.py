"""``meshpar export``: export a step, or each new step of a running job; measure and push the export."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshpar.checkpoints.format.manifest import read_manifest, step_name
from meshpar.checkpoints.steps.lease import is_written
from meshpar.checkpoints.steps.steps import PIN_FILE, Steps, checkpoints_in
from meshpar.checkpoints.storage.disk import DiskPath
from meshpar.checkpoints.storage.place import Place, PlaceLike, on_disk, place
from meshpar.core.errors import CheckpointError
from meshpar.launchers.export.publishing import check_repository, held_out, measure, push, write_card
from meshpar.launchers.export.run import chosen_step, export_run
from meshpar.process.leftovers import host_name, is_running, this_process


def export(
    src: PlaceLike,
    dst: PlaceLike,
    options: dict[str, Any],
    *,
    best: str | None,
    held_out_text: Path | None,
    push_to: str | None,
    dry_run: bool,
    watched: bool,
    every: int | None,
) -> None:
    """Export and print what was done.

    Args:
        src: a run's folder, its checkpoints, or one step.
        dst: the folder to write; with ``watched``, the folder of one folder for each step.
        options: of :func:`meshpar.launchers.export_run`.
        best: as for :func:`meshpar.launchers.export_run`; with ``watched``: export each step that is the best so far.
        held_out_text: a text on which to compare the quantised export with the step's own weights.
        push_to: ``owner/name`` of the Hugging Face Hub.
        dry_run: print what would be pushed.
        watched: export new steps until the job that writes them has ended.
        every: with ``watched``: export each step whose number is a multiple of this.

    Raises:
        CheckpointError: options that do not fit each other, or as for :func:`meshpar.launchers.export_run`.
    """
    if held_out_text is not None and options["quantize"] is None:
        raise CheckpointError(
            "--measure compares a quantised export with the step's own weights; pass --quantize FORMAT as well"
        )
    if held_out_text is not None and options.get("weights", "trained") != "trained":
        raise CheckpointError(
            "--measure compares a quantised export with the step's trained weights; drop --measure, or --weights"
        )
    if dry_run and push_to is None:
        raise CheckpointError("--dry-run lists what --push would upload; pass --push OWNER/NAME as well")
    if every is not None and (not watched or best is not None):
        raise CheckpointError("--every chooses steps of --watch; pass --watch, and either --every or --best")
    if push_to is not None:
        check_repository(push_to)

    def local(path: PlaceLike) -> DiskPath:
        return on_disk(path, why="--watch, --push and --measure work on a disk; export without them")

    def one(step: Place, target: Place) -> None:
        ids = None if held_out_text is None else held_out(local(step), held_out_text, options["config"])
        print(f"exported to {export_run(step, target, **options)}", flush=True)
        if ids is not None:
            print(
                measure(local(step), local(target), ids, {key: options[key] for key in ("config", "layout")}),
                flush=True,
            )
        if push_to is not None:
            write_card(local(step), local(target), push_to)
            print(push(local(target), push_to, dry_run=dry_run), flush=True)

    if watched:
        out = local(dst)
        watch(
            local(checkpoints_in(src)),
            lambda step: one(step, out / step_name(read_manifest(step).step)),
            best=best,
            every=every or 1,
        )
        return
    if push_to is not None or held_out_text is not None:
        for address in (src, dst):
            local(address)
    one(chosen_step(src, best), place(dst))


def watch(
    root: Path, export: Callable[[Place], object], *, best: str | None = None, every: int = 1, poll_s: float = 5.0
) -> None:
    """Export each new step, pinned meanwhile, until no job writes the folder; errors of one step are printed."""
    steps, done, held = Steps(root), set[int](), None
    _release_dead(steps)
    while True:
        running = is_written(root)  # before the look, so that the last step is seen
        chosen = [step for step in steps.committed() if step % every == 0] if best is None else []
        if best is not None and (step := steps.best(best)) is not None and step != held:
            chosen, held = [step], step
        for step in (candidate for candidate in chosen if candidate not in done):
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
            (folder / PIN_FILE).write_durably(json.dumps(this_process()).encode())
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
