"""The files of an exported model beside its weights: config, generation config, tokenizer; and the weights' names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from meshpar.checkpoints import read_manifest
from meshpar.checkpoints.export import files_beside_weights
from meshpar.checkpoints.storage import Place, fetched, place
from meshpar.errors import CheckpointError, LayoutError
from meshpar.launchers.jobs.job import RECIPE, TOKENIZER
from meshpar.launchers.recipes.recipe import load_recipe
from meshpar.training.tokenizer import load_tokenizer
from meshpar.weights import WeightMap

_GENERATION = "generation_config.json"


@final
@dataclass(frozen=True, slots=True)
class Beside:
    """Files to write beside a model's weights: the contents of ``config.json``, a tokenizer's folder, and other files."""

    config: Mapping[str, Any]
    tokenizer: Place | None
    files: tuple[Place, ...]


def beside(step: Place, given: Path | None = None) -> Beside:
    """Find the files beside the model of a step.

    Args:
        step: the step's folder, in the folder of checkpoints of a run's folder.
        given: a folder whose ``config.json`` and other files take precedence; None: the config that was saved with the step, the run's
            tokenizer, and the generation config of the weights that the run started from.

    Raises:
        CheckpointError: ``given`` is not a folder, or its ``config.json`` cannot be read.
    """
    run = step.parent.parent
    tokenizer = fetched(run / TOKENIZER) if (run / TOKENIZER).is_dir() else None
    if given is not None:
        return Beside(config_in(given), tokenizer, tuple(files_beside_weights(given)))
    config = dict(read_manifest(step).config)
    if tokenizer is not None and config and config.get("eos_token_id") is None:
        config["eos_token_id"] = load_tokenizer(tokenizer).eos_id
    return Beside(config, tokenizer, _generation_config(run))


def weight_names(layout: str | None) -> WeightMap | None:
    """Return the rules from the saved names to the published ones.

    Args:
        layout: ``own``: keep the names; ``llama``, ``qwen3``, ``gpt2``: the rules of meshpar's models; the path of a JSON file: the rules
            of ``WeightMap.to_json``; None: the rules that were saved with the step, for which this function returns None.
    """
    if layout is None:
        return None
    if layout == "own":
        return WeightMap()
    if layout.endswith(".json"):
        try:
            return WeightMap.from_json(json.loads(Path(layout).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, AttributeError, LayoutError) as error:
            raise CheckpointError(f"--layout: {layout} has no rules of a weight map: {error}") from error
    found = names_of_ours(layout)
    if found is None:
        raise CheckpointError(f"--layout must be own, llama, qwen3, gpt2 or a file ending in .json, got {layout!r}")
    return found


def names_of_ours(kind: object) -> WeightMap | None:
    """Return the rules of meshpar's model that is published as ``kind``; None if there is none."""
    from meshpar.models import GPT2, GPT2Config, Transformer, TransformerConfig

    with torch.device("meta"):
        if kind == "gpt2":
            return GPT2(GPT2Config()).meshpar_layout().weights
        if kind in ("llama", "qwen3"):
            return Transformer(TransformerConfig(qk_norm=kind == "qwen3")).meshpar_layout().weights
    return None


def config_in(folder: Place) -> dict[str, Any]:
    """Return the contents of a folder's ``config.json``; raises CheckpointError if it cannot be read."""
    path = folder / "config.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"--config: expected a folder with config.json, got {folder}: {error}") from error


def _generation_config(run: Place) -> tuple[Place, ...]:
    """Return the generation config of the weights or of the config that a run's model started from."""
    if not (run / RECIPE).is_file():
        return ()
    model = load_recipe(fetched(run / RECIPE), disks=False).model
    folders = [place(each).expanduser() for each in (model.weights, getattr(model, "config", None)) if isinstance(each, (str, Path))]
    return tuple(each / _GENERATION for each in folders if (each / _GENERATION).is_file())[:1]
