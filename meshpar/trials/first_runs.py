"""The tests of what passes divide, in the first forwards of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch

from meshpar._torch.calls import eager
from meshpar._torch.units import Units
from meshpar.trials.engine import report
from meshpar.trials.positions import MixingTest
from meshpar.trials.split import SplitTest


@final
class FirstRuns:
    """The tests that wait for a forward of one module.

    Attributes:
        split: compares split blocks with unsplit ones, in the first forward whose gradients are wanted.
        mixing: runs the first forward on other batches, too.
    """

    def __init__(self, units: Units) -> None:
        self._units = units
        self.split: SplitTest | None = None
        self.mixing: MixingTest | None = None
        self._eager = ExitStack()

    @property
    def wait(self) -> bool:
        """A test waits for the next forward."""
        return self.split is not None or self.mixing is not None

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

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Let calls in the ``with`` block, which are no step's, run no test."""
        waiting, self.split, self.mixing = (self.split, self.mixing), None, None
        try:
            yield
        finally:
            self.split, self.mixing = waiting

    def end_backward(self) -> None:
        """Let what ran eagerly for a test be compiled again."""
        self._eager.close()
