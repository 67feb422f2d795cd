"""The command line. Nothing heavy is imported before a command runs: ``meshpar --help`` does not load torch."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ParamSpec, cast

import typer

from meshpar.launchers.agent.startup import quick_imports
from meshpar.launchers.commands import checkpoints as checkpoint_commands
from meshpar.launchers.commands import launch as launch_commands
from meshpar.launchers.commands.plan import plan

if TYPE_CHECKING:
    from meshpar.checkpoints.verify import Verify

P = ParamSpec("P")

app = typer.Typer(
    name="meshpar", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Train the same model on any mesh of devices, save it, load it on another, export it.",
)  # fmt: skip

RecipeArgument = Annotated[str, typer.Argument(help="A YAML file, or the name of a recipe that comes with meshpar.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Fields to set: training.steps=50 mesh=dp_shard=2", show_default=False)
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
WorldSize = Annotated[int | None, typer.Option("--world-size", help="Number of ranks; default: what the mesh says.", min=1)]


def _reported(command: Callable[P, int | None]) -> Callable[P, None]:
    """Turn an error of meshpar into one message and exit code 1, and the command's result into the exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        from meshpar.errors import MeshparError

        try:
            code = command(*args, **kwargs)
        except MeshparError as error:
            if kwargs.get("debug"):
                traceback.print_exc()
            else:
                print(f"meshpar: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        raise typer.Exit(code or 0)

    return run


@app.command()
@_reported
def train(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    nproc: Annotated[int | None, typer.Option(help="Ranks on this machine; default: what the mesh says.", min=1)] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Do not print the recipe.")] = False,
    nodes: Annotated[int, typer.Option(help="Try it as so many nodes, all on this machine, with --nproc ranks each.", min=1)] = 1,
    find_batch_size: Annotated[bool, typer.Option("--find-batch-size", help="First try the largest micro-batch that fits.")] = False,
    memory: Annotated[str | None, typer.Option(help="What a rank may use while that is tried: 4GiB; on a CPU it must be said.")] = None,
    debug: Debug = False,
) -> int:
    """Train a recipe.

    Starts its own ranks on this machine; inside torchrun or srun it is one of theirs.
    """
    with quick_imports():
        from meshpar.launchers.commands.train import train_recipe
        from meshpar.launchers.export.run import bytes_of

    limit = None if memory is None else bytes_of(memory)
    return train_recipe(recipe, overrides or [], nproc=nproc, quiet=quiet, nodes=nodes, find_batch=find_batch_size, memory=limit)


@app.command()
@_reported
def export(
    src: Annotated[Path, typer.Argument(help="A run's folder, its checkpoints, or one step.")],
    dst: Annotated[Path, typer.Argument(help="The folder to make.")],
    dtype: Annotated[str | None, typer.Option(help="Of the weights: float32, bfloat16, float16; default: as saved.")] = None,
    best: Annotated[str | None, typer.Option(help="Export the step where this metric is lowest: val/loss; +name: highest.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of one file: 500MB, 5GB, 2GiB.")] = "5GB",
    verify: Annotated[str, typer.Option(help="none, size, or full: every byte is what was saved, seen while it is read.")] = "size",
    config: Annotated[Path | None, typer.Option(help="A folder whose config.json, tokenizer, ... go with it, not the run's.")] = None,
    layout: Annotated[str | None, typer.Option(help="Names: own, llama, qwen3, gpt2, or rules.json; default: as saved.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
    debug: Debug = False,
) -> None:
    """Export a checkpoint for transformers.

    Safetensors with their index, config and tokenizer, streamed from file to file.
    """
    from meshpar.launchers.export.run import export_run

    written = export_run(
        src, dst, dtype=dtype, best=best, max_shard_size=max_shard_size, verify=cast("Verify", verify), config=config, layout=layout,
        overwrite=overwrite,
    )  # fmt: skip
    print(f"exported to {written}")


@app.command()
@_reported
def describe(
    recipe: Annotated[str, typer.Argument(help="A recipe, or a shape's name: 124m, llama-8b, llama-70b, gpt2, ...")],
    overrides: Overrides = None,
    mesh: Annotated[str | None, typer.Option(help="The mesh, instead of the recipe's: dp_replicate=8,dp_shard=8,tp=8")] = None,
    world_size: WorldSize = None,
    debug: Debug = False,
) -> None:
    """Print what each rank would hold.

    Block by block, with bytes, on any number of ranks; no device is needed.
    """
    with quick_imports():
        from meshpar.launchers.commands.inspecting import describe_recipe

    print(describe_recipe(recipe, overrides or [], mesh=mesh, world_size=world_size))


@app.command()
@_reported
def check(recipe: RecipeArgument, overrides: Overrides = None, world_size: WorldSize = None, debug: Debug = False) -> None:
    """Find every problem before anything runs."""
    with quick_imports():
        from meshpar.launchers.commands.inspecting import check_recipe

    print(check_recipe(recipe, overrides or [], world_size=world_size))


@app.command()
@_reported
def convert(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Write the recipe here; default: standard output.")] = None,
    debug: Debug = False,
) -> None:
    """Write a recipe in meshpar's own keys.

    YAML of transformers' Trainer or of accelerate becomes a recipe, with comments that tell what became of each key.
    """
    with quick_imports():
        from meshpar.launchers.commands.inspecting import convert_recipe

    text = convert_recipe(recipe, overrides or [])
    if out is None:
        print(text, end="")
    else:
        out.write_text(text, encoding="utf-8")


@app.command()
@_reported
def quickstart(
    overrides: Overrides = None,
    mesh: Annotated[str, typer.Option(help="fsdp (dp_shard=2) or hsdp (dp_replicate=2,dp_shard=1).")] = "fsdp",
    out: Annotated[Path, typer.Option(help="The run's folder.")] = Path("runs/quickstart"),
    minutes: Annotated[float, typer.Option(help="About how long, on two CPU cores.")] = 3.0,
    debug: Debug = False,
) -> int:
    """See it all work, in about three minutes.

    Trains a small model on Python's own source, resumes on another mesh, exports it and loads it with transformers.
    """
    with quick_imports():
        from meshpar.launchers.commands.quickstart import quickstart as run

    return run(out, mesh=mesh, minutes=minutes, overrides=overrides or [])


@app.command()
@_reported
def generate(
    model: Annotated[Path, typer.Argument(help="A folder that `meshpar export` made, or any of transformers'.")],
    prompt: Annotated[str, typer.Argument(help="The beginning of the text.")],
    tokens: Annotated[int, typer.Option(help="At most so many new tokens.", min=1)] = 64,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.", min=0.0)] = 0.0,
    debug: Debug = False,
) -> None:
    """Complete a text with an exported model."""
    from meshpar.launchers.commands.generating import Completer

    print(prompt + Completer(model).complete(prompt, tokens=tokens, temperature=temperature))


@app.command()
@_reported
def plugins(debug: Debug = False) -> None:
    """List installed passes, layouts, objectives."""
    from meshpar.launchers.commands.inspecting import list_plugins

    print(list_plugins())


app.command()(_reported(plan))
checkpoint_commands.register(app, _reported)
launch_commands.register(app, _reported)
