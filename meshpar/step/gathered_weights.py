"""The gathered weights that forwards share: of evaluations one after another, and of the micro-batches of one step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from meshpar._torch.autograd import in_backward
from meshpar._torch.calls import assert_async
from meshpar._torch.fsdp import make_ready
from meshpar.core import runtime
from meshpar.core.errors import MeshparError
from meshpar.step.backward import Backward
from meshpar.step.inner_calls import Calls
from meshpar.step.moment import Guarded, Moment

_WRITTEN = (
    "a parameter was written through .data between two forwards of an evaluation, which share their gathered weights; "
    "write through the parameter itself, under torch.no_grad()"
)


@final
@dataclass(frozen=True, slots=True)
class Gathering:
    """A fact of the data pass: whether forwards leave weights gathered; ``goes_on``: whether a stage's step runs."""

    keeps: bool
    # ReplicaShards of the replicas that gather once a step, or None
    slices: Any
    goes_on: Callable[[], bool] | None

    @property
    def once_a_step(self) -> bool:
        """The micro-batches of a step share gathered weights, as in a stage, where forwards and backwards alternate."""
        return self.keeps and self.goes_on is not None and self.slices is None


@final
class GatheredWeights(Moment):
    """The gathered weights of one module between its forwards; ranks compare whether one wrote a shard meanwhile."""

    def __init__(
        self,
        guarded: Guarded,
        gathering: Gathering,
        agree: Callable[[str, Sequence[int]], list[bool]],
        backward: Backward,
        calls: Calls,
    ) -> None:
        self._module, self._units, self._agree = guarded.module, guarded.units, agree
        self._backward, self._calls = backward, calls
        self._keeps, self._slices = gathering.keeps and guarded.guards == "always", gathering.slices
        self._goes_on = gathering.goes_on if gathering.once_a_step else None
        # the last forward was an evaluation's, and left weights gathered for the next one
        self._kept = self._shares_gathered = False
        if self._keeps:
            module: Any = guarded.module
            train: Any = module.train
            module.train = functools.partial(self._train, train)  # type: ignore[method-assign]

    def serve_call(self) -> None:
        """Serve a call of the module, when guards have looked at the parameters, or let go of what is gathered."""
        if not self._serves():
            self._units.reshard()
        self.begin()

    def keep(self) -> bool:
        """Remember the shards that a call has gathered; return whether its weights stay for the next evaluation."""
        if torch.is_grad_enabled():
            if self._goes_on is not None:
                self._units.writes.keep_shards()
            return True
        if self._slices is not None:
            # an evaluation's weights may be swapped back before the backward of an earlier forward
            self._slices.changed()
        self._kept = self._evaluates
        if self._kept:
            self._units.writes.keep_shards()
        return self._kept

    def after_error(self) -> None:
        """Note a failed evaluation, whose weights are freed; other ranks may keep theirs, and ask in the next."""
        if not torch.is_grad_enabled():
            self._kept = self._evaluates

    def before_backward(self, roots: object, *, reaches: object) -> None:
        if self._kept:  # since an evaluation, whose weights may have been swapped back
            self._units.reshard()  # of this rank alone: the ranks still ask

    def after_backward(self) -> None:
        self._shares_gathered = False

    def _serves(self) -> bool:
        """Return whether what the last forward left gathered serves the next. Collective between evaluations."""
        if self._goes_on is not None and self._goes_on() and torch.is_grad_enabled():
            if (name := self._units.writes.written_shard()) is not None:
                raise MeshparError(
                    f"{name} was written between two micro-batches of a step, which share gathered weights; write "
                    "after par.backward"
                )
            return True
        were_kept, self._kept = self._kept, False
        if not were_kept or torch.is_grad_enabled() or self._module.training:
            return False
        same = self._units.writes.shards_agree()
        wrote = same is None or (not runtime.queues(same.device) and not same)
        if not all(self._agree("a forward of the module", [int(wrote)])) or wrote:
            return False
        if same is not None and runtime.queues(same.device):
            assert_async(same, _WRITTEN)
        return True

    def begin(self) -> None:
        """Start to gather over replicas before a forward that does not share what an earlier one gathered."""
        if self._slices is None:
            return
        make_ready(self._module)
        if self._shares_gathered and torch.is_grad_enabled():
            self._slices.check_unwritten()
        else:
            self._slices.changed()
        reduces = self._backward.reducing and self._units.reduces()
        self._shares_gathered = torch.is_grad_enabled() and not reduces
        self._slices.begin()

    @property
    def _evaluates(self) -> bool:
        """Gathered weights stay for the next evaluation; a frozen teacher's do not, which backwards of others free."""
        trains = any(parameter.requires_grad for parameter in self._module.parameters())
        return self._keeps and trains and not self._module.training

    def _train(self, inner: Callable[..., nn.Module], mode: bool = True) -> nn.Module:
        """Change the mode of the module; evaluations leave weights gathered, training does not use them."""
        if mode:
            self._backward.unwind()
            if not self._calls.depth and not in_backward():
                self._units.reshard()
        return inner(mode)
