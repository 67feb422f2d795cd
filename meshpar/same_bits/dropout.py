"""Random numbers by the number of a micro-batch and the name of a module, which no mesh changes."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, final

import torch
from torch import nn

from meshpar._torch.autograd import in_backward
from meshpar._torch.calls import eager
from meshpar.core.errors import MeshparError
from meshpar.passes.tensor import random
from meshpar.step.moment import Moment


@final
class DrawsBySample(Moment):
    """Seed each forward in training by its number among those of all data ranks, and each block by its name."""

    def __init__(self, module: nn.Module, blocks: Sequence[str], device: torch.device, rank: int, ranks: int) -> None:
        self._module, self._device, self._rank, self._ranks = module, device, rank, ranks
        self._shared: list[torch.Tensor] | None = None
        # a stack: of the blocks that run, the states with which they began
        self._outside: list[list[torch.Tensor]] = []
        self._calls: dict[str, int] = {}
        in_blocks = {child for name in blocks for child in module.get_submodule(name).modules()}
        dropouts = [
            name for name, child in module.named_modules() if random.is_dropout(child) and child not in in_blocks
        ]
        for name in dict.fromkeys((*blocks, *dropouts)):
            child = module.get_submodule(name)
            if child is not module:
                child.register_forward_pre_hook(partial(self._enter, name), prepend=True)
                child.register_forward_hook(self._leave, always_call=True)

    def before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        # all ranks have one random state here, and draw a seed a data rank, as one process does in as many calls
        if self._module.training and self._shared is None:
            seed = random.draw_seeds(self._device, self._ranks)[self._rank]
            self._shared = random.states(self._device)
            self._calls.clear()
            random.seed(self._device, seed)

    def after_forward(self, output: object) -> None:
        if self._shared is not None:
            random.set_states(self._device, self._shared)
            self._shared = None

    def after_error(self) -> None:
        self._outside.clear()
        self.after_forward(None)

    @eager
    def _enter(self, name: str, child: nn.Module, args: object) -> None:
        """Seed a block by its name; a recomputation finds the state with which the block ran."""
        if self._shared is None or in_backward():
            return
        self._outside.append(random.states(self._device))
        self._calls[name] = number = self._calls.get(name, 0) + 1
        random.seed(self._device, random.mix(random.initial_seed(self._device), zlib.crc32(name.encode()), number))

    @eager
    def _leave(self, child: nn.Module, args: object, output: object) -> None:
        if self._shared is not None and not in_backward():
            with suppress(IndexError):  # after an error
                random.set_states(self._device, self._outside.pop())

    def simulated(self) -> None:
        return None


@final
class DrawsNothing(Moment):
    """Refuse a forward in training that draws random numbers where neither layout nor modules say that it does."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device
        self._before: list[torch.Tensor] = []

    def before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._before = random.states(self._device) if self._module.training else []

    def after_forward(self, output: object) -> None:
        if self._before and not all(map(torch.equal, self._before, random.states(self._device))):
            raise MeshparError(_UNDECLARED)

    def simulated(self) -> None:
        return None


_UNDECLARED = (
    "under same_bits a forward draws random numbers in training, which no dropout module does, so that they would "
    "follow the rank; set ModelLayout(dropout=True), with which each micro-batch draws its own"
)
