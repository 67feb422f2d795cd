"""Compare the losses of ranks that share samples and positions, and refuse what needs a whole sequence."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshpar.core import runtime
from meshpar.core.errors import MeshparError, ParallelError
from meshpar.exchange.ranks import Largest
from meshpar.step.moment import Guard, Guarded
from meshpar.tensors.digests import leaves

_ROUNDINGS, _QUEUED_ROUNDINGS = 64, 1024
"""How far losses may differ, in units of their dtype's rounding: an accelerator adds in another order each time."""
_LEAST = 1e-2
"""How large a loss counts at least: one whose terms cancel to about zero has the rounding of its terms."""


def compare_losses(roots: Iterable[object], groups: Mapping[str, dist.ProcessGroup], device: torch.device) -> None:
    """Compare what a backward is about to start from on ranks of the same positions. Collective over ``groups``."""
    plain = [
        root.detach()
        for root in roots
        if isinstance(root, Tensor) and not isinstance(root, DTensor) and root.numel() == 1
    ]
    kind = max((loss.dtype for loss in plain), key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)
    total = torch.zeros((), device=device, dtype=torch.float64)
    for loss in plain:
        total += loss.reshape(()).to(device, torch.float64).nan_to_num(-1e300)
    allowed = torch.finfo(kind).eps * (_QUEUED_ROUNDINGS if runtime.queues(device) else _ROUNDINGS)
    for axis, group in groups.items():
        exchanged = Largest(torch.stack([total, -total]), group).read()
        high, negated = runtime.among_real_ranks(exchanged.tolist) or (0.0, 0.0)
        low = -negated
        if high != low and not high - low <= allowed * max(abs(high), abs(low), _LEAST):
            raise ParallelError(
                f"ranks of {axis} compute the same samples together, but their backward starts from different "
                f"losses: from {low:.6g} to {high:.6g}, here {total.item():.6g}. Give collectives of your own in "
                "a loss or a hook group=par.data_group, whose ranks have different samples. Where a value made "
                "inside of a split module entered the loss by another way than the module's output (an attribute, "
                "a list, a hook), each rank has that of its own heads or features; leave that module and the "
                "layers in it whole, TensorParallel(styles={'blocks.*.attn': None}), or draw random numbers of the "
                "loss alike on these ranks"
            )


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
