"""``meshpar export --push``: upload an export to the Hugging Face Hub, with a model card that says where it comes from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from meshpar.checkpoints import read_manifest
from meshpar.errors import MeshparError, brief
from meshpar.imports import need
from meshpar.launchers.jobs.job import RECIPE

CARD = "README.md"
_BLOCK = 1 << 20


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
    """Write the model card of an export and return its path.

    Args:
        step: the step that was exported.
        exported: the folder of the export.
        name: ``owner/name``.
    """
    (exported / CARD).write_text("\n".join(_card(step, exported, name)) + "\n", encoding="utf-8")
    return exported / CARD


def push(exported: Path, name: str, *, dry_run: bool) -> str:
    """Upload a folder as one commit by huggingface_hub's uploader; return a line of text.

    Credentials and the address are huggingface_hub's own: ``hf auth login``, ``HF_TOKEN``, ``HF_ENDPOINT``.

    Args:
        exported: the folder.
        name: ``owner/name``; created, private, if it does not exist.
        dry_run: only say what would be uploaded.

    Raises:
        MeshparError: the upload failed.
    """
    files = [each for each in sorted(exported.iterdir()) if each.is_file()]
    if dry_run:
        rows = [f"  {each.name}  {each.stat().st_size:,} bytes" for each in files]
        return "\n".join([f"would push to {name}:", *rows])
    hub, errors = need("huggingface_hub", extra="transformers"), need("huggingface_hub.errors", extra="transformers")
    try:
        api = hub.HfApi()
        api.create_repo(name, private=True, exist_ok=True)
        done = api.upload_folder(repo_id=name, folder_path=exported, commit_message=f"Export by meshpar: {exported.name}")
    except (errors.HfHubHTTPError, OSError, ValueError, RuntimeError) as error:
        raise MeshparError(
            f"pushing {exported} to {name} failed: {brief(error)}; the export is complete: push it again with `hf upload {name} {exported}`"
        ) from error
    return f"pushed to {done.commit_url}"


def _card(step: Path, exported: Path, name: str) -> Iterator[str]:
    """Yield the lines of the card: recipe, data position, metrics, mesh, versions and checksums."""
    manifest, recipe = read_manifest(step), step.parent.parent / RECIPE
    yield from ("---", yaml.safe_dump({"library_name": "transformers", "tags": ["meshpar"]}).strip(), "---", "", f"# {name}", "")
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
        yield from ("", "## Recipe", "", "```yaml", recipe.read_text(encoding="utf-8").strip(), "```")
    yield from ("", "## Checksums", "", "| file | bytes | SHA-256 |", "| --- | --- | --- |")
    for file in sorted(each for each in exported.iterdir() if each.is_file() and each.name != CARD):
        yield f"| {file.name} | {file.stat().st_size} | `{_sha256(file)}` |"


def _position(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return where in its data a job was: its steps and tokens, and the position of the data itself."""
    found = {key: extra[key] for key in ("step", "tokens", "skipped") if key in extra}
    return found | {f"data.{key}": value for key, value in (extra.get("data") or {}).items() if isinstance(value, int | str)}


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found.update(block)
    return found.hexdigest()
