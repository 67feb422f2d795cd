"""Restore what a test finds in a process that other tests use, or miss it loudly."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

_WATCHED = ("torch", "torch.distributed", "torch.nn.functional", "torch.nn.modules", "torch.optim", "torch.utils")
_TORCH, _MESHPAR = (str(Path(file).parent) + os.sep for file in (torch.__file__, Path(__file__).parent))


class Found:
    """Settings of this process, and the functions of meshpar and torch, before a test."""

    def __init__(self) -> None:
        self._folder, self._names = os.getcwd(), _names()

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
        names = _names()
        changed = sorted(
            f"{place}.{key}"
            for place, known in self._names.items()
            for key, now in _replaced(place, known, names.get(place, known))
            if not _is_expected(place, now)
        )
        self._names = names
        if changed:
            raise AssertionError(
                f"{test} left {', '.join(changed)} changed in ranks that run the next test, expected everything as it "
                "was; patch with pytest.MonkeyPatch.context(), or write @on_ranks(..., fresh='the reason')"
            )


def _names() -> dict[str, dict[str, Any]]:
    """Return what names of modules and classes stand for: all of meshpar's, and the best known of torch's."""
    found: dict[str, dict[str, Any]] = {}
    for name, module in list(sys.modules.items()):
        if not _is_ours(name) and name not in _WATCHED and name.rpartition(".")[0] not in _WATCHED[1:]:
            continue
        found[name] = dict(vars(module))
        for key, value in found[name].items():
            if issubclass(type(value), type) and value.__module__ == name:
                found[f"{name}.{key}"] = dict(vars(value))
    return found


def _replaced(place: str, known: dict[str, Any], names: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the functions that other ones have replaced in a module or class, and meshpar's constants."""
    kinds = (int, float, str, tuple) if _is_ours(place) and place in sys.modules else ()
    for key, before in known.items():
        now = names.get(key, before)
        if now is before or (issubclass(type(before), type) and before.__module__ == place):
            continue  # of a class its methods are compared
        if all(callable(one) or issubclass(type(one), kinds) for one in (before, now)):
            yield key, now


def _is_ours(place: str) -> bool:
    return place.partition(".")[0] == "meshpar"


def _is_expected(place: str, function: object) -> bool:
    """Return whether torch, or meshpar in torch, wraps it once for a whole process, as the compiler does."""
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    return file.startswith(_TORCH) or (file.startswith(_MESHPAR) and place.startswith("torch"))
