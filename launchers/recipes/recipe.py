"""Recipes: what a run is made of, as strict YAML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self, final

from pydantic import PrivateAttr

from meshpar import registry
from meshpar.checkpoints import storage
from meshpar.errors import MeshError, MeshparError, RecipeError
from meshpar.launchers.recipes.named import (
    OBJECTIVES,
    convert_keys,
    make_importable,
    objective_factory,
    own_problems,
    read_passes,
    wants_teacher,
)
from meshpar.launchers.recipes.schema import Section, build, validate
from meshpar.launchers.recipes.sections import (
    CheckpointSection,
    DataSection,
    LoRASection,
    MixSection,
    Model,
    Optimizer,
    OptimizerSection,
    Own,
    ScheduleSection,
    TeacherSection,
    TrainingSection,
    mixed_names,
)
from meshpar.launchers.recipes.yamlfile import Document, Place, apply_overrides, read_document, to_yaml
from meshpar.mesh import MeshSpec, is_auto
from meshpar.models.gpt2 import GPT2Config
from meshpar.models.transformer_config import RopeScaling, TransformerConfig
from meshpar.patterns import suggestion
from meshpar.training.lora import LoRA
from meshpar.training.order import weights_problem
from meshpar.training.settings import Bound
from meshpar.training.text import SUFFIXES, kind_of

_DOWNLOAD = "expected a folder (nothing is downloaded: `hf download NAME --local-dir FOLDER`)"


class UnknownRecipeError(RecipeError):
    """Raised where a name is neither a file nor a recipe that comes with meshpar."""


@final
class Recipe(Section):
    """Describe a run.

    Attributes:
        name: name of the run; default: the recipe file's name.
        seed: seed of initial weights, order of the data and dropout.
        device: type of the devices; ``auto``: the accelerator if there is one, else the CPU.
        preflight: run the doctor's checks before training: ``warn`` logs findings, ``fail`` ends the job on any finding.
        watchdog: seconds without progress after which every rank prints its stack trace and the job ends; None: never.
        patience: seconds that replicas (``--elastic=replicas``) wait for a replica that does not answer, before they continue without it.
        optimizer_copies: number of replicas (``--elastic=replicas``) that hold each parameter's optimizer state, if ``HybridShard`` has
            ``optimizer: world``; 1: the loss of a replica ends the job, which resumes from the newest checkpoint.
        profile: write a profile of a few early steps to the run's folder (:mod:`meshpar.training.profile`).
        output: the run's folder; default: ``runs/NAME``. A URL in an object store (``s3://bucket/run``) keeps its logs in
            ``runs/s3/bucket/run``.
        code: folder from which your own classes are imported; None: the recipe's folder.
        mesh: axes and sizes; empty: one process.
        passes: passes with their options, in order; default: the passes that the mesh's axes require.
        dtype: dtype of the stored parameters, their gradients and the optimizer state. Modules that the layout keeps in float32 stay
            float32. A pass computes in its own ``param_dtype``.
        model: see the sections below; the same applies to the other headings.
        teacher: the frozen teacher of a distillation.
        lora: adapters; nothing else is trained.
        notes: how foreign or old names were translated.
    """

    name: str = ""
    seed: Annotated[int, Bound(ge=0)] = 0
    device: Literal["auto", "cpu", "cuda", "xpu", "hpu", "mps"] = "auto"
    preflight: Literal["off", "warn", "fail"] = "off"
    watchdog: Annotated[float, Bound(gt=0)] | None = 600.0
    patience: Annotated[float, Bound(gt=0)] = 20.0
    optimizer_copies: Annotated[int, Bound(ge=1)] = 2
    profile: bool = False
    output: str = ""
    code: str | None = None
    mesh: str = ""
    passes: tuple[dict[str, dict[str, Any]], ...] = ()
    dtype: Literal["float32", "bfloat16"] = "float32"
    model: Model
    teacher: TeacherSection | None = None
    lora: LoRASection | None = None
    data: DataSection = DataSection()
    optimizer: Optimizer = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    training: TrainingSection
    checkpoint: CheckpointSection = CheckpointSection()
    _notes: tuple[str, ...] = PrivateAttr(())
    _document: Document | None = PrivateAttr(None)

    def __eq__(self, other: object) -> bool:
        """Compare the fields; the place where they were written is no part of a recipe."""
        return isinstance(other, Recipe) and dict(self) == dict(other)

    __hash__ = None  # type: ignore[assignment]

    @property
    def notes(self) -> tuple[str, ...]:
        """The new names of renamed keys."""
        return self._notes

    def where(self, field: str) -> str:
        """Return a field with its file and line, or its override, for a message."""
        place = tuple(int(each) if each.isdigit() else each for each in field.split("."))
        return field if self._document is None else self._document.where(place)

    @property
    def folder(self) -> Path:
        """The run's folder on this machine: ``output``, and where that is a URL, a folder for logs, metrics and the board."""
        kept = self.kept
        return kept.expanduser() if isinstance(kept, Path) else Path("runs", *kept.root.split("://"), kept.key)

    @property
    def kept(self) -> storage.Place:
        """Where the run's checkpoints, its recipe and its tokenizer are kept: ``output``."""
        return storage.place(self.output).expanduser()

    def adapters(self) -> LoRA | None:
        """Return the settings of the adapters."""
        return None if self.lora is None else build(LoRA, self.lora)

    def noting(self, notes: Sequence[str]) -> Self:
        """Return the recipe with what is to be told about it."""
        self._notes = tuple(notes)
        return self

    def to_yaml(self) -> str:
        """Return the recipe as resolved: reading this text gives the same recipe."""
        data = self.model_dump(mode="json")
        data["model"] = _model_text(self.model)
        if isinstance(self.optimizer, Own):
            data["optimizer"] = _own_text(self.optimizer)
        for name in ("dataset", "validation_dataset"):
            own = getattr(self.data, name)
            data["data"] = {key: value for key, value in data["data"].items() if key != name}
            data["data"] |= {} if own is None else {name: _own_text(own)}
        if self.code is None:
            del data["code"]
        if self.lora is None:
            del data["lora"]
        else:
            data["lora"] = _written(data["lora"])
        if self.teacher is None:
            del data["teacher"]
        else:
            data["teacher"] = {**_written(data["teacher"]), "model": _model_text(self.teacher.model)}
        return to_yaml(data)


def _own_text(section: Own) -> dict[str, Any]:
    """Return a class of the user's own with its keywords, None included: that may be what a keyword is set to."""
    fields = section.model_dump(mode="json", by_alias=True, exclude={"kind", "name"})
    return {name: value for name, value in fields.items() if name in section.keywords or value not in (None, [])}


def _model_text(section: Any) -> dict[str, Any]:
    if isinstance(section, Own):
        return _own_text(section)
    fields = section.model_dump(mode="json")
    if section.kind == "huggingface":
        return {name: value for name, value in fields.items() if value is not None}
    return {"kind": section.kind} | _written(fields)


def _written(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that have a value: in a model's section, none means the shape's default."""
    return {name: _written(value) if isinstance(value, dict) else value for name, value in fields.items() if value is not None}


def load_recipe(source: str | Path, overrides: Sequence[str] = (), *, disks: bool = True) -> Recipe:
    """Read a recipe, with fields set from the command line.

    Args:
        source: a YAML file, or the name of a recipe that comes with meshpar (:func:`shipped`).
        overrides: ``training.steps=50``; values are YAML.
        disks: whether the folders of the model must exist here; False: the recipe is for a machine with other disks.

    Raises:
        RecipeError: listing everything that is wrong.
    """
    document = _find(source)
    apply_overrides(document, overrides)
    return resolve(document, disks=disks)


def shipped() -> dict[str, Path]:
    """Return the recipes that come with meshpar."""
    folder = resources.files("meshpar.launchers.recipes")
    return {
        Path(each.name).stem: Path(str(each)) for each in sorted(folder.iterdir(), key=lambda one: one.name) if each.name.endswith(".yaml")
    }


def resolve(document: Document, *, disks: bool = True) -> Recipe:
    """Return the recipe of a document, or raise RecipeError with every problem."""
    data = dict(document.data)
    problems: list[str] = []
    _find_own_code(data, document)
    notes = _read_plan(data, document, problems)
    if isinstance(data.get("teacher"), Mapping):
        data["teacher"] = dict(data["teacher"])
        data["teacher"].setdefault("mesh", data["mesh"])
        notes += [f"teacher.{note}" for note in _read_plan(data["teacher"], document, problems, ("teacher",))]
    _take_from_weights(data)
    _name_kinds(data)
    data["name"] = data.get("name") or Path(document.name).stem
    data["output"] = data.get("output") or f"runs/{data['name']}"
    found = validate(Recipe, data, document)
    if isinstance(found, Recipe):
        problems += _calling_problems(found, document)
        problems += [f"{document.where(place)}: {text}" for place, text in _conflicts(found, disks=disks)]
    else:
        assert isinstance(found, list)
        problems = found + problems
    if problems:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in this recipe"
        raise RecipeError("\n  ".join([count, *problems]))
    assert isinstance(found, Recipe)
    found._document = document
    return found.noting(notes)


def _name_kinds(data: dict[str, Any]) -> None:
    """Write which kind of optimizer and of data a section is."""
    optimizer, section = data.get("optimizer"), data.get("data")
    if isinstance(optimizer, Mapping):
        data["optimizer"] = {"name": "own" if "class" in optimizer else "adamw", **optimizer}
    if isinstance(section, Mapping) and section.get("dataset") is not None:
        data["data"] = {"source": "dataset", **section}
    elif isinstance(section, Mapping) and section.get("mix"):
        data["data"] = {"source": "mix", **section}


def _find_own_code(data: dict[str, Any], document: Document) -> None:
    """Make the recipe's folder importable if the recipe names something by import path, and write the folder into the recipe."""

    def inside(*path: str) -> Any:
        found: Any = data
        for part in path:
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    sections = (("model",), ("teacher", "model"), ("optimizer",), ("data", "dataset"), ("data", "validation_dataset"))
    passes = [each for place in (("passes",), ("teacher", "passes")) for each in (inside(*place) or ()) if isinstance(inside(*place), list)]
    names = [name for each in passes for name in (each if isinstance(each, Mapping) else (each,))]
    if any(inside(*place, "class") for place in sections) or any("." in str(each) for each in (inside("training", "objective"), *names)):
        data["code"] = inside("code") or str(Path(document.name).absolute().parent)
        make_importable(Path(str(data["code"])).expanduser())


def _calling_problems(recipe: Recipe, document: Document) -> list[str]:
    """Return what is wrong with the objective's options and with classes of the user's own; imports them."""
    found: list[str] = []
    data, training = recipe.data, recipe.training
    own: list[tuple[Place, Any, tuple[str, ...]]] = [
        (("model",), recipe.model, ("vocab_size",)),
        (("teacher", "model"), None if recipe.teacher is None else recipe.teacher.model, ("vocab_size",)),
        (("optimizer",), recipe.optimizer, ("params", "lr")),
        (("data", "dataset"), data.dataset, ("sequence_length",)),
        (("data", "validation_dataset"), data.validation_dataset, ("sequence_length",)),
    ]
    for place, section, given in own:
        if not isinstance(section, Own):
            continue
        try:
            factory = registry.imported(section.class_)
        except MeshparError as error:
            found.append(f"{document.where((*place, 'class'))}: {error}")
            continue
        given = tuple(name for name in given if name not in section.keywords)
        found += own_problems(factory, section.keywords, document, place, given)
    if "." in training.objective or training.objective in registry.names(OBJECTIVES):
        try:
            factory = objective_factory(training.objective)
        except MeshparError as error:
            return [*found, f"{document.where(('training', 'objective'))}: {error}"]
        found += own_problems(factory, training.objective_options, document, ("training", "objective_options"))
    return found


def _find(source: str | Path) -> Document:
    known = shipped()
    if str(source) in known and not Path(source).is_file():
        return read_document(known[str(source)])
    if not Path(source).is_file():
        raise UnknownRecipeError(f"no recipe file {source}, and none of that name comes with meshpar; {suggestion(str(source), known)}")
    return read_document(Path(source))


def _read_plan(data: dict[str, Any], document: Document, problems: list[str], at: Place = ()) -> list[str]:
    """Put model, mesh and passes of a mapping in the form that the recipe has, and return what is to be told about old names."""
    if isinstance(data.get("model"), Mapping):
        data["model"] = {"kind": "own" if "class" in data["model"] else "transformer", **data["model"]}
    notes = convert_keys(data, document, problems, at)
    data["mesh"] = data.get("mesh") or ""
    mesh = _read_mesh(data["mesh"], document, problems, at)
    data["passes"], more = read_passes(data.get("passes"), mesh, document, problems, at)
    return [*notes, *more]


def _take_from_weights(data: dict[str, Any]) -> None:
    """Take the config and the tokenizer that published weights come with, where the recipe names none."""
    model, section = data.get("model"), data.get("data") or {}
    if not isinstance(model, Mapping) or not isinstance(section, Mapping) or not isinstance(model.get("weights"), str):
        return
    folder = Path(model["weights"]).expanduser()
    if model["kind"] == "huggingface":
        data["model"] = {"config": model["weights"], **model}
    if (
        section.get("tokenizer") is None
        and section.get("source") != "tokens"
        and not section.get("dataset")
        and (folder / "tokenizer.json").is_file()
    ):
        data["data"] = {**section, "tokenizer": model["weights"]}


def _read_mesh(text: object, document: Document, problems: list[str], at: Place) -> MeshSpec | str | None:
    if not isinstance(text, str):
        return None  # the section's own type says what is wrong
    if is_auto(text):
        return text.strip()
    try:
        return MeshSpec(text)
    except MeshError as error:
        problems.append(f"{document.where((*at, 'mesh'))}: {error}")
        return None


def _conflicts(recipe: Recipe, *, disks: bool) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield fields that are right by themselves and wrong together."""
    data, training = recipe.data, recipe.training
    if training.steps is None and training.epochs is None:
        yield ("training",), "set the length of the training: steps, epochs or both"
    if data.source == "stdlib" and data.paths:
        yield ("data", "paths"), "stdlib needs no paths; for files of your own write source: files"
    if (data.source == "dataset") != (data.dataset is not None):
        yield ("data", "source"), "a dataset of your own is written dataset: {class: mypackage.Dataset}, without another source"
    if data.validation_dataset is not None and (data.dataset is None or data.validation_fraction):
        yield ("data", "validation_dataset"), "requires data.dataset, and excludes validation_fraction"
    if data.source == "dataset" and (data.paths or data.validation_paths):
        yield ("data", "paths"), "a dataset of your own reads its files itself; pass them as keywords of the class"
    if data.source not in ("stdlib", "dataset", "mix") and not data.paths:
        yield ("data", "paths"), f"source: {data.source} needs paths"
    yield from _packing_problems(recipe)
    if data.source == "tokens" and (len(data.paths) > 1 or len(data.validation_paths) > 1):
        yield ("data", "paths"), f"tokens are one .bin file, got {len(data.paths)}"
    if data.source == "tokens" and data.tokenizer in ("bytes", "bpe"):
        yield (
            ("data", "tokenizer"),
            "the input is tokens already: remove data.tokenizer, or name the folder of their tokenizer, for the export",
        )
    weights = recipe.model.weights
    there = weights is not None and storage.place(weights).expanduser().exists()
    if there and data.tokenizer is None and data.source not in ("tokens", "dataset"):
        yield (
            ("data", "tokenizer"),
            f"missing: {weights} has no tokenizer.json; name the folder of the tokenizer that the weights were trained with, "
            "or write bytes or bpe for another one",
        )
    sources: list[DataSection | MixSection] = [data, *data.mix]
    for each in sources:
        suffixes = SUFFIXES.get(each.source, ())
        for path in (*each.paths, *each.validation_paths) if suffixes else ():
            if kind_of(Path(path)) not in ("", *suffixes) and not Path(path).expanduser().is_dir():
                yield (
                    ("data", "mix" if data.mix else "paths"),
                    f"source: {each.source} reads files ending in {' or '.join(suffixes)}, got {path!r}",
                )
    if (
        data.eos is not None
        and data.tokenizer in (None, "bytes")
        and recipe.model.weights is None
        and data.source not in ("tokens", "dataset")
    ):
        yield ("data", "eos"), "tokenizer bytes ends a document with its own token; remove data.eos, or use another tokenizer"
    yield from _objective_problems(recipe)
    if data.validation_paths and data.validation_fraction:
        yield ("data", "validation_fraction"), "set either validation_paths or validation_fraction, not both"
    if training.validate_every is not None and not data.validates:
        yield ("training", "validate_every"), "there is no validation data; set data.validation_fraction or data.validation_paths"
    length = recipe.schedule.steps or training.steps
    if length is not None and recipe.schedule.warmup_steps > length:
        yield ("schedule", "warmup_steps"), f"{recipe.schedule.warmup_steps} steps of warm-up do not fit in {length} steps"
    if recipe.schedule.warmup_steps and recipe.schedule.warmup_ratio:
        yield ("schedule", "warmup_ratio"), "set either warmup_steps or warmup_ratio, not both"
    if recipe.lora is not None and (recipe.model.kind != "huggingface" or recipe.model.weights is None):
        yield ("lora",), "adapters need a model of transformers (kind: huggingface) with its weights"
    if recipe.lora is not None:
        try:
            recipe.adapters()
        except MeshparError as error:
            yield ("lora",), str(error)
    # The folders of a teacher may be made by a run before; whether they are there is seen when the job is checked.
    for name, section in (("model", recipe.model), *([] if recipe.teacher is None else [("teacher.model", recipe.teacher.model)])):
        files = [*folder_problems(section)] if disks and name == "model" else []
        files = [f"{text}; {_DOWNLOAD}" if text.startswith("weights: ") else text for text in files]
        yield from ((tuple(name.split(".")), text) for text in (*files, *_model_problems(section)))


def _packing_problems(recipe: Recipe) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what is wrong with mixtures, conversations and packing."""
    data, training = recipe.data, recipe.training
    if (data.source == "mix") != bool(data.mix):
        yield ("data", "mix"), "a mixture is written mix: [{source: files, paths: [...], weight: 0.7}, ...], without another source"
    if data.mix and (data.paths or data.validation_paths or data.template):
        yield ("data", "mix"), "paths, validation_paths and template are written in each source of the mix"
    if len({*mixed_names(data)}) < len(data.mix):
        yield (
            ("data", "mix"),
            f"two sources share a name in {mixed_names(data)}; give each its own name, under which its loss is logged",
        )
    for each in data.mix:
        if bool(each.paths) == (each.source == "stdlib") or (each.source == "tokens" and len(each.paths) > 1):
            yield (
                ("data", "mix"),
                f"source: {each.source} with paths {list(each.paths)}; expected none for stdlib, one for tokens, else one or more",
            )
        if each.name and not each.name.replace("-", "").replace("_", "").isalnum():
            yield ("data", "mix"), f"name {each.name!r} is part of a metric's; use letters, digits, - and _"
    if data.mix and (problem := weights_problem([each.weight for each in data.mix])):
        yield ("data", "mix"), problem
    endless = any(each.epochs is None for each in data.mix)
    if data.mix and training.epochs is not None and (endless or training.epochs > 1):
        yield (
            ("training", "epochs"),
            "a mixture ends with the epochs of its sources; set training.steps, and epochs in data.mix",
        )
    for place, value in ((("training", "validate_every"), training.validate_every), (("checkpoint", "every"), recipe.checkpoint.every)):
        if endless and value == "epoch":
            yield place, "a mixture with a source that repeats without end has no epoch; set a number of steps"
    if data.template is not None and data.source != "chat":
        yield ("data", "template"), "a chat template requires source: chat"
    templates = {each.template for each in data.mix if each.source == "chat"}
    if len(templates) > 1:
        named = " and ".join(sorted(each or "that of the tokenizer" for each in templates))
        yield ("data", "mix"), f"the conversations have several templates, {named}, and a model learns one; set one template for all"
    unnamed = [each for each in (data.mix or (data,)) if each.source == "chat" and each.template is None]
    if unnamed and data.tokenizer in (None, "bytes", "bpe") and recipe.model.weights is None:
        yield (
            ("data", "template"),
            f"tokenizer {data.tokenizer or 'bytes'} has no chat template; write template: chatml or llama3, or a file",
        )
    if data.packing == "best_fit" and data.documents == "joined":
        yield ("data", "packing"), "best_fit keeps documents whole, and documents: joined makes one text of them; use one of the two"
    try:
        examples = getattr(objective_factory(training.objective), "examples", "tokens")
    except MeshparError:
        return
    if examples != "tokens" and data.mix:
        yield ("data", "mix"), f"the objective {training.objective} learns from {examples}, and a mixture contains texts"


def _objective_problems(recipe: Recipe) -> Iterator[tuple[tuple[str, ...], str]]:
    training, data = recipe.training, recipe.data
    try:
        factory = objective_factory(training.objective)
    except MeshparError:
        return  # told before; an objective that is not installed by build.check_job, with what is
    if wants_teacher(factory) != (recipe.teacher is not None):
        words = "needs a teacher; set teacher.model and its weights" if recipe.teacher is None else "uses no teacher"
        yield ("teacher",), f"the objective {training.objective} {words}"
    if getattr(factory, "examples", "tokens") != "tokens" and data.source not in ("stdlib", "jsonl", "csv", "parquet", "dataset"):
        yield (
            ("data", "source"),
            f"the objective {training.objective} learns from stdlib, jsonl, csv or parquet, which hold two fields, got {data.source!r}",
        )


def folder_problems(section: Any) -> Iterator[str]:
    """Yield the folders of a model's section that are not there."""
    if section.weights is not None and not storage.place(section.weights).expanduser().exists():
        yield f"weights: {section.weights} does not exist"
        return
    folder = section.config if section.kind == "huggingface" and isinstance(section.config, str) else None
    if folder is not None and not (Path(folder).expanduser() / "config.json").is_file():
        yield f"config: no config.json in {folder}"


def _model_problems(section: Any) -> Iterator[str]:
    try:
        if section.kind in ("transformer", "gpt2"):
            model_config(section, vocab_size=512)
        elif section.kind == "huggingface" and isinstance(section.config, dict) and "model_type" not in section.config:
            yield "config: a config.json names its model_type, such as llama, qwen3 or gpt2"
    except ValueError as error:
        yield str(error)


def model_config(section: Any, vocab_size: int) -> TransformerConfig | GPT2Config:
    """Return the shape of a ``transformer`` or ``gpt2`` section.

    Args:
        section: of the recipe.
        vocab_size: of the data. A transformer that names neither a preset nor its own gets it, rounded up to a multiple of 64, which
            every usual tensor axis divides.
    """
    given = {name: value for name, value in section.given().items() if name not in ("kind", "preset", "weights", "ignore")}
    if section.kind == "gpt2":
        return GPT2Config(**given)
    given |= {"rope_scaling": RopeScaling(**section.rope_scaling.given())} if section.rope_scaling is not None else {}
    if section.preset is not None:
        return TransformerConfig.preset(section.preset, **given)
    return TransformerConfig(**{"vocab_size": rounded_vocabulary(vocab_size), **given})


def rounded_vocabulary(size: int) -> int:
    """Return a vocabulary that every usual tensor axis divides."""
    return -(-size // 64) * 64
