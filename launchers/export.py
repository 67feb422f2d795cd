"""``meshpar export``: write a run's model, adapters merged or alone, with config and tokenizer."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch

from meshpar.checkpoints import CheckpointManager, DistributedCheckpoint
from meshpar.checkpoints.export.gguf import KINDS, Kind, write_gguf
from meshpar.checkpoints.export.published import bytes_of
from meshpar.checkpoints.export.quantizing import Quantization
from meshpar.checkpoints.export.safetensors import ExportOptions, files_beside_weights, write_safetensors
from meshpar.checkpoints.export.target import apart, free_target, make_on_disk
from meshpar.checkpoints.format.manifest import MODEL, read_manifest
from meshpar.checkpoints.format.verify import Verify, verify_files
from meshpar.checkpoints.format.weights import weights_in
from meshpar.checkpoints.steps.steps import Steps, checkpoints_in, open_step
from meshpar.checkpoints.storage.disk import DiskPath
from meshpar.checkpoints.storage.files import read_json
from meshpar.checkpoints.storage.place import Place, PlaceLike, copy_file, entries, fetched, on_disk, place
from meshpar.core.errors import CheckpointError, LayoutError
from meshpar.core.registry import layout_for
from meshpar.launchers.jobs.job import RECIPE, TOKENIZER
from meshpar.launchers.jobs.reports import show_bytes
from meshpar.launchers.recipes.schema import build, parse_dtype, validate
from meshpar.launchers.recipes.sections import LoRASection
from meshpar.launchers.recipes.yamlfile import read_document
from meshpar.models.huggingface import from_config
from meshpar.process.imports import expanded
from meshpar.training.lora import LoRA, add_adapters, config_of
from meshpar.training.tokenizer import load_tokenizer
from meshpar.weights import TypedSource, WeightMap
from meshpar.weights.maps import NAME, AdapterFactors, MergedAdapters, PackedAdapterLayer, adapted_layers, base_name

_GENERATION, _PROCESSORS, _EOS = "generation_config.json", "*processor_config.json", "eos_token_id"
_IDS = ("bos_token_id", _EOS, "pad_token_id", "decoder_start_token_id")
_ADAPTERS = "adapter_model.safetensors"


@final
@dataclass(frozen=True, slots=True)
class Beside:
    """Contents of configs (empty: no such file), tokenizer and other ``files``, which win, beside a model's weights."""

    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    tokenizer: Place | None
    files: tuple[Place, ...]


def beside(step: Place, given: Path | None = None) -> Beside:
    """Find config, generation config, processors and tokenizer for a step's export; files in ``given`` win."""
    run = step.parent.parent
    recipe = _recipe_of(run)
    tokenizer: Place | None = fetched(run / TOKENIZER) if (run / TOKENIZER).is_dir() else None
    end = None if tokenizer is None else load_tokenizer(fetched(tokenizer)).eos_id
    if given is not None:
        config, files = config_in(given), files_beside_weights(given)
    else:
        sources = [] if recipe is None else recipe.sources()
        files = [file for source in sources[:1] for file in entries(source, _PROCESSORS)]
        files += [source / _GENERATION for source in sources if (source / _GENERATION).is_file()][:1]
        if tokenizer is None and recipe is not None and recipe.weights is not None:
            tokenizer = next(iter(sources), None)
        config = dict(read_manifest(step).config)
        if recipe is not None and recipe.adapters is not None:
            first = next((source for source in sources if (source / "config.json").is_file()), None)
            if first is None and isinstance(recipe.config, Mapping):
                config = dict(recipe.config)
            else:
                config = config_in(expanded(place(str(recipe.weights))) if first is None else first)
    generation = next((_json(file) for file in files if file.name == _GENERATION), {})
    config, generation = _end_texts(config, end) if config else config, _end_texts(generation, end, config)
    return Beside(config, generation, tokenizer, tuple(file for file in files if file.name != _GENERATION))


@final
@dataclass(frozen=True, slots=True)
class RunRecipe:
    """A run's first weights, its model's config or the folder of that, and the settings of adapters on the weights."""

    weights: str | None
    config: Mapping[str, Any] | str | None
    adapters: LoRA | None

    def sources(self) -> list[Place]:
        """Return the folders of the weights and of the config from which the run started, where they exist."""
        folders = [expanded(place(name)) for name in (self.weights, self.config) if isinstance(name, str)]
        return [folder for folder in folders if folder.is_dir()]


def _recipe_of(run: Place) -> RunRecipe | None:
    """Read a run's recipe as plain data: nothing that it names is imported. None without a recipe."""
    if not (run / RECIPE).is_file():
        return None
    document = read_document(fetched(run / RECIPE))
    model, lora = (document.data.get(name) for name in ("model", "lora"))
    weights, config = (model.get(name) if isinstance(model, Mapping) else None for name in ("weights", "config"))
    adapters = None
    if lora is not None and isinstance(weights, str):
        section = validate(LoRASection, lora, document, ("lora",))
        if isinstance(section, list):
            raise CheckpointError("\n".join(section))
        adapters = build(LoRA, section)
    config = config if isinstance(config, (str, Mapping)) else None
    return RunRecipe(weights if isinstance(weights, str) else None, config, adapters)


def _end_texts(
    config: Mapping[str, Any], end: int | None, otherwise: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a config whose ends of text include the id ``end``; ``otherwise``: the config with the other ends."""
    inner = config.get("text_config")
    ends = [source.get(_EOS) for source in (config, inner, otherwise) if isinstance(source, Mapping)]
    first: Any = next((value for value in ends if value is not None), [])
    ids = [first] if isinstance(first, int) else list(first)
    if not config or end is None or (end in ids and config.get(_EOS) is not None):
        return dict(config)
    ids = ids if end in ids else [end, *ids]
    return {**config, _EOS: ids if len(ids) > 1 else end}


def weight_names(layout: str | None) -> WeightMap | None:
    """Return the rules from saved to published names: own, a family of ours, or a JSON file; None: as saved."""
    if layout is None:
        return None
    if layout == "own":
        return WeightMap()
    if layout.endswith(".json"):
        try:
            return WeightMap.from_json(read_json(DiskPath(layout).reader()))
        except (CheckpointError, ValueError, TypeError, AttributeError, LayoutError) as error:
            raise CheckpointError(f"--layout: {layout} has no rules of a weight map: {error}") from error
    rules = names_of_ours(layout)
    if rules is None:
        raise CheckpointError(f"--layout must be own, llama, qwen3, gpt2 or a file ending in .json, got {layout!r}")
    return rules


def names_of_ours(kind: object) -> WeightMap | None:
    """Return the rules of meshpar's model that is published as ``kind``; None if there is none."""
    from meshpar.models import GPT2, GPT2Config, Transformer, TransformerConfig

    with torch.device("meta"):
        if kind == "gpt2":
            return GPT2(GPT2Config()).meshpar_layout().weights
        if kind in ("llama", "qwen3"):
            return Transformer(TransformerConfig(qk_norm=kind == "qwen3")).meshpar_layout().weights
    return None


def config_in(folder: PlaceLike) -> dict[str, Any]:
    try:
        return _json(place(folder) / "config.json")
    except CheckpointError as error:
        raise CheckpointError(f"--config: expected a folder with config.json, got {folder}: {error}") from error


def _json(path: Place) -> dict[str, Any]:
    try:
        return dict(read_json(path.reader()))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read as a JSON object: {error}") from error


def merge_adapters(src: Place, settings: LoRA, base: Place) -> TypedSource:
    """Return the adapted weights for export tile by tile, equal to those of peft's ``merge_and_unload``."""
    adapters, packed, names = stored_adapters(src), dict[str, PackedAdapterLayer](), WeightMap()
    if settings.parameters:  # files may store what the model packs one by one, and the model alone knows how
        model = from_config(on_disk(base, why="its config.json is read by transformers"))
        names = layout_for(model).weights
        add_adapters(model, settings)
        packed = {name: layer for name, layer in adapted_layers(model).items() if isinstance(layer, PackedAdapterLayer)}
    ours, factors = names.view(weights_in(base)), {}
    for layer in sorted({name.rpartition(".lora_")[0] for name in adapters}):
        a, b, on = adapters[f"{layer}.lora_A.weight"], adapters[f"{layer}.lora_B.weight"], packed.get(layer)
        weight = f"{base_name(layer)}.{'weight' if on is None else on.leaf}"
        if weight not in ours.shapes():
            raise CheckpointError(
                f"the weights have no {weight}, to which an adapter belongs; give the folder of the adapted weights"
            )
        factors[weight] = AdapterFactors(partial(_pair, a, b), settings.alpha / settings.rank, on)
    return names.publish(MergedAdapters(ours, factors))


def _pair(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return a, b


def export_adapters(src: Place, dst: Place, settings: LoRA, base: Place, *, overwrite: bool = False) -> Place:
    """Write the adapters in peft's format (``PeftModel.from_pretrained``), with the tokenizer, chat template and end of
    text of their run.

    The folder appears, or replaces the old one, once it is complete.

    Args:
        src: a step of adapters, or the folder of all steps (exports the newest).
        dst: the folder to write.
        settings: settings of the adapters.
        base: the folder of the adapted weights.
        overwrite: replace an existing folder.
    """
    from safetensors.torch import save_file

    target = free_target(dst, overwrite=overwrite)
    apart(target, src)
    adapters = stored_adapters(src)
    source = weights_in(base)
    layers = sorted({name.rpartition(".lora_")[0] for name in adapters})
    linear = [layer for layer in layers if f"{layer}.weight" in source.shapes()]
    # GPT-2's Conv1D stores a linear layer's weight transposed
    turned = any(
        tuple(source.shapes()[f"{layer}.weight"])
        != (len(adapters[f"{layer}.lora_B.weight"]), adapters[f"{layer}.lora_A.weight"].shape[1])
        for layer in linear[:1]
    )
    below = expanded(base).absolute()
    config = config_of(settings, linear, base_model_name_or_path=str(below), fan_in_fan_out=turned, inference_mode=True)
    files = beside(open_step(src))
    tokenizer = [] if files.tokenizer is None else files_beside_weights(files.tokenizer)
    ids = {name: files.config[name] for name in _IDS if files.config.get(name) is not None}
    with make_on_disk(target, overwrite=overwrite) as folder:
        tensors = {f"base_model.model.{name}": value.contiguous() for name, value in adapters.items()}
        save_file(tensors, folder / _ADAPTERS)
        (folder / _ADAPTERS).flush()
        config.save_pretrained(str(folder))
        for file in (*tokenizer, *files.files):
            copy_file(file, folder / file.name)
        if generation := files.generation or ids:
            (folder / _GENERATION).write_durably((json.dumps(generation, indent=2) + "\n").encode())
    return dst


def stored_adapters(src: Place) -> dict[str, torch.Tensor]:
    """Return the adapters of a step by peft's names: ``layer.lora_A.weight``."""
    checkpoint = DistributedCheckpoint(open_step(src))
    adapters = {}
    for name, stored in checkpoint.tensors.items():
        if name.startswith(MODEL) and ".lora_" in name:
            value = torch.empty(stored.shape, dtype=stored.dtype)
            checkpoint.read(name, tuple(slice(0, size) for size in stored.shape), value)
            adapters[name.removeprefix(MODEL).replace(f".{NAME}.", ".")] = value
    if not adapters:
        raise CheckpointError(f"{src} has no adapters; export it with `meshpar export`")
    return adapters


def export_run(
    src: PlaceLike,
    dst: PlaceLike,
    *,
    dtype: str | None = None,
    best: str | None = None,
    max_shard_size: str = "5GB",
    verify: Verify = "size",
    config: Path | None = None,
    layout: str | None = None,
    quantize: Quantization | Kind | None = None,
    high: Sequence[str] = (),
    adapters: bool = False,
    weights: str = "trained",
    overwrite: bool = False,
) -> Place:
    """Export a checkpoint with the tokenizer, chat template and end of text of its run.

    Trained adapters are merged into the weights below them, unless ``adapters``.

    Args:
        src: a run's folder, its checkpoints, or one step.
        dst: the folder to write.
        dtype: dtype of the weights, as text; None: as saved.
        best: a metric: export the step with its lowest value (``+name``: highest); None: the newest step.
        max_shard_size: largest size of one file: ``5GB``, ``500MiB``, or bytes.
        verify: see :func:`meshpar.checkpoints.export_safetensors`.
        config: a folder whose ``config.json`` and other files take precedence, see
            :func:`meshpar.launchers.export.beside`.
        layout: names of the weights, see :func:`meshpar.launchers.export.weight_names`; None: as saved with the
            step.
        quantize: format of the linear weights, see :func:`meshpar.checkpoints.export_safetensors` and
            :func:`meshpar.checkpoints.export_gguf`.
        high: patterns of modules whose weights stay.
        adapters: write the adapters alone, in peft's format; see :func:`meshpar.launchers.export_adapters`.
        weights: ``trained``, the name of an average of the run, or ``averaged`` for its only one.
        overwrite: replace an existing file or folder.

    Raises:
        CheckpointError: there is no such checkpoint, or an option is invalid.
    """
    dst, folder = place(dst), chosen_step(src, best)
    print(f"exporting {folder}", file=sys.stderr)
    adapted = _adapted(folder.parent.parent)
    model: Place | TypedSource = folder
    names = weight_names(layout)
    if adapted is not None and weights != "trained":
        raise CheckpointError(f"a run that trained adapters (lora) has no averages; drop --weights {weights}")
    if adapters:
        if adapted is None:
            raise CheckpointError(
                f"--adapters: {folder.parent.parent} is not a run that trained adapters (lora); drop --adapters"
            )
        if dtype or quantize or layout or config is not None:
            raise CheckpointError(
                "adapters are written as saved; drop --dtype, --quantize, --layout and --config, or drop --adapters"
            )
        verify_files(folder, read_manifest(folder), verify)
        return export_adapters(folder, dst, *adapted, overwrite=overwrite)
    if adapted is not None:
        if layout is not None:
            raise CheckpointError("merged adapters keep the names of the weights below them; drop --layout")
        apart(dst.resolve(), folder, adapted[1])
        verify_files(folder, read_manifest(folder), verify)
        model = merge_adapters(folder, *adapted)
    files = beside(folder, config)
    if quantize in KINDS and dtype is not None:
        raise CheckpointError(
            f"--dtype {dtype} does not fit --quantize {quantize}, which sets each tensor's dtype; drop --dtype"
        )
    with show_bytes() as advance:
        about = ExportOptions(config=files.config, generation=files.generation, beside=files.files, verify=verify)
        stored = replace(about, dtype=dtype_of(dtype), max_shard_size=bytes_of(max_shard_size), progress=advance)
        options = replace(stored, tokenizer=files.tokenizer, weights=names, quantize=quantize, high=high)
        options = replace(options, averaged=weights, overwrite=overwrite)
        write = write_gguf if quantize in KINDS else write_safetensors
        return write(model, dst, options)


def chosen_step(src: PlaceLike, best: str | None) -> Place:
    root = checkpoints_in(src)
    if best is None:
        return open_step(root)
    step = CheckpointManager(root, best=best).best()
    if step is None:
        raise CheckpointError(
            f"no step in {root} has the metric {best.removeprefix('+')!r}; `meshpar checkpoints ls` lists the "
            "metrics of each step"
        )
    return open_step(Steps(root).folder(step))


def _adapted(run: Place) -> tuple[LoRA, Place] | None:
    recipe = _recipe_of(run)
    if recipe is None or recipe.adapters is None or recipe.weights is None:
        return None
    base = expanded(place(recipe.weights))
    if not base.exists():
        raise CheckpointError(
            f"{run} holds adapters of the weights in {recipe.weights}, and that folder does not exist here; an "
            "export merges both, so run it where the folder is (a relative path starts in the working directory)"
        )
    return recipe.adapters, base


def dtype_of(text: str | None) -> torch.dtype | None:
    try:
        return None if text is None else parse_dtype(text)
    except ValueError as error:
        raise CheckpointError(f"--dtype: {error}") from error
