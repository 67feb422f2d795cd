"""The gathered weights that forwards share: of evaluations one after another, and of the micro-batches of one step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn

from meshpar._torch.calls import assert_async
from meshpar._torch.fsdp import make_ready
from meshpar._torch.units import Units
from meshpar.core import runtime
from meshpar.core.errors import MeshparError
from meshpar.passes.applied import applied
from meshpar.step.comparisons import Comparisons
from meshpar.step.pytrees import leaves

_WRITTEN = (
    "a parameter was written through .data between two forwards of an evaluation, which share their gathered weights; "
    "write through the parameter itself, under torch.no_grad()"
)


@final
class SharedWeights:
    """The gathered weights of one module between its forwards.

    Args:
        module: the outermost module.
        units: of the module.
        compares: ranks tell one another in each evaluation whether one wrote a shard meanwhile.

    Attributes:
        kept: the last forward was an evaluation's, and left weights gathered for the next one.
    """

    def __init__(self, module: nn.Module, units: Units, *, compares: bool) -> None:
        self._module, self._units = module, units
        self._keeps, self.kept = applied(module).keeps_gathered and compares, False
        self._shares_gathered, self._shards = False, applied(module).replica_shards
        self._stages = applied(module).layers if applied(module).gathers_once else None

    def free_before_training(self, free: Callable[[], None]) -> None:
        """Let ``module.train()`` call ``free``, where evaluations keep weights gathered."""
        module: Any = self._module
        if self._keeps:
            module.train = functools.partial(_train, module.train, free)

    def serve(self, agreement: Comparisons | None) -> bool:
        """Return whether what the last forward left gathered serves the next: both are of one step of a stage, or
        both only evaluate, and no rank wrote a shard meanwhile.

        Collective between evaluations where the last one left something. It follows from forwards and modes alone
        whether it did.

        Raises:
            MeshparError: a shard was written between two forwards of one step.
        """
        if self._stages is not None and self._stages.goes_on and torch.is_grad_enabled():
            if (name := self._units.written_since_kept()) is not None:
                raise MeshparError(
                    f"{name} was written between two micro-batches of a step, which share gathered weights; write "
                    "after par.backward"
                )
            return True
        kept, self.kept = self.kept, False
        if not kept or torch.is_grad_enabled() or self._module.training or agreement is None:
            return False
        same = self._units.unwritten()
        wrote = same is None or (not runtime.queues(same.device) and not same)
        if not all(agreement.meet("a forward of the module", [int(wrote)])) or wrote:
            return False
        if same is not None and runtime.queues(same.device):
            assert_async(same, _WRITTEN)
        return True

    def begin(self, *, reducing: bool) -> None:
        """Start to gather over replicas before a forward: any code may have written since the last one.

        The micro-batches of one step share what the first gathered. Every rank comes here alike: what it does follows
        from forwards.

        Args:
            reducing: the backward of this forward reduces gradients.
        """
        if self._shards is None:
            return
        make_ready(self._module)
        if self._shares_gathered and torch.is_grad_enabled():
            self._shards.check_unwritten()
        else:
            self._shards.changed()
        self._shares_gathered = torch.is_grad_enabled() and not (reducing and self._units.reduces())
        self._shards.begin()

    def end_step(self) -> None:
        """Gather anew in the next forward, as a backward has reduced gradients; under stages no forward knows which."""
        self._shares_gathered = False

    def trained(self) -> None:
        """Remember the shards behind what a forward of training has gathered, where the next one may use it."""
        if self._stages is not None:
            self._units.keep()

    def evaluated(self, output: object) -> None:
        """Keep or free gathered weights after a forward without gradients."""
        if self._shards is not None:
            # an evaluation's weights may be swapped back before the backward of an earlier forward
            self._shards.changed()
        if self._evaluates:
            self._units.keep()
            self.kept = True
        else:
            self._units.release(leaf for leaf in leaves(output, objects=True) if isinstance(leaf, Tensor))

    def failed(self) -> None:
        """Free gathered weights after a forward without gradients that an error ended here; other ranks may have kept
        them, and learn of it before the next one.
        """
        self.kept = self._evaluates
        self._units.leave()

    @property
    def _evaluates(self) -> bool:
        """Gathered weights are kept for the next evaluation. Those of a module that is not trained are not: backwards
        of other models, such as a student, would free what a frozen teacher keeps.
        """
        trains = any(parameter.requires_grad for parameter in self._module.parameters())
        return self._keeps and trains and not self._module.training


def _train(inner: Callable[..., nn.Module], free: Callable[[], None], mode: bool = True) -> nn.Module:
    if mode:
        free()
    return inner(mode)
