"""The command ``meshpar``, also as ``python -m meshpar.launchers``."""

from __future__ import annotations

import sys

_EXTRA = {"numpy", "pydantic", "rich", "safetensors", "tensorboard", "tokenizers", "torchdata", "typer", "yaml"}
"""The packages of the extra ``train``, by import name."""


def main() -> None:
    """Run the command line; exit with the remedy where a package of the extra ``train`` is missing."""
    try:
        from meshpar.launchers.cli import app

        app()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        sys.exit(f"meshpar: the command line needs {missing!r}, which is not installed: pip install 'meshpar[train]'")


if __name__ == "__main__":
    main()
