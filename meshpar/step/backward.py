"""Notice the backwards of one parallel module: where one begins, by which ways it comes into units, where it ends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, final

from torch import Tensor, nn

from meshpar._torch.autograd import at_end_of_backward, in_backward
from meshpar._torch.units import Units
from meshpar.step.backward_entrances import Entrances
from meshpar.step.gradients import average_outside
from meshpar.step.moment import Forward, Moment
from meshpar.tensors.pytrees import leaves


@final
class Backward:
    """The backwards of one module; ``reducing``: the next one reduces gradients, as the last or only one of a step."""

    def __init__(
        self, module: nn.Module, units: Units, same_axes: Collection[str], moments: Callable[[], Sequence[Moment]]
    ) -> None:
        self._module, self._units, self._moments = module, units, moments
        self._same_axes = frozenset(same_axes)
        self._runs = self._reached_output = False
        self.reducing = True
        self.entrances = Entrances(self._enter)
        units.backwards.watch(self.expect_end)

    def mark(self) -> None:
        """Mark the shards, and average gradients that reach them from outside of a call, as by ``full_tensor()``."""
        for parameter in self._units.mark():
            average_outside(parameter, self._same_axes, functools.partial(self._reach_outside, parameter))

    def _reach_outside(self, parameter: nn.Parameter) -> None:
        self.expect_end()
        self._units.backwards.use(parameter)

    def after_forward(self, output: object) -> None:
        """Notice the backwards that come to the output of a call."""
        forward = Forward()
        for moment in self._moments():
            moment.wants_gradients(forward)
        begin = functools.partial(self._begin, forward)
        for tensor in trained_outputs(output):
            tensor.register_hook(begin)

    def before(self, roots: list[Any]) -> None:
        """Look at a backward, of any model, that is about to run from ``roots``, tensors or nodes."""
        if in_backward():
            return
        if self._units.modules:
            self._units.backwards.expect(self.entrances.look(roots))
        reaches = functools.cache(functools.partial(self.entrances.reached, roots))
        for moment in self._moments():
            moment.before_backward(roots, reaches=reaches)

    def _begin(self, forward: Forward, grad: Tensor) -> None:
        """Look at a backward that reaches an output of the module, and see that its end is noticed."""
        for moment in self._moments():
            moment.begin_backward(forward)
        if not self._reached_output:
            self._reached_output = True
            self._units.show()
        self.expect_end()

    def _enter(self, unit: nn.Module) -> None:
        """Gather a unit for a backward that comes into it by a loss that a block keeps, not by its outputs."""
        for moment in self._moments():
            moment.begin_backward(None)
        self.expect_end()
        self._units.backwards.enter(unit)
        self._units.show(unit)

    def expect_end(self) -> None:
        """Run :meth:`_end` when the backward that runs now ends."""
        if not self._runs:
            self._runs = True
            at_end_of_backward(self._end)

    def unwind(self) -> None:
        """Wind up a backward that an error ended; the gradients that it left are refused until somebody clears them."""
        begun = self._runs or self._units.in_backward()  # it came by FSDP2's hook, and no further
        if not begun or in_backward():
            return
        self._close()
        self._units.unwind()
        for moment in self._moments():
            moment.after_failed_backward()

    def _close(self) -> None:
        self._runs = self._reached_output = False
        for moment in self._moments():
            moment.close_backward()

    def _end(self) -> None:
        self._close()
        reduces = not self._units.modules or (self.reducing and self._units.reduces())
        for moment in self._moments():
            moment.end_backward(reduces=reduces)
        if not reduces:
            return
        unused = self._units.backwards.take_unused()
        for moment in self._moments():
            unused += moment.reduce()
        if any(parameter.grad is not None for parameter in self._module.parameters()):
            for moment in self._moments():
                moment.gradients(unused)
        for moment in self._moments():
            moment.after_backward()


def trained_outputs(output: object) -> list[Tensor]:
    """Return the tensors of a call's output that want gradients."""
    return [leaf for leaf in leaves(output, objects=True) if isinstance(leaf, Tensor) and leaf.requires_grad]
