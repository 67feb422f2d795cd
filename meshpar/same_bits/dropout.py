"""Random numbers by the number of a micro-batch and the name of a module, which no mesh changes."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import partial
from typing import Any, final

import torch

from meshpar._torch.autograd import in_backward
from meshpar._torch.calls import eager
from meshpar.passes.tensor import random
from meshpar.step.moment import Guarded, Moment


@final
class DrawsBySample(Moment):
    """Seed each forward in training by its number among those of all data ranks, and again around each block by its
    name; refuse one that draws where neither layout nor modules say so (not ``declared``).
    """

    def __init__(self, guarded: Guarded, rank: int, ranks: int, *, declared: bool) -> None:
        module, blocks = guarded.module, guarded.resolved.blocks
        self._module, self._device, self._rank, self._ranks = module, guarded.device, rank, ranks
        self._declared, self._seed = declared, 0
        # the states to which a forward returns, and with which it began
        self._shared, self._begun = list[torch.Tensor](), list[torch.Tensor]()
        self._calls: dict[str, int] = {}
        in_blocks = {child for name in blocks for child in module.get_submodule(name).modules()}
        for name, child in module.named_modules(remove_duplicate=False) if declared else ():
            if name and (name in blocks or (random.is_dropout(child) and child not in in_blocks)):
                child.register_forward_pre_hook(partial(self._enter_or_leave, name), prepend=True)
                child.register_forward_hook(partial(self._enter_or_leave, name), always_call=True)

    def before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        # all ranks have one random state here, and draw a seed a data rank, as one process does in as many calls
        if self._module.training and not self._shared:
            self._seed = random.draw_seeds(self._device, self._ranks)[self._rank]
            self._shared = random.states(self._device)
            self._calls.clear()
            random.seed(self._device, self._seed)
            self._begun = random.states(self._device)

    def after_forward(self, output: object) -> None:
        if self._shared:
            try:
                if not self._declared:
                    random.check_declared(self._device, self._begun, "each micro-batch")
            finally:
                self.after_error()

    def after_error(self) -> None:
        if self._shared:
            random.set_states(self._device, self._shared)
            self._shared = []

    @eager
    def _enter_or_leave(self, name: str, *of_hook: object) -> None:
        """Seed by a block's name and the number of this event; a recomputation finds the state of the first run."""
        if self._shared and not in_backward():
            self._calls[name] = number = self._calls.get(name, 0) + 1
            random.seed(self._device, random.mix(self._seed, zlib.crc32(name.encode()), number))

    def simulated(self) -> None:
        return None
