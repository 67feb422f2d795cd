"""``meshpar checkpoints ls, show, verify, diff, prune, pin, rm`` and ``meshpar import``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from meshpar.launchers.commands import Debug, Reported

if TYPE_CHECKING:
    from meshpar.weights import WeightMap

Root = Annotated[Path, Argument(help="A run's folder, or the folder of its checkpoints.")]
Step = Annotated[Path, Argument(help="A step's folder, .../latest, or a run's folder (its newest step).")]


def register(app: typer.Typer, reported: Reported) -> None:
    """Add the commands to ``app``; ``reported`` converts a command's errors to a message and an exit code."""
    group = typer.Typer(no_args_is_help=True, help="List, verify, compare and prune checkpoints.")
    for command in (ls, show, verify, diff, prune, pin, rm):
        group.command(command.__name__)(reported(command))
    app.add_typer(group, name="checkpoints")
    app.command("import")(reported(import_model))


def ls(root: Root, debug: Debug = False) -> None:
    """List the committed steps and unfinished folders."""
    from meshpar.checkpoints import list_steps

    print(list_steps(root))


def show(step: Step, debug: Debug = False) -> None:
    """Print the origin of a step and a table of its tensors."""
    from meshpar.checkpoints import show_step

    print(show_step(step))


def verify(step: Step, debug: Debug = False) -> None:
    """Verify every byte of a step against the saved checksums."""
    from meshpar.checkpoints import verify_step

    print(verify_step(step))


def diff(one: Step, other: Step, debug: Debug = False) -> None:
    """Print the differences between two steps."""
    from meshpar.checkpoints import diff_steps

    print(diff_steps(one, other))


def prune(
    root: Root,
    keep: Annotated[int, Option(help="Number of newest steps to keep. Pinned steps are always kept.", min=1)],
    best: Annotated[str | None, Option(help="Metric whose lowest step is also kept; +name: highest.")] = None,
    debug: Debug = False,
) -> None:
    """Delete old steps and the leftovers of dead processes."""
    from meshpar.checkpoints import prune_steps

    print(prune_steps(root, keep, best=best))


def pin(
    step: Step, unpin: Annotated[bool, Option("--unpin", help="Remove the step's pin.")] = False, debug: Debug = False
) -> None:
    """Protect a step from being deleted by retention or prune."""
    from meshpar.checkpoints import pin_step

    print(pin_step(step, pinned=not unpin))


def rm(step: Step, debug: Debug = False) -> None:
    """Delete one step, unless it is pinned."""
    from meshpar.checkpoints import remove_step

    print(remove_step(step))


def import_model(
    src: Annotated[Path, Argument(help="Folder with config.json and safetensors, or checkpoint-N of Trainer's FSDP.")],
    dst: Annotated[Path, Argument(help="The folder of checkpoints in which to write the step.")],
    model: Annotated[
        str, Option(help="Whose model will restore it: ours (Transformer, GPT2) or transformers.")
    ] = "ours",
    dtype: Annotated[str | None, Option(help="Dtype of the weights: bfloat16, ...; default: unchanged.")] = None,
    step: Annotated[int, Option(help="The step's number.", min=0)] = 0,
    config: Annotated[Path | None, Option(help="The folder with the model's config.json, if SRC has none.")] = None,
    debug: Debug = False,
) -> None:
    """Convert a published model to a checkpoint that any mesh restores."""
    from meshpar.checkpoints import import_safetensors
    from meshpar.checkpoints.steps.importing import config_beside
    from meshpar.core.errors import CheckpointError
    from meshpar.launchers.recipes.schema import parse_dtype

    try:
        kind = None if dtype is None else parse_dtype(dtype)
    except ValueError as error:
        raise CheckpointError(f"--dtype: {error}") from error
    published = config_beside(config or src)
    if config is not None and not published:
        raise CheckpointError(
            f"{config} has no config.json; expected the model's, as transformers saves it: correct --config"
        )
    rules = _rules(config or src, published, model)
    print(f"imported to {import_safetensors(src, dst, weights=rules, dtype=kind, step=step, config=published)}")


def _rules(src: Path, config: Mapping[str, Any], model: str) -> WeightMap:
    """Return the rules from the names of the model that will restore the step to those of the config in ``src``."""
    from meshpar.checkpoints.storage.place import place
    from meshpar.core.errors import CheckpointError
    from meshpar.launchers.export.run import names_of_ours
    from meshpar.weights import WeightMap

    if model not in ("ours", "transformers"):
        raise CheckpointError(f"--model must be ours or transformers, got {model!r}")
    kind = config.get("model_type")
    if kind is None:
        raise CheckpointError(
            f"{place(src)} has no config.json that names a model_type, without which nobody knows the model of the "
            "step; expected a folder as transformers saves it, or pass --config FOLDER"
        )
    if model == "transformers":
        return WeightMap()
    rules = names_of_ours(kind)
    if rules is None:
        raise CheckpointError(
            f"{place(src)} has a model of type {kind!r}; ours are llama, qwen3 and gpt2; pass --model transformers "
            "for others"
        )
    return rules
