"""Export of a live model, through a temporary checkpoint beside the target."""

from __future__ import annotations

import torch

from meshpar.checkpoints.export.safetensors import export_safetensors
from meshpar.checkpoints.export.target import free_target, make_beside
from meshpar.checkpoints.format.copying import Progress
from meshpar.checkpoints.steps.checkpointable import Checkpointable
from meshpar.checkpoints.steps.leftovers import remove
from meshpar.checkpoints.steps.planning import Planning
from meshpar.checkpoints.steps.ranks import Ranks
from meshpar.checkpoints.steps.saving import Noted, Saving
from meshpar.checkpoints.steps.steps import Steps
from meshpar.checkpoints.storage.place import Place, PlaceLike, place


def export_module(
    par: Checkpointable,
    dst: PlaceLike,
    dtype: torch.dtype | None = None,
    max_shard_size: int = 5 << 30,
    tokenizer: PlaceLike | None = None,
    progress: Progress | None = None,
    *,
    overwrite: bool = False,
    timeout_s: float = 1800.0,
) -> Place:
    """Export a parallel module without gathering it in memory. Temporarily uses twice the model's size on the disk, or
    in the store.

    Collective: every rank calls it, with the same ``dst`` on a file system that all share, or a URL.

    Args:
        par: the parallel module.
        dst: the folder to write; it appears once it is complete.
        dtype: dtype of the floating-point tensors; None: unchanged.
        max_shard_size: bytes of tensors in one file, unless one tensor alone is larger.
        tokenizer: a folder whose files (but for weights and ``config.json``) are copied next to the model.
        progress: called after each tile.
        overwrite: whether to replace an existing folder.
        timeout_s: seconds that a rank waits for the others within one step.

    Returns:
        ``dst``.

    Raises:
        CheckpointError: on every rank, if any rank fails.
    """
    ranks = Ranks(timeout_s)
    target = place(dst).resolve()

    def begin() -> Place:
        free_target(target, overwrite=overwrite)
        return make_beside(target)

    root = ranks.share("exporting", begin)
    try:
        steps = Steps(root)
        folder = ranks.share("exporting", lambda: steps.begin(0, replace=False))
        saving = Saving(ranks, folder, Noted(step=0, extra={}, metrics={}), Planning())
        saving.plan(par, None)
        step = saving.finish(lambda manifest: steps.commit(folder, manifest))
        ranks.share(
            "exporting",
            lambda: export_safetensors(step, target, dtype, max_shard_size, tokenizer, progress, overwrite=overwrite),
        )
        return place(dst)
    finally:
        if ranks.rank == 0:
            remove(root)
