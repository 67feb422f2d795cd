"""Read recipes: find the file, fill in what it leaves out, and report every problem of fields, alone and together."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, cast

from meshpar.checkpoints.storage import place as storage
from meshpar.core import registry
from meshpar.core.errors import MeshError, MeshparError, RecipeError
from meshpar.core.mesh import MeshSpec, is_auto
from meshpar.core.patterns import suggestion
from meshpar.launchers.recipes.recipe import (
    Classes,
    Recipe,
    UntrustedError,
    make_importable,
    own_problems,
    read_passes,
    wants_teacher,
)
from meshpar.launchers.recipes.schema import validate
from meshpar.launchers.recipes.sections import DataSection, MixSection, Own, mixed_names, model_config
from meshpar.launchers.recipes.yamlfile import Document, FieldPath, apply_overrides, dotted, read_document
from meshpar.process.imports import expanded
from meshpar.process.secrets import REMEDY, secrets_in
from meshpar.training.order import weights_problem
from meshpar.training.text import SUFFIXES, as_lines, kind_of
from meshpar.weights import average_called


class UnknownRecipeError(RecipeError):
    """Raised where a name is neither a file nor a recipe that comes with meshpar."""


def load_recipe(
    source: str | Path, overrides: Sequence[str] = (), *, disks: bool = True, trust: bool = False
) -> Recipe:
    """Read a recipe, with fields set from the command line.

    Args:
        source: a YAML file, or the name of a recipe that comes with meshpar (:func:`shipped`).
        overrides: ``training.steps=50``; values are YAML.
        disks: whether the folders of the model must exist here; False: the recipe is for a machine with other disks.
        trust: import the classes that the recipe names by import path, as a job does; False: import nothing, and leave
            what needs them unchecked.

    Raises:
        RecipeError: listing everything that is wrong.
    """
    path, recipes = Path(source), shipped()
    if not path.is_file() and str(source) not in recipes:
        raise UnknownRecipeError(
            f"no recipe file {source}, and none of that name comes with meshpar; {suggestion(str(source), recipes)}"
        )
    document = read_document(path if path.is_file() else recipes[str(source)])
    apply_overrides(document, overrides)
    return resolve(document, disks=disks, trust=trust)


def shipped() -> dict[str, Path]:
    folder = resources.files("meshpar.launchers.recipes")
    paths = sorted(Path(str(path)) for path in folder.iterdir())
    return {path.stem: path for path in paths if path.suffix == ".yaml"}


def resolve(document: Document, *, disks: bool = True, trust: bool = False) -> Recipe:
    """Return the recipe of a document; arguments as for :func:`load_recipe`. Raises RecipeError with every problem."""
    if secrets := list(secrets_in(document.data)):  # alone: other problems quote values
        names = ", ".join(map(dotted, secrets))
        raise RecipeError(
            f"{document.name}: {names}: this looks like a credential, and a recipe is kept in readable files; {REMEDY}"
        )
    data = dict(document.data)
    problems = []
    if foreign := [key for key in FOREIGN if key in data]:
        problems.append(
            f"{document.where((foreign[0],))}: this is a key of transformers' Trainer or of accelerate; write the "
            "recipe's keys, which docs/migrate.md lists beside theirs"
        )
    classes = Classes(dict(_import_paths(data)), trust, document)
    if classes.paths:
        data["code"] = data.get("code") or str(Path(document.name).absolute().parent)
    if classes.paths and trust:
        make_importable(expanded(Path(str(data["code"]))))
    _read_plan(data, classes, problems)
    if isinstance(data.get("teacher"), Mapping):
        data["teacher"] = dict(data["teacher"])
        data["teacher"].setdefault("mesh", data["mesh"])
        _read_plan(data["teacher"], classes, problems, ("teacher",))
    _take_from_weights(data)
    _name_kinds(data)
    data["name"] = data.get("name") or Path(document.name).stem
    data["output"] = data.get("output") or f"runs/{data['name']}"
    recipe = validate(Recipe, data, document)
    if isinstance(recipe, list):
        problems = recipe + problems
    else:
        recipe.read_from(classes)
        problems += calling_problems(recipe, document)
        problems += [f"{recipe.where(field)}: {text}" for field, text in conflicts(recipe, disks=disks)]
    if problems or isinstance(recipe, list):
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in this recipe"
        raise RecipeError("\n  ".join([count, *problems]))
    return recipe


FOREIGN = ("per_device_train_batch_size", "num_train_epochs", "learning_rate", "fsdp", "fsdp_config", "num_processes")
"""Keys by which the YAML of other trainers is known."""
OPTIMIZERS = {"muon": "meshpar.optim.Muon", "small_adamw": "meshpar.optim.SmallAdamW"}
"""Short names of meshpar's optimizers, as ``class``."""


def _name_kinds(data: dict[str, Any]) -> None:
    """Write which kind of optimizer and of data a section is."""
    optimizer, section = data.get("optimizer"), data.get("data")
    if isinstance(optimizer, Mapping):
        data["optimizer"] = {"name": "own" if "class" in optimizer else "adamw", **optimizer}
        if optimizer.get("class") in OPTIMIZERS:
            data["optimizer"]["class"] = OPTIMIZERS[optimizer["class"]]
    if isinstance(section, Mapping) and section.get("dataset") is not None:
        data["data"] = {"source": "dataset", **section}
    elif isinstance(section, Mapping) and section.get("mix"):
        data["data"] = {"source": "mix", **section}


_SECTIONS: tuple[tuple[FieldPath, registry.Kind, tuple[str, ...]], ...] = (
    (("model",), registry.MODEL, ("vocab_size",)),
    (("teacher", "model"), registry.MODEL, ("vocab_size",)),
    (("optimizer",), registry.OPTIMIZER, ("params", "module", "lr")),
    (("data", "dataset"), registry.DATASET, ("sequence_length",)),
    (("data", "validation_dataset"), registry.DATASET, ("sequence_length",)),
)
"""The sections with a ``class``, its kind, and the arguments that meshpar passes it."""
_LISTS = (("trackers", registry.TRACKER, ("run",)), ("evaluations", registry.EVALUATION, ("tokenizer",)))
"""The headings over classes by name, as :data:`_SECTIONS`."""


def _import_paths(data: Mapping[str, Any]) -> Iterator[tuple[FieldPath, str]]:
    """Yield place and name of each class that a recipe names and that is no plugin."""

    def inside(*path: str | int) -> Any:
        value: Any = data
        for part in path:
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    named: list[tuple[FieldPath, registry.Kind, Any]] = [
        ((*at, "class"), kind, inside(*at, "class")) for at, kind, _ in _SECTIONS
    ]
    for path in (("passes",), ("teacher", "passes")):
        for number, entry in enumerate(inside(*path) if isinstance(inside(*path), list) else ()):
            names = entry if isinstance(entry, Mapping) else (entry,)
            named += [((*path, number), registry.PASS, name) for name in names]
    named.append((("training", "objective"), registry.OBJECTIVE, inside("training", "objective")))
    for heading, kind, _ in _LISTS:
        entries = inside(heading)
        named += [((heading, name), kind, name) for name in (entries if isinstance(entries, Mapping) else ())]
    for at, kind, name in named:
        if isinstance(name, str) and not kind.has(OPTIMIZERS.get(name, name)):
            yield at, name


def _read_plan(data: dict[str, Any], classes: Classes, problems: list[str], at: FieldPath = ()) -> None:
    """Put model, mesh and passes of a mapping in the form that the recipe has."""
    if isinstance(data.get("model"), Mapping):
        data["model"] = {"kind": "own" if "class" in data["model"] else "transformer", **data["model"]}
    data["mesh"] = data.get("mesh") or ""
    text, mesh = data["mesh"], None
    if isinstance(text, str):  # else the section's own type says what is wrong
        try:
            mesh = text.strip() if is_auto(text) else MeshSpec(text)
        except MeshError as error:
            problems.append(f"{classes.document.where((*at, 'mesh'))}: {error}")
    data["passes"] = read_passes(data.get("passes"), mesh, classes, problems, at)


def _take_from_weights(data: dict[str, Any]) -> None:
    """Take the config and the tokenizer that published weights come with, where the recipe names none."""
    model, section = data.get("model"), data.get("data") or {}
    if not isinstance(model, Mapping) or not isinstance(section, Mapping) or not isinstance(model.get("weights"), str):
        return
    folder = expanded(Path(model["weights"]))
    if model["kind"] == "huggingface":
        data["model"] = {"config": model["weights"], **model}
    text = section.get("source") != "tokens" and not section.get("dataset")
    if text and section.get("tokenizer") is None and (folder / "tokenizer.json").is_file():
        data["data"] = {**section, "tokenizer": model["weights"]}


Conflicts = Iterator[tuple[str, str]]
"""Fields, each with what is wrong with it."""

_NO_VALIDATION = "there is no validation data; set data.validation_fraction, data.validation_paths or evaluations"
_DOWNLOAD = "expected a folder (nothing is downloaded: `hf download NAME --local-dir FOLDER`)"


def conflicts(recipe: Recipe, *, disks: bool) -> Conflicts:
    """Yield fields that are wrong together; ``disks``: the folders of the model must exist here."""
    for check in (_length_problems, _source_problems, _tokenizer_problems, _objective_problems):
        yield from check(recipe)
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
    every = {"training.validate_every": training.validate_every, "checkpoint.every": recipe.checkpoint.every}
    for field in [name for name, value in every.items() if endless and value == "epoch"]:
        yield field, "a mixture with a source that repeats without end has no epoch; set a number of steps"


def _average_problems(recipe: Recipe) -> Conflicts:
    for name, average in recipe.averages.items():
        if name in ("trained", "averaged") or "." in name or not name:
            yield f"averages.{name}", "expected a name without dots, and neither trained nor averaged, such as ema"
        if average.decay is not None and average.power is not None:
            yield f"averages.{name}.power", "set either decay or power, not both"
        if recipe.lora is not None:
            text = "averages are of whole models, and a run with lora saves its adapters alone; drop averages, or lora"
            yield f"averages.{name}", text
    weights = recipe.validation.weights
    for validated in [weights] if isinstance(weights, str) else weights or ["none"]:
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
        names = mixed_names(data)
        yield "data.mix", f"two sources share a name in {names}; give each its own name, under which its loss is logged"
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
        yield "data.template", f"tokenizer {name} has no chat template; write template: chatml or llama3, or a file"
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
        text = (
            f"missing: {weights} has no tokenizer.json; name the folder of the tokenizer that the weights were trained "
            "with, or write bytes or bpe for another one"
        )
        yield "data.tokenizer", text
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
    for field, model in models:
        try:
            if model.kind in ("transformer", "gpt2"):
                model_config(model, vocab_size=512)
            elif model.kind == "huggingface" and isinstance(model.config, dict) and "model_type" not in model.config:
                yield field, "config: a config.json names its model_type, such as llama, qwen3 or gpt2"
        except ValueError as error:
            yield field, str(error)


def folder_problems(section: Any) -> Iterator[str]:  # one of the sections of models
    """Yield the folders of a model's section that do not exist."""
    if section.weights is not None and not expanded(storage.place(section.weights)).exists():
        yield f"weights: {section.weights} does not exist"
        return
    folder = section.config if section.kind == "huggingface" and isinstance(section.config, str) else None
    if folder is not None and not (expanded(Path(folder)) / "config.json").is_file():
        yield f"config: no config.json in {folder}"


def calling_problems(recipe: Recipe, document: Document) -> list[str]:
    """Return what is wrong with options of the objective, plugins and own classes that may be imported."""
    training = recipe.training
    called: list[tuple[FieldPath, FieldPath, registry.Kind, str, Mapping[str, Any], tuple[str, ...]]] = []
    for at, kind, passed in _SECTIONS:
        section: Any = functools.reduce(lambda outer, field: getattr(outer, str(field), None), at, cast(Any, recipe))
        if isinstance(section, Own):
            called.append(((*at, "class"), at, kind, section.class_, section.keywords, passed))
    if "." in training.objective or training.objective in registry.names(registry.OBJECTIVES):
        there = ("training", "objective"), ("training", "objective_options")
        called.append((*there, registry.OBJECTIVE, training.objective, training.objective_options, ()))
    for heading, kind, passed in _LISTS:
        for name, options in getattr(recipe, heading).items():
            called.append(((heading, name), (heading, name), kind, name, options, passed))
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
