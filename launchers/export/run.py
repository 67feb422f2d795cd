"""``meshpar export``: write a run's model for transformers, with its tokenizer."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from meshpar.checkpoints import CheckpointManager, export_gguf, export_safetensors
from meshpar.checkpoints.export import apart
from meshpar.checkpoints.gguf import KINDS, Kind
from meshpar.checkpoints.manifest import read_manifest
from meshpar.checkpoints.quantizing import Quantization
from meshpar.checkpoints.steps import Steps, checkpoints_in, open_step
from meshpar.checkpoints.storage import Place, fetched, place
from meshpar.checkpoints.verify import Verify, verify_files
from meshpar.errors import CheckpointError
from meshpar.launchers import progress
from meshpar.launchers.export.beside import Beside, beside, config_in, weight_names
from meshpar.launchers.export.merging import merged
from meshpar.launchers.jobs.job import RECIPE
from meshpar.launchers.recipes.recipe import load_recipe
from meshpar.launchers.recipes.schema import parse_dtype
from meshpar.training.lora import LoRA
from meshpar.weights import TypedSource

_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}


def export_run(
    src: str | Place,
    dst: str | Place,
    *,
    dtype: str | None = None,
    best: str | None = None,
    max_shard_size: str = "5GB",
    verify: Verify = "size",
    config: Path | None = None,
    layout: str | None = None,
    quantize: Quantization | Kind | None = None,
    high: Sequence[str] = (),
    overwrite: bool = False,
) -> Place:
    """Export a checkpoint with the tokenizer of its run.

    Trained adapters are merged into the weights below them.

    Args:
        src: a run's folder, its checkpoints, or one step.
        dst: the folder to write.
        dtype: dtype of the weights, as text; None: as saved.
        best: a metric: export the step with its lowest value (``+name``: highest); None: the newest step.
        max_shard_size: largest size of one file: ``5GB``, ``500MiB``, or bytes.
        verify: see :func:`meshpar.checkpoints.export_safetensors`.
        config: a folder whose ``config.json`` and other files take precedence, see :func:`meshpar.launchers.export.beside.beside`.
        layout: names of the weights, see :func:`meshpar.launchers.export.beside.weight_names`; None: as saved with the step.
        quantize: format of the linear weights, see :func:`meshpar.checkpoints.export_safetensors` and
            :func:`meshpar.checkpoints.export_gguf`.
        high: patterns of modules whose weights stay.
        overwrite: replace an existing file or folder.

    Raises:
        CheckpointError: there is no such checkpoint, or an option is invalid.
    """
    dst, folder = place(dst), chosen_step(src, best)
    print(f"exporting {folder}", file=sys.stderr)
    adapted = _adapted(folder.parent.parent)
    weights: Place | TypedSource = folder
    if adapted is None:
        found, names = beside(folder, config), weight_names(layout)
    elif config is not None or layout is not None:
        raise CheckpointError("merged adapters keep the names and the config of the weights below them; drop --config and --layout")
    else:
        settings, base = adapted
        apart(dst.resolve(), folder, base)
        verify_files(folder, read_manifest(folder), verify)
        found, names, weights = Beside(config_in(base), base, ()), None, merged(folder, settings, base)
    options: dict[str, Any] = {"config": found.config, "weights": names, "verify": verify, "high": high, "overwrite": overwrite}
    with progress.of_bytes() as told:
        if quantize in KINDS:
            if dtype is not None:
                raise CheckpointError(f"--dtype {dtype} does not fit --quantize {quantize}, which sets each tensor's dtype; drop --dtype")
            return export_gguf(weights, dst, quantize, None if found.tokenizer is None else fetched(found.tokenizer), told, **options)
        options |= {"beside": found.files, "quantize": quantize}
        return export_safetensors(weights, dst, _dtype(dtype), bytes_of(max_shard_size), found.tokenizer, told, **options)


def chosen_step(src: str | Place, best: str | None) -> Place:
    """Return the folder of the step to export; arguments and errors as for :func:`export_run`."""
    return open_step(checkpoints_in(src) if best is None else _best(checkpoints_in(src), best))


def _adapted(run: Place) -> tuple[LoRA, Place] | None:
    """Return the adapters' settings and the weights below them if a run trained adapters; None otherwise."""
    if not (run / RECIPE).is_file():
        return None
    recipe = load_recipe(fetched(run / RECIPE), disks=False)
    settings = recipe.adapters()
    if settings is None or recipe.model.weights is None:
        return None
    base = place(recipe.model.weights).expanduser()
    if not base.exists():
        raise CheckpointError(
            f"{run} holds adapters of the weights in {recipe.model.weights}, and that folder does not exist here; an export merges "
            "both, so run it where the folder is (a relative path starts in the working directory)"
        )
    return settings, base


def _dtype(text: str | None) -> torch.dtype | None:
    try:
        return None if text is None else parse_dtype(text)
    except ValueError as error:
        raise CheckpointError(f"--dtype: {error}") from error


def _best(root: Place, metric: str) -> Place:
    step = CheckpointManager(root, best=metric).best()
    if step is None:
        raise CheckpointError(
            f"no step in {root} has the metric {metric.removeprefix('+')!r}; `meshpar checkpoints ls` lists the metrics of each step"
        )
    return Steps(root).folder(step)


def bytes_of(text: str) -> int:
    """Return the number of bytes of ``5GB``, ``1.5 GiB`` or ``1000``."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]I?)?B?\s*", text.upper())
    if found is None:
        raise CheckpointError(f"the size is {text!r}; expected a size such as 500MB, 5GB or 2GiB")
    return int(float(found[1]) * _UNITS[found[2] or ""])
