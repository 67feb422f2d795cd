"""What a test finds in a process that other tests use: restored after it, or missed loudly."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import torch

_WATCHED = ("torch", "torch.distributed", "torch.nn.functional", "torch.nn.modules", "torch.optim", "torch.utils")
_TORCH, _MESHPAR = (str(Path(file).parent) + os.sep for file in (torch.__file__, Path(__file__).parent))


class Found:
    """Settings of this process, and the functions of meshpar and torch, before a test."""

    def __init__(self) -> None:
        self._folder, self._values = os.getcwd(), _values()

    def restore(self, test: str) -> None:
        """Put settings back, and refuse patches that ``test`` left.

        Raises:
            AssertionError: a function of meshpar or torch, or a constant of meshpar, is another one.
        """
        os.chdir(self._folder)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)
        gc.collect()  # a module of the test may still have its patches in torch
        values = _values()
        changed = sorted(
            ".".join(place)
            for place, before in self._values.items()
            if (now := values.get(place, before)) is not before and not _is_expected(place, now)
        )
        self._values = values
        if changed:
            raise AssertionError(
                f"{test} left {', '.join(changed)} changed in ranks that run the next test, expected everything as it "
                "was; patch with pytest.MonkeyPatch.context(), or write @on_ranks(..., fresh='the reason')"
            )


def _values() -> dict[tuple[str, str], Any]:
    """Return the functions, methods and constants of meshpar, and the best known functions of torch."""
    found: dict[tuple[str, str], Any] = {}
    for name, module in list(sys.modules.items()):
        ours = name.partition(".")[0] == "meshpar"
        if not ours and name not in _WATCHED and name.rpartition(".")[0] not in _WATCHED[1:]:
            continue
        for key, value in list(vars(module).items()):
            kind = type(value)  # isinstance() makes torch.distributed.reduce_op warn
            if issubclass(kind, type) and value.__module__ == name:
                found |= {(f"{name}.{key}", inner): method for inner, method in vars(value).items() if callable(method)}
            elif callable(value) or (ours and issubclass(kind, int | float | str | tuple)):
                found[name, key] = value
    return found


def _is_expected(place: tuple[str, str], function: object) -> bool:
    """Whether torch wraps it once for a whole process, as optimizers and the compiler do, or meshpar in torch."""
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    return file.startswith(_TORCH) or (file.startswith(_MESHPAR) and place[0].startswith("torch"))
