"""``meshpar describe``, ``check``, ``convert`` and ``plugins``: inspect without running."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import entry_points

from meshpar import registry
from meshpar.errors import PlanError
from meshpar.launchers.jobs import build
from meshpar.launchers.recipes.recipe import Recipe, UnknownRecipeError, load_recipe, resolve, shipped
from meshpar.launchers.recipes.sections import Own
from meshpar.launchers.recipes.yamlfile import Document, apply_overrides
from meshpar.models.transformer_config import PRESETS


def describe_recipe(source: str, overrides: Sequence[str] = (), *, mesh: str | None = None, world_size: int | None = None) -> str:
    """Return a table of the parameters that a rank stores.

    Args:
        source: a recipe, or the name of a shape (``llama-70b``, ``gpt2``).
        overrides: fields of the recipe to set.
        mesh: replaces the recipe's mesh.
        world_size: number of ranks; None: the size of the mesh.

    Raises:
        MeshparError: the recipe or the plan has problems.
    """
    recipe = recipe_or_shape(source, [*overrides, *([] if mesh is None else [f"mesh={mesh}"])])
    model = build.build_shape(recipe)
    ranks = build.world_size_of(recipe) if world_size is None else world_size
    made = build.plan_of(recipe).describe(model, build.layout_of(recipe, model), world_size=ranks)
    return str(replace(made, optimizer_bytes=None) if isinstance(recipe.optimizer, Own) else made)


def check_recipe(source: str, overrides: Sequence[str] = (), *, world_size: int | None = None) -> str:
    """Check a recipe and return a line that says that it fits.

    Raises:
        RecipeError, PlanError: listing every problem.
    """
    recipe = load_recipe(source, overrides)
    ranks = build.world_size_of(recipe) if world_size is None else world_size
    problems = build.check_job(recipe, ranks)
    if problems:
        raise PlanError(problems)
    notes = "".join(f"\nnote: {note}" for note in recipe.notes)
    return f"{source} fits {ranks} rank{'s' if ranks > 1 else ''}: {build.plan_of(recipe)}{notes}"


def convert_recipe(source: str, overrides: Sequence[str] = ()) -> str:
    """Return a recipe as resolved, in meshpar's own keys; comments above it tell what became of foreign ones.

    Raises:
        RecipeError: with everything that is wrong.
    """
    recipe = load_recipe(source, overrides)
    return "".join(f"# {note}\n" for note in recipe.notes) + recipe.to_yaml()


def list_plugins() -> str:
    """Return the installed plugins by group, with their packages."""
    lines = []
    for group in registry.GROUPS:
        lines.append(group)
        found = sorted(entry_points(group=group), key=lambda each: each.name)
        lines += [f"  {each.name:24} {each.value}  ({each.dist.name if each.dist else 'unknown'})" for each in found] or ["  (none)"]
    return "\n".join(lines)


def recipe_or_shape(source: str, overrides: Sequence[str]) -> Recipe:
    """Return the recipe called ``source``, or a recipe of the shape with that name.

    Raises:
        RecipeError: there is neither, or the recipe has problems.
    """
    if source in PRESETS or (source == "gpt2" and source not in shipped()):
        model = {"kind": "gpt2"} if source == "gpt2" else {"preset": source}
        document = Document(source, {"name": source, "model": model, "training": {"steps": 1}})
        apply_overrides(document, overrides)
        return resolve(document)
    try:
        return load_recipe(source, overrides)
    except UnknownRecipeError as error:
        raise UnknownRecipeError(f"{error}; shapes: {', '.join(PRESETS)}") from None
