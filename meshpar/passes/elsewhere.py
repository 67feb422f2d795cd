"""Tensors of the model that other ranks have, and questions about the parameters of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn

from meshpar.core.errors import MeshparError
from meshpar.core.passes import unmatched
from meshpar.core.patterns import covers
from meshpar.step.run import Run, run_of


@final
@dataclass(frozen=True, slots=True)
class OtherLayers:
    """A fact: tensors that other ranks have, by all their names -> their shapes without memory."""

    tensors: Mapping[str, Tensor]


def tensors_elsewhere(run: Run | None) -> Mapping[str, Tensor]:
    """Return the tensors that other ranks have; none where all ranks have all layers."""
    elsewhere = None if run is None else run.find(OtherLayers)
    return {} if elsewhere is None else elsewhere.tensors


def all_parameters(module: nn.Module) -> list[Tensor]:
    """Return all parameters of the model, once each: this rank's, and the shapes of those of other ranks."""
    elsewhere = [tensor for tensor in tensors_elsewhere(run_of(module)).values() if isinstance(tensor, nn.Parameter)]
    return [*module.parameters(), *{id(tensor): tensor for tensor in elsewhere}.values()]


def first_covering(patterns: Sequence[str], module: nn.Module, what: str) -> dict[int, str]:
    """Return by ``id`` of a parameter the first of ``patterns`` that covers a name of it; each must cover one."""
    covered = dict[int, str]()
    every = [*module.named_parameters(remove_duplicate=False), *tensors_elsewhere(run_of(module)).items()]
    for pattern in reversed(patterns):
        fitting = {id(tensor): pattern for name, tensor in every if covers(pattern, name)}
        if not fitting:
            raise MeshparError(unmatched(f"{what} {pattern!r}", pattern, module))
        covered |= fitting
    return covered
