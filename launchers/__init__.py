"""Recipes, the command line, and where jobs run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshpar.process.imports import lazily

if TYPE_CHECKING:
    from meshpar.launchers.commands.train import train_recipe
    from meshpar.launchers.export import export_adapters, export_run
    from meshpar.launchers.recipes.loading import load_recipe
    from meshpar.launchers.recipes.recipe import Recipe
    from meshpar.launchers.targets.job import Job, Launched, Target

__all__ = ["Job", "Launched", "Recipe", "Target", "export_adapters", "export_run", "load_recipe", "train_recipe"]

_HOMES = {
    "commands.train": ("train_recipe",),
    "export": ("export_adapters", "export_run"),
    "recipes.loading": ("load_recipe",),
    "recipes.recipe": ("Recipe",),
    "targets.job": ("Job", "Launched", "Target"),
}

# Recipes and the command line load what they use, and no more.
__getattr__, __dir__ = lazily(__name__, _HOMES)
