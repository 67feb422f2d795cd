"""``meshpar export``: export a step, or each new one; measure and push what was exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshpar.checkpoints.manifest import read_manifest, step_name
from meshpar.checkpoints.steps import checkpoints_in
from meshpar.checkpoints.storage import Place, on_disk, place
from meshpar.errors import CheckpointError
from meshpar.launchers.export.measuring import held_out, measure
from meshpar.launchers.export.publishing import check_repository, push, write_card
from meshpar.launchers.export.run import chosen_step, export_run
from meshpar.launchers.export.watching import watch


def export(
    src: str | Place,
    dst: str | Place,
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
        raise CheckpointError("--measure compares a quantised export with the step's own weights; pass --quantize FORMAT as well")
    if dry_run and push_to is None:
        raise CheckpointError("--dry-run lists what --push would upload; pass --push OWNER/NAME as well")
    if every is not None and (not watched or best is not None):
        raise CheckpointError("--every chooses steps of --watch; pass --watch, and either --every or --best")
    if push_to is not None:
        check_repository(push_to)

    def local(path: str | Place) -> Path:
        return on_disk(path, why="--watch, --push and --measure work on a disk; export without them")

    def one(step: Place, target: Place) -> None:
        ids = None if held_out_text is None else held_out(local(step), held_out_text, options["config"])
        print(f"exported to {export_run(step, target, **options)}", flush=True)
        if ids is not None:
            print(measure(local(step), local(target), ids, {key: options[key] for key in ("config", "layout")}), flush=True)
        if push_to is not None:
            write_card(local(step), local(target), push_to)
            print(push(local(target), push_to, dry_run=dry_run), flush=True)

    if watched:
        out = local(dst)
        watch(local(checkpoints_in(src)), lambda step: one(step, out / step_name(read_manifest(step).step)), best=best, every=every or 1)
        return
    if push_to is not None or held_out_text is not None:
        for each in (src, dst):
            local(each)
    one(chosen_step(src, best), place(dst))
