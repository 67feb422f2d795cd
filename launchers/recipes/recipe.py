"""Recipes, as strict YAML, and the classes that they name, imported for a job alone, or where a person trusts them."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias, cast, final

from pydantic import BeforeValidator, Field, PrivateAttr

from meshpar.checkpoints.storage import place as storage
from meshpar.core import registry
from meshpar.core.errors import MeshparError, RecipeError, brief
from meshpar.core.mesh import MeshSpec
from meshpar.core.passes import Guards
from meshpar.core.patterns import suggestion
from meshpar.launchers.recipes import sections
from meshpar.launchers.recipes.schema import Section, build, section_of, section_of_call, validate
from meshpar.launchers.recipes.sections import Own
from meshpar.launchers.recipes.yamlfile import Document, FieldPath, place_of, to_yaml
from meshpar.passes import Pass, passes_for
from meshpar.process.imports import expanded
from meshpar.process.secrets import redacted
from meshpar.training.lora import LoRA
from meshpar.training.settings import Bound

Written = dict[str, dict[str, Any]]
"""A pass as a resolved recipe writes it: ``{"FullyShard": {"offload": "cpu"}}``."""
Find: TypeAlias = Callable[[registry.Kind, str], Any]
"""Return the class that a name stands for, see :meth:`meshpar.core.registry.Kind.find`."""


_OFF = BeforeValidator(lambda value: "off" if value is False else value)  # of YAML's off without quotes


class UntrustedError(RecipeError):
    """Raised where a command that only looks needs a class that a recipe names by import path."""


@final
@dataclass(frozen=True, slots=True)
class Classes:
    """The classes that a recipe names: import paths by place, of those that are no plugins; ``trusted``: to import."""

    paths: Mapping[FieldPath, str] = field(default_factory=dict)
    trusted: bool = False
    document: Document = field(default_factory=lambda: Document("", {}))

    def find(self, kind: registry.Kind, name: str) -> Any:
        """Return the plugin or class called ``name``; raises UntrustedError if it may not be imported."""
        if not self.trusted and not kind.has(name):
            registry.check_path(name)
            where = next((f"{self.document.where(at)}: " for at, path in self.paths.items() if path == name), "")
            raise UntrustedError(
                f"{where}this command imports no class that a recipe names, got {name}; if you trust the recipe and "
                "the code that it names, add --trust"
            )
        return kind.find(name)

    @property
    def unseen(self) -> dict[FieldPath, str]:
        return {} if self.trusted else dict(self.paths)

    def origins(self) -> str:
        """Return one line: which classes are imported from which files."""
        files: dict[str, list[str]] = {}
        for path in dict.fromkeys(self.paths.values()):
            home = path.rpartition(".")[0]
            files.setdefault(vars(sys.modules[home]).get("__file__") or home, []).append(path)
        parts = [f"{', '.join(names)} from {file}" for file, names in files.items()]
        return f"imports {'; '.join(parts)}" if parts else ""


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
        guards: when ranks compare what must be alike: ``always``, ``first`` (in the first two steps) or ``off``, as in
            :class:`meshpar.Plan`; also of the teacher's plan.
        same_bits: losses, gradients and weights have the same bits on every mesh; ``data.accumulate`` and
            ``training.validate_steps`` then count the micro-batches of all data ranks.
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
    preflight: Annotated[Literal["off", "warn", "fail"], _OFF] = "off"
    watchdog: Annotated[float, Bound(gt=0)] | None = 600.0
    patience: Annotated[float, Bound(gt=0)] = 20.0
    profile: bool = False
    output: str = ""
    code: str | None = None
    mesh: str = ""
    passes: tuple[dict[str, dict[str, Any]], ...] = ()
    guards: Annotated[Guards, _OFF] = "always"
    same_bits: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    model: sections.Model
    teacher: sections.TeacherSection | None = None
    lora: sections.LoRASection | None = None
    data: sections.DataSection = sections.DataSection()
    optimizer: sections.Optimizer = sections.OptimizerSection()
    schedule: sections.ScheduleSection = sections.ScheduleSection()
    training: sections.TrainingSection
    averages: dict[str, sections.AverageSection] = Field(default_factory=dict)
    validation: sections.ValidationSection = sections.ValidationSection()
    trackers: dict[str, dict[str, Any]] = Field(default_factory=dict)
    evaluations: dict[str, dict[str, Any]] = Field(default_factory=dict)
    checkpoint: sections.CheckpointSection = sections.CheckpointSection()
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
        document = self._classes.document
        return document.where(place_of(field)) if document.name else field

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
        return storage.by_storage(
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
            dataset = getattr(self.data, name)
            data["data"] = {key: value for key, value in data["data"].items() if key != name}
            data["data"] |= {} if dataset is None else {name: _own_text(dataset)}
        for name in ("lora", "teacher"):
            data[name] = None if data[name] is None else _written(data[name])
        if self.teacher is not None:
            data["teacher"]["model"] = _model_text(self.teacher.model)
        absent = [name for name in ("code", "lora", "teacher") if data[name] is None]
        return {name: value for name, value in data.items() if name not in absent}


def received(sent: Mapping[str, Any]) -> Recipe:
    """Return the recipe that a launcher sent by :meth:`Recipe.sent`, trusted, with its file's line numbers."""
    lines, overrides = ({tuple(key): text for key, text in sent[name]} for name in ("lines", "overrides"))
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


def make_importable(folder: Path) -> None:
    """Append ``folder`` to the import path: a file there does not hide an installed package."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def own_problems(
    factory: object, keywords: Mapping[str, Any], document: Document, place: FieldPath, given: tuple[str, ...] = ()
) -> list[str]:
    """Return problems of a class's keywords, with file and line; ``given``: arguments that meshpar passes."""
    if not callable(factory) or (not isinstance(factory, type) and not inspect.isroutine(factory)):
        return [
            f"{document.where((*place, name))}: {type(factory).__name__} is an object already and accepts no keywords"
            for name in keywords
        ]
    try:
        section = validate(section_of_call(factory, given), dict(keywords), document, place)
    except ValueError as error:  # a builtin without a signature
        return [f"{document.where(place)}: {error}"]
    return section if isinstance(section, list) else []


def make_own(factory: Any, keywords: Mapping[str, Any], *arguments: Any, **given: Any) -> Any:
    """Return what a class or function makes of its keywords; objects as they are. Raises RecipeError."""
    if not isinstance(factory, type) and not inspect.isroutine(factory):
        return factory
    leading = tuple(inspect.signature(factory).parameters)[: len(arguments)]
    section = validate(section_of_call(factory, (*leading, *given)), dict(keywords), Document("", {}))
    if not isinstance(section, Section):
        raise RecipeError("; ".join(text.removeprefix(": ") for text in section))
    try:
        return build(factory, section, *arguments, **given)
    except MeshparError:
        raise
    except Exception as error:  # the code of a user
        raise RecipeError(f"{factory.__name__} cannot be made with these keywords: {brief(error)}") from error


def has_keyword(factory: Any, name: str) -> bool:
    return callable(factory) and name in inspect.signature(factory).parameters


def wants_teacher(factory: Any) -> bool:
    return isinstance(factory, type) and has_keyword(factory, "teacher")


def read_passes(
    raw: object, mesh: MeshSpec | str | None, classes: Classes, problems: list[str], at: FieldPath = ()
) -> list[Written]:
    """Return a recipe's passes, resolved, or those that the mesh requires; adds problems to ``problems``."""
    document = classes.document
    if raw in (None, "auto"):
        return default_passes(mesh)
    if not isinstance(raw, list):
        problems.append(
            f"{document.where((*at, 'passes'))}: expected a list of passes (- FullyShard, or - FullyShard: {{offload: "
            f"cpu}}), got {raw!r}"
        )
        return []
    passes: list[Written] = []
    for number, item in enumerate(raw):
        entry: FieldPath = (*at, "passes", number)
        name, options = next(iter(item.items())) if isinstance(item, Mapping) and len(item) == 1 else (item, {})
        if not isinstance(name, str) or not (options is None or isinstance(options, Mapping)):
            expected = "expected a pass's name, or one name with its options"
            problems.append(f"{document.where(entry)}: {expected}, got {item!r}")
            continue
        options = dict(options or {})
        try:
            entry = (*entry, name) if isinstance(item, Mapping) else entry
            wrong, _, section = _make_pass(name, options, classes.find, document, entry)
        except UntrustedError:  # it stays as it is written
            passes.append({name: options})
            continue
        problems += wrong
        if not wrong:
            passes.append({name: options if section is None else section.model_dump(mode="json", exclude_unset=True)})
    return passes


def default_passes(mesh: MeshSpec | str | None) -> list[Written]:
    return [{pass_.name: {}} for pass_ in (() if mesh is None else passes_for(mesh))]


def make_passes(passes: Sequence[Mapping[str, Mapping[str, Any]]], find: Find = registry.Kind.find) -> list[Pass]:
    """Return the pass objects of a resolved recipe, whose classes ``find`` finds; raises MeshparError."""
    objects: list[Pass] = []
    for name, options in (entry for written in passes for entry in written.items()):
        problems, pass_, _ = _make_pass(name, options, find, Document("passes", {}), (name,))
        if pass_ is None:
            raise MeshparError("\n".join(problems))
        objects.append(pass_)
    return objects


def _make_pass(
    name: str, options: Mapping[str, Any], find: Find, document: Document, at: FieldPath
) -> tuple[list[str], Pass | None, Section | None]:
    """Return the problems of a pass, the pass if there are none, and the section of its options if it has one."""
    where, installed = document.where(at), registry.names(registry.PASSES)
    if "." not in name and name not in installed:
        return [f"{where}: no pass {name!r} is installed; {suggestion(name, installed)}"], None, None
    try:
        factory = find(registry.PASS, name)
        if dataclasses.is_dataclass(factory) and isinstance(factory, type):
            section = validate(section_of(factory), dict(options), document, at)
            if not isinstance(section, Section):
                return section, None, None
            return [], cast("Pass", build(factory, section)), section
        if options and not callable(factory):
            return [f"{where}: {name} has no options"], None, None
        return [], cast("Pass", factory(**options) if callable(factory) else factory), None
    except UntrustedError:
        raise
    except (TypeError, ValueError, MeshparError) as error:
        return [f"{where}: {error}"], None, None
