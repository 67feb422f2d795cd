"""After an export: measure the effect of quantising, and push to the Hugging Face Hub with a model card."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from meshpar.checkpoints import read_manifest
from meshpar.checkpoints.storage.place import place
from meshpar.checkpoints.storage.transfer import fetched
from meshpar.core.errors import CheckpointError, MeshparError, brief
from meshpar.launchers.export.run import beside, export_run
from meshpar.launchers.jobs.job import RECIPE
from meshpar.launchers.recipes.yamlfile import read_document, to_yaml
from meshpar.models.huggingface import check_attention
from meshpar.process.imports import need
from meshpar.process.secrets import redacted
from meshpar.training.tokenizer import load_tokenizer

CARD = "README.md"
_BLOCK = 1 << 20
_LENGTH, _MOST = 512, 32  # tokens of a sample, and samples


def check_repository(name: str) -> None:
    """Raise MeshparError unless ``name`` is ``owner/name`` and huggingface_hub is installed."""
    library = need("huggingface_hub.utils", extra="transformers")
    try:
        library.validate_repo_id(name)
    except ValueError as error:
        raise MeshparError(f"--push: expected owner/name, got {name!r}: {error}") from error
    if name.count("/") != 1:
        raise MeshparError(f"--push: expected owner/name, got {name!r}")


def write_card(step: Path, exported: Path, name: str) -> Path:
    """Write the model card of a step's export to the Hub as ``name``, and return its path."""
    (exported / CARD).write_text("\n".join(_card(step, exported, name)) + "\n", encoding="utf-8")
    return exported / CARD


def push(exported: Path, name: str, *, dry_run: bool) -> str:
    """Upload a folder as one commit by huggingface_hub, with its own credentials; return a line of text."""
    files = [path for path in sorted(exported.iterdir()) if path.is_file()]
    if dry_run:
        rows = [f"  {file.name}  {file.stat().st_size:,} bytes" for file in files]
        return "\n".join([f"would push to {name}:", *rows])
    hub, errors = need("huggingface_hub", extra="transformers"), need("huggingface_hub.errors", extra="transformers")
    try:
        api = hub.HfApi()
        api.create_repo(name, private=True, exist_ok=True)
        done = api.upload_folder(
            repo_id=name, folder_path=exported, commit_message=f"Export by meshpar: {exported.name}"
        )
    except (errors.HfHubHTTPError, OSError, ValueError, RuntimeError) as error:
        raise MeshparError(
            f"pushing {exported} to {name} failed: {brief(error)}; the export is complete: push it again with `hf "
            f"upload {name} {exported}`"
        ) from error
    return f"pushed to {done.commit_url}"


def _card(step: Path, exported: Path, name: str) -> Iterator[str]:
    """Yield the lines of the card: recipe, data position, metrics, mesh, versions and checksums."""
    manifest, recipe = read_manifest(step), step.parent.parent / RECIPE
    yield from (
        "---",
        yaml.safe_dump({"library_name": "transformers", "tags": ["meshpar"]}).strip(),
        "---",
        "",
        f"# {name}",
        "",
    )
    yield f"Step {manifest.step}, saved {manifest.saved_at[:19]} UTC, exported by meshpar."
    mesh = ",".join(f"{axis}={size}" for axis, size in manifest.mesh.items()) or "none"
    rows = [
        ("Mesh", f"{mesh} ({manifest.world_size} ranks, {manifest.device})"),
        ("Plan", manifest.plan.replace("\n", "; ") or "none"),
        ("Seed", str(manifest.seed)),
        *((f"Position: {key}", str(value)) for key, value in _position(manifest.extra).items()),
        *((f"Metric {key}", f"{value:.6g}") for key, value in sorted(manifest.metrics.items()) if value is not None),
        *((f"Version of {key}", value) for key, value in sorted(manifest.versions.items())),
    ]
    yield from ("", "| | |", "| --- | --- |", *(f"| {key} | {value.replace('|', '/')} |" for key, value in rows))
    if recipe.is_file():
        yield from ("", "## Recipe", "", "```yaml", to_yaml(redacted(read_document(recipe).data)).strip(), "```")
    yield from ("", "## Checksums", "", "| file | bytes | SHA-256 |", "| --- | --- | --- |")
    for file in sorted(path for path in exported.iterdir() if path.is_file() and path.name != CARD):
        yield f"| {file.name} | {file.stat().st_size} | `{_sha256(file)}` |"


def _position(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return where in its data a job was: its steps and tokens, and the position of the data itself."""
    found = {key: extra[key] for key in ("step", "tokens", "skipped") if key in extra}
    return found | {
        f"data.{key}": value for key, value in (extra.get("data") or {}).items() if isinstance(value, int | str)
    }


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found.update(block)
    return found.hexdigest()


def held_out(step: Path, file: Path, config: Path | None = None) -> torch.Tensor:
    """Return the tokens (N, L) of a text's first samples, by the tokenizer that is exported with a step."""
    found = beside(place(step), config)
    folder = found.tokenizer if config is None else config
    if not file.is_file():
        raise CheckpointError(f"--measure: expected a file of text, got {file}")
    if folder is None or not (folder / "tokenizer.json").is_file():
        raise CheckpointError(
            "--measure needs a tokenizer to read the text, and this run has none; pass --config DIR, a "
            "folder with config.json and tokenizer.json"
        )
    ids = load_tokenizer(fetched(folder)).encode(file.read_text(encoding="utf-8", errors="replace"))
    length = min(
        _LENGTH, found.config.get("max_position_embeddings") or found.config.get("n_positions") or _LENGTH, len(ids)
    )
    if length < 2:
        raise CheckpointError(f"--measure: {file} has {len(ids)} tokens; expected 2 or more")
    count = min(_MOST, len(ids) // length)
    return torch.tensor(ids[: count * length]).view(count, length)


def measure(step: Path, exported: Path, ids: torch.Tensor, names: Mapping[str, Any]) -> str:
    """Compare a quantised export with the step's own weights on tokens (N, L); return a line of text."""
    with tempfile.TemporaryDirectory(prefix=f".{exported.name}.plain-", dir=exported.resolve().parent) as beside_it:
        plain = Path(beside_it) / "plain"
        export_run(step, plain, **names)
        before, after = _load(plain, plain), _load(exported, plain)
        losses, worst, largest = torch.zeros(2, dtype=torch.float64), 0.0, 0.0
        with torch.no_grad():
            for row in ids[:, None]:
                logits = [model(input_ids=row).logits[0].float() for model in (before, after)]
                losses += torch.stack(
                    [torch.nn.functional.cross_entropy(scores[:-1], row[0, 1:], reduction="sum") for scores in logits]
                )
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
    local: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    config = transformers.AutoConfig.from_pretrained(plain, **local)
    check_attention(config)
    options: dict[str, Any] = {"dtype": torch.float32, **local}
    if file := next(folder.glob("*.gguf"), None):
        options |= {"gguf_file": file.name, "config": config}
    elif "quantization_config" in json.loads((folder / "config.json").read_text(encoding="utf-8")):
        need("compressed_tensors", extra="quantize")
    try:
        model, problems = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    except Exception as error:  # each class of transformers has its own
        raise CheckpointError(f"--measure: transformers does not load {folder.name}: {brief(error)}") from error
    if wrong := {kind: sorted(map(str, names))[:3] for kind, names in problems.items() if names}:
        raise CheckpointError(
            f"--measure: transformers does not load all of {folder.name}: {wrong}; measure it in your engine"
        )
    return model.eval()
