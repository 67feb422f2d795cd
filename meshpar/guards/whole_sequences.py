"""Refuse what a model computes over a whole sequence where ranks see different positions of it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, final

from torch import Tensor

from meshpar.core.errors import MeshparError
from meshpar.step.moment import Guard, Guarded
from meshpar.tensors.pytrees import leaves


@final
class WholeSequences(Guard):
    """Refuse labels that a model would shift, and batches that did not go through ``par.split``."""

    def __init__(self, guarded: Guarded) -> None:
        self._forward, self._lengths = type(guarded.module).forward, guarded.lengths

    def before_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        named = dict(zip(inspect.signature(self._forward).parameters, (None, *args))) | dict(kwargs)
        if any(named.get(argument) is not None for argument in ("labels", "shift_labels")):
            raise MeshparError(
                "the module got labels, but each rank has only a part of the positions: a model that shifts labels "
                "loses one label at the end of each part, and its mean covers the part alone; compute the sum of the "
                "loss from the logits and aligned labels, and multiply it by par.token_scale"
            )
        ids = (
            leaf
            for leaf in leaves((args, kwargs))
            if isinstance(leaf, Tensor) and leaf.ndim == 2 and not leaf.is_floating_point()
        )
        length = next((tensor.shape[1] for tensor in ids), None)
        if self._lengths and length is not None and length not in self._lengths:
            raise MeshparError(
                f"the module got {length} positions, and par.split gave parts of {sorted(self._lengths)}: pass every "
                "batch through par.split, also in evaluation"
            )
