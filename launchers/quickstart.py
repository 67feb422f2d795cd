"""``meshpar quickstart``: train, resume on another mesh, export, load with transformers, complete a line; in about three minutes."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from meshpar import runtime
from meshpar.checkpoints import CheckpointManager
from meshpar.errors import LaunchError, MeshparError, RecipeError
from meshpar.launchers import build
from meshpar.launchers.exporting import export_run
from meshpar.launchers.job import CHECKPOINTS, METRICS, TENSORBOARD, TOKENIZER
from meshpar.launchers.recipe import Recipe, load_recipe
from meshpar.launchers.train import launch
from meshpar.training.data import PackedTokens

MESHES = {"fsdp": "dp_shard=2", "hsdp": "dp_replicate=2,dp_shard=1"}
OTHER_MESH = "tp=2"
RANKS = 2
STEPS_A_MINUTE = 165
_PROMPTS = ("import ", "def __init__(self", "    for i in ", "if __name__ == ")


def quickstart(out: Path, *, mesh: str = "fsdp", minutes: float = 3.0, overrides: Sequence[str] = ()) -> int:
    """Run the whole way and return the exit code.

    Args:
        out: the run's folder.
        mesh: ``fsdp`` or ``hsdp``.
        minutes: about how long, on two CPU cores.
        overrides: of the recipe ``quickstart``.

    Raises:
        MeshparError: a step failed, or did not do what it says.
    """
    if mesh not in MESHES:
        raise RecipeError(f"--mesh is {' or '.join(MESHES)}, got {mesh!r}")
    if importlib.util.find_spec("transformers") is None:
        raise MeshparError("the quickstart loads its export with transformers, which is not installed: pip install 'meshpar[transformers]'")
    steps = max(20, round(STEPS_A_MINUTE * minutes))
    first = steps * 9 // 10
    common = [
        f"output={out}",
        f"data.cache={out / 'data'}",
        f"schedule.steps={steps}",
        f"checkpoint.every={max(5, first // 4)}",
        *overrides,
    ]
    start = time.monotonic()

    _title(f"1  Train on {MESHES[mesh]}: {first} steps on the source of Python's standard library")
    code = launch(load_recipe("quickstart", [*common, f"mesh={MESHES[mesh]}", f"training.steps={first}"]), RANKS, quiet=True)
    if code:
        return code
    _title(f"2  Go on from its checkpoint on another mesh, {OTHER_MESH}, to step {steps}")
    recipe = load_recipe("quickstart", [*common, f"mesh={OTHER_MESH}", f"training.steps={steps}"])
    code = launch(recipe, RANKS, quiet=True)
    if code:
        return code
    before, after = _losses(out / METRICS)
    print(f"the training loss fell from {before:.2f} to {after:.2f}")
    if not after < before:
        raise LaunchError(f"the loss did not fall ({before:.3f} to {after:.3f}); please report this")
    _title("3  Export, and load the export with transformers")
    exported = export_run(out, out / "export", overwrite=True)
    model, tokenizer = _load(exported)
    difference, largest = _compare(recipe, model)
    print(
        f"{type(model).__name__} from {exported}: its logits differ from the trained model's by at most {difference:.1e} (of {largest:.1f})"
    )
    if not difference <= 1e-4 * largest:
        raise LaunchError("the exported model is not the trained one; please report this")
    _title("4  Complete lines of Python")
    for prompt in _PROMPTS:
        print(
            f"  {prompt}\x1b[1m{_complete(model, tokenizer, prompt)}\x1b[0m"
            if _colours()
            else f"  {prompt}|{_complete(model, tokenizer, prompt)}"
        )
    _title(f"Done in {(time.monotonic() - start) / 60:.1f} minutes")
    print(_farewell(out))
    return 0


def _losses(path: Path) -> tuple[float, float]:
    """Return the first and the last reported training loss."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    losses = [record["train/loss"] for record in records if record.get("train/loss") is not None]
    return losses[0], losses[-1]


def _load(folder: Path) -> tuple[Any, Any]:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), transformers.AutoTokenizer.from_pretrained(folder)


def _compare(recipe: Recipe, exported: Any) -> tuple[float, float]:
    """Return the largest difference of logits from the trained model's, and the largest logit, on text kept from training."""
    data = build.prepare_data(recipe)
    with runtime.distributed("cpu"):
        alone = recipe.model_copy(update={"mesh": "", "passes": ()})
        par = build.plan_of(alone).apply(build.build_model(alone, data.tokens.train.vocab_size)).materialize(seed=0)
        CheckpointManager(recipe.folder / CHECKPOINTS).restore(par)
        held_out = data.tokens.validation or data.tokens.train
        ids = PackedTokens(held_out, recipe.data.sequence_length).__getitems__([0])["input_ids"]
        par.module.eval()
        with torch.no_grad():
            trained = par.module(input_ids=ids).logits
            theirs = exported(input_ids=ids).logits
    return float((trained - theirs).abs().max()), float(trained.abs().max())


def _complete(model: Any, tokenizer: Any, prompt: str) -> str:
    """Return the likeliest rest of the line."""
    ids = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        made = model.generate(**ids, max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return str(tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)).split("\n")[0]


def _title(text: str) -> None:
    print(f"\n== {text}", flush=True)


def _colours() -> bool:
    import sys

    return sys.stdout.isatty()


def _farewell(out: Path) -> str:
    return "\n".join(
        [
            f"  {out / CHECKPOINTS}   the checkpoints; any mesh resumes from them",
            f"  {out / 'export'}   the model for transformers: AutoModelForCausalLM.from_pretrained({str(out / 'export')!r})",
            f"  {out / TOKENIZER}   the tokenizer, trained on the same text",
            f"  {out / METRICS}   every reported number",
            "",
            "What to try next:",
            f"  tensorboard --logdir {out / TENSORBOARD}",
            f"  meshpar train quickstart output={out} mesh=dp_replicate=2 training.steps=1000    # go on, on a third mesh",
            "  meshpar train quickstart data.source=files data.paths=[MY_FOLDER] output=runs/mine    # your own text",
            "  meshpar describe llama-70b --mesh dp_replicate=8,dp_shard=8,tp=8    # what 512 ranks would hold",
        ]
    )
