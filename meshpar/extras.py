"""Import packages that only an extra installs; name the extra where one is missing."""

from __future__ import annotations

import importlib
from types import ModuleType

from meshpar.errors import MeshparError


def need(module: str, *, extra: str = "train") -> ModuleType:
    """Import ``module`` of an extra.

    Raises:
        MeshparError: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise MeshparError(f"this needs {module.partition('.')[0]!r}, which is not installed: pip install 'meshpar[{extra}]'") from error
