"""Notice the backwards of one parallel module: where one begins, by which ways it comes into units, where it ends; and
average gradients that come to shards from outside of units.
"""

from __future__ import annotations

import functools
import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from meshpar._torch.autograd import Node, at_end_of_backward, in_backward, next_node
from meshpar._torch.fsdp import UnitBackwards, UnitRun
from meshpar._torch.tensors import held_part
from meshpar._torch.units import Units
from meshpar.core.errors import MeshparError
from meshpar.same_bits.trees import average_
from meshpar.step.moment import Forward, HandsOn, Listeners, Moment
from meshpar.tensors.digests import tensors_in
from meshpar.tensors.placements import held_by_this_rank, local_tensor, whole_tensor


@final
class Backward:
    """The backwards of one module; ``reducing``: the next one reduces gradients, as the last or only one of a step."""

    def __init__(
        self,
        module: nn.Module,
        units: Units,
        average_outside: Callable[[nn.Parameter, Callable[[], None]], None],
        listeners: Listeners,
        hands_on: HandsOn | None,
    ) -> None:
        self._units, self._at, self._hands_on, self._average_outside = units, listeners.at, hands_on, average_outside
        self._tables = [child._parameters for child in module.modules() if child._parameters]
        self._runs = self._reached_output = False
        self.reducing = True
        self.entrances = Entrances(self._enter)
        units.backwards.watch(self._reduces_unit)

    def mark(self) -> None:
        """Mark the shards, and average gradients that reach them from outside of a call, as by ``full_tensor()``."""
        for parameter in self._units.mark():
            self._average_outside(parameter, functools.partial(self._reach_outside, parameter))

    def _reach_outside(self, parameter: nn.Parameter) -> None:
        self.expect_end()
        self._units.backwards.use(parameter)

    def after_forward(self, output: object) -> None:
        """Notice the backwards that come to the output of a call, or to what it has handed on."""
        output = output if self._hands_on is None else self._hands_on.handed_on(output)
        forward = Forward()
        for note in self._at[Moment.wants_gradients]:
            note(forward)
        begin = functools.partial(self._begin, forward)
        for tensor in trained_outputs(output):
            tensor.register_hook(begin)

    def before(self, roots: list[Any]) -> None:
        """Look at a backward, of any model, that is about to run from ``roots``, tensors or nodes."""
        if in_backward():
            return
        if self._units.modules:
            self.entrances.look(roots, self._units.backwards)
        reaches = functools.cache(functools.partial(self.entrances.reached, roots))
        for look in self._at[Moment.before_backward]:
            look(roots, reaches=reaches)

    def _begin(self, forward: Forward, grad: Tensor) -> None:
        """Look at a backward that reaches an output of the module, and see that its end is noticed."""
        for look in self._at[Moment.begin_backward]:
            look(forward)
        if not self._reached_output:
            self._reached_output = True
            self._units.show()
        self.expect_end()

    def _enter(self, unit: nn.Module) -> None:
        """Gather a unit for a backward that comes into it by a loss that a block keeps, not by its outputs."""
        for look in self._at[Moment.begin_backward]:
            look(None)
        self.expect_end()
        self._units.backwards.enter(unit)
        self._units.show(unit)

    def _reduces_unit(self, group: object) -> None:
        self.expect_end()
        self._units.writes.look(group)

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
        for note in self._at[Moment.after_failed_backward]:
            note()

    def _close(self) -> None:
        self._runs = self._reached_output = False
        for close in self._at[Moment.close_backward]:
            close()

    def _end(self) -> None:
        self._close()
        reduces = not self._units.modules or (self.reducing and self._units.reduces())
        for end in self._at[Moment.end_backward]:
            end(reduces=reduces)
        if not reduces:
            return
        unused = self._units.backwards.take_unused()
        for reduce in self._at[Moment.reduce]:
            unused += reduce()
        if self._has_gradients():
            for look in self._at[Moment.gradients]:
                look(unused)
        for act in self._at[Moment.after_backward]:
            act()

    def _has_gradients(self) -> bool:
        """Return whether a parameter has a gradient; each micro-batch asks, and walks over no modules."""
        for table in self._tables:
            for parameter in table.values():
                if parameter is not None and parameter.grad is not None:
                    return True
        return False


def trained_outputs(output: object) -> list[Tensor]:
    """Return the tensors of a call's output that want gradients."""
    return [tensor for tensor in tensors_in(output, objects=True) if tensor.requires_grad]


def average_outside(parameter: Any, reached: Callable[[], None], *, kept: Collection[str], by_tree: bool) -> None:
    """Average gradients of a shard's ``full_tensor()`` in a loss over axes not ``kept``; ``by_tree``: sum them."""
    mesh: DeviceMesh = parameter.device_mesh
    data = [dim for dim, name in enumerate(mesh.mesh_dim_names or ()) if name not in kept and mesh.size(dim) > 1]
    if not data:
        return
    average = partial(average_, by_tree=by_tree)
    groups = [mesh.get_group(dim) for dim in data]

    def full_tensor(*, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        if not (torch.is_grad_enabled() and parameter.requires_grad):
            return DTensor.full_tensor(parameter, grad_placements=grad_placements)
        return cast("Tensor", _Outside.apply(parameter, True, partial(average, groups=groups), reached))

    def to_local(*, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        copies = [group for dim, group in zip(data, groups) if parameter.placements[dim].is_replicate()]
        if not copies or not (torch.is_grad_enabled() and parameter.requires_grad):
            return DTensor.to_local(parameter, grad_placements=grad_placements)
        return cast("Tensor", _Outside.apply(parameter, False, partial(average, groups=copies), reached))

    parameter.full_tensor, parameter.to_local = full_tensor, to_local


class _Outside(torch.autograd.Function):
    """The whole of a parameter, or this rank's part, whose gradient is averaged over groups of data ranks."""

    @staticmethod
    def forward(
        ctx: Any, parameter: DTensor, whole: bool, average: Callable[[Tensor], None], reached: Callable[[], None]
    ) -> Tensor:
        ctx.like, ctx.whole, ctx.average, ctx.reached = parameter.detach(), whole, average, reached
        return whole_tensor(parameter) if whole else local_tensor(parameter).view_as(held_part(parameter))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.reached()
        total = grads[0].contiguous().clone()
        ctx.average(total)
        grad = torch.empty_like(ctx.like)  # on the host where the parameter is
        local_tensor(grad).copy_(total[held_by_this_rank(ctx.like)] if ctx.whole else total)
        return grad, None, None, None


STALE = (
    "weights changed between a forward and its backward (by an optimizer's step), and the backward would "
    "use the new weights; run the backward before the change, or the forward again after it"
)
_NUMBER_OF = methodcaller("_sequence_nr")
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
        if self._thread != threading.get_ident():  # each thread numbers its own nodes
            self._thread, self._stepped = threading.get_ident(), 0
            for numbered in (self._numbers, self._owners, self._outermost, self._exits, self._hooked):
                numbered.clear()
        if len(self._numbers) > _MOST:
            self._forget(self._numbers[_MOST // 2])

    def opens(self, unit: nn.Module) -> None:
        """Remember that the nodes from here on are ``unit``'s own."""
        around = self._open[-1] if self._open else None
        run = UnitRun(unit, around, next_node())
        runs = self._outermost if around is None else around.inside
        runs += (run,)
        self._open += (run,)
        self._mark(run.first, run)

    def closes(self, unit: nn.Module, output: Any) -> None:
        """Remember that ``unit`` returns ``output``."""
        if not self._open or self._open[-1].unit is not unit:
            return  # an error came before its own forward
        run = self._open.pop()
        run.last = next_node()
        self._mark(run.last, self._open[-1] if self._open else None)
        if type(output) is Tensor:
            if (node := output.grad_fn) is not None:
                self._exits.add(node._sequence_nr())
        else:
            self._exits.update(node._sequence_nr() for node in _nodes(tensors_in(output, objects=True)))

    def _mark(self, number: int, owner: UnitRun | None) -> None:
        if self._numbers and self._numbers[-1] == number:  # no node came between
            self._owners[-1] = owner
        else:
            self._numbers += (number,)
            self._owners += (owner,)

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

    def look(self, roots: Iterable[object], backwards: UnitBackwards) -> None:
        """Look through the graph of a backward from ``roots``; ``backwards`` expect the outermost runs it reaches."""
        if not self._known():
            backwards.expect([], skips=False)
            return
        seen: dict[Any, Any] = dict.fromkeys(_nodes(roots))
        nodes, inputs = list(seen), list[Any]()
        first = [(node, 0) for node in nodes]
        for node in nodes:
            edges = node.next_functions
            inputs += (edges,)
            for inner, _ in edges:
                if inner is not None and inner not in seen:
                    seen[inner] = None
                    nodes += (inner,)
        numbers = list(map(_NUMBER_OF, nodes))
        owners = [None, *self._owners]
        owned = [owners[index] for index in map(partial(bisect_right, self._numbers), numbers)]
        owner_of = dict(zip(nodes, zip(owned, numbers)))
        reached: set[UnitRun] = set()
        for here, edges in zip((None, *owned), (first, *inputs)):
            for node, _ in edges:
                owner, number = owner_of[node] if node is not None else (None, 0)
                if owner is not None and owner is not here:
                    reached.add(owner)
                    if number not in self._exits and number not in self._hooked:
                        self._hook(node, number, owner.unit)
        for run in list(reached):
            around = run.around
            while around is not None and around not in reached:
                reached.add(around)
                around = around.around
        outermost, skips = [run for run in self._outermost if run in reached], False
        for outer in outermost:
            for run in outer.in_backward():
                # Before its forward has made a node, a run needs no gradients on any rank.
                run.reached, run.done = run in reached, run.last <= outer.first
                skips |= not run.reached and not run.done
        backwards.expect(outermost, skips=skips)

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
