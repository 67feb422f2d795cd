"""``meshpar run``; the command line calls :func:`register`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from meshpar.launchers.startup import quick_imports

Reported = Callable[[Callable[..., Any]], Callable[..., None]]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

_PASS_ON = {"allow_interspersed_args": False, "ignore_unknown_options": True}


def register(app: typer.Typer, reported: Reported) -> None:
    """Add the commands to ``app``; ``reported`` turns the errors of a command into a message and an exit code."""
    app.command("run", context_settings=_PASS_ON)(reported(run))


def run(
    what: Annotated[str, typer.Argument(metavar="SCRIPT_OR_RECIPE", help="A .py file, or a recipe.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's arguments, or the recipe's KEY=VALUE.", show_default=False)
    ] = None,
    nproc: Annotated[str | None, typer.Option(help="Ranks on this node; default: the recipe's mesh, or one an accelerator.")] = None,
    nodes: Annotated[str | None, typer.Option(help="Nodes of the job; MIN:MAX goes on with fewer when some are lost.")] = None,
    node_rank: Annotated[int | None, typer.Option(help="This node's place, from 0: ranks are numbered in this order.", min=0)] = None,
    head: Annotated[str | None, typer.Option(help="HOST:PORT of node 0, where the nodes meet.")] = None,
    restarts: Annotated[int | None, typer.Option(help="Start failed ranks again so many times.", min=0)] = None,
    run_id: Annotated[str | None, typer.Option(help="Equal on all nodes, another for every start.")] = None,
    logs: Annotated[Path | None, typer.Option(help="Folder of logs, a file a rank; default: runs/NAME/logs.")] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT_OR_RECIPE is a module's name.")] = False,
    debug: Debug = False,
) -> int:
    """Run a script or a recipe on ranks of this node.

    Starts the ranks with torch's elastic agent; inside torchrun or srun it is one of theirs.
    """
    with quick_imports():
        from meshpar.errors import MeshparError
        from meshpar.launchers.failures import exit_code
        from meshpar.launchers.run_command import run as run_it

    place = {"nproc": nproc, "nodes": nodes, "node_rank": node_rank, "head": head, "restarts": restarts, "run_id": run_id}
    try:
        return run_it(what, arguments or [], place, module=module, logs=logs)
    except MeshparError as error:
        if debug:
            raise
        print(f"meshpar: {error}", file=sys.stderr)
        return exit_code(error)
