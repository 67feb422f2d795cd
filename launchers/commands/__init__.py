"""The commands of the command line, and the arguments and options that several of them have."""

from __future__ import annotations

import functools
import inspect
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any, final

import typer
from typer import Argument, Option

Trust = Annotated[bool, Option("--trust", help="Import classes that the recipe names by import path, as train does.")]
RECIPE_OR_SHAPE = Argument(help="A recipe, or a shape's name: 124m, llama-8b, llama-70b, gpt2, ...", show_default=False)
RecipeOrShape = Annotated[str, RECIPE_OR_SHAPE]
Overrides = Annotated[
    list[str] | None,
    Argument(metavar="[KEY=VALUE]...", help="Fields to set: training.steps=50 mesh=dp_shard=2", show_default=False),
]

_DEBUG = inspect.Parameter(
    "debug",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, Option("--debug", help="Show the traceback of an error.")],
)


@final
class Commands(typer.Typer):
    """Commands with ``--debug``, else an error is one message; they exit with its code or with their own result."""

    def command(self, name: str | None = None, **options: Any) -> Callable[..., Any]:
        register = super().command(name, **options)

        def add(command: Callable[..., int | None]) -> Callable[..., None]:
            @functools.wraps(command)
            def run(*args: Any, debug: bool, **kwargs: Any) -> None:
                from meshpar.core.errors import MeshparError
                from meshpar.launchers.agent.failures import exit_code
                from meshpar.process.secrets import redact

                try:
                    code = command(*args, **kwargs)
                except MeshparError as error:
                    if debug:
                        traceback.print_exc()
                    else:
                        print(f"meshpar: {printable(redact(str(error)))}", file=sys.stderr)
                    raise typer.Exit(exit_code(error)) from None
                except KeyboardInterrupt:
                    print("meshpar: interrupted", file=sys.stderr)
                    raise typer.Exit(130) from None
                raise typer.Exit(code or 0)

            parameters = [*inspect.signature(command, eval_str=True).parameters.values(), _DEBUG]
            run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
            run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
            return register(run)

        return add


def printable(text: str) -> str:
    """Return text of a file or an error without what a terminal takes as a command."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
