"""``meshpar export --measure``: what quantising does to the loss and the logits on a held-out text, computed by transformers."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from meshpar.checkpoints.storage import fetched
from meshpar.errors import CheckpointError, brief
from meshpar.imports import need
from meshpar.launchers.export.beside import beside
from meshpar.launchers.export.run import export_run
from meshpar.training.tokenizer import load_tokenizer

_LENGTH, _MOST = 512, 32  # tokens of a sample, and samples


def held_out(step: Path, file: Path, config: Path | None = None) -> torch.Tensor:
    """Return the tokens (N, L) of the first samples of a text, by the tokenizer that is exported with a step.

    Raises:
        CheckpointError: there is no such file, or no tokenizer, or the text is shorter than two tokens.
    """
    found = beside(step, config)
    folder = found.tokenizer if config is None else config
    if not file.is_file():
        raise CheckpointError(f"--measure: expected a file of text, got {file}")
    if folder is None or not (folder / "tokenizer.json").is_file():
        raise CheckpointError("--measure needs a tokenizer to read the text, and this run has none; pass --config DIR with tokenizer.json")
    ids = load_tokenizer(fetched(folder)).encode(file.read_text(encoding="utf-8", errors="replace"))
    length = min(_LENGTH, found.config.get("max_position_embeddings") or found.config.get("n_positions") or _LENGTH, len(ids))
    if length < 2:
        raise CheckpointError(f"--measure: {file} has {len(ids)} tokens; expected 2 or more")
    count = min(_MOST, len(ids) // length)
    return torch.tensor(ids[: count * length]).view(count, length)


def measure(step: Path, exported: Path, ids: torch.Tensor, names: Mapping[str, Any]) -> str:
    """Compare a quantised export with the step's own weights; return a line of text.

    Args:
        step: the step.
        exported: its quantised export.
        ids: tokens (N, L) from :func:`held_out`.
        names: the options ``config`` and ``layout`` of the export.

    Raises:
        CheckpointError: transformers does not load one of both.
    """
    with tempfile.TemporaryDirectory(prefix=f".{exported.name}.plain-", dir=exported.resolve().parent) as beside_it:
        plain = Path(beside_it) / "plain"
        export_run(step, plain, **names)
        before, after = _load(plain, plain), _load(exported, plain)
        losses, worst, largest = torch.zeros(2, dtype=torch.float64), 0.0, 0.0
        with torch.no_grad():
            for row in ids[:, None]:
                logits = [model(input_ids=row).logits[0].float() for model in (before, after)]
                losses += torch.stack([torch.nn.functional.cross_entropy(each[:-1], row[0, 1:], reduction="sum") for each in logits])
                worst = max(worst, float((logits[0] - logits[1]).abs().max()))
                largest = max(largest, float(logits[0].abs().max()))
    one, other = (losses / (ids.numel() - len(ids))).tolist()
    return (
        f"held-out loss {one:.4f} before, {other:.4f} after ({other - one:+.4f}) on {ids.numel():,} tokens; "
        f"greatest difference of a logit {worst:.3g} (largest logit {largest:.3g})"
    )


def _load(folder: Path, plain: Path) -> Any:  # noqa: ANN401 - of transformers
    """Load a folder by transformers alone; a GGUF file by the plain export's config."""
    transformers = need("transformers", extra="quantize")
    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(plain)
    options: dict[str, Any] = {"dtype": torch.float32}
    if file := next(folder.glob("*.gguf"), None):
        options |= {"gguf_file": file.name, "config": config}
    elif "quantization_config" in json.loads((folder / "config.json").read_text(encoding="utf-8")):
        need("compressed_tensors", extra="quantize")
    try:
        model, problems = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    except Exception as error:  # each class of transformers has its own
        raise CheckpointError(f"--measure: transformers does not load {folder.name}: {brief(error)}") from error
    if wrong := {kind: sorted(map(str, names))[:3] for kind, names in problems.items() if names}:
        raise CheckpointError(f"--measure: transformers does not load all of {folder.name}: {wrong}; measure it in your engine")
    return model.eval()
