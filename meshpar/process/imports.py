"""Packages of an extra and home folders, which may be missing, and imports on first use, quiet and quick ones."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

from meshpar.core.errors import MeshparError, RecipeError


def lazily(package: str, homes: Mapping[str, Sequence[str]]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of ``package``; ``homes`` has the names of each module inside it."""
    home_of = {name: home for home, names in homes.items() for name in names}

    def load(name: str) -> object:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{home_of[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of})

    return load, names


# transformers imports torchao, whose files and enums do not suit every torch
_TALKATIVE = ("torchao", "torch.utils._pytree")


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Keep loggers silent that warn, at each import, of what a reader can do nothing about; usable as a decorator."""
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in _TALKATIVE}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def need(module: str, *, extra: str = "train", raises: type[MeshparError] = MeshparError) -> ModuleType:
    """Import ``module`` of an extra; ``raises``: the error where its package is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise raises(
            f"this needs {module.partition('.')[0]!r}, which is not installed: pip install 'meshpar[{extra}]'"
        ) from error


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import large packages without garbage collection of their definitions: saves a second with torch."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


P = TypeVar("P", bound=Any)  # a path, or a place in a store


def expanded(path: P) -> P:
    """Return a path with the home folder for a leading ``~``; raises RecipeError where the system knows no home."""
    try:
        return path.expanduser()  # type: ignore[no-any-return]
    except RuntimeError as error:
        raise RecipeError(
            f"{path}: no home folder is known for {path.parts[0]}; set HOME, or write a path without ~"
        ) from error
