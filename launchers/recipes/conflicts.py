"""Fields of a recipe that are wrong together, and arguments that a class does not take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshpar.checkpoints.storage import place as storage
from meshpar.core import registry
from meshpar.core.errors import MeshparError
from meshpar.launchers.recipes.recipe import Recipe, UntrustedError, own_problems, wants_teacher
from meshpar.launchers.recipes.sections import DataSection, MixSection, Own, mixed_names, model_config
from meshpar.launchers.recipes.yamlfile import Document, Place
from meshpar.process.imports import expanded
from meshpar.training.order import weights_problem
from meshpar.training.text import SUFFIXES, as_lines, kind_of
from meshpar.weights import average_called

Conflicts = Iterator[tuple[str, str]]
"""Fields, each with what is wrong with it."""

_NO_VALIDATION = "there is no validation data; set data.validation_fraction, data.validation_paths or evaluations"
_DOWNLOAD = "expected a folder (nothing is downloaded: `hf download NAME --local-dir FOLDER`)"


def conflicts(recipe: Recipe, *, disks: bool) -> Conflicts:
    """Yield fields that are wrong together; ``disks``: the folders of the model must exist here."""
    yield from _length_problems(recipe)
    yield from _source_problems(recipe)
    yield from _tokenizer_problems(recipe)
    yield from _objective_problems(recipe)
    yield from _model_problems(recipe, disks=disks)
    yield from _average_problems(recipe)


def _length_problems(recipe: Recipe) -> Conflicts:
    data, training, schedule = recipe.data, recipe.training, recipe.schedule
    if training.steps is None and training.epochs is None:
        yield "training", "set the length of the training: steps, epochs or both"
    if training.validate_every is not None and not data.validates and not recipe.evaluations:
        yield "training.validate_every", _NO_VALIDATION
    length = schedule.steps or training.steps
    if length is not None and schedule.warmup_steps > length:
        yield "schedule.warmup_steps", f"{schedule.warmup_steps} steps of warm-up do not fit in {length} steps"
    if schedule.warmup_steps and schedule.warmup_ratio:
        yield "schedule.warmup_ratio", "set either warmup_steps or warmup_ratio, not both"
    endless = any(part.epochs is None for part in data.mix)
    if data.mix and training.epochs is not None and (endless or training.epochs > 1):
        text = "a mixture ends with the epochs of its sources; set training.steps, and epochs in data.mix"
        yield "training.epochs", text
    for field, every in (
        ("training.validate_every", training.validate_every),
        ("checkpoint.every", recipe.checkpoint.every),
    ):
        if endless and every == "epoch":
            yield field, "a mixture with a source that repeats without end has no epoch; set a number of steps"


def _average_problems(recipe: Recipe) -> Conflicts:
    validated = recipe.validation.weights
    for name, average in recipe.averages.items():
        if name in ("trained", "averaged") or "." in name or not name:
            yield f"averages.{name}", "expected a name without dots, and neither trained nor averaged, such as ema"
        if average.decay is not None and average.power is not None:
            yield f"averages.{name}.power", "set either decay or power, not both"
        if recipe.lora is not None:
            text = "averages are of whole models, and a run with lora saves its adapters alone; drop averages, or lora"
            yield f"averages.{name}", text
    try:
        if average_called(validated, recipe.averages) and not recipe.data.validates and not recipe.evaluations:
            yield "validation.weights", _NO_VALIDATION
    except MeshparError as error:
        yield "validation.weights", str(error)


def _source_problems(recipe: Recipe) -> Conflicts:
    data = recipe.data
    if data.source == "stdlib" and data.paths:
        yield "data.paths", "stdlib needs no paths; for files of your own write source: files"
    if (data.source == "dataset") != (data.dataset is not None):
        how = "dataset: {class: mypackage.Dataset}, without another source"
        yield "data.source", f"a dataset of your own is written {how}"
    if data.validation_dataset is not None and (data.dataset is None or data.validation_fraction):
        yield "data.validation_dataset", "requires data.dataset, and excludes validation_fraction"
    if data.source == "dataset" and (data.paths or data.validation_paths):
        yield "data.paths", "a dataset of your own reads its files itself; pass them as keywords of the class"
    if data.source not in ("stdlib", "dataset", "mix") and not data.paths:
        yield "data.paths", f"source: {data.source} needs paths"
    if data.source == "tokens" and (len(data.paths) > 1 or len(data.validation_paths) > 1):
        yield "data.paths", f"tokens are one .bin file, got {len(data.paths)}"
    sources: list[DataSection | MixSection] = [data, *data.mix]
    for source in sources:
        suffixes = SUFFIXES.get(source.source, ())
        for path in (*source.paths, *source.validation_paths) if suffixes else ():
            if kind_of(Path(path)) not in ("", *suffixes) and not expanded(Path(path)).is_dir():
                reads = f"source: {source.source} reads files ending in {' or '.join(suffixes)}"
                yield f"data.{'mix' if data.mix else 'paths'}", f"{reads}, got {path!r}{as_lines(expanded(Path(path)))}"
    if data.validation_paths and data.validation_fraction:
        yield "data.validation_fraction", "set either validation_paths or validation_fraction, not both"
    if (data.source == "mix") != bool(data.mix):
        how = "mix: [{source: files, paths: [...], weight: 0.7}, ...], without another source"
        yield "data.mix", f"a mixture is written {how}"
    if data.mix and (data.paths or data.validation_paths or data.template):
        yield "data.mix", "paths, validation_paths and template are written in each source of the mix"
    if len({*mixed_names(data)}) < len(data.mix):
        text = (
            f"two sources share a name in {mixed_names(data)}; give each its own name, under which its loss is logged"
        )
        yield "data.mix", text
    for part in data.mix:
        if bool(part.paths) == (part.source == "stdlib") or (part.source == "tokens" and len(part.paths) > 1):
            expected = "expected none for stdlib, one for tokens, else one or more"
            yield "data.mix", f"source: {part.source} with paths {list(part.paths)}; {expected}"
        if part.name and not part.name.replace("-", "").replace("_", "").isalnum():
            yield "data.mix", f"the name {part.name!r} is part of a metric's; use letters, digits, - and _"
    if data.mix and (problem := weights_problem([part.weight for part in data.mix])):
        yield "data.mix", problem


def _tokenizer_problems(recipe: Recipe) -> Conflicts:
    data, weights = recipe.data, recipe.model.weights
    if data.template is not None and data.source != "chat":
        yield "data.template", "a chat template requires source: chat"
    templates = {part.template for part in data.mix if part.source == "chat"}
    if len(templates) > 1:
        named = " and ".join(sorted(template or "that of the tokenizer" for template in templates))
        text = f"the conversations have several templates, {named}, and a model learns one; set one template for all"
        yield "data.mix", text
    unnamed = [part for part in (data.mix or (data,)) if part.source == "chat" and part.template is None]
    if unnamed and data.tokenizer in (None, "bytes", "bpe") and weights is None:
        name = data.tokenizer or "bytes"
        text = f"tokenizer {name} has no chat template; write template: chatml or llama3, or a file"
        yield "data.template", text
    if data.packing == "best_fit" and data.documents == "joined":
        text = "best_fit keeps documents whole, and documents: joined makes one text of them; use one of the two"
        yield "data.packing", text
    if data.source == "tokens" and data.tokenizer in ("bytes", "bpe"):
        text = (
            "the input is tokens already: remove data.tokenizer, or name the folder of their tokenizer, for the export"
        )
        yield "data.tokenizer", text
    there = weights is not None and expanded(storage.place(weights)).exists()
    if there and data.tokenizer is None and data.source not in ("tokens", "dataset"):
        yield (
            "data.tokenizer",
            f"missing: {weights} has no tokenizer.json; name the folder of the tokenizer that the weights were "
            "trained with, or write bytes or bpe for another one",
        )
    of_bytes = data.tokenizer in (None, "bytes") and data.source not in ("tokens", "dataset")
    if data.eos is not None and of_bytes and weights is None:
        text = "tokenizer bytes ends a document with its own token; remove data.eos, or use another tokenizer"
        yield "data.eos", text


def _objective_problems(recipe: Recipe) -> Conflicts:
    name, data = recipe.training.objective, recipe.data
    try:
        factory = recipe.find(registry.OBJECTIVE, name)
    except MeshparError:
        return  # the checks of the job name the objectives that are installed
    if wants_teacher(factory) != (recipe.teacher is not None):
        words = "needs a teacher; set teacher.model and its weights" if recipe.teacher is None else "uses no teacher"
        yield "teacher", f"the objective {name} {words}"
    examples = getattr(factory, "examples", "tokens")
    if examples != "tokens" and data.mix:
        yield "data.mix", f"the objective {name} learns from {examples}, and a mixture contains texts"
    if examples != "tokens" and data.source not in ("stdlib", "jsonl", "csv", "parquet", "dataset"):
        tables = "stdlib, jsonl, csv or parquet, which hold two fields"
        yield "data.source", f"the objective {name} learns from {tables}, got {data.source!r}"


def _model_problems(recipe: Recipe, *, disks: bool) -> Conflicts:
    if recipe.lora is not None and (recipe.model.kind != "huggingface" or recipe.model.weights is None):
        yield "lora", "adapters need a model of transformers (kind: huggingface) with its weights"
    try:
        recipe.adapters()
    except MeshparError as error:
        yield "lora", str(error)
    # A run before may make the folders of a teacher; they are looked for when the job is checked.
    for text in folder_problems(recipe.model) if disks else ():
        yield "model", f"{text}; {_DOWNLOAD}" if text.startswith("weights: ") else text
    models = [("model", recipe.model), *([("teacher.model", recipe.teacher.model)] if recipe.teacher else [])]
    for field, section in models:
        yield from ((field, text) for text in _shape_problems(section))


def folder_problems(section: Any) -> Iterator[str]:  # one of the sections of models
    """Yield the folders of a model's section that do not exist."""
    if section.weights is not None and not expanded(storage.place(section.weights)).exists():
        yield f"weights: {section.weights} does not exist"
        return
    folder = section.config if section.kind == "huggingface" and isinstance(section.config, str) else None
    if folder is not None and not (expanded(Path(folder)) / "config.json").is_file():
        yield f"config: no config.json in {folder}"


def _shape_problems(section: Any) -> Iterator[str]:
    try:
        if section.kind in ("transformer", "gpt2"):
            model_config(section, vocab_size=512)
        elif section.kind == "huggingface" and isinstance(section.config, dict) and "model_type" not in section.config:
            yield "config: a config.json names its model_type, such as llama, qwen3 or gpt2"
    except ValueError as error:
        yield str(error)


def calling_problems(recipe: Recipe, document: Document) -> list[str]:
    """Return what is wrong with options of the objective, plugins and own classes that may be imported."""
    data, training, teacher = recipe.data, recipe.training, recipe.teacher
    sections: list[tuple[Place, registry.Kind, Any, tuple[str, ...]]] = [
        (("model",), registry.MODEL, recipe.model, ("vocab_size",)),
        (("teacher", "model"), registry.MODEL, None if teacher is None else teacher.model, ("vocab_size",)),
        (("optimizer",), registry.OPTIMIZER, recipe.optimizer, ("params", "module", "lr")),
        (("data", "dataset"), registry.DATASET, data.dataset, ("sequence_length",)),
        (("data", "validation_dataset"), registry.DATASET, data.validation_dataset, ("sequence_length",)),
    ]
    called: list[tuple[Place, Place, registry.Kind, str, Mapping[str, Any], tuple[str, ...]]] = [
        ((*at, "class"), at, kind, section.class_, section.keywords, passed)
        for at, kind, section, passed in sections
        if isinstance(section, Own)
    ]
    if "." in training.objective or training.objective in registry.names(registry.OBJECTIVES):
        there = ("training", "objective"), ("training", "objective_options")
        called.append((*there, registry.OBJECTIVE, training.objective, training.objective_options, ()))
    for heading, kind, argument, entries in (
        ("trackers", registry.TRACKER, "run", recipe.trackers),
        ("evaluations", registry.EVALUATION, "tokenizer", recipe.evaluations),
    ):
        for name, options in entries.items():
            called.append(((heading, name), (heading, name), kind, name, options, (argument,)))
    problems: list[str] = []
    for where, at, kind, name, keywords, passed in called:
        try:
            missing = tuple(argument for argument in passed if argument not in keywords)
            problems += own_problems(recipe.find(kind, name), keywords, document, at, missing)
        except UntrustedError:
            continue
        except MeshparError as error:
            problems.append(f"{document.where(where)}: {error}")
    return problems
