"""The ways by which a backward comes into units other than by their outputs, as by a loss that a block keeps: each
gathers the unit's weights. Autograd numbers nodes in order, so the numbers where a unit's forward begins and ends tell
its own nodes. (Hooks on saved tensors cost more, replace a user's, and hide changes in place from autograd.)
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, final

from torch import Tensor, nn

from meshpar._torch.autograd import Node, next_node
from meshpar._torch.unit_backwards import UnitRun
from meshpar.core.errors import MeshparError
from meshpar.tensors.pytrees import leaves

STALE = (
    "weights changed between a forward and its backward (by an optimizer's step), and the backward would "
    "use the new weights; run the backward before the change, or the forward again after it"
)
_MOST = 1 << 17
"""Beginnings and ends of units that are remembered at most; forwards that no optimizer step follows would pile up."""


@final
class Entrances:
    """The ways into the units of one module; ``enter`` is called where a backward comes into one not by its outputs."""

    def __init__(self, enter: Callable[[nn.Module], None]) -> None:
        self._enter = enter
        self._numbers: list[int] = []
        self._owners: list[UnitRun | None] = []  # of the nodes from each of the numbers on
        self._outermost: list[UnitRun] = []
        self._exits: set[int] = set()
        self._hooked: set[int] = set()
        self._open: list[UnitRun] = []
        self._stepped = 0
        self._thread = threading.get_ident()

    def begin(self) -> None:
        """Begin a forward of the outermost module."""
        self._open.clear()

    def opens(self, unit: nn.Module) -> None:
        """Remember that the nodes from here on are ``unit``'s own."""
        run = UnitRun(unit, self._open[-1] if self._open else None, next_node())
        (self._outermost if run.around is None else run.around.inside).append(run)
        self._open.append(run)
        self._mark(run)

    def closes(self, unit: nn.Module, output: object) -> None:
        """Remember that ``unit`` returns ``output``."""
        if not self._open or self._open[-1].unit is not unit:
            return  # an error came before its own forward
        self._open.pop().last = next_node()
        self._mark(self._open[-1] if self._open else None)
        self._exits.update(node._sequence_nr() for node in _nodes(leaves(output, objects=True)))

    def _mark(self, owner: UnitRun | None) -> None:
        if self._thread != threading.get_ident():  # each thread numbers its own nodes
            self._thread, self._stepped = threading.get_ident(), 0
            for numbered in (self._numbers, self._owners, self._outermost, self._exits, self._hooked):
                numbered.clear()
        number = next_node()
        if self._numbers and self._numbers[-1] == number:  # no node came between
            self._owners[-1] = owner
            return
        self._numbers.append(number)
        self._owners.append(owner)
        if len(self._numbers) > _MOST:
            self._forget(self._numbers[_MOST // 2])

    def step(self) -> None:
        """Forget the forwards before the optimizer step before this one."""
        if self._thread != threading.get_ident():
            return
        self._forget(self._stepped)
        self._stepped = next_node()

    def _forget(self, number: int) -> None:
        first = bisect_right(self._numbers, number - 1)
        del self._numbers[:first], self._owners[:first]
        self._outermost = [run for run in self._outermost if run.last >= number or run in self._open]
        self._exits = {exit_number for exit_number in self._exits if exit_number >= number}
        self._hooked = {exit_number for exit_number in self._hooked if exit_number >= number}

    def look(self, roots: Iterable[object]) -> list[UnitRun]:
        """Look through the graph of a backward from ``roots``; return the outermost runs that it reaches."""
        if not self._known():
            return []
        # A node's owner is mostly that of the node before it: only others are looked up.
        numbers, owners, exits = [-1, *self._numbers, math.inf], [None, *self._owners], self._exits
        seen: set[Any] = set()
        reached: set[UnitRun] = set()
        waiting: list[tuple[int, Sequence[tuple[Any, int]]]] = [(0, [(node, 0) for node in _nodes(roots)])]
        for here, edges in waiting:
            for node, _ in edges:
                if node is None:
                    continue
                number = node._sequence_nr()
                index = here if numbers[here] <= number < numbers[here + 1] else bisect_right(numbers, number) - 1
                owner = owners[index]
                if owner is not None and owner is not owners[here]:
                    reached.add(owner)
                    if number not in exits and number not in self._hooked:
                        self._hook(node, number, owner.unit)
                if node not in seen and (inputs := node.next_functions):
                    seen.add(node)
                    waiting.append((index, inputs))
        for run in list(reached):
            around = run.around
            while around is not None:
                reached.add(around)
                around = around.around
        outermost = [run for run in self._outermost if run in reached]
        for outer in outermost:
            for run in outer.in_backward():
                # Before its forward has made a node, a run needs no gradients on any rank.
                run.reached, run.done = run in reached, run.last <= outer.first
        return outermost

    def reached(self, roots: Iterable[object]) -> bool:
        """Return whether a backward from ``roots``, tensors or nodes, reaches a forward of the module."""
        if not self._known():
            return False
        stack, seen = list(_nodes(roots)), set[Any]()
        while stack:
            node = stack.pop()
            index = bisect_right(self._numbers, node._sequence_nr()) - 1
            if index >= 0 and self._owners[index] is not None:
                return True
            if node not in seen:
                seen.add(node)
                stack += [function for function, _ in node.next_functions if function is not None]
        return False

    def _known(self) -> bool:
        """Return whether nodes of this thread may be a unit's; a compiler traces a block's backward in its forward."""
        return bool(self._numbers) and not self._open and self._thread == threading.get_ident()

    def _hook(self, node: Any, number: int, owner: nn.Module) -> None:
        if number < self._stepped:
            raise MeshparError(STALE)
        self._hooked.add(number)
        node.register_prehook(partial(self._reach, owner))

    def _reach(self, owner: nn.Module, grads: object) -> None:
        self._enter(owner)


def _nodes(values: Iterable[object]) -> Iterator[Any]:
    """Yield the nodes of a graph from which gradients of ``values`` come, tensors or nodes."""
    for leaf in values:
        node = leaf.grad_fn if isinstance(leaf, Tensor) else leaf
        if isinstance(node, Node):
            yield node
