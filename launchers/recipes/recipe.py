"""Recipes: what a run is made of, as strict YAML."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, final

from pydantic import Field, PrivateAttr

from meshpar.checkpoints.storage import place as storage
from meshpar.core import registry
from meshpar.launchers.recipes.named import Classes, make_importable
from meshpar.launchers.recipes.schema import Section, build
from meshpar.launchers.recipes.sections import (
    AverageSection,
    CheckpointSection,
    DataSection,
    LoRASection,
    Model,
    Optimizer,
    OptimizerSection,
    Own,
    ScheduleSection,
    TeacherSection,
    TrainingSection,
    ValidationSection,
)
from meshpar.launchers.recipes.yamlfile import Document, to_yaml
from meshpar.process.homes import expanded
from meshpar.process.secrets import redacted
from meshpar.training.lora import LoRA
from meshpar.training.settings import Bound


@final
class Recipe(Section):
    """Describe a run.

    Attributes:
        name: name of the run; default: the recipe file's name.
        seed: seed of initial weights, order of the data and dropout.
        device: type of the devices; ``auto``: the accelerator if there is one, else the CPU.
        preflight: run the doctor's checks before training: ``warn`` logs findings, ``fail`` ends the job on any
            finding.
        watchdog: seconds without progress after which every rank prints its stack trace and the job ends; None: never.
        patience: seconds that replicas (``--elastic=replicas``) wait for a replica that does not answer, before they
            continue without it.
        profile: write a profile of a few early steps to the run's folder (:mod:`meshpar.launchers.jobs.profile`).
        output: the run's folder; default: ``runs/NAME``. A URL in an object store (``s3://bucket/run``) keeps its logs
            in ``runs/s3/bucket/run``.
        code: folder from which your own classes are imported; None: the recipe's folder.
        mesh: axes and sizes; empty: one process.
        passes: passes with their options, in order; default: the passes that the mesh's axes require.
        dtype: dtype of the stored parameters, their gradients and the optimizer state. Modules that the layout keeps in
            float32 stay float32. A pass computes in its own ``param_dtype``.
        model: see the sections below; the same applies to the other headings.
        teacher: the frozen teacher of a distillation.
        lora: adapters; nothing else is trained.
        averages: averages of the weights by name, see below: ``{ema: {decay: 0.999}}``.
        validation: which weights are validated.
        trackers: trackers with their options, in addition to TensorBoard: ``{wandb: {project: lm}}``. Names are those
            of plugins (``wandb``, ``trackio``, ``mlflow``, :mod:`meshpar.training.trackers`) or import paths.
        evaluations: evaluations with their options, made after each validation: ``{multiple_choice: {path:
            questions.jsonl}}``. Names are those of plugins (``multiple_choice``, ``samples``, ``lm_eval``,
            :mod:`meshpar.training.evaluation`) or import paths.
        notes: what a launcher changed in the recipe.
    """

    name: str = ""
    seed: Annotated[int, Bound(ge=0)] = 0
    device: Literal["auto", "cpu", "cuda", "xpu", "hpu", "mps"] = "auto"
    preflight: Literal["off", "warn", "fail"] = "off"
    watchdog: Annotated[float, Bound(gt=0)] | None = 600.0
    patience: Annotated[float, Bound(gt=0)] = 20.0
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
    averages: dict[str, AverageSection] = Field(default_factory=dict)
    validation: ValidationSection = ValidationSection()
    trackers: dict[str, dict[str, Any]] = Field(default_factory=dict)
    evaluations: dict[str, dict[str, Any]] = Field(default_factory=dict)
    checkpoint: CheckpointSection = CheckpointSection()
    _notes: tuple[str, ...] = PrivateAttr(())
    _classes: Classes = PrivateAttr(Classes())

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
        place = tuple(int(part) if part.isdigit() else part for part in field.split("."))
        return self._classes.document.where(place) if self._classes.document.name else field

    @property
    def classes(self) -> Classes:
        """The classes that the recipe names by import path."""
        return self._classes

    def find(self, kind: registry.Kind, name: str) -> Any:
        """Return the class that a field names, see :meth:`Classes.find`."""
        return self._classes.find(kind, name)

    @property
    def folder(self) -> Path:
        """The run's folder on this machine: ``output``, and where that is a URL, a folder for logs, metrics and the
        board.
        """
        return storage.either(
            self.kept, disk=expanded, store=lambda kept: Path("runs", *kept.root.split("://"), kept.key)
        )

    @property
    def kept(self) -> storage.Place:
        """Where the run's checkpoints, its recipe and its tokenizer are kept: ``output``."""
        return expanded(storage.place(self.output))

    def adapters(self) -> LoRA | None:
        """Return the settings of the adapters."""
        return None if self.lora is None else build(LoRA, self.lora)

    def read_from(self, classes: Classes) -> Self:
        """Return the recipe with its :attr:`classes`, and the document in which :meth:`where` looks up fields."""
        self._classes = classes
        return self

    def noting(self, notes: Sequence[str]) -> Self:
        """Return the recipe with other :attr:`notes`."""
        self._notes = tuple(notes)
        return self

    def to_yaml(self) -> str:
        """Return the recipe as resolved: reading this text gives the same recipe."""
        data = self.plain()
        models = [section["model"] for section in (data, data.get("teacher")) if section]
        for section, tag in ((data["optimizer"], "name"), *((model, "kind") for model in models)):
            if "class" in section:  # which says what kind it is
                del section[tag]
        return to_yaml(redacted(data))

    def sent(self) -> dict[str, Any]:
        """Return the resolved recipe as a launcher sends it to ranks, which :func:`received` reads there."""
        document = self._classes.document
        return {
            "recipe": self.plain(),
            "notes": list(self._notes),
            "name": document.name or self.name,
            "lines": list(document.lines.items()),
            "overrides": list(document.overrides.items()),
        }

    def plain(self) -> dict[str, Any]:
        """Return the resolved fields as plain data."""
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
        return data


def received(sent: Mapping[str, Any]) -> Recipe:
    """Return the recipe that a launcher sent by :meth:`Recipe.sent`, trusted, with its file's line numbers."""
    lines, overrides = ({tuple(place): text for place, text in sent[name]} for name in ("lines", "overrides"))
    document = Document(sent["name"], sent["recipe"], lines, overrides)
    if "code" in sent["recipe"]:
        make_importable(expanded(Path(sent["recipe"]["code"])))
    recipe = Recipe.model_validate_json(json.dumps(sent["recipe"]))
    return recipe.read_from(Classes(trusted=True, document=document)).noting(sent["notes"])


def _own_text(section: Own) -> dict[str, Any]:
    """Return a class of the user's own with its keywords, None included: that may be what a keyword is set to."""
    fields = section.model_dump(mode="json", by_alias=True)
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
    return {
        name: _written(value) if isinstance(value, dict) else value
        for name, value in fields.items()
        if value is not None
    }
