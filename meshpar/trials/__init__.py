"""Trials: what the passes divide is tried in the first forwards, before anybody trusts it (docs/development.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, final

import torch
from torch import nn

from meshpar._torch.calls import eager
from meshpar.core.passes import Facts, Role
from meshpar.passes.tensor.context import Context
from meshpar.step.inner_calls import installed
from meshpar.step.moment import Guarded, Moment
from meshpar.tensors.placements import whole_tensor
from meshpar.trials.engine import report
from meshpar.trials.experts import watch_experts
from meshpar.trials.positions import MixingTest
from meshpar.trials.split import SplitTest


def split_test(module: nn.Module, blocks: Sequence[str], device: torch.device, facts: Facts) -> SplitTest | None:
    """Return the test that compares split blocks with unsplit blocks; None if no features are split."""
    split = facts.find(Context)
    if split is None or split.parts == 1:
        return None
    return SplitTest(module, split, blocks, lambda name: whole_tensor(module.get_parameter(name)).to(device))


@final
class FirstRuns(Moment):
    """The tests that wait for the first forwards of one module: of split blocks, and of other batches."""

    def __init__(self, guarded: Guarded) -> None:
        module, resolved, self._units = guarded.module, guarded.resolved, guarded.units
        self.split: SplitTest | None = split_test(module, resolved.blocks, guarded.device, guarded.facts)
        self.mixing: MixingTest | None = None
        changes = installed(module)
        # it runs the model on other batches, which a stage cannot do alone
        if changes is not None and changes.exchange is not None and not resolved.divided(Role.LAYERS):
            self.mixing = MixingTest(module, changes.exchange, resolved.blocks)
        watch_experts(module, resolved.layout, guarded.facts)
        self._eager = ExitStack()

    @property
    def wait(self) -> bool:
        """A test waits for the next forward."""
        return self.split is not None or self.mixing is not None

    @property
    def leaves_inference_mode(self) -> bool:
        """The next forward runs on other batches, too, whose tensors must be plain ones."""
        return self.mixing is not None

    @eager
    def run(self, forward: Callable[..., Any], inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return ``forward(inner, args, kwargs)``, and run the tests that wait for it."""
        if self.mixing is not None:
            self.mixing.run(inner, args, kwargs)
            self.mixing = None
        if not torch.is_grad_enabled() or self.split is None:
            return forward(inner, args, kwargs)
        test, self.split = self.split, None
        self._eager.enter_context(test.eagerly())
        with test.watch():
            output = forward(inner, args, kwargs)
        test.returned(output)
        self._units.reshard()
        report(test.run())
        return output

    def close_backward(self) -> None:
        """Let what ran eagerly for a test be compiled again."""
        self._eager.close()
