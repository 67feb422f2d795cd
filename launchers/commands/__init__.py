"""The commands of the command line, and the arguments and options that several of them have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from typer import Argument, Option

Reported = Callable[[Callable[..., int | None]], Callable[..., None]]
"""Converts a command's errors to a message and an exit code."""

Debug = Annotated[bool, Option("--debug", help="Show the traceback of an error.")]
Trust = Annotated[bool, Option("--trust", help="Import classes that the recipe names by import path, as train does.")]
RecipeOrShape = Annotated[str, Argument(help="A recipe, or a shape's name: 124m, llama-8b, llama-70b, gpt2, ...")]
Overrides = Annotated[
    list[str] | None,
    Argument(metavar="[KEY=VALUE]...", help="Fields to set: training.steps=50 mesh=dp_shard=2", show_default=False),
]
