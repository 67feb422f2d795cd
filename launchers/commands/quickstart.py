"""``meshpar quickstart``: train, resume on another mesh, export, load with transformers, complete lines."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from meshpar.checkpoints import CheckpointManager
from meshpar.checkpoints.steps.steps import CHECKPOINTS
from meshpar.core import runtime
from meshpar.core.errors import LaunchError, RecipeError
from meshpar.launchers.commands.generating import Completer, Sampling
from meshpar.launchers.commands.train import launch
from meshpar.launchers.export import export_run
from meshpar.launchers.jobs import build, datasets
from meshpar.launchers.jobs.job import METRICS, TENSORBOARD
from meshpar.launchers.recipes.loading import load_recipe
from meshpar.launchers.recipes.recipe import Recipe
from meshpar.process.imports import need
from meshpar.training.samples import PackedTokens

MESHES = {"fsdp": "dp_shard=2", "hsdp": "dp_replicate=2,dp_shard=1"}
RANKS = 2
OTHER_MESH, OTHER_BATCH = "tp=2", 8
"""The mesh that resumes, on which both ranks get the same data: twice the micro-batch keeps the global batch."""

STEPS_A_MINUTE = 180
TOLERANCE = 1e-4
"""Relative to the largest logit: two implementations of one model differ by rounding only."""

_PROMPTS = ("import os\nimport", "    def __init__(self", "        if not isinstance", "        raise")


def quickstart(out: Path, *, mesh: str = "fsdp", minutes: float = 3.0, overrides: Sequence[str] = ()) -> int:
    """Train, resume on another mesh, export and generate in about ``minutes`` on two cores; return the exit code."""
    if mesh not in MESHES:
        raise RecipeError(f"--mesh is {mesh!r}; expected {' or '.join(MESHES)}")
    need("transformers", extra="transformers")
    start = time.monotonic()
    tenth = max(2, round(STEPS_A_MINUTE * minutes / 10))
    common = [f"output={out}", f"data.cache={out / 'data'}", f"checkpoint.every={3 * tenth}"]
    common += [f"schedule.steps={10 * tenth}", f"schedule.warmup_steps={2 * tenth}", *overrides]
    first = [*common, f"mesh={MESHES[mesh]}", f"training.steps={9 * tenth}"]
    second = [*common, f"mesh={OTHER_MESH}", f"data.micro_batch={OTHER_BATCH}", f"training.steps={10 * tenth}"]

    _print_title(f"1  Train on {MESHES[mesh]}: {9 * tenth} steps on the source of Python's standard library")
    code = launch(load_recipe("quickstart", first, trust=True), RANKS, quiet=True)
    if code:
        return code
    _print_title(f"2  Resume from the checkpoint on another mesh, {OTHER_MESH}, to step {10 * tenth}")
    recipe = load_recipe("quickstart", second, trust=True)
    code = launch(recipe, RANKS, quiet=True)
    if code:
        return code
    records = [json.loads(line) for line in (out / METRICS).read_text(encoding="utf-8").splitlines()]
    losses = [record["train/loss"] for record in records if record.get("train/loss") is not None]
    print(f"the training loss fell from {losses[0]:.2f} to {losses[-1]:.2f}")
    if not losses[-1] < losses[0]:
        raise LaunchError(f"the loss did not fall: {losses}; please report this")
    _print_title("3  Export, and load the export with transformers")
    export_run(out, out / "export", overwrite=True)
    completer = Completer(out / "export")
    _tell_difference(recipe, completer.model)
    _print_title("4  Complete lines of Python")
    for prompt in _PROMPTS:
        rest = (completer.complete(prompt, Sampling(tokens=24)).splitlines() or [""])[0]
        print(f"  {prompt.splitlines()[-1]} »{rest}")
    _print_title(f"Done in {(time.monotonic() - start) / 60:.1f} minutes")
    print(_farewell(out))
    return 0


def _tell_difference(recipe: Recipe, exported: nn.Module) -> None:
    data = datasets.prepare_data(recipe)
    held_out = data.tokens.validation or data.tokens.train
    ids = PackedTokens(held_out, recipe.data.sequence_length).__getitems__([0])["input_ids"]
    alone = recipe.model_copy(update={"mesh": "", "passes": ()})
    with runtime.distributed("cpu"), torch.no_grad():
        par = build.plan_of(alone).apply(build.build_model(alone, data.vocab_size)).materialize(seed=0)
        CheckpointManager(recipe.folder / CHECKPOINTS).restore(par)
        trained, theirs = par.module.eval()(input_ids=ids).logits, exported(input_ids=ids).logits
    difference, largest = float((trained - theirs).abs().max()), float(trained.abs().max())
    print(
        f"loaded as {type(exported).__name__}; its logits on held-out text differ from the trained model's by at most "
        f"{difference:.1e}"
    )
    if not difference <= TOLERANCE * largest:
        raise LaunchError(
            f"the exported model is not the trained one (the largest logit is {largest:.1f}); please report this"
        )


def _print_title(text: str) -> None:
    print(f"\n== {text}", flush=True)


def _farewell(out: Path) -> str:
    files = {
        CHECKPOINTS: "checkpoints; any mesh resumes from them",
        "export": "the model for transformers, with its tokenizer",
        METRICS: "every reported number",
    }
    width = max(len(str(out / file)) for file in files)
    lines = [f"  {out / file!s:<{width}}  {what}" for file, what in files.items()]
    commands = [
        f"tensorboard --logdir {out / TENSORBOARD}    # show the curves",
        f"meshpar generate {out / 'export'} 'def main('    # complete your own beginning",
        f"meshpar train {out / 'recipe.yaml'} mesh=dp_replicate=2 passes=auto training.steps=1000    "
        "# resume on a third mesh",
        "meshpar train quickstart data.source=files data.paths=[FOLDER] output=runs/mine    # train on your own text",
        "meshpar describe llama-70b --mesh dp_replicate=8,dp_shard=8,tp=8    # print the bytes of each of 512 ranks",
    ]
    return "\n".join([*lines, "", "Try next:", *(f"  {command}" for command in commands)])
