"""``meshpar checkpoints ls, show, verify, diff, prune, pin`` and ``meshpar import``; the command line calls :func:`register`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from meshpar.weights import WeightMap

Reported = Callable[[Callable[..., int | None]], Callable[..., None]]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Root = Annotated[Path, typer.Argument(help="A run's folder, or the folder of its checkpoints.")]
Step = Annotated[Path, typer.Argument(help="A step's folder, .../latest, or a run's folder (its newest step).")]
_CHECKPOINTS = "checkpoints"


def register(app: typer.Typer, reported: Reported) -> None:
    """Add the commands to ``app``; ``reported`` turns the errors of a command into a message and an exit code."""
    group = typer.Typer(no_args_is_help=True, help="Look at checkpoints, verify them, choose which stay.")
    for name, command in (("ls", ls), ("show", show), ("verify", verify), ("diff", diff), ("prune", prune), ("pin", pin)):
        group.command(name)(reported(command))
    app.add_typer(group, name="checkpoints")
    app.command("import")(reported(import_model))


def ls(root: Root, debug: Debug = False) -> None:
    """List the committed steps, and what else lies there."""
    from meshpar.checkpoints import list_steps

    print(list_steps(_steps_in(root)))


def show(step: Step, debug: Debug = False) -> None:
    """Tell where a step comes from and what is in it, tensor by tensor."""
    from meshpar.checkpoints import show_step

    print(show_step(_steps_in(step)))


def verify(step: Step, debug: Debug = False) -> None:
    """Read every byte of a step and compare it with what was saved."""
    from meshpar.checkpoints import verify_step

    print(verify_step(_steps_in(step)))


def diff(one: Step, other: Step, debug: Debug = False) -> None:
    """Tell what differs between two steps."""
    from meshpar.checkpoints import diff_steps

    print(diff_steps(_steps_in(one), _steps_in(other)))


def prune(
    root: Root,
    keep: Annotated[int, typer.Option(help="How many of the newest steps stay; pinned ones stay as well.", min=1)],
    best: Annotated[str | None, typer.Option(help="Keep the step where this metric is lowest, too; +name: highest.")] = None,
    debug: Debug = False,
) -> None:
    """Remove old steps, and what dead processes left."""
    from meshpar.checkpoints import prune_steps

    print(prune_steps(_steps_in(root), keep, best=best))


def pin(
    step: Step, unpin: Annotated[bool, typer.Option("--unpin", help="Let retention have it again.")] = False, debug: Debug = False
) -> None:
    """Keep a step, whatever retention removes."""
    from meshpar.checkpoints import pin_step

    print(pin_step(_steps_in(step), pinned=not unpin))


def import_model(
    src: Annotated[Path, typer.Argument(help="A folder with config.json and safetensors, as transformers saves it.")],
    dst: Annotated[Path, typer.Argument(help="The folder of checkpoints to add a step to.")],
    model: Annotated[str, typer.Option(help="Who will restore it: ours (Transformer, GPT2) or transformers.")] = "ours",
    dtype: Annotated[str | None, typer.Option(help="Of the weights: float32, bfloat16, float16; default: as they are.")] = None,
    step: Annotated[int, typer.Option(help="The step's number.", min=0)] = 0,
    debug: Debug = False,
) -> None:
    """Make a checkpoint of a published model, which any mesh restores."""
    from meshpar.checkpoints import import_safetensors
    from meshpar.errors import CheckpointError
    from meshpar.launchers.recipes.schema import parse_dtype

    try:
        kind = None if dtype is None else parse_dtype(dtype)
    except ValueError as error:
        raise CheckpointError(f"--dtype: {error}") from error
    print(f"imported to {import_safetensors(src, dst, weights=_rules(src, model), dtype=kind, step=step)}")


def _steps_in(path: Path) -> Path:
    return path / _CHECKPOINTS if (path / _CHECKPOINTS).is_dir() else path


def _rules(src: Path, model: str) -> WeightMap:
    """Return the names of the model that will restore the step -> those in ``src``."""
    from meshpar.checkpoints.importing import config_beside
    from meshpar.errors import CheckpointError
    from meshpar.launchers.export.beside import names_of_ours
    from meshpar.weights import WeightMap

    if model == "transformers":
        return WeightMap()
    if model != "ours":
        raise CheckpointError(f"--model must be ours or transformers, got {model!r}")
    kind = config_beside(src).get("model_type")
    found = names_of_ours(kind)
    if found is None:
        raise CheckpointError(f"{src} holds a model of type {kind!r}; ours are llama, qwen3 and gpt2, for others pass --model transformers")
    return found
