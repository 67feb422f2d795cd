"""The one place that looks up a home folder: containers run as users that have none."""

from __future__ import annotations

from typing import Any, TypeVar

from meshpar.core.errors import RecipeError

P = TypeVar("P", bound=Any)  # a path, or a place in a store


def expanded(path: P) -> P:
    """Return a path with the home folder for a leading ``~``; raises RecipeError where the system knows no home."""
    try:
        return path.expanduser()  # type: ignore[no-any-return]
    except RuntimeError as error:
        raise RecipeError(
            f"{path}: no home folder is known for {path.parts[0]}; set HOME, or write a path without ~"
        ) from error
