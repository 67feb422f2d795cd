"""``meshpar describe``, ``check``, ``convert``, ``plan`` and ``plugins``: inspect without running."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Sequence
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from meshpar.core import registry
from meshpar.core.errors import MeshparError, PlanError
from meshpar.core.mesh import MeshSpec, is_auto
from meshpar.core.passes import Stage
from meshpar.forecasting import Forecast, Hardware
from meshpar.forecasting.html import page
from meshpar.forecasting.ranking import Ranking, ranking_text
from meshpar.forecasting.report import as_data
from meshpar.forecasting.search import search as search_plans
from meshpar.launchers.agent.replicas import check_elastic, divide_replicas
from meshpar.launchers.jobs import build, datasets
from meshpar.launchers.jobs.checks import check_job, data_notes, untried
from meshpar.launchers.jobs.reports import show_parts
from meshpar.launchers.recipes import sections
from meshpar.launchers.recipes.loading import UnknownRecipeError, load_recipe, resolve, shipped
from meshpar.launchers.recipes.recipe import Recipe
from meshpar.launchers.recipes.schema import describe_type
from meshpar.launchers.recipes.sections import Own
from meshpar.launchers.recipes.yamlfile import Document, apply_overrides, dotted
from meshpar.models.gpt2 import GPT2Config
from meshpar.models.transformer_config import PRESETS, TransformerConfig
from meshpar.passes import passes_for
from meshpar.plan import Plan
from meshpar.training.adamw_and_schedules import AdamWSettings, Schedule
from meshpar.training.lora import LoRA
from meshpar.training.settings import TrainSettings


def describe_recipe(
    source: str,
    overrides: Sequence[str] = (),
    *,
    mesh: str | None = None,
    world_size: int | None = None,
    elastic: str | None = None,
    trust: bool = False,
) -> str:
    """Return a table of the parameters that each rank stores, for a recipe or a shape (``llama-70b``)."""
    recipe = recipe_or_shape(source, [*overrides, *([] if mesh is None else [f"mesh={mesh}"])], trust=trust)
    ranks = build.world_size_of(recipe) if world_size is None else world_size
    recipe, ranks, replicas = one_replica(recipe, ranks, elastic)
    model = build.build_shape(recipe)
    plan = build.plan_of(recipe)
    table = plan.describe(model, build.layout_of(recipe, model), world_size=ranks, replicas=replicas)
    table = dataclasses.replace(table, optimizer_bytes=None) if isinstance(recipe.optimizer, Own) else table
    usual = ", ".join(f"{pass_.name}()" for pass_ in passes_for(plan.mesh))
    return f'{table}\nmeshpar.passes_for("{plan.mesh}") returns [{usual}]'


def one_replica(recipe: Recipe, ranks: int, elastic: str | None, nodes: int = 1) -> tuple[Recipe, int, int]:
    """Return the recipe of one replica of an elastic job, its ranks, and the number of replicas."""
    if elastic is None:
        return recipe, ranks, 1
    check_elastic(elastic)
    division = divide_replicas(MeshSpec.placed(recipe.mesh, ranks, ranks // nodes), nodes, 0)
    return division.recipe(recipe), division.ranks, division.count


def check_recipe(
    source: str,
    overrides: Sequence[str] = (),
    *,
    world_size: int | None = None,
    elastic: str | None = None,
    trust: bool = False,
) -> str:
    """Check a recipe; return a line that says that it fits, and what is not checked without ``trust``."""
    recipe = load_recipe(source, overrides, trust=trust)
    ranks = build.world_size_of(recipe) if world_size is None else world_size
    recipe, ranks, replicas = one_replica(recipe, ranks, elastic)
    problems = check_job(recipe, ranks, replica=replicas > 1)
    if problems:
        raise PlanError(problems)
    if unseen := recipe.classes.unseen:
        fields = [dotted(at) if path in at else f"{dotted(at)} {path}" for at, path in unseen.items()]
        note = (
            f"a check imports no class that a recipe names, so what needs these is not checked: {', '.join(fields)}; "
            f"if you trust the recipe and the code in {recipe.code}, add --trust"
        )
        return "\nnote: ".join([f"{source}: no problem found without its own classes", *recipe.notes, note])
    local = datasets.with_local_data(recipe)
    notes = "".join(f"\nnote: {note}" for note in (*recipe.notes, *untried(recipe), *data_notes(local)))
    prefix = f"{replicas} replicas of " if replicas > 1 else ""
    return f"{source} fits {prefix}{ranks} rank{'s' if ranks > 1 else ''}: {build.plan_of(recipe)}{notes}"


def forecast_recipe(
    source: str, overrides: Sequence[str], hardware: str, *, nodes: int | None, gpus_per_node: int | None,
    elastic: str | None, search: bool, seconds: float, full: bool, trust: bool,
    html: Path | None, json_file: Path | None,
) -> None:  # fmt: skip
    """Print the forecast of a recipe or a shape, or the ranking of a search, and write it to files."""
    profile, ranks = profile_and_ranks(hardware, nodes, gpus_per_node)
    recipe = recipe_or_shape(source, overrides, trust=trust)
    ranks = ranks or ranks_of(recipe.mesh, profile, search=search)
    forecasts: Sequence[Forecast]
    ranking = _search_plans(recipe, profile, ranks, elastic, seconds) if search else None
    if ranking is not None:
        forecasts = ranking.best
        print(ranking_text(ranking), forecasts[0], sep="\n")
    else:
        recipe, ranks, replicas = one_replica(recipe, ranks, elastic, max(1, ranks // profile.node))
        plan, depth = build.plan_of(recipe), "all" if full else "probes"
        forecast = partial(build.forecast_job, recipe, profile, ranks, depth=depth, replicas=replicas)
        forecasts = [forecast(plan=plan)]
        plain = Plan(plan.mesh, [pass_ for pass_ in plan.passes if pass_.stage != Stage.RECOMPUTE])
        without = forecast(plan=plain) if len(plain.passes) < len(plan.passes) else None
        print(forecasts[0])
        if without is not None:
            print(_recomputation(forecasts[0], without))
    write_reports(forecasts, ranking, html, json_file)


def profile_and_ranks(hardware: str, nodes: int | None, gpus_per_node: int | None) -> tuple[Hardware, int | None]:
    """Return the profile with nodes of a size, and the number of ranks where the options say it."""
    profile = Hardware.load(hardware)
    if gpus_per_node is not None:
        profile = dataclasses.replace(profile, node=gpus_per_node)
    return profile, None if nodes is None and gpus_per_node is None else (nodes or 1) * profile.node


def write_reports(
    forecasts: Sequence[Forecast], ranking: Ranking | None, html: Path | None, json_file: Path | None
) -> None:
    """Write forecasts to files, and print where."""
    if html is not None:
        html.write_text(page(forecasts, ranking), encoding="utf-8")
        print(f"report: {html}")
    if json_file is not None:
        json_file.write_text(json.dumps([as_data(forecast) for forecast in forecasts], indent=1), encoding="utf-8")
        print(f"data: {json_file}")


def _search_plans(recipe: Recipe, profile: Hardware, ranks: int, elastic: str | None, seconds: float) -> Ranking:
    """Return the ranking of plans for a recipe; raises MeshparError where none fits, or the search is not for it."""
    if elastic is not None:
        check_elastic(elastic)
    plan = build.plan_of(recipe)
    if recipe.training.objective != "causal_lm" or recipe.lora is not None or isinstance(recipe.optimizer, Own):
        raise MeshparError(
            "--search trains a whole model on packed text with AdamW; forecast this recipe's plans one by one, "
            "without --search"
        )
    model = build.build_shape(recipe)
    with show_parts("steps simulated") as advance:
        batch = build.batch_of(recipe, plan, ranks)
        layout, replicas = registry.layout_for(model), elastic is not None
        ranking = search_plans(
            model, layout, batch, profile, ranks, plan=plan, progress=advance, elastic=replicas, seconds=seconds
        )
    if not ranking.best:
        nearest = min(ranking.out, key=lambda candidate: candidate.peak or float("inf"))
        raise MeshparError(
            f"no setting fits {ranks} x {profile.name}; nearest: {nearest.settings}: {nearest.problem}; use more nodes"
        )
    return ranking


def ranks_of(mesh: str, profile: Hardware, *, search: bool) -> int:
    """Return the ranks of a mesh that says how many there are; otherwise, and in a search, a node's."""
    spec = None if search or not mesh or is_auto(mesh) else MeshSpec(mesh)
    return profile.node if spec is None or -1 in spec.axes.values() else spec.size


def _recomputation(forecast: Forecast, without: Forecast) -> str:
    """Return a line on the memory that recomputation saves and the time that it costs."""
    saved, more = without.memory.peak - forecast.memory.peak, forecast.cost.seconds - without.cost.seconds
    verdict = "may not fit" if without.verdict == "may fit" else without.verdict
    fits = "" if without.fits else f", and without it the step {verdict}"
    return (
        f"recomputation saves {saved / 2**30:.2f} GiB of a peak of {without.memory.peak / 2**30:.2f} "
        f"and costs {more * 1e3:,.1f} ms a step, {more / without.cost.seconds:.0%}{fits}"
    )


def list_plugins() -> str:
    lines = []
    for group in registry.GROUPS:
        lines.append(group)
        entries = sorted(entry_points(group=group), key=lambda entry: entry.name)
        packages = [entry.dist.name if entry.dist else "unknown" for entry in entries]
        rows = [f"  {entry.name:24} {entry.value}  ({package})" for entry, package in zip(entries, packages)]
        lines += rows or ["  (none)"]
    return "\n".join(lines)


def recipe_or_shape(source: str, overrides: Sequence[str], *, trust: bool) -> Recipe:
    if source in PRESETS or (source == "gpt2" and source not in shipped()):
        model = {"kind": "gpt2"} if source == "gpt2" else {"preset": source}
        document = Document(source, {"name": source, "model": model, "training": {"steps": 1}})
        apply_overrides(document, overrides)
        return resolve(document, trust=trust)
    try:
        return load_recipe(source, overrides, trust=trust)
    except UnknownRecipeError as error:
        raise UnknownRecipeError(f"{error}; shapes: {', '.join(PRESETS)}") from None


_SECTIONS: tuple[tuple[str, type[BaseModel], tuple[type, ...]], ...] = (
    ("The recipe", Recipe, ()),
    ("model, kind: transformer", sections.TransformerSection, (TransformerConfig, sections.HuggingFaceSection)),
    ("model, kind: gpt2", sections.GPT2Section, (GPT2Config, sections.HuggingFaceSection)),
    ("model, kind: huggingface", sections.HuggingFaceSection, ()),
    ("model, class: package.module.Name", sections.OwnModel, (sections.HuggingFaceSection, Own)),
    ("teacher", sections.TeacherSection, ()),
    ("lora", sections.LoRASection, (LoRA,)),
    ("data", sections.DataSection, ()),
    ("data.mix", sections.MixSection, ()),
    ("optimizer", sections.OptimizerSection, (AdamWSettings, sections.Rated)),
    ("optimizer, class: package.module.Name", sections.OwnOptimizer, (Own, sections.Rated)),
    ("schedule", sections.ScheduleSection, (Schedule,)),
    ("training", sections.TrainingSection, (TrainSettings,)),
    ("averages.NAME", sections.AverageSection, ()),
    ("validation", sections.ValidationSection, (TrainSettings,)),
    ("checkpoint", sections.CheckpointSection, ()),
)
"""Heading, section, and the classes that document more of its fields."""
_NAMED = {
    *("model", "teacher", "lora", "data", "optimizer", "schedule", "training", "validation", "checkpoint"),
    *("dataset", "validation_dataset", "rope_scaling"),
}


def keys_text() -> str:
    """Return every key of a recipe with its type, default and meaning, as a page of Markdown."""
    lines = [
        "# Keys of a recipe\n",
        "`meshpar check --keys` prints this page. Every key can be set on the command line: `training.steps=500`.",
        "Relative paths start in the working directory of the command.\n",
    ]
    for title, section, documented in _SECTIONS:
        sources = (*documented, section)
        lines += [f"## {title}\n", "| key | type | default | meaning |", "| --- | --- | --- | --- |"]
        classes = [source for source in sources if dataclasses.is_dataclass(source)]
        defaults = {field.name: field.default for source in classes for field in dataclasses.fields(source)}
        meanings = {name: text for source in sources for name, text in attributes(source).items()}
        for name, field in section.model_fields.items():
            if field.default == "own":
                continue
            takes = "fields" if name in _NAMED else describe_type(field.annotation)
            written = name in inspect.get_annotations(section)  # the section's own field, in place of its dataclass's
            value = field.get_default(call_default_factory=True)
            default = _default(value if written else defaults.get(name, value))
            default = field.description or "required" if field.is_required() else default
            cells = map(_cell, (takes, default, meanings.get(name, "")))
            lines.append(f"| `{field.alias or name}` | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def attributes(cls: type) -> dict[str, str]:
    """Return the attributes that a class's docstring documents, with what it says of each on one line."""
    _, _, text = (inspect.getdoc(cls) or "").partition("\nAttributes:\n")
    meanings: dict[str, str] = {}
    names: list[str] = []
    for line in text.splitlines():
        if not line.startswith("    "):
            break
        if entry := re.match(r"    (\w[\w, ]*): (.*)", line):
            names = entry[1].split(", ")
            meanings |= dict.fromkeys(names, entry[2])
        else:
            meanings |= {name: f"{meanings[name]} {line.strip()}" for name in names}
    return meanings


def _default(value: object) -> str:
    if value in (PydanticUndefined, dataclasses.MISSING, None) or isinstance(value, BaseModel):
        return ""
    return str(value).lower() if isinstance(value, bool) else str(list(value) if isinstance(value, tuple) else value)


def _cell(text: str) -> str:
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text).replace("``", "`").replace("|", "\\|").replace("None: ", "null: ")
    return re.sub(r"<class '([^']*)'>|typing\.", lambda found: found[1] or "", text)
