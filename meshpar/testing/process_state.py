"""Restore what a test finds in a process that other tests use, or miss it loudly."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Mapping
from operator import is_
from pathlib import Path
from typing import Any

import torch

_WATCHED = ("torch", "torch.distributed", "torch.nn.functional", "torch.nn.modules", "torch.optim", "torch.utils")
_TORCH, _MESHPAR = (str(Path(file).parent) + os.sep for file in (torch.__file__, Path(__file__).parent))


class ProcessState:
    """Settings of this process, and the functions of meshpar and torch, before a test."""

    def __init__(self) -> None:
        self._folder = os.getcwd()
        self._names: dict[str, dict[str, Any]] = {}
        self._classes: dict[str, dict[str, type]] = {}
        self._seen: set[str] = set()
        self._watched: list[str] = []
        list(self._replaced())

    def restore(self, test: str) -> None:
        """Put settings back; raises AssertionError if ``test`` left a function, or a constant of meshpar, changed."""
        os.chdir(self._folder)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)
        gc.collect()  # a module of the test may still have its patches in torch
        changed = sorted(f"{space}.{key}" for space, key, now in self._replaced() if not _is_expected(space, now))
        if changed:
            raise AssertionError(
                f"{test} left {', '.join(changed)} changed in ranks that run the next test, expected everything as it "
                "was; patch with pytest.MonkeyPatch.context(), or write @on_ranks(..., fresh='the reason')"
            )

    def _replaced(self) -> Iterator[tuple[str, str, Any]]:
        """Yield names of meshpar, and the best known of torch, that stand for other things than at the last call."""
        new = sys.modules.keys() - self._seen
        self._seen |= new
        self._watched += [name for name in new if _is_watched(name)]
        for name in self._watched:
            namespace = vars(sys.modules[name]) if name in sys.modules else {}
            if not _is_same(self._names.get(name), namespace):
                yield from self._compared(name, namespace)
                classes = {key: value for key, value in namespace.items() if issubclass(type(value), type)}
                self._classes[name] = {key: kind for key, kind in classes.items() if kind.__module__ == name}
            for key, kind in self._classes[name].items():
                if not _is_same(self._names.get(f"{name}.{key}"), vars(kind)):
                    yield from self._compared(f"{name}.{key}", vars(kind))

    def _compared(self, space: str, namespace: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
        """Yield what is replaced in one module or class, and keep what it holds now."""
        earlier, self._names[space] = self._names.get(space, {}), dict(namespace)
        kinds = (int, float, str, tuple) if _is_ours(space) and space in sys.modules else ()
        for key, before in earlier.items():
            now = namespace.get(key, before)
            if now is before or (issubclass(type(before), type) and before.__module__ == space):
                continue  # of a class its methods are compared
            if all(callable(value) or issubclass(type(value), kinds) for value in (before, now)):
                yield space, key, now


def _is_same(known: Mapping[str, Any] | None, namespace: Mapping[str, Any]) -> bool:
    return known is not None and len(known) == len(namespace) and all(map(is_, known.values(), namespace.values()))


def _is_watched(name: str) -> bool:
    return _is_ours(name) or name in _WATCHED or name.rpartition(".")[0] in _WATCHED[1:]


def _is_ours(space: str) -> bool:
    return space.partition(".")[0] == "meshpar"


def _is_expected(space: str, function: object) -> bool:
    """Return whether torch, or meshpar in torch, wraps it once for a whole process, as the compiler does."""
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    return file.startswith(_TORCH) or (file.startswith(_MESHPAR) and space.startswith("torch"))
