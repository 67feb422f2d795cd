"""The first weights of a model: drawn from a seed, read from a folder, or read except for a new head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch

from meshpar.checkpoints import Safetensors
from meshpar.errors import RecipeError
from meshpar.launchers.recipes.sections import Model
from meshpar.parallelized import Parallelized
from meshpar.patterns import matches, nearest
from meshpar.state import initialize
from meshpar.weights import TypedSource


def with_weights(par: Parallelized, section: Model, seed: int) -> Parallelized:
    """Give a parallel model the first weights of its recipe section, and return the model.

    Raises:
        RecipeError: ``new`` matches no parameter.
        MeshparError: weights do not fit; the message names all of them.
    """
    if section.weights is None:
        return par.materialize(seed=seed)
    source = Safetensors(section.weights.expanduser())
    patterns = getattr(section, "new", ())
    if not patterns:
        return par.materialize(weights=source, ignore=section.ignore)
    shapes = {name: tuple(tensor.shape) for name, tensor in initialize.state(par.module)}
    for pattern in patterns:
        if not any(matches(pattern, name) for name in shapes):
            raise RecipeError(f"model.new: {pattern!r} matches no parameter; nearest: {', '.join(nearest(pattern, shapes)) or 'none'}")
    new = {name: shape for name, shape in shapes.items() if any(matches(pattern, name) for pattern in patterns)}
    par.materialize(weights=_Without(source, new), ignore=section.ignore)
    initialize.from_seed(par.module, par.layout, seed, par.device, set(new))
    return par


@final
class _Without:
    """A source of weights with zeros for some names."""

    def __init__(self, source: TypedSource, new: Mapping[str, tuple[int, ...]]) -> None:
        self._source, self._new = source, new

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {**self._source.shapes(), **self._new}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {name: dtype for name, dtype in self._source.dtypes().items() if name not in self._new}

    def read(self, name: str, index: tuple[slice, ...], out: torch.Tensor) -> None:
        if name in self._new:
            out.zero_()
        else:
            self._source.read(name, index, out)
