"""``meshpar plan``: forecast memory, collectives and step time of a recipe on any hardware."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from meshpar.launchers.commands import Debug, Overrides, RecipeOrShape, Trust

if TYPE_CHECKING:
    from meshpar.forecasting import Forecast, Hardware
    from meshpar.forecasting.ranking import Ranking
    from meshpar.launchers.recipes.recipe import Recipe


def plan(
    recipe: RecipeOrShape,
    overrides: Overrides = None,
    nodes: Annotated[int | None, Option(help="Default: as many as the mesh's ranks fill, or 1.", min=1)] = None,
    gpus_per_node: Annotated[int | None, Option(help="Accelerators per node; default: the profile's.", min=1)] = None,
    hardware: Annotated[str, Option(help="h100, h200, a100, b200, or the YAML file of a profile.")] = "h100",
    elastic: Annotated[str | None, Option(help="replicas: as `meshpar run --elastic replicas` starts it.")] = None,
    search: Annotated[bool, Option("--search", help="Rank every legal mesh and setting instead.")] = False,
    full: Annotated[bool, Option("--full", help="Replay every block instead of extrapolating from a few.")] = False,
    html: Annotated[Path | None, Option(help="Write the report as one HTML file.")] = None,
    json_file: Annotated[Path | None, Option("--json", help="Write the forecast as JSON.")] = None,
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """Forecast memory, collectives and step time of a recipe, without any accelerator."""
    from dataclasses import replace

    from meshpar.forecasting.hardware import Hardware
    from meshpar.launchers.commands.inspecting import recipe_or_shape

    profile = Hardware.load(hardware)
    if gpus_per_node is not None:
        profile = replace(profile, node=gpus_per_node)
    ranks = None if nodes is None and gpus_per_node is None else (nodes or 1) * profile.node
    read = recipe_or_shape(recipe, overrides or [], trust=trust)
    forecasts, ranking, without = _forecasts(read, profile, ranks, elastic, search=search, full=full)
    if ranking is not None:
        from meshpar.forecasting.ranking import ranking_text

        print(ranking_text(ranking))
    for forecast in forecasts[:1]:
        print(forecast)
    if without is not None:
        print(_recomputation(forecasts[0], without))
    if html is not None:
        from meshpar.forecasting.html import page

        html.write_text(page(forecasts, ranking), encoding="utf-8")
        print(f"report: {html}")
    if json_file is not None:
        from meshpar.forecasting.report import as_data

        json_file.write_text(json.dumps([as_data(forecast) for forecast in forecasts], indent=1), encoding="utf-8")
        print(f"data: {json_file}")


def _forecasts(
    recipe: Recipe, profile: Hardware, ranks: int | None, elastic: str | None, *, search: bool, full: bool
) -> tuple[Sequence[Forecast], Ranking | None, Forecast | None]:
    """Return the forecasts, best first, a search's ranking, and the forecast without recomputation."""
    from meshpar.core.passes import Stage
    from meshpar.launchers.commands.inspecting import one_replica
    from meshpar.launchers.jobs import build
    from meshpar.plan import Plan

    ranks = ranks or ranks_of(recipe.mesh, profile, search=search)
    if search:
        ranking = _searched(recipe, profile, ranks, elastic)
        return ranking.best, ranking, None
    recipe, ranks, replicas = one_replica(recipe, ranks, elastic, max(1, ranks // profile.node))
    plan = build.plan_of(recipe)
    depth: Literal["all", "probes"] = "all" if full else "probes"
    plain = Plan(plan.mesh, [pass_ for pass_ in plan.passes if pass_.stage != Stage.RECOMPUTE])
    plans = [plan, plain] if len(plain.passes) < len(plan.passes) else [plan]
    forecast = partial(build.forecast_job, recipe, profile, ranks, depth=depth, replicas=replicas)
    forecasts = [forecast(plan=candidate) for candidate in plans]
    return forecasts[:1], None, forecasts[1] if len(forecasts) > 1 else None


def _searched(recipe: Recipe, profile: Hardware, ranks: int, elastic: str | None) -> Ranking:
    """Return the ranking of plans for a recipe; raises MeshparError where none fits, or the search is not for it."""
    from meshpar.core.errors import MeshparError
    from meshpar.core.registry import layout_for
    from meshpar.forecasting.search import search as search_plans
    from meshpar.launchers.agent import console
    from meshpar.launchers.agent.replicas import check_elastic
    from meshpar.launchers.jobs import build
    from meshpar.launchers.recipes.sections import Own

    if elastic is not None:
        check_elastic(elastic)
    plan = build.plan_of(recipe)
    if recipe.training.objective != "causal_lm" or recipe.lora is not None or isinstance(recipe.optimizer, Own):
        raise MeshparError(
            "--search trains a whole model on packed text with AdamW; forecast this recipe's plans one by one, "
            "without --search"
        )
    model = build.build_shape(recipe)
    with console.show_parts("steps simulated") as advance:
        batch, layout, replicas = build.batch_of(recipe), layout_for(model), elastic is not None
        ranking = search_plans(model, layout, batch, profile, ranks, plan=plan, progress=advance, elastic=replicas)
    if not ranking.best:
        nearest = min(ranking.out, key=lambda candidate: candidate.peak or float("inf"))
        raise MeshparError(
            f"no setting fits {ranks} x {profile.name}; nearest: {nearest.settings}: {nearest.problem}; use more nodes"
        )
    return ranking


def ranks_of(mesh: str, profile: Hardware, *, search: bool) -> int:
    """Return the ranks of a mesh that says how many there are; otherwise, and in a search, a node's."""
    from meshpar.core.mesh import MeshSpec, is_auto

    spec = None if search or not mesh or is_auto(mesh) else MeshSpec(mesh)
    return profile.node if spec is None or -1 in spec.axes.values() else spec.size


def _recomputation(made: Forecast, without: Forecast) -> str:
    """Return a line on the memory that recomputation saves and the time that it costs."""
    saved, more = without.memory.peak - made.memory.peak, made.cost.seconds - without.cost.seconds
    verdict = "may not fit" if without.verdict == "may fit" else without.verdict
    fits = "" if without.fits else f", and without it the step {verdict}"
    return (
        f"recomputation saves {saved / 2**30:.2f} GiB of a peak of {without.memory.peak / 2**30:.2f} "
        f"and costs {more * 1e3:,.1f} ms a step, {more / without.cost.seconds:.0%}{fits}"
    )
