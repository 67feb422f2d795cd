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
        # the states to which a forward returns, and with which one began that must not draw
        self._shared, self._begun = list[torch.Tensor](), list[torch.Tensor]()
        # of this forward by event, and of the last ones by event and by the seed before, for recomputations
        self._last, self._seeds = dict[str, int](), dict[tuple[str, int], int]()
        in_blocks = {child for name in blocks for child in module.get_submodule(name).modules()}
        for name, child in module.named_modules(remove_duplicate=False) if declared else ():
            if name and (name in blocks or (random.is_dropout(child) and child not in in_blocks)):
                child.register_forward_pre_hook(partial(self._seed_at, f"into {name}"), prepend=True)
                child.register_forward_hook(partial(self._seed_at, f"out of {name}"), always_call=True)

    def before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._begun = random.states(self._device) if self._module.training and not self._declared else []
        # all ranks have one random state here, and draw a seed a data rank, as one process does in as many calls
        if self._module.training and self._declared and not self._shared:
            self._seed = random.draw_seeds(self._device, self._ranks)[self._rank]
            self._shared = random.states(self._device)
            self._last.clear()
            random.seed(self._device, self._seed)

    def after_forward(self, output: object) -> None:
        self.after_error()
        if self._begun:
            random.check_declared(self._device, self._begun, "each micro-batch")

    def after_error(self) -> None:
        if self._shared:
            random.set_states(self._device, self._shared)
            self._shared = []

    @eager
    def _seed_at(self, event: str, *of_hook: object) -> None:
        """Seed by an event's name and its last seed in the forward; a recomputation seeds as the first run did."""
        key = event, torch.initial_seed()
        if self._shared and not in_backward():
            value = random.mix(self._last.get(event, self._seed), zlib.crc32(event.encode()))
            self._last[event] = self._seeds[key] = value
            # 300 forwards through 100 blocks, in 16 MiB
            if len(self._seeds) > 1 << 16:
                del self._seeds[next(iter(self._seeds))]
        if key in self._seeds:
            random.seed(self._device, self._seeds[key])

    def simulated(self) -> None:
        return None
