"""The step of a recipe's job, as a forecast replays it: one place for `meshpar plan` and for the forecast beside a job."""

from __future__ import annotations

from typing import Any

from torch import nn

from meshpar.errors import RecipeError
from meshpar.forecasting.api import forecast
from meshpar.forecasting.hardware import Hardware
from meshpar.forecasting.report import Forecast
from meshpar.forecasting.step import Batch, ObjectiveLoss
from meshpar.launchers.jobs import build
from meshpar.launchers.recipes.recipe import Recipe, folder_problems
from meshpar.launchers.recipes.sections import Own
from meshpar.plan import Plan


def batch_of(recipe: Recipe) -> Batch:
    """Return what a data rank trains on in a step, with samples of full length."""
    data = recipe.data
    return Batch(
        sequence=build.sequence_of(recipe),
        micro_batch=data.micro_batch,
        accumulate=data.accumulate,
        examples=build.examples_of(recipe),
        target=data.target_length,
        reduce_each=recipe.training.reduce_each,
        documents=build.several_documents(recipe),
    )


def forecast_job(recipe: Recipe, hardware: Hardware | str, ranks: int, *, plan: Plan | None = None, **options: Any) -> Forecast:
    """Forecast a recipe's step: its model with adapters, its objective, and its teacher.

    Args:
        recipe: the job.
        hardware: a profile or the name of one.
        ranks: number of ranks.
        plan: instead of the recipe's.
        options: of :func:`meshpar.forecast`.
    """
    model = build.build_shape(recipe)
    layout = build.layout_of(recipe, model)
    teacher: tuple[Plan, nn.Module] | None = None
    if recipe.teacher is not None:
        if missing := list(folder_problems(recipe.teacher.model)):
            raise RecipeError(f"teacher.model.{missing[0]}; train and export the teacher first")
        teacher = build.teacher_plan_of(recipe), build.teacher_shape(recipe)
    loss = ObjectiveLoss(build.objective_of(recipe, None if teacher is None else teacher[1]))
    return forecast(
        plan or build.plan_of(recipe),
        model,
        batch_of(recipe),
        hardware=hardware,
        world_size=ranks,
        layout=layout,
        loss=loss,
        teacher=teacher,
        optimizer=build.optimizer_of(recipe) if isinstance(recipe.optimizer, Own) else None,
        **options,
    )
