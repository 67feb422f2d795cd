"""The reference of a recipe's keys, written from the sections and their docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from meshpar.launchers.recipes import sections
from meshpar.launchers.recipes.recipe import Recipe
from meshpar.launchers.recipes.schema import describe_type
from meshpar.models.gpt2 import GPT2Config
from meshpar.models.transformer_config import TransformerConfig
from meshpar.training.lora import LoRA
from meshpar.training.optimizer import AdamWSettings, Schedule
from meshpar.training.settings import TrainSettings

_WEIGHTS = sections.OwnModel
_SECTIONS: tuple[tuple[str, type[BaseModel], tuple[type, ...]], ...] = (
    ("", Recipe, (Recipe,)),
    (
        "model, kind: transformer",
        sections.TransformerSection,
        (TransformerConfig, sections.TransformerSection, _WEIGHTS),
    ),
    ("model, kind: gpt2", sections.GPT2Section, (GPT2Config, _WEIGHTS)),
    ("model, kind: huggingface", sections.HuggingFaceSection, (sections.HuggingFaceSection,)),
    ("model, class: package.module.Name", sections.OwnModel, (sections.Own, sections.OwnModel)),
    ("teacher", sections.TeacherSection, (sections.TeacherSection,)),
    ("lora", sections.LoRASection, (LoRA,)),
    ("data", sections.DataSection, (sections.DataSection,)),
    ("data.mix", sections.MixSection, (sections.MixSection,)),
    ("optimizer", sections.OptimizerSection, (AdamWSettings, sections.Rated, sections.OptimizerSection)),
    (
        "optimizer, class: package.module.Name",
        sections.OwnOptimizer,
        (sections.Own, sections.Rated, sections.OwnOptimizer),
    ),
    ("schedule", sections.ScheduleSection, (Schedule, sections.ScheduleSection)),
    ("training", sections.TrainingSection, (TrainSettings, sections.TrainingSection)),
    ("averages.NAME", sections.AverageSection, (sections.AverageSection,)),
    ("validation", sections.ValidationSection, (TrainSettings, sections.ValidationSection)),
    ("checkpoint", sections.CheckpointSection, (sections.CheckpointSection,)),
)
_NAMED = {
    "model",
    "teacher",
    "lora",
    "data",
    "optimizer",
    "schedule",
    "training",
    "validation",
    "checkpoint",
    "dataset",
    "validation_dataset",
    "rope_scaling",
}


def keys_text() -> str:
    """Return every key of a recipe with its type, default and meaning, as a page of Markdown."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield "# Keys of a recipe\n"
    yield "`meshpar check --keys` prints this page. Every key can be set on the command line: `training.steps=500`."
    yield "Relative paths start in the working directory of the command.\n"
    for title, section, sources in _SECTIONS:
        yield f"## {title or 'The recipe'}\n"
        yield "| key | type | default | meaning |"
        yield "| --- | --- | --- | --- |"
        own = {
            field.name: field.default
            for source in sources
            if dataclasses.is_dataclass(source)
            for field in dataclasses.fields(source)
        }
        meanings = {name: text for source in sources for name, text in attributes(source).items()}
        for name, field in section.model_fields.items():
            if field.default == "own":
                continue
            takes = "fields" if name in _NAMED else describe_type(field.annotation)
            written = name in inspect.get_annotations(section)  # the section's own field, in place of its dataclass's
            value = field.get_default(call_default_factory=True)
            default = (
                (field.description or "required")
                if field.is_required()
                else _default(value if written else own.get(name, value))
            )
            yield f"| `{field.alias or name}` | {_cell(takes)} | {_cell(default)} | {_cell(meanings.get(name, ''))} |"
        yield ""


def attributes(cls: type) -> dict[str, str]:
    """Return the attributes that a class's docstring documents, with what it says of each on one line."""
    _, _, text = (inspect.getdoc(cls) or "").partition("\nAttributes:\n")
    found: dict[str, str] = {}
    names: list[str] = []
    for line in text.splitlines():
        if not line.startswith("    "):
            break
        if entry := re.match(r"    (\w[\w, ]*): (.*)", line):
            names = entry[1].split(", ")
            found |= dict.fromkeys(names, entry[2])
        else:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found


def _default(value: object) -> str:
    if value in (PydanticUndefined, dataclasses.MISSING) or value is None or isinstance(value, BaseModel):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _cell(text: str) -> str:
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text).replace("``", "`").replace("|", "\\|").replace("None: ", "null: ")
    return re.sub(r"<class '([^']*)'>|typing\.", lambda found: found[1] or "", text)
