"""Recipes: what a run is made of, as strict YAML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self, final

from pydantic import Field, PrivateAttr

from meshpar.errors import MeshError, RecipeError
from meshpar.launchers.schema import Section, section_of, validate
from meshpar.launchers.techniques import read_passes, take_trainer_keys
from meshpar.launchers.yamlfile import Document, apply_overrides, read_document, to_yaml
from meshpar.mesh import MeshSpec
from meshpar.models.gpt2 import GPT2Config
from meshpar.models.transformer_config import RopeScaling, TransformerConfig
from meshpar.patterns import nearest

Count = Annotated[int, Field(ge=1)]
Every = Count | Literal["epoch"] | None
Fraction = Annotated[float, Field(ge=0, lt=1)]

_TransformerFields: Any = section_of(TransformerConfig)
_GPT2Fields: Any = section_of(GPT2Config)


@final
class TransformerSection(_TransformerFields):
    """A :class:`meshpar.models.Transformer`: the fields of its config, from a ``preset`` where one is named."""

    kind: Literal["transformer"] = "transformer"
    preset: str | None = None
    weights: Path | None = None


@final
class GPT2Section(_GPT2Fields):
    """A :class:`meshpar.models.GPT2`: the fields of its config; the defaults are the 124M model."""

    kind: Literal["gpt2"] = "gpt2"
    weights: Path | None = None


@final
class HuggingFaceSection(Section):
    """A causal language model of transformers.

    Attributes:
        config: the contents of a ``config.json``, or the folder that holds one; nothing is downloaded.
        weights: a folder of safetensors to start from; None: drawn from the seed.
    """

    kind: Literal["huggingface"] = "huggingface"
    config: dict[str, Any] | str
    weights: Path | None = None


@final
class DataSection(Section):
    """What is read, and how it becomes batches.

    Attributes:
        source: ``stdlib`` (the source of Python's standard library), ``files`` (text), ``jsonl``, or ``tokens`` (a ``.bin`` and its
            ``.json``).
        paths: files, folders and globs; one token file for ``tokens``.
        field: the key of the text in a line of JSON.
        separator: text that divides a file into documents; None: a file is one document.
        tokenizer: ``bytes``, ``bpe`` (trained on the text) or a folder with a ``tokenizer.json``; None: ``bytes`` for text, none for
            tokens.
        vocab_size: of a trained BPE.
        eos: the token that ends a document, where the tokenizer's folder does not say.
        sequence_length: tokens of a sample.
        micro_batch: samples of a data rank in one forward pass.
        accumulate: micro-batches in a step.
        shuffle: whether an epoch's order is drawn from the seed.
        validation_fraction: part of the documents that is kept for validation.
        validation_paths: text (or a token file) of its own to validate on.
        workers: processes that read ahead; 0: the training process itself.
        pin_memory: copy batches to page-locked memory; None: where there is an accelerator.
        persistent_workers: keep the workers from one epoch to the next.
        prefetch: batches that each worker keeps ready.
        cache: where tokenizers and tokens are kept.
    """

    source: Literal["stdlib", "files", "jsonl", "tokens"] = "stdlib"
    paths: tuple[str, ...] = ()
    field: str = "text"
    separator: str | None = None
    tokenizer: str | None = None
    vocab_size: Annotated[int, Field(ge=257)] = 4096
    eos: str | None = None
    sequence_length: Count = 256
    micro_batch: Count = 8
    accumulate: Count = 1
    shuffle: bool = True
    validation_fraction: Fraction = 0.0
    validation_paths: tuple[str, ...] = ()
    workers: Annotated[int, Field(ge=0)] = 0
    pin_memory: bool | None = None
    persistent_workers: bool = True
    prefetch: Count = 2
    cache: str = "~/.cache/meshpar"


@final
class OptimizerSection(Section):
    """AdamW; ``lr`` is the peak that the schedule reaches."""

    name: Literal["adamw"] = "adamw"
    lr: Annotated[float, Field(gt=0)] = 3e-4
    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    fused: bool | None = None


@final
class ScheduleSection(Section):
    """The learning rate over the run, see :class:`meshpar.training.schedule.Schedule`.

    Attributes:
        steps: the length that it is laid out for, where the run stops before or goes on after; None: the run's.
    """

    name: Literal["constant", "linear", "cosine", "step", "wsd"] = "cosine"
    steps: Count | None = None
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    step_every: Count = 1
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2


@final
class TrainingSection(Section):
    """How long, and what how often, see :class:`meshpar.training.settings.TrainSettings`.

    Attributes:
        objective: a plugin of the group ``meshpar.objectives``.
        loss_scaling: for float16; None: where a pass computes in float16.
        tensorboard: write TensorBoard scalars.
    """

    objective: str = "causal_lm"
    steps: Count | None = None
    epochs: Count | None = None
    clip: Annotated[float, Field(gt=0)] | None = 1.0
    log_every: Count = 10
    validate_every: Every = None
    validate_steps: Count | None = None
    check_replicas_every: Count | None = None
    nonfinite: Literal["raise", "skip"] = "raise"
    reduce_each: bool = False
    loss_scaling: bool | None = None
    tensorboard: bool = True


@final
class CheckpointSection(Section):
    """When checkpoints are written, which stay, and what a run starts from.

    Attributes:
        every: steps between two, ``epoch``, or None: at the end only.
        keep: how many of the newest stay; None: all.
        best: a metric (``val/loss``; ``+name`` for the highest) whose best step stays as well.
        background: write beside training; the optimizer is held back only while the state is copied.
        resume: ``auto`` goes on from the newest undamaged one in the output folder; ``never`` refuses a folder that holds any;
            a path (a step or a run) is gone on from where the output folder holds none.
    """

    every: Every = None
    keep: Count | None = 3
    best: str | None = None
    background: bool = False
    resume: str = "auto"


@final
class Recipe(Section):
    """A run.

    Attributes:
        name: of the run.
        seed: of initial weights, order of the data and dropout.
        device: ``auto``: the accelerator where there is one.
        output: the run's folder.
        mesh: axes and sizes; empty: one process.
        passes: name -> options, in their order; None: those that the mesh's axes call for.
        notes: what became of names that are not meshpar's own.
    """

    name: str
    seed: Annotated[int, Field(ge=0)] = 0
    device: Literal["auto", "cpu", "cuda", "xpu", "hpu", "mps"] = "auto"
    output: str = ""
    mesh: str = ""
    passes: tuple[dict[str, dict[str, Any]], ...] = ()
    model: Annotated[TransformerSection | GPT2Section | HuggingFaceSection, Field(discriminator="kind")]
    data: DataSection = DataSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    training: TrainingSection
    checkpoint: CheckpointSection = CheckpointSection()
    _notes: tuple[str, ...] = PrivateAttr(())

    @property
    def notes(self) -> tuple[str, ...]:
        """What became of old names."""
        return self._notes

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.output).expanduser()

    def noting(self, notes: Sequence[str]) -> Self:
        """Return the recipe with what is to be told about it."""
        self._notes = tuple(notes)
        return self

    def to_yaml(self) -> str:
        """Return the recipe as resolved: reading this text gives the same recipe."""
        data = self.model_dump(mode="json")
        data["model"] = {"kind": self.model.kind} | (data["model"] if self.model.kind == "huggingface" else _written(data["model"]))
        return to_yaml(data)


def _written(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that have a value: in a model's section, none means the shape's default."""
    return {name: _written(value) if isinstance(value, dict) else value for name, value in fields.items() if value is not None}


def load_recipe(source: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, with fields set from the command line.

    Args:
        source: a YAML file, or the name of a recipe that comes with meshpar (:func:`shipped`).
        overrides: ``training.steps=50``; values are YAML.

    Raises:
        RecipeError: listing everything that is wrong.
    """
    document = _find(source)
    apply_overrides(document, overrides)
    return resolve(document)


def shipped() -> dict[str, Path]:
    """Return the recipes that come with meshpar."""
    folder = resources.files("meshpar.launchers") / "recipes"
    return {
        Path(each.name).stem: Path(str(each)) for each in sorted(folder.iterdir(), key=lambda one: one.name) if each.name.endswith(".yaml")
    }


def resolve(document: Document) -> Recipe:
    """Return the recipe of a document, or raise RecipeError with every problem."""
    data = dict(document.data)
    problems: list[str] = []
    if isinstance(data.get("model"), Mapping):
        data["model"] = {"kind": "transformer", **data["model"]}
    take_trainer_keys(data, document, problems)
    data["mesh"] = data.get("mesh") or ""
    mesh = _read_mesh(data["mesh"], document, problems)
    passes, notes = read_passes(data.get("passes"), mesh, document, problems)
    data["passes"] = passes
    data["name"] = data.get("name") or Path(document.name).stem
    data["output"] = data.get("output") or f"runs/{data['name']}"
    found = validate(Recipe, data, document)
    if isinstance(found, Recipe):
        problems += [f"{document.where(place)}: {text}" for place, text in _conflicts(found)]
    else:
        assert isinstance(found, list)
        problems = found + problems
    if problems:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in this recipe"
        raise RecipeError("\n  ".join([count, *problems]))
    assert isinstance(found, Recipe)
    return found.noting(notes)


def _find(source: str | Path) -> Document:
    known = shipped()
    if str(source) in known and not Path(source).is_file():
        return read_document(known[str(source)])
    if not Path(source).is_file():
        near = nearest(str(source), known) or sorted(known)
        raise RecipeError(f"no recipe file {source}, and none of that name comes with meshpar; nearest: {', '.join(near)}")
    return read_document(Path(source))


def _read_mesh(text: Any, document: Document, problems: list[str]) -> MeshSpec | str | None:
    if not isinstance(text, str):
        return None  # the section's own type says what is wrong
    if text.strip().startswith("auto"):
        return text.strip()
    try:
        return MeshSpec(text)
    except MeshError as error:
        problems.append(f"{document.where(('mesh',))}: {error}")
        return None


def _conflicts(recipe: Recipe) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield fields that are right by themselves and wrong together."""
    data, training = recipe.data, recipe.training
    if training.steps is None and training.epochs is None:
        yield ("training",), "say how long to train: steps, epochs or both"
    if data.source == "stdlib" and data.paths:
        yield ("data", "paths"), "stdlib needs no paths; for files of your own write source: files"
    if data.source != "stdlib" and not data.paths:
        yield ("data", "paths"), f"source: {data.source} needs paths"
    if data.source == "tokens" and (len(data.paths) > 1 or len(data.validation_paths) > 1):
        yield ("data", "paths"), f"tokens are one .bin file, got {len(data.paths)}"
    if data.source == "tokens" and data.tokenizer in ("bytes", "bpe"):
        yield (
            ("data", "tokenizer"),
            "the input is tokens already: leave it out, or give the folder of the tokenizer that made them, for the export",
        )
    if data.source == "jsonl":
        for path in data.paths:
            if Path(path).suffix not in ("", ".jsonl") and not Path(path).expanduser().is_dir():
                yield ("data", "paths"), f"JSON lines are files ending in .jsonl, got {path!r}"
    if data.validation_paths and data.validation_fraction:
        yield ("data", "validation_fraction"), "validation is text of its own (validation_paths) or a part of this text, not both"
    if training.validate_every is not None and not data.validation_paths and not data.validation_fraction:
        yield ("training", "validate_every"), "there is nothing to validate on; give data.validation_fraction or data.validation_paths"
    length = recipe.schedule.steps or training.steps
    if length is not None and recipe.schedule.warmup_steps > length:
        yield ("schedule", "warmup_steps"), f"{recipe.schedule.warmup_steps} steps of warm-up do not fit in {length} steps"
    yield from ((("model",), text) for text in _model_problems(recipe.model))


def _model_problems(section: Any) -> Iterator[str]:
    if section.weights is not None and not section.weights.expanduser().exists():
        yield f"weights: {section.weights} does not exist"
    try:
        if section.kind != "huggingface":
            model_config(section, vocab_size=512)
        elif isinstance(section.config, str) and not (Path(section.config).expanduser() / "config.json").is_file():
            yield f"config: no config.json in {section.config}"
        elif isinstance(section.config, dict) and "model_type" not in section.config:
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
    given = {name: value for name, value in section.given().items() if name not in ("kind", "preset", "weights")}
    if section.kind == "gpt2":
        return GPT2Config(**given)
    given |= {"rope_scaling": RopeScaling(**section.rope_scaling.given())} if section.rope_scaling is not None else {}
    if section.preset is not None:
        return TransformerConfig.preset(section.preset, **given)
    return TransformerConfig(**{"vocab_size": -(-vocab_size // 64) * 64, **given})
