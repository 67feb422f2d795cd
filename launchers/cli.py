"""The command line. Heavy imports happen inside the commands, so that ``meshpar --help`` does not load torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from meshpar import checkpoints as steps
from meshpar.launchers.commands import RECIPE_OR_SHAPE, Commands, Overrides, RecipeOrShape, Trust, printable
from meshpar.launchers.commands import launch as launch_commands
from meshpar.process.imports import quick_imports

app = Commands(name="meshpar", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

checkpoints = Commands(no_args_is_help=True, help="List, verify, compare and prune checkpoints.")

RecipeArgument = Annotated[str, Argument(help="A YAML file, or the name of a recipe that comes with meshpar.")]
WorldSize = Annotated[int | None, Option(help="Number of ranks; default: the size of the mesh.", min=1)]
Elastic = Annotated[str | None, Option(help="replicas: as `meshpar run --elastic replicas` starts it.")]
Root = Annotated[Path, Argument(help="A run's folder, or the folder of its checkpoints.")]
Step = Annotated[Path, Argument(help="A step's folder, .../latest, or a run's folder (its newest step).")]


def _version(wanted: bool) -> None:
    if wanted:
        import meshpar

        print(f"meshpar {meshpar.__version__}")
        raise typer.Exit


def _keys(wanted: bool) -> None:
    if wanted:
        from meshpar.launchers.commands.inspecting import keys_text

        print(keys_text(), end="")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Train a model on any mesh of devices, resume it on another mesh, export it."""


@app.command()
def train(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    nproc: Annotated[int | None, Option(help="Ranks on this machine; default: the mesh's.", min=1)] = None,
    quiet: Annotated[bool, Option("--quiet", help="Do not print the recipe.")] = False,
    nodes: Annotated[int, Option(help="Simulate this number of nodes here, with --nproc ranks each.", min=1)] = 1,
    find_batch_size: Annotated[bool, Option("--find-batch-size", help="First find the largest micro-batch.")] = False,
    memory: Annotated[
        str | None, Option(help="Memory of a rank for --find-batch-size, required on CPUs: 4GiB.")
    ] = None,
) -> int:
    """Train a recipe.

    Starts the ranks on this machine. Inside torchrun or srun, the process becomes one of their ranks.
    """
    with quick_imports():
        from meshpar.launchers.commands.train import train_recipe
        from meshpar.launchers.export import bytes_of

    limit = None if memory is None else bytes_of(memory)
    return train_recipe(
        recipe, overrides or [], nproc=nproc, quiet=quiet, nodes=nodes, find_batch=find_batch_size, memory=limit
    )


@app.command()
def export(
    src: Annotated[Path, Argument(help="A run's folder, its checkpoints, or one step.")],
    dst: Annotated[Path, Argument(help="The folder to write.")],
    dtype: Annotated[str | None, Option(help="Dtype of the weights: bfloat16, ...; default: as saved.")] = None,
    best: Annotated[str | None, Option(help="Metric whose lowest step is exported: val/loss; +name: highest.")] = None,
    max_shard_size: Annotated[str, Option(help="Largest size of one file: 500MB, 5GB, 2GiB.")] = "5GB",
    verify: Annotated[str, Option(help="Check before: none, size (of files), full (of every byte).")] = "size",
    config: Annotated[Path | None, Option(help="Folder whose config.json, tokenizer, ... replace the run's.")] = None,
    layout: Annotated[str | None, Option(help="Names: own, llama, qwen3, gpt2, rules.json; default: as saved.")] = None,
    quantize: Annotated[str | None, Option(help="fp8, fp8-block, int8, int4; as GGUF: f16, q8_0, q4_0.")] = None,
    keep_high: Annotated[
        list[str] | None,
        Option(help="Module to leave unquantised, '*' for one part: model.layers.0.mlp.*; repeatable."),
    ] = None,
    adapters: Annotated[bool, Option("--adapters", help="Write trained adapters alone, in peft's format.")] = False,
    weights: Annotated[str, Option(help="trained, averaged (the only average), or an average's name.")] = "trained",
    measure: Annotated[Path | None, Option(help="Text on which to compare the quantised export with the step.")] = None,
    push: Annotated[
        str | None, Option(metavar="OWNER/NAME", help="Upload to the Hugging Face Hub, with a card.")
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print what --push would upload.")] = False,
    watch: Annotated[bool, Option("--watch", help="Export new steps to DST/step-N until their job ends.")] = False,
    every: Annotated[int | None, Option(help="With --watch: only steps that are multiples of this.", min=1)] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an existing file or folder.")] = False,
) -> None:
    """Export a checkpoint for transformers and inference engines.

    Writes safetensors with their index, config and tokenizer, without loading the whole model.
    """
    from meshpar.launchers.commands.publishing import export as run

    options = {
        "dtype": dtype, "max_shard_size": max_shard_size, "verify": verify, "config": config, "layout": layout,
        "quantize": quantize, "high": keep_high or (), "adapters": adapters, "weights": weights, "overwrite": overwrite,
    }  # fmt: skip
    run(src, dst, options, best=best, text=measure, repository=push, dry_run=dry_run, watched=watch, every=every)


@app.command()
def describe(
    recipe: RecipeOrShape,
    overrides: Overrides = None,
    mesh: Annotated[str | None, Option(help="Instead of the recipe's: dp_replicate=8,dp_shard=8,tp=8")] = None,
    world_size: WorldSize = None,
    elastic: Elastic = None,
    trust: Trust = False,
) -> None:
    """Print the parameters that each rank would store.

    Lists placement and bytes of each block, for any number of ranks. Needs no device.
    """
    with quick_imports():
        from meshpar.launchers.commands.inspecting import describe_recipe

    print(describe_recipe(recipe, overrides or [], mesh=mesh, world_size=world_size, elastic=elastic, trust=trust))


@app.command()
def check(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    world_size: WorldSize = None,
    elastic: Elastic = None,
    keys: Annotated[bool, Option("--keys", callback=_keys, is_eager=True, help="Print all keys, and stop.")] = False,
    trust: Trust = False,
) -> None:
    """Check a recipe and list every problem, without running it.

    Imports nothing that the recipe names, unless --trust is given.
    """
    with quick_imports():
        from meshpar.launchers.commands.inspecting import check_recipe

    print(check_recipe(recipe, overrides or [], world_size=world_size, elastic=elastic, trust=trust))


@app.command()
def convert(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    out: Annotated[Path | None, Option(help="Write the recipe here; default: standard output.")] = None,
) -> None:
    """Write a recipe as it is resolved: with overrides, defaults and the passes that its mesh requires."""
    with quick_imports():
        from meshpar.launchers.recipes.loading import load_recipe

    text = load_recipe(recipe, overrides or []).to_yaml()
    if out is None:
        print(text, end="")
    else:
        out.write_text(text, encoding="utf-8")


@app.command()
def quickstart(
    overrides: Overrides = None,
    mesh: Annotated[str, Option(help="fsdp (dp_shard=2) or hsdp (dp_replicate=2,dp_shard=1).")] = "fsdp",
    out: Annotated[Path, Option(help="The run's folder.")] = Path("runs/quickstart"),
    minutes: Annotated[float, Option(help="Approximate duration on two CPU cores.")] = 3.0,
) -> int:
    """Train, resume, export and generate in about three minutes.

    Trains a small model on Python's own source, resumes on another mesh, exports the model and loads the export with
    transformers.
    """
    with quick_imports():
        from meshpar.launchers.commands.quickstart import quickstart as run

    return run(out, mesh=mesh, minutes=minutes, overrides=overrides or [])


@app.command()
def generate(
    model: Annotated[Path, Argument(help="A folder from `meshpar export`, or any folder that transformers loads.")],
    prompt: Annotated[str, Argument(help="The beginning of the text.")],
    tokens: Annotated[int, Option(help="Largest number of new tokens.", min=1)] = 64,
    temperature: Annotated[float, Option(help="Of the sampling; 0: always the most likely token.", min=0.0)] = 0.0,
    top_p: Annotated[
        float, Option(help="Sample from the fewest tokens whose probabilities reach this.", max=1.0)
    ] = 1.0,
    stop: Annotated[list[str] | None, Option(help="Text before which the answer ends; repeatable.")] = None,
    seed: Annotated[int | None, Option(help="Of the sampling; default: a different answer each time.")] = None,
    chat: Annotated[bool, Option("--chat", help="Use the tokenizer's chat template; print the answer alone.")] = False,
    engine: Annotated[str, Option(help="Engine: transformers, or vllm if it is installed.")] = "transformers",
) -> None:
    """Complete a text with an exported model."""
    from meshpar.launchers.commands.generating import Completer, Sampling, VllmCompleter

    if engine not in ("transformers", "vllm"):
        raise typer.BadParameter(f"--engine must be transformers or vllm, got {engine!r}")
    if not 0.0 < top_p <= 1.0 or "" in (stop or []):
        raise typer.BadParameter("--top-p must be above 0 and at most 1, and --stop a text")
    if temperature == 0.0 and (top_p < 1.0 or seed is not None):
        raise typer.BadParameter("--top-p and --seed are for sampling: also pass --temperature, such as 0.8")
    how = Sampling(tokens=tokens, temperature=temperature, top_p=top_p, stop=stop or (), seed=seed)
    completer = (Completer if engine == "transformers" else VllmCompleter)(model)
    text = completer.complete(prompt, how, chat=chat)
    print(prompt + text if completer.continues and not chat else text)


@app.command()
def runs(
    root: Annotated[Path, Argument(help="Folder with the folders of runs, or a run's folder.")] = Path("runs"),
) -> None:
    """List runs: last record, steps, loss, rate, state."""
    with quick_imports():
        from meshpar.launchers.commands.runs import list_runs

    print(printable(list_runs(root)))


@app.command()
def compare(
    one: Annotated[Path, Argument(help="A run's folder.")],
    other: Annotated[Path, Argument(help="Another run's folder.")],
    tolerance: Annotated[float, Option(help="Largest relative difference of values that are the same.", min=0.0)] = 0.0,
    deep: Annotated[bool, Option("--deep", help="Also name the first tensor of checkpoints that differs.")] = False,
) -> None:
    """Compare two runs: settings, values, curves, and the first step that differs."""
    with quick_imports():
        from meshpar.launchers.commands.runs import compare_runs

    print(printable(compare_runs(one, other, tolerance=tolerance, deep=deep)))


@app.command()
def stacks(
    run: Annotated[Path, Argument(help="The folder of a run that trains now.")],
    wait: Annotated[float, Option(help="Seconds within which a rank must answer.", min=0.1)] = 10.0,
    threads: Annotated[bool, Option("--threads", help="Show all threads, not the main thread alone.")] = False,
) -> None:
    """Print every rank's stack, step and last collectives, also while ranks wait in a collective."""
    with quick_imports():
        from meshpar.launchers.agent.stacks import show_stacks

    print(printable(show_stacks(run, wait, all_threads=threads)))


@app.command()
def plugins() -> None:
    """List installed plugins: passes, layouts, objectives, launchers."""
    from meshpar.launchers.commands.inspecting import list_plugins

    print(list_plugins())


@app.command()
def plan(
    recipe: Annotated[str | None, RECIPE_OR_SHAPE] = None,
    overrides: Overrides = None,
    script: Annotated[
        Path | None, Option(help="A training script that puts models on a mesh; its arguments come after --.")
    ] = None,
    nodes: Annotated[int | None, Option(help="Default: as many as the mesh's ranks fill, or 1.", min=1)] = None,
    gpus_per_node: Annotated[int | None, Option(help="Accelerators per node; default: the profile's.", min=1)] = None,
    hardware: Annotated[str, Option(help="h100, h200, a100, b200, or the YAML file of a profile.")] = "h100",
    elastic: Elastic = None,
    search: Annotated[bool, Option("--search", help="Rank every legal mesh and setting instead.")] = False,
    seconds: Annotated[
        float, Option(help="With --search: bound on it, in seconds; the best so far is shown.", min=1.0)
    ] = 60.0,
    full: Annotated[bool, Option("--full", help="Replay every block instead of extrapolating from a few.")] = False,
    html: Annotated[Path | None, Option(help="Write the report as one HTML file.")] = None,
    json_file: Annotated[Path | None, Option("--json", help="Write the forecast as JSON.")] = None,
    trust: Trust = False,
) -> None:
    """Forecast memory, collectives and step time of a recipe or a script, without any accelerator."""
    if script is not None and (search or elastic is not None or trust):
        raise typer.BadParameter("--search, --elastic and --trust are for recipes; drop them, or drop --script")
    if script is None and recipe is None:
        raise typer.BadParameter("give a recipe, a shape's name, or --script train.py")
    with quick_imports():
        from meshpar.launchers.commands.inspecting import forecast_recipe
        from meshpar.launchers.commands.scripts import forecast_script

    if script is not None:
        words = [*([] if recipe is None else [recipe]), *(overrides or [])]
        forecast_script(
            script, words, hardware, nodes=nodes, gpus_per_node=gpus_per_node, full=full, html=html, json_file=json_file
        )
    elif recipe is not None:
        forecast_recipe(
            recipe,
            overrides or [],
            hardware,
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            elastic=elastic,
            search=search,
            seconds=seconds,
            full=full,
            trust=trust,
            html=html,
            json_file=json_file,
        )


data = Commands(no_args_is_help=True, help="Show the data of a recipe.")


@data.command()
def preview(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    samples: Annotated[int, Option(help="Number of samples.", min=1)] = 3,
    validation: Annotated[bool, Option("--validation", help="Show samples of the validation.")] = False,
    trust: Trust = False,
) -> None:
    """Print the first samples of the training as text, with the trained tokens between « and ».

    Tokenizes the data as a training does, into the same cache.
    """
    with quick_imports():
        from meshpar.launchers.commands.previewing import preview_data

    for text in preview_data(recipe, overrides or [], samples, validation=validation, trust=trust):
        print(printable(text))


@app.command("import")
def import_model(
    src: Annotated[Path, Argument(help="Folder with config.json and safetensors, or checkpoint-N of Trainer's FSDP.")],
    dst: Annotated[Path, Argument(help="The folder of checkpoints in which to write the step.")],
    model: Annotated[
        str, Option(help="Whose model will restore it: ours (Transformer, GPT2) or transformers.")
    ] = "ours",
    dtype: Annotated[str | None, Option(help="Dtype of the weights: bfloat16, ...; default: unchanged.")] = None,
    step: Annotated[int, Option(help="The step's number.", min=0)] = 0,
    config: Annotated[Path | None, Option(help="The folder with the model's config.json, if SRC has none.")] = None,
) -> None:
    """Convert a published model to a checkpoint that any mesh restores."""
    from meshpar.launchers.commands.publishing import import_published

    print(f"imported to {import_published(src, dst, model=model, dtype=dtype, step=step, config=config)}")


@checkpoints.command()
def ls(
    root: Root,
    best: Annotated[
        str | None, Option(help="Metric whose best step is marked; default: the recipe's, or val/loss.")
    ] = None,
) -> None:
    """List the committed steps and unfinished folders."""
    from meshpar.launchers.recipes.yamlfile import read_document

    for file in (root / "recipe.yaml", root.parent / "recipe.yaml"):
        if best is None and file.is_file():
            best = (read_document(file).data.get("checkpoint") or {}).get("best")
    print(steps.list_steps(root, best or "val/loss"))


@checkpoints.command()
def show(step: Step) -> None:
    """Print the origin of a step and a table of its tensors."""
    print(steps.show_step(step))


@checkpoints.command()
def verify(step: Step) -> None:
    """Verify every byte of a step against the saved checksums."""
    print(steps.verify_step(step))


@checkpoints.command()
def diff(one: Step, other: Step) -> None:
    """Print the differences between two steps."""
    print(steps.diff_steps(one, other))


@checkpoints.command()
def prune(
    root: Root,
    keep: Annotated[int, Option(help="Number of newest steps to keep. Pinned steps are always kept.", min=1)],
    best: Annotated[str | None, Option(help="Metric whose lowest step is also kept; +name: highest.")] = None,
) -> None:
    """Delete old steps and the leftovers of dead processes."""
    print(steps.prune_steps(root, keep, best=best))


@checkpoints.command()
def pin(step: Step, unpin: Annotated[bool, Option("--unpin", help="Remove the step's pin.")] = False) -> None:
    """Protect a step from being deleted by retention or prune."""
    print(steps.pin_step(step, pinned=not unpin))


@checkpoints.command()
def rm(step: Step) -> None:
    """Delete one step, unless it is pinned."""
    print(steps.remove_step(step))


app.add_typer(checkpoints, name="checkpoints")
app.add_typer(data, name="data")
launch_commands.register(app)
