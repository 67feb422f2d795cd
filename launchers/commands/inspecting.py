"""``meshpar describe``, ``check``, ``convert`` and ``plugins``: inspect without running."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import entry_points

from meshpar.core import registry
from meshpar.core.errors import PlanError
from meshpar.core.mesh import MeshSpec
from meshpar.launchers.agent.replicas import check_elastic, divided
from meshpar.launchers.jobs import build
from meshpar.launchers.jobs.data_checks import data_notes, untried
from meshpar.launchers.recipes.loading import UnknownRecipeError, load_recipe, resolve, shipped
from meshpar.launchers.recipes.recipe import Recipe
from meshpar.launchers.recipes.sections import Own
from meshpar.launchers.recipes.yamlfile import Document, apply_overrides, dotted
from meshpar.models.transformer_config import PRESETS


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
    recipe, ranks, replicas = one_replica(
        recipe, build.world_size_of(recipe) if world_size is None else world_size, elastic
    )
    model = build.build_shape(recipe)
    made = build.plan_of(recipe).describe(model, build.layout_of(recipe, model), world_size=ranks, replicas=replicas)
    return str(replace(made, optimizer_bytes=None) if isinstance(recipe.optimizer, Own) else made)


def one_replica(recipe: Recipe, ranks: int, elastic: str | None, nodes: int = 1) -> tuple[Recipe, int, int]:
    """Return the recipe of one replica of an elastic job, its ranks, and the number of replicas."""
    if elastic is None:
        return recipe, ranks, 1
    check_elastic(elastic)
    division = divided(MeshSpec.placed(recipe.mesh, ranks, ranks // nodes), nodes, 0)
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
    recipe, ranks, replicas = one_replica(
        recipe, build.world_size_of(recipe) if world_size is None else world_size, elastic
    )
    problems = build.check_job(recipe, ranks, replica=replicas > 1)
    if problems:
        raise PlanError(problems)
    if unseen := recipe.classes.unseen:
        listed = ", ".join(
            dotted(place) if path in place else f"{dotted(place)} {path}" for place, path in unseen.items()
        )
        lines = [
            *recipe.notes,
            f"a check imports no class that a recipe names, so what needs these is not checked: {listed}; if you trust "
            f"the recipe and the code in {recipe.code}, add --trust",
        ]
        return "\nnote: ".join([f"{source}: no problem found without its own classes", *lines])
    local = build.with_local_data(recipe)
    notes = "".join(f"\nnote: {note}" for note in (*recipe.notes, *untried(recipe), *data_notes(local)))
    prefix = f"{replicas} replicas of " if replicas > 1 else ""
    return f"{source} fits {prefix}{ranks} rank{'s' if ranks > 1 else ''}: {build.plan_of(recipe)}{notes}"


def convert_recipe(source: str, overrides: Sequence[str] = ()) -> str:
    """Return a recipe as resolved: with overrides, defaults and the passes that its mesh requires."""
    return load_recipe(source, overrides).to_yaml()


def list_plugins() -> str:
    """Return the installed plugins by group, with their packages."""
    lines = []
    for group in registry.GROUPS:
        lines.append(group)
        found = sorted(entry_points(group=group), key=lambda entry: entry.name)
        lines += [
            f"  {entry.name:24} {entry.value}  ({entry.dist.name if entry.dist else 'unknown'})" for entry in found
        ] or ["  (none)"]
    return "\n".join(lines)


def recipe_or_shape(source: str, overrides: Sequence[str], *, trust: bool) -> Recipe:
    """Return the recipe called ``source``, or a recipe of the shape with that name."""
    if source in PRESETS or (source == "gpt2" and source not in shipped()):
        model = {"kind": "gpt2"} if source == "gpt2" else {"preset": source}
        document = Document(source, {"name": source, "model": model, "training": {"steps": 1}})
        apply_overrides(document, overrides)
        return resolve(document, trust=trust)
    try:
        return load_recipe(source, overrides, trust=trust)
    except UnknownRecipeError as error:
        raise UnknownRecipeError(f"{error}; shapes: {', '.join(PRESETS)}") from None
