"""``meshpar plan --script``: what ranks hold of the models that a script puts on a mesh, without training them."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn

from meshpar.core.errors import MeshparError
from meshpar.core.runtime import kept_environment
from meshpar.forecasting import Batch, Forecast, Hardware, forecast
from meshpar.launchers.commands.inspecting import profile_and_ranks, write_reports
from meshpar.process.preview import EndOfPreview, PlannedModel, previewing


def run_to_mesh(script: Path, arguments: Sequence[str], ranks: int | None, node: int) -> Sequence[PlannedModel]:
    """Run a script as ``python SCRIPT ARGUMENTS`` does, to where it puts models on a mesh; return these models.

    Raises:
        MeshparError: the script is no file, or ends before.
    """
    if not script.is_file():
        raise MeshparError(f"{script} is no file; pass the script that you train with: --script train.py")
    before, ended = (sys.argv, sys.path), "ended"
    sys.argv, sys.path = [str(script), *arguments], [str(script.resolve().parent), *sys.path]
    try:
        # libraries set RANK and others, by which what runs next would take itself for one of a job's ranks
        with previewing(ranks, node), kept_environment():
            runpy.run_path(str(script), run_name="__main__")
    except EndOfPreview as end:
        return end.models
    except SystemExit as end:
        ended = f"ended with {end.code!r}"
    finally:
        sys.argv, sys.path = before
        if dist.is_initialized():
            dist.destroy_process_group()
    raise MeshparError(
        f"{script} {ended} and put no model on a mesh; expected a trainer of on_mesh(...), a model in "
        "meshpar's Accelerator.prepare, a fit with MeshparStrategy, or plan.apply(...): pass the arguments with which "
        "the script trains after --"
    )


def forecast_script(
    script: Path, arguments: Sequence[str], hardware: str, *,
    nodes: int | None, gpus_per_node: int | None, full: bool, html: Path | None, json_file: Path | None,
) -> None:  # fmt: skip
    """Print what ranks hold of each model of a script, and forecast the steps of those that it trains."""
    profile, ranks = profile_and_ranks(hardware, nodes, gpus_per_node)
    forecasts = list[Forecast]()
    for model in run_to_mesh(script, arguments, ranks, profile.node):
        with previewing(ranks, profile.node):
            spec = model.plan.resolve(1)
        table = model.plan.describe(copy_to_meta(model.module), model.layout, world_size=spec.size)
        print(f"{model.name or 'the LightningModule'}: {table}\n")
        if not model.plan.frozen:
            try:
                forecasts.append(_forecast_step(model, profile, spec.size, full=full))
                print(forecasts[-1])
            except MeshparError as error:
                print(f"no forecast of a step: {str(error).splitlines()[0]}\n")
    write_reports(forecasts, None, html, json_file)


def _forecast_step(model: PlannedModel, hardware: Hardware, ranks: int, *, full: bool) -> Forecast:
    """Forecast a step of a script's model on the batches of its loader."""
    if model.batch is None:
        raise MeshparError("the script names no batches where it puts the model on a mesh")
    if any(type(part).__module__ == "__main__" for part in model.module.modules()):
        raise MeshparError("the script defines the model's classes; move them to a module that it imports")
    tokens = model.batch if isinstance(model.batch, Mapping) else {"input_ids": model.batch}
    if not isinstance(tokens.get("input_ids"), Tensor):
        raise MeshparError("its batches have no input_ids, and its loss is not known")
    batch = dataclasses.replace(Batch.of(tokens), accumulate=model.micro_batches)
    return forecast(
        model.plan,
        copy_to_meta(model.module),
        batch,
        hardware=hardware,
        world_size=ranks,
        layout=model.layout,
        depth="all" if full else "probes",
    )


def copy_to_meta(module: nn.Module) -> nn.Module:
    """Return a copy without weights, whose tied parameters are tied."""
    memo = {}
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        empty = tensor.detach().to("meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(module, memo)
