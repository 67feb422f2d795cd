"""Published models: ``meshpar export`` of new steps, measured and pushed to a Hub, and ``meshpar import``."""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from meshpar.checkpoints import import_safetensors, read_manifest
from meshpar.checkpoints.format.manifest import step_name
from meshpar.checkpoints.steps.importing import config_beside
from meshpar.checkpoints.steps.lease import is_written
from meshpar.checkpoints.steps.steps import PIN_FILE, Steps, checkpoints_in
from meshpar.checkpoints.storage.disk import DiskPath
from meshpar.checkpoints.storage.place import Place, PlaceLike, fetched, on_disk, place
from meshpar.core.errors import CheckpointError, MeshparError, brief
from meshpar.launchers.export import beside, chosen_step, dtype_of, export_run, names_of_ours
from meshpar.launchers.jobs.job import RECIPE
from meshpar.launchers.recipes.yamlfile import read_document, to_yaml
from meshpar.models.huggingface import check_attention
from meshpar.process.imports import need
from meshpar.process.leftovers import host_name, is_running, this_process
from meshpar.process.secrets import redacted
from meshpar.training.tokenizer import load_tokenizer
from meshpar.weights import WeightMap

CARD = "README.md"
_LENGTH, _MOST = 512, 32  # tokens of a sample, and samples


def export(
    src: PlaceLike, dst: PlaceLike, options: Mapping[str, Any], *, best: str | None, text: Path | None,
    repository: str | None, dry_run: bool, watched: bool, every: int | None,
) -> None:  # fmt: skip
    """Export by ``options`` of :func:`meshpar.launchers.export_run`, measure, push or watch, and print each."""
    if text is not None and options["quantize"] is None:
        raise CheckpointError(
            "--measure compares a quantised export with the step's own weights; pass --quantize FORMAT as well"
        )
    if text is not None and options["weights"] != "trained":
        raise CheckpointError(
            "--measure compares a quantised export with the step's trained weights; drop --measure, or --weights"
        )
    if dry_run and repository is None:
        raise CheckpointError("--dry-run lists what --push would upload; pass --push OWNER/NAME as well")
    if every is not None and (not watched or best is not None):
        raise CheckpointError("--every chooses steps of --watch; pass --watch, and either --every or --best")
    if repository is not None:
        library = need("huggingface_hub.utils", extra="transformers")
        try:
            library.validate_repo_id(repository)
        except ValueError as error:
            raise MeshparError(f"--push: expected owner/name, got {repository!r}: {error}") from error
        if repository.count("/") != 1:
            raise MeshparError(f"--push: expected owner/name, got {repository!r}")

    def local(path: PlaceLike) -> DiskPath:
        return on_disk(path, why="--watch, --push and --measure work on a disk; export without them")

    def export_step(step: Place, target: Place) -> None:
        ids = None if text is None else held_out(local(step), text, options["config"])
        print(f"exported to {export_run(step, target, **options)}", flush=True)
        if ids is not None:
            names = {key: options[key] for key in ("config", "layout")}
            print(measure(local(step), local(target), ids, names), flush=True)
        if repository is not None:
            card = "\n".join(_card(local(step), local(target), repository))
            (local(target) / CARD).write_text(f"{card}\n", encoding="utf-8")
            print(push(local(target), repository, dry_run=dry_run), flush=True)

    if watched:
        root, out = local(checkpoints_in(src)), local(dst)
        watch(root, lambda step: export_step(step, out / step_name(read_manifest(step).step)), best, every or 1)
        return
    if repository is not None or text is not None:
        for address in (src, dst):
            local(address)
    export_step(chosen_step(src, best), place(dst))


def watch(
    root: Path, export: Callable[[Place], object], best: str | None = None, every: int = 1, *, poll_s: float = 5.0
) -> None:
    """Export each new step, pinned meanwhile, until no job writes the folder; errors of one step are printed."""
    steps, done, last_best = Steps(root), set[int](), None
    _release_dead(steps)
    while True:
        running = is_written(root)  # before the look, so that the last step is seen
        chosen = [step for step in steps.committed() if step % every == 0] if best is None else []
        if best is not None and (step := steps.best(best)) is not None and step != last_best:
            chosen, last_best = [step], step
        for step in (candidate for candidate in chosen if candidate not in done):
            done.add(step)
            with _pin(steps, step) as folder:
                if folder is None:
                    continue
                try:
                    export(folder)
                except CheckpointError as error:
                    print(f"meshpar: {folder.name} is not exported: {error}", file=sys.stderr, flush=True)
        if not running:
            return
        time.sleep(poll_s)


@contextmanager
def _pin(steps: Steps, step: int) -> Iterator[Place | None]:
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
            owner = json.loads(pin.read_text())
            dead = owner["host"] == host_name() and not is_running(owner["process"], owner["id"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a user's pin is empty
        if dead:
            pin.unlink(missing_ok=True)


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
        message = f"Export by meshpar: {exported.name}"
        done = api.upload_folder(repo_id=name, folder_path=exported, commit_message=message)
    except (errors.HfHubHTTPError, OSError, ValueError, RuntimeError) as error:
        raise MeshparError(
            f"pushing {exported} to {name} failed: {brief(error)}; the export is complete: push it again with `hf "
            f"upload {name} {exported}`"
        ) from error
    return f"pushed to {done.commit_url}"


def _card(step: Path, exported: Path, name: str) -> Iterator[str]:
    """Yield the lines of the card: recipe, data position, metrics, mesh, versions and checksums."""
    manifest, recipe = read_manifest(step), step.parent.parent / RECIPE
    extra = manifest.extra
    position = {key: extra[key] for key in ("step", "tokens", "skipped") if key in extra}
    data = (extra.get("data") or {}).items()
    position |= {f"data.{key}": value for key, value in data if isinstance(value, int | str)}
    head = yaml.safe_dump({"library_name": "transformers", "tags": ["meshpar"]}).strip()
    yield from ("---", head, "---", "", f"# {name}", "")
    yield f"Step {manifest.step}, saved {manifest.saved_at[:19]} UTC, exported by meshpar."
    mesh = ",".join(f"{axis}={size}" for axis, size in manifest.mesh.items()) or "none"
    rows = [
        ("Mesh", f"{mesh} ({manifest.world_size} ranks, {manifest.device})"),
        ("Plan", manifest.plan.replace("\n", "; ") or "none"),
        ("Seed", str(manifest.seed)),
        *((f"Position: {key}", str(value)) for key, value in position.items()),
        *((f"Metric {key}", f"{value:.6g}") for key, value in sorted(manifest.metrics.items()) if value is not None),
        *((f"Version of {key}", value) for key, value in sorted(manifest.versions.items())),
    ]
    yield from ("", "| | |", "| --- | --- |", *(f"| {key} | {value.replace('|', '/')} |" for key, value in rows))
    if recipe.is_file():
        yield from ("", "## Recipe", "", "```yaml", to_yaml(redacted(read_document(recipe).data)).strip(), "```")
    yield from ("", "## Checksums", "", "| file | bytes | SHA-256 |", "| --- | --- | --- |")
    for file in sorted(path for path in exported.iterdir() if path.is_file() and path.name != CARD):
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        yield f"| {file.name} | {file.stat().st_size} | `{digest}` |"


def held_out(step: Path, file: Path, config: Path | None = None) -> torch.Tensor:
    """Return the tokens (N, L) of a text's first samples, by the tokenizer that is exported with a step."""
    files = beside(place(step), config)
    folder = files.tokenizer if config is None else config
    if not file.is_file():
        raise CheckpointError(f"--measure: expected a file of text, got {file}")
    if folder is None or not (folder / "tokenizer.json").is_file():
        raise CheckpointError(
            "--measure needs a tokenizer to read the text, and this run has none; pass --config DIR, a "
            "folder with config.json and tokenizer.json"
        )
    ids = load_tokenizer(fetched(folder)).encode(file.read_text(encoding="utf-8", errors="replace"))
    positions = files.config.get("max_position_embeddings") or files.config.get("n_positions")
    length = min(_LENGTH, positions or _LENGTH, len(ids))
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
                score = partial(torch.nn.functional.cross_entropy, target=row[0, 1:], reduction="sum")
                losses += torch.stack([score(scores[:-1]) for scores in logits])
                worst = max(worst, float((logits[0] - logits[1]).abs().max()))
                largest = max(largest, float(logits[0].abs().max()))
    plain_loss, loss = (losses / (ids.numel() - len(ids))).tolist()
    change = f"{plain_loss:.4f} before, {loss:.4f} after ({loss - plain_loss:+.4f})"
    return (
        f"held-out loss {change} on {ids.numel():,} tokens; "
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


def import_published(src: Path, dst: Path, *, model: str, dtype: str | None, step: int, config: Path | None) -> Place:
    """Convert a published model to a step that ``model`` (``ours`` or ``transformers``) restores; return its folder."""
    published = config_beside(config or src)
    if config is not None and not published:
        raise CheckpointError(
            f"{config} has no config.json; expected the model's, as transformers saves it: correct --config"
        )
    if model not in ("ours", "transformers"):
        raise CheckpointError(f"--model must be ours or transformers, got {model!r}")
    kind, named = published.get("model_type"), place(config or src)
    if kind is None:
        raise CheckpointError(
            f"{named} has no config.json that names a model_type, without which nobody knows the model of the "
            "step; expected a folder as transformers saves it, or pass --config FOLDER"
        )
    names = WeightMap() if model == "transformers" else names_of_ours(kind)
    if names is None:
        raise CheckpointError(
            f"{named} has a model of type {kind!r}; ours are llama, qwen3 and gpt2; pass --model transformers "
            "for others"
        )
    return import_safetensors(src, dst, weights=names, dtype=dtype_of(dtype), step=step, config=published)
