"""Arguments and options that several commands have, and the wrapper that every command gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

Reported = Callable[[Callable[..., int | None]], Callable[..., None]]
"""Converts a command's errors to a message and an exit code."""

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Import the classes that the recipe names by import path, as train does.")
]
RecipeOrShape = Annotated[str, typer.Argument(help="A recipe, or a shape's name: 124m, llama-8b, llama-70b, gpt2, ...")]
